"""Combines an output without the batch, a loss above all, from what micro-batches have reduced.

A loss is a function of sums over samples: `total / count`, `ce / tokens + 0.1 * mse`, `mean(f) @ mean(p)`. That of the
mini-batch is the same function of the sums over all micro-batches, and no mean of their losses, which padding makes
wrong. So a stage hands out the *pieces*, sums and means over samples, and what is made of them is made once, of those
of the mini-batch: by the caller's thread, with autograd, where that is called which goes backward.

`forward_backward` goes back through a micro-batch before others have come forward. Its loss then is the same function
of its own totals, in proportion, and of the counts of the mini-batch, which are known before the step where they come
from inputs alone (labels, masks): its shares add up to the loss if it is affine in these totals. See
`fxpipe.tracing.shapes.batch_reductions`, which makes all this from a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe._torch.thread_state import ThreadState, set_thread_state


@dataclass(frozen=True, slots=True)
class CombinationRef:
    """Stands in arguments for a value: of the piece, or after all pieces of the call, with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class CombinationCall:
    """One function of a combination."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: ThreadState  # of the recording


@dataclass(frozen=True, slots=True)
class OutputCombination:
    """One output as a function of pieces."""

    output: int  # its place among the leaves of the model's output
    pieces: tuple[int, ...]  # places among all that micro-batches hand out
    reductions: tuple[int | str | None, ...]  # of these pieces: the dimension of rows, "sum", "mean"; None: the same
    calls: tuple[CombinationCall, ...]  # the last one makes the output
    is_known: tuple[bool, ...]  # of these pieces: do they come from inputs alone
    is_affine: bool  # in the pieces that do not
    where: str  # what the output is, and the user's line

    def __call__(self, pieces: Sequence[Any]) -> Any:
        values = list(pieces)
        for call in self.calls:
            args, kwargs = map_nested(
                (call.args, call.kwargs), lambda v: values[v.number] if isinstance(v, CombinationRef) else v
            )
            with set_thread_state(call.state):
                values.append(call.function(*args, **kwargs))
        return values[-1]

    @property
    def is_joint(self) -> bool:
        """Returns whether it is made of rows, so that its calls run for the mini-batch only."""
        return any(isinstance(how, int) for how in self.reductions)

    def on(self, device: torch.device) -> OutputCombination:
        """The combination on the device where pieces are; calls are recorded with another."""
        calls = []
        for call in self.calls:
            args, kwargs = map_nested((call.args, call.kwargs), lambda v: device if isinstance(v, torch.device) else v)
            calls.append(replace(call, args=args, kwargs=kwargs))
        return replace(self, calls=tuple(calls))

    def of(self, handed_out: Sequence[Any]) -> Any:
        """The output, of all that micro-batches hand out, gathered."""
        return self([handed_out[place] for place in self.pieces])

    def share(self, handed_out: Sequence[Any], known: Mapping[int, Any], weight: float) -> Any:
        """Computes a micro-batch's share of the output, by its weight: the mean over micro-batches is the output."""
        pieces = []
        for place, how, is_known in zip(self.pieces, self.reductions, self.is_known, strict=True):
            piece = handed_out[place]
            if is_known:
                piece = known[place].to(piece.device) if isinstance(piece, torch.Tensor) else known[place]
            elif (how == "sum" or isinstance(how, int)) and weight != 1:
                piece = piece / weight
            pieces.append(piece)
        return self(pieces)


def map_nested(value: Any, change: Callable[[Any], Any]) -> Any:
    """Applies a function to what lists, tuples, dicts and slices hold, named tuples aside."""
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
    """Returns the divisor of the mean of a tensor, where its size depends on values."""
    return torch.scalar_tensor(x.numel(), dtype=torch.int64, device=x.device)


def sum_from_mean(mean: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The sum of which this is the mean; where nothing counts, 0 and not 0 / 0. In as many digits as a sum needs."""
    wide = torch.promote_types(mean.dtype, torch.float32)
    return torch.where(count == 0, torch.zeros((), dtype=wide, device=mean.device), mean.to(wide) * count)
