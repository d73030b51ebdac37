"""Random nodes of a stage, seeded by a mix of the seeds of step and micro-batch and the ordinal of the node.

So a node's numbers do not depend on cut, schedule or timing, and recomputation draws the same numbers. They are bit for
bit those of torch's generator after `manual_seed`, which other stages use at the same time. In order of preference:

1. A function that takes `generator=` gets a generator of the thread.
2. On a CPU, dropout and RNNs are reimplemented with such a generator (`RNG_KERNELS`); RNNs also on a GPU.
3. Torch's other functions draw from torch's generator, which has the state of the thread's generator during the call.
4. So do custom operators and opaque Python, where checkpoints (`torch.utils.checkpoint`) become plain calls.

In 3 and 4 a stage waits while another uses the same generator: on a GPU only while kernels are queued.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fxpipe._torch.checkpoint import call_checkpoints_through, can_call_checkpoints_through
from fxpipe._torch.functions import opname
from fxpipe._torch.modes import TorchDispatchMode, pop_dispatch_mode, push_dispatch_mode
from fxpipe._torch.operators import RNN_FUNCTIONS, OpOverload, OpOverloadPacket, schema_of
from fxpipe._torch.versions import TESTED_VERSIONS
from fxpipe.errors import StateError
from fxpipe.rewriting.program import stage_context
from fxpipe.tracing.model_state import seeded_python_rng
from fxpipe.tracing.record.packing import PACKED_FUNCTIONS
from fxpipe.utils import accelerator
from fxpipe.utils.accelerator import generator_lock, mix_seed

_aten: Any = torch.ops.aten
_CPU = torch.device("cpu")
_SEEDED = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True, slots=True)
class RandomCall:
    """A random node of stage code; stored as `drawing` of its target."""

    ordinal: int
    function: Callable[..., Any] | str


def seeded_generator(device: torch.device, ordinal: int) -> torch.Generator:
    """Returns this thread's generator of a device, seeded for a random node in the running micro-batch."""
    return _own_generator(device).manual_seed(mix_seed(stage_context.seed, ordinal))


def seeded_function(
    ordinal: int, function: Callable[..., Any] | str, device: torch.device, python_rng: bool = False
) -> Callable[..., Any]:
    """Wraps `function` (or the method of that name) to draw by the seed of the running micro-batch."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return (
            getattr(args[0], function)(*args[1:], **kwargs) if isinstance(function, str) else function(*args, **kwargs)
        )

    written_out: Any = RNG_KERNELS.get(function)

    def begun(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
        return seeded_generator(_device_of(args, kwargs, device), ordinal)

    def draw_given(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **{**kwargs, "generator": begun(args, kwargs)})

    def draw(*args: Any, **kwargs: Any) -> Any:
        generator = begun(args, kwargs)
        if written_out is not None and (generator.device == _CPU or function in ANY_DEVICE_KERNELS):
            drawn = written_out(generator, *args, **kwargs)
            if drawn is not NotImplemented:
                return drawn
        return _lend_generator(generator, functools.partial(call, *args, **kwargs))

    def draw_alone(*args: Any, **kwargs: Any) -> Any:
        seed = mix_seed(stage_context.seed, ordinal)

        def work() -> Any:
            with seeded_python_rng(seed) if python_rng else contextlib.nullcontext():
                return call(*args, **kwargs)

        for at in dict.fromkeys((device, _CPU)):  # always lock the CPU first, to prevent deadlocks
            work = functools.partial(_lend_generator, _own_generator(at).manual_seed(seed), work)
        # A checkpoint would recompute in backward with torch's generator, while other stages draw from it.
        with call_checkpoints_through():
            return work()

    chosen: Callable[..., Any]
    if takes_generator(function):
        chosen = draw_given
    elif written_out is not None or is_from_torch(function):
        chosen = draw
    else:
        if not can_call_checkpoints_through():
            warnings.warn(
                f"{opname(function)}, kept whole, draws random numbers, and torch {torch.__version__} (fxpipe is "
                f"tested with {TESTED_VERSIONS}) does not let fxpipe switch checkpoints off: if it uses "
                "torch.utils.checkpoint, that may be recomputed with other random numbers if another stage draws at "
                "the same time; use no checkpoint in it",
                stacklevel=2,
            )
        chosen = draw_alone
    name = function if isinstance(function, str) else opname(function)
    chosen.__name__ = chosen.__qualname__ = f"seeded_{name}"
    chosen.__module__ = __name__
    chosen.drawing = RandomCall(ordinal, function)  # type: ignore[attr-defined]
    return chosen


def is_from_torch(function: Callable[..., Any] | str) -> bool:
    """Returns whether a function is torch's, and so only draws from generators."""
    if isinstance(function, str):
        return True
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        overload = function if isinstance(function, OpOverload) else getattr(function, function.overloads()[0])
        return str(overload.namespace) == "aten"
    return str(getattr(function, "__module__", None) or "torch").partition(".")[0] == "torch"


def takes_generator(function: Callable[..., Any] | str) -> bool:
    """Returns whether it takes `generator=`. Python functions do not count: some pass it by position."""
    if isinstance(function, OpOverload):
        return is_from_torch(function) and _has_generator(function)
    if not is_from_torch(function) or hasattr(function, "__code__"):
        return False
    packet = getattr(_aten, function if isinstance(function, str) else opname(function), None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if isinstance(packet, OpOverloadPacket) else []
    return any(_SEEDED in o.tags and _has_generator(o) for o in overloads)


def _has_generator(overload: OpOverload) -> bool:
    return any(argument.name == "generator" for argument in schema_of(overload).arguments)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any], default: torch.device) -> torch.device:
    device: torch.device | None = kwargs.get("device")
    if device is None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                return value.device
    return device or default


_thread = threading.local()


def _own_generator(device: torch.device) -> torch.Generator:
    """Returns this thread's generator of a device; callers seed it first."""
    generators: dict[torch.device, torch.Generator] = _thread.__dict__.setdefault("generators", {})
    if device not in generators:
        generators[device] = torch.Generator(device)
    return generators[device]


def _lend_generator(generator: torch.Generator, call: Callable[[], Any]) -> Any:
    """Calls `call` with the state of `generator` in the process's generator; then stores the new state."""
    device = generator.device
    process = accelerator.default_generator(device)
    with generator_lock(device):
        before = process.get_state()
        process.set_state(generator.get_state())
        try:
            return call()
        finally:
            generator.set_state(process.get_state())
            process.set_state(before)


# -- Random functions that take no generator, reimplemented with one --------------------------------------------------
#
# They give the results of torch's functions after `manual_seed`, bit for bit: the same kernels on the same numbers in
# the same order (ATen: `Dropout.cpp`, `RNN.cpp`; the tests compare them). So workers do not wait for the generator of
# the process. For unsupported arguments a function returns `NotImplemented` before it draws.
#
# This holds on a CPU. On a GPU other kernels draw, and only the RNNs are reimplemented: cuDNN draws their dropout from
# a separate state, which torch's seed does not set and which continues from call to call, so recomputation would get
# another mask.


def dropout(
    generator: Generator, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or not 0 < p < 1 or input.numel() == 0:
        return F.dropout(input, p, training, inplace)  # draws nothing
    noise = torch.empty_like(input).bernoulli_(1 - p, generator=generator).div_(1 - p)
    return input.mul_(noise) if inplace else input.mul(noise)


def _recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an RNN that runs layer by layer, with dropout in between."""

    def run(generator: Generator, input: Tensor, hx: Any, params: Any, *options: Any, **packing: Any) -> Any:
        if len(options) != 6 or not isinstance(params, (tuple, list)):
            return NotImplemented
        has_biases, layers, p, train, bidirectional, batch_first = options
        states = hx if isinstance(hx, (tuple, list)) else (hx,)
        each = len(params) // layers
        parts = [state.split(2 if bidirectional else 1) for state in states]
        ends: list[Sequence[Tensor]] = []
        x = input.transpose(0, 1) if batch_first else input
        for layer in range(layers):
            if layer and train and p:
                x = dropout(generator, x, p)
            initial = [part[layer].contiguous() for part in parts]
            weights = params[layer * each : (layer + 1) * each]
            state = initial if len(initial) > 1 else initial[0]
            x, *end = function(x, state, weights, has_biases, 1, 0.0, train, bidirectional, False, **packing)
            ends.append(end)
        return (x.transpose(0, 1) if batch_first else x, *map(torch.cat, zip(*ends, strict=True)))

    return run


_ATEN_RNNS = (_aten.lstm.input, _aten.gru.input, _aten.rnn_tanh.input, _aten.rnn_relu.input)
ANY_DEVICE_KERNELS = {f: _recurrent(f) for f in (*RNN_FUNCTIONS, *PACKED_FUNCTIONS.values(), *_ATEN_RNNS)}
# (generator, *arguments of the function) -> its result
RNG_KERNELS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, torch.dropout, _aten.dropout.default), dropout),
    **ANY_DEVICE_KERNELS,
}


class _NoRandomNumbers(TorchDispatchMode):
    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # `_fused_sdp_choice` has the tag, but returns a number.
        if _SEEDED not in func.tags or not any("Tensor" in str(r.type) for r in schema_of(func).returns):
            return func(*args, **kwargs)
        device = _device_of(args, kwargs, _CPU)
        process = accelerator.default_generator(device)
        with generator_lock(device):
            before = process.get_state()
            result = func(*args, **kwargs)
            if torch.equal(before, process.get_state()):
                return result
        raise StateError(
            f"{self.name}, kept whole, draws random numbers, which it did not when it was traced; recomputed, it would "
            "draw other ones: use checkpoint='never'"
        )


def forbid_random_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Forbids random numbers in an opaque call that drew none in the trace, in steps that would recompute it."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not stage_context.recomputes:
            return function(*args)
        # A `with` would also set global flags that disable torch.compile; threads that leave in another order than they
        # entered would never reset them.
        push_dispatch_mode(_NoRandomNumbers(function.__name__))
        try:
            return function(*args)
        finally:
            pop_dispatch_mode()

    return call
