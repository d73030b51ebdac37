"""`squeeze` in micro-batches of one sample: keeps the batch dimension.

In a micro-batch of one sample, `x.squeeze()` would remove the batch, and the outputs of micro-batches could not be
combined. So each squeeze gets the dimensions that it removes from the mini-batch. A mini-batch of one sample needs
another graph.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from fxpipe._torch.operators import OpOverload
from fxpipe.tracing.dynamic_sizes import SizeCondition
from fxpipe.tracing.node_info import info
from fxpipe.tracing.traced import Traced

_ATEN = torch.ops.aten.squeeze
_SQUEEZES = ("squeeze", torch.squeeze, _ATEN.default, _ATEN.dim, _ATEN.dims)


def fix_squeezes(traced: Traced, batch: int) -> tuple[SizeCondition, ...]:
    """Sets dims of squeezes that could remove the batch; returns conditions. `batch`: samples in the recording."""
    reads = []
    for node in traced.nodes:
        if node.target not in _SQUEEZES or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        sizes = info(node.args[0]).shapes[0].shape
        asked = _squeezed_dims(node, len(sizes))
        varying = [sizes[d] for d in asked if sizes[d].free_symbols == {traced.batch}]
        for size in varying:
            alone = sympy.Eq(size, 1)
            if alone == sympy.false:
                continue
            is_alone = bool(alone.subs(traced.batch, batch))
            reads.append(SizeCondition(alone if is_alone else sympy.Ne(size, 1), info(node).source))
            if not is_alone:
                _set_squeeze_dims(node, tuple(d for d in asked if sizes[d] == 1))
    return tuple(reads)


def _squeezed_dims(node: fx.Node, dims: int) -> list[int]:
    """Returns the dimensions that a squeeze removes if their size is 1."""
    named: tuple[Any, ...] = (*node.args[1:], *(value for key, value in node.kwargs.items() if key == "dim"))
    if not named:
        return list(range(dims))
    return [d % dims for d in (named[0] if isinstance(named[0], (tuple, list)) else named)]


# No model of the zoo: `x.squeeze()` over micro-batches of one sample needs it (behaviour/test_batch.py).
def _set_squeeze_dims(node: fx.Node, dims: tuple[int, ...]) -> None:
    node.args, node.kwargs = (node.args[0], dims), {}
    if isinstance(node.target, OpOverload):
        node.target = _ATEN.dims
