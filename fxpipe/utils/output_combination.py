"""Combines an output without a batch dimension, usually a loss, from reductions over micro-batches.

A loss is a function of sums over samples: `total / count`, `ce / tokens + 0.1 * mse`, `mean(f) @ mean(p)`. The loss of
the mini-batch is this function of the sums over all micro-batches. So stages return the *pieces*, sums and means over
samples, and the caller's thread computes the output once from the pieces of the mini-batch, with autograd.

`forward_backward` runs the backward of a micro-batch before the forward of others. It then uses the micro-batch's
share: the function of its totals, in proportion, and of the counts of the mini-batch, which are known before the step
if they depend only on inputs (labels, masks). The shares add up to the loss if it is affine in the totals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe._torch.thread_state import ThreadState, set_thread_state


@dataclass(frozen=True, slots=True)
class CombinationRef:
    """A placeholder in arguments for a value, by number: pieces from 0 up, results of calls from -1 down."""

    number: int


@dataclass(frozen=True, slots=True)
class CombinationCall:
    """One function of a combination."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: ThreadState  # when it was recorded
    node: str = ""  # whose value it computes, equal for all outputs; empty if values are changed in place


@dataclass(frozen=True, slots=True)
class OutputCombination:
    """One output as a function of pieces."""

    output: int  # index among the leaves of the model's output
    pieces: tuple[int, ...]  # indices among all values that micro-batches return
    reductions: tuple[int | str | None, ...]  # for each piece: the dimension of rows, "sum", "mean"; None: equal in all
    calls: tuple[CombinationCall, ...]  # the last call returns the output
    is_known: tuple[bool, ...]  # for each piece: True if it depends only on inputs
    is_affine: bool  # in the other pieces
    where: str  # description of the output, and the user's line
    requires_grad: bool = True  # as the model's output does

    def __call__(self, pieces: Sequence[Any], computed: dict[str, Any] | None = None) -> Any:
        """Computes the output. `computed`: values of other outputs by node; values of this one are added."""
        values, computed = dict(enumerate(pieces)), {} if computed is None else computed
        for number, call in enumerate(self.calls, 1):
            if call.node in computed:
                values[-number] = computed[call.node]
                continue
            args, kwargs = map_nested(
                (call.args, call.kwargs), lambda v: values[v.number] if isinstance(v, CombinationRef) else v
            )
            with set_thread_state(call.state):
                values[-number] = call.function(*args, **kwargs)
            if call.node:
                computed[call.node] = values[-number]
        return values[-len(self.calls)]

    @property
    def is_joint(self) -> bool:
        """True if a piece has rows, so that the calls run only for the full mini-batch."""
        return any(isinstance(how, int) for how in self.reductions)

    def on(self, device: torch.device) -> OutputCombination:
        """Returns the combination for pieces on `device`; calls were recorded with another device."""
        calls = []
        for call in self.calls:
            args, kwargs = map_nested((call.args, call.kwargs), lambda v: device if isinstance(v, torch.device) else v)
            calls.append(replace(call, args=args, kwargs=kwargs))
        return replace(self, calls=tuple(calls))

    def of(self, handed_out: Sequence[Any], computed: dict[str, Any] | None = None) -> Any:
        """Computes the output from the gathered values of all micro-batches."""
        return self([handed_out[place] for place in self.pieces], computed)

    def share(self, handed_out: Sequence[Any], known: Mapping[int, Any], weight: float) -> Any:
        """Computes a micro-batch's share of the output, by its weight: the mean over micro-batches is the output."""
        pieces = []
        for place, how, is_known in zip(self.pieces, self.reductions, self.is_known, strict=True):
            piece = handed_out[place]
            if is_known:
                piece = known[place].to(piece.device) if isinstance(piece, torch.Tensor) else known[place]
            elif how == "sum" and weight != 1:
                piece = piece / weight
            pieces.append(piece)
        return self(pieces)


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """State of the model that is computed once for the mini-batch, after the forwards of all micro-batches."""

    names: tuple[str, ...]
    assigned: frozenset[str]  # names that forward sets to another tensor; it writes to the others in place
    combination: OutputCombination  # returns the new values, in the order of `names`

    def on(self, device: torch.device) -> StateUpdate:
        return replace(self, combination=self.combination.on(device))

    @torch.no_grad()
    def of(self, pieces: Sequence[Any]) -> list[torch.Tensor]:
        """Computes the new values from gathered pieces."""
        pieces = [x.detach() if isinstance(x, torch.Tensor) else x for x in pieces]
        return [value.detach() for value in self.combination(pieces)]

    def of_all(self, handed_out: Sequence[Any]) -> list[torch.Tensor]:
        """Computes the new values from the gathered values of all micro-batches."""
        return self.of([handed_out[place] for place in self.combination.pieces])


def needing_all(combinations: Sequence[OutputCombination]) -> OutputCombination | None:
    """Returns the first output with a gradient that is more than a sum over micro-batches: its backward needs all F."""
    return next((one for one in combinations if one.requires_grad and not one.is_affine), None)


def map_nested(value: Any, change: Callable[[Any], Any]) -> Any:
    """Applies a function to the items of nested lists, tuples, dicts and slices, except named tuples."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map_nested(item, change) for item in value)
    if isinstance(value, Mapping):
        return {key: map_nested(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(map_nested(part, change) for part in (value.start, value.stop, value.step)))
    return change(value)


def cross_entropy_divisor(target: torch.Tensor, weight: torch.Tensor | None, ignored: int) -> torch.Tensor:
    """Computes the divisor of a mean cross entropy: the number of classes that count, or the sum of their weights."""
    counts = target != ignored
    if weight is None:
        return counts.sum()
    return torch.where(counts, weight[torch.where(counts, target, 0)], 0).sum()


def element_count(x: torch.Tensor) -> torch.Tensor:
    """Returns the divisor of the mean of a tensor with a data-dependent size."""
    return torch.scalar_tensor(x.numel(), dtype=torch.int64, device=x.device)


def sum_from_mean(mean: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Computes the sum from a mean, in float32 or wider; 0 if `count` is 0."""
    wide = torch.promote_types(mean.dtype, torch.float32)
    return torch.where(count == 0, torch.zeros((), dtype=wide, device=mean.device), mean.to(wide) * count)
