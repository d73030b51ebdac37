"""Decisions by lot: random numbers that forward reads, as layer drop does (`if torch.rand(()) < p: skip`).

A model draws such a number once for a mini-batch. So does a pipe, before it cuts the mini-batch, and the answers choose
the graph. For this the numbers must be the same ones whoever draws them, the model while it is recorded or the guards
of a graph at hand: they come from a stream of their own, which nothing but such draws advances.

A draw is a random function without tensors among its arguments that gives one number.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode

from fxpipe.tracing.containers import tensors_in
from fxpipe.tracing.functions import opname
from fxpipe.tracing.recording.fake import drawn, is_faked, is_off


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


# -- what has drawn nothing, and might ---------------------------------------------------------------------------------

# They draw for some values only, rrelu for negative ones, poisson and binomial for none that are 0; or, on a GPU, from
# a state of cuDNN's.
_BY_VALUE = frozenset("rrelu rrelu_ poisson binomial lstm gru rnn_tanh rnn_relu".split())


def might_draw(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Would this call, which has drawn nothing, draw on other values or sizes?

    An expert that no token goes to has an empty input, and its dropout draws nothing; `randperm(1)` does not either.
    """
    name = opname(function)
    schemas = _random_schemas(name)
    if not schemas and _switch_of(function) is None:
        return False
    if name not in _BY_VALUE and all(t.numel() > 1 for t in tensors_in((args, kwargs, result))):
        return False
    if (switch := _switch_of(function)) is not None:
        given = switch.bind(*args, **kwargs)
        given.apply_defaults()
        of = given.arguments
        return bool(of["training"]) and 0 not in (of.get("p"), of.get("dropout_p"))
    fitting = [s for s in schemas if len(args) <= len(s.arguments)]
    return bool(fitting) and not all(is_off(s, args, kwargs) for s in fitting)


@functools.cache
def _random_schemas(name: str) -> tuple[torch.FunctionSchema, ...]:
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, OpOverloadPacket):
        return ()
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return tuple(o._schema for o in overloads if torch.Tag.nondeterministic_seeded in o.tags)


def _switch_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function of `torch.nn.functional` that draws in training only."""
    if getattr(function, "__module__", None) != "torch.nn.functional" or not hasattr(function, "__code__"):
        return None
    signature = inspect.signature(function)
    names = signature.parameters.keys()
    is_random = "training" in names and not names.isdisjoint(("p", "dropout_p", "lower"))
    return signature if is_random else None
