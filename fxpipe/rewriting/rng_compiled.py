"""Code for `torch.compile`, without nodes that it does not support.

It does not support generators. Dropout multiplies by noise from a custom operator, which draws when the code runs, so
the compiler's graph neither breaks nor changes from step to step. Other random nodes run uncompiled, as do gradients in
forward, packed sequences, and the rest of a forward as Python. The operator's tag keeps the compiler from recomputing
the noise in backward, when another micro-batch may be running. On a CPU it equals the noise of uncompiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxpipe.rewriting.rng import RandomCall, seeded_generator
from fxpipe.tracing.node_info import info
from fxpipe.tracing.record.packing import PACKING_NODES


@torch.library.custom_op("fxpipe::dropout_noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _dropout_noise(like: Tensor, p: float, ordinal: int) -> Tensor:
    """Draws the factors by which dropout multiplies `like`, for the running micro-batch and node `ordinal`."""
    generator = seeded_generator(like.device, ordinal)
    return torch.empty_like(like).bernoulli_(1 - p, generator=generator).div_(1 - p)


@_dropout_noise.register_fake
def _(like: Tensor, p: float, ordinal: int) -> Tensor:
    return torch.empty_like(like)


def with_compilable_rng(run: fx.GraphModule) -> fx.GraphModule:
    """Replaces unsupported nodes of the code; returns the same code if it has none."""
    drawing = [node for node in run.graph.nodes if isinstance(getattr(node.target, "drawing", None), RandomCall)]
    uncompiled = [n for n in run.graph.nodes if hasattr(n.target, "inside") or info(n).is_graph_break]  # or a gradient
    uncompiled += [n for n in run.graph.nodes if n.target in PACKING_NODES]
    if not drawing and not uncompiled:
        return run
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(run.graph, copies))
    for node in uncompiled:
        copies[node].target = torch.compiler.disable(node.target)
    for node in drawing:
        copies[node].target = _compilable_function(node.target)
    return fx.GraphModule({}, graph, class_name=type(run).__name__)


def _compilable_function(target: Any) -> Callable[..., Any]:
    drawing: RandomCall = target.drawing
    if drawing.function is not F.dropout:
        disabled: Callable[..., Any] = torch.compiler.disable(target)
        return disabled
    ordinal = drawing.ordinal

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not 0 < p < 1 or input.numel() == 0:
            return F.dropout(input, p, training, inplace)  # draws nothing
        noise: Tensor = torch.ops.fxpipe.dropout_noise(input.detach(), p, ordinal)
        return input.mul_(noise) if inplace else input.mul(noise)

    return dropout
