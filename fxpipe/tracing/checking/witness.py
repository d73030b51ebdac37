"""What only the model's own run shows, and a graph made in another way does not do: looked for while the model runs.

The recorder sees all of it where it records the model itself. Export and symbolic tracing see the model run on fake
tensors or proxies, and give a graph whose outputs may be right all the same: hooks and `backward` leave no trace in it,
and a number that Python drew is a constant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxpipe.tracing.functions import opname
from fxpipe.tracing.recording.autograd_nodes import REMEDY, WHAT, SeenNode, is_node_of
from fxpipe.tracing.recording.own_dice import OwnDice
from fxpipe.tracing.recording.refusals import KEPT_WHOLE, CannotRecord, draws_in_python, lost_in_other_ways
from fxpipe.tracing.snapshot import dice, gradients_aside, same_dice
from fxpipe.tracing.source import user_line


class _Witness(TorchFunctionMode):
    """Notes the first call of a function that other graphs lose."""

    def __init__(self) -> None:
        super().__init__()
        self.error: CannotRecord | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        found = lost_in_other_ways(func, opname(func), args, given)
        if found is not None:
            self._note(*found)
        result = func(*args, **given)
        if result is not None and is_node_of(func, opname(func)):
            return SeenNode(result, lambda: self._note(WHAT, REMEDY + KEPT_WHOLE))
        return result

    def _note(self, what: str, remedy: str) -> None:
        self.error = self.error or CannotRecord(f"the model {what} at {user_line()}; {remedy}", final=True)


@contextlib.contextmanager
def witnessed(model: nn.Module, inputs: Sequence[Any]) -> Iterator[None]:
    """A block in which the model runs.

    Args:
        inputs: what is given to it: leaves whose `grad` tells whether backward has come to them.

    Raises:
        CannotRecord: it did what no other way of making a graph carries, so that none needs to be tried.
    """
    before, own_dice, witness = dice(), OwnDice(model), _Witness()
    with gradients_aside(model):
        with witness:
            yield
        leaves = [*model.parameters(), *(x for x in inputs if isinstance(x, torch.Tensor))]
        has_run_backward = any(leaf.grad is not None for leaf in leaves)
    if witness.error is not None:
        raise witness.error
    if has_run_backward:
        raise CannotRecord(
            "forward runs backward, which puts gradients into the model's parameters or inputs; do so outside forward",
            final=True,
        )
    if not same_dice(before, dice()):
        raise draws_in_python()
    own_dice.refuse_rolled()
