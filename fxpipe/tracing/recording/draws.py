"""Decisions by lot: random numbers that forward reads, as layer drop does (`if torch.rand(()) < p: skip`).

A model draws such a number once for a mini-batch. So does a pipe, before it cuts the mini-batch, and the answers choose
the graph. For this the numbers must be the same ones whoever draws them, the model while it is recorded or the guards
of a graph at hand: they come from a stream of their own, which nothing but such draws advances.

A draw is a random function without tensors among its arguments that gives one number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxpipe.tracing.containers import tensors_in
from fxpipe.tracing.recording.fake import drawn, is_faked


class Draws:
    """A stream of random numbers."""

    def __init__(self, seed: int):
        self._state = torch.Generator().manual_seed(seed).get_state()

    def take(self, call: Callable[[], Any]) -> Any:
        """The result of `call`, drawn from the stream; torch's generator stays where it is."""
        generator = torch.default_generator
        before = generator.get_state()
        generator.set_state(self._state)
        try:
            return call()
        finally:
            self._state = generator.get_state()
            generator.set_state(before)


def is_draw(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Is this random result a draw?"""
    return (
        isinstance(result, torch.Tensor)
        and result.numel() == 1
        and result.device.type == "cpu"
        and not any(True for _ in tensors_in((args, kwargs)))
    )


class Drawing(TorchFunctionMode):
    """A model that runs under this mode takes its draws from the stream, as it does while it is recorded.

    `lots`: of each draw in turn, is it one of the stream? Those inside of what is one node are not.
    """

    def __init__(self, draws: Draws, lots: Sequence[bool]):
        super().__init__()
        self.draws, self.lots = draws, iter(lots)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(True for _ in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        before = torch.default_generator.get_state()
        result = func(*args, **kwargs)
        is_one = is_draw(args, kwargs, result) and not torch.equal(before, torch.default_generator.get_state())
        if is_one and next(self.lots, True):
            return self.draws.take(lambda: func(*args, **kwargs))
        return result


def generator_states() -> list[Any]:
    """Where torch's generators stand."""
    if is_faked():
        return [drawn()]
    states: list[Any] = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():
        states += [g.get_offset() for g in torch.cuda.default_generators]
    return states


def same_states(left: list[Any], right: list[Any]) -> bool:
    return left == right if is_faked() else torch.equal(left[0], right[0]) and left[1:] == right[1:]
