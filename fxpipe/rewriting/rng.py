"""Random nodes of a stage, which draw by seed: the step's, the micro-batch's and the node's own, mixed.

So a node's numbers hang neither on the cut nor on the schedule nor on timing, and a recomputed node draws the same ones
without any saved state. They are those that the function draws from torch's generator after `manual_seed` of that seed,
bit for bit. But that generator belongs to the process, and other stages run meanwhile. So, in order of preference:

1. A function that takes `generator=` is given one of the thread's own.
2. On a CPU the commonest of the others (dropouts, attention, RNNs) are written out with such a generator, RNNs also on
   a GPU, where no seed of torch would reach their dropout.
3. What torch has besides draws from torch's own generator, seeded for the while and put back after it: most kernels of
   a GPU, which take no other, and on a CPU alpha dropout, fractional pooling, attention in half precision or under
   autocast.
4. So does what is not torch's: custom operators, and Python kept whole, which may look at the generator or seed it.

No stage waits for another in 1 and 2. In 3 and 4 one that draws from the same generator does: on a GPU, which has a
lock of its own, while kernels are queued and no longer. Python kept whole takes the CPU's besides, since it may draw
there as well.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe._torch.checkpoint import can_replay_checkpoints, replay_checkpoints
from fxpipe._torch.dispatch_modes import TorchDispatchMode, pop_dispatch_mode, push_dispatch_mode
from fxpipe._torch.functions import opname
from fxpipe._torch.operators import OpOverload, OpOverloadPacket, schema_of
from fxpipe._torch.versions import TESTED_VERSIONS
from fxpipe.errors import StateError
from fxpipe.rewriting.program import stage_context
from fxpipe.rewriting.rng_kernels import ANY_DEVICE_KERNELS, RNG_KERNELS
from fxpipe.utils import accelerator
from fxpipe.utils.random_generators import generator_lock, mix_seed

_CPU = torch.device("cpu")
_SEEDED = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True, slots=True)
class RandomCall:
    """The parts of a random node of stage code; its target keeps them as `drawing`."""

    ordinal: int
    function: Callable[..., Any] | str


def seeded_generator(device: torch.device, ordinal: int) -> torch.Generator:
    """This thread's generator of a device, where a random node begins in the running micro-batch."""
    return _own_generator(device).manual_seed(mix_seed(stage_context.seed, ordinal))


def seeded_function(
    ordinal: int, function: Callable[..., Any] | str, device: torch.device, python_rng: bool = False
) -> Callable[..., Any]:
    """`function` (or the method of that name), its random numbers taken from the seed of the running micro-batch.

    `device` is the stage's. `python_rng`: it draws from Python's and numpy's, too.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return (
            getattr(args[0], function)(*args[1:], **kwargs) if isinstance(function, str) else function(*args, **kwargs)
        )

    written_out: Any = RNG_KERNELS.get(function)

    def begun(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
        return seeded_generator(_device_of(args, kwargs, device), ordinal)

    def draw_given(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **{**kwargs, "generator": begun(args, kwargs)})

    def draw_written_out(*args: Any, **kwargs: Any) -> Any:
        generator = begun(args, kwargs)
        if generator.device == _CPU or function in ANY_DEVICE_KERNELS:
            drawn = written_out(generator, *args, **kwargs)
            if drawn is not NotImplemented:
                return drawn
        return _lend_generator(generator, functools.partial(call, *args, **kwargs))

    def draw(*args: Any, **kwargs: Any) -> Any:
        return _lend_generator(begun(args, kwargs), functools.partial(call, *args, **kwargs))

    def draw_alone(*args: Any, **kwargs: Any) -> Any:
        seed = mix_seed(stage_context.seed, ordinal)
        generators = [_own_generator(at).manual_seed(seed) for at in dict.fromkeys((_CPU, device))]
        work = functools.partial(call, *args, **kwargs)
        return _lend_generators(
            generators, functools.partial(_call_with_python_rng, seed, work) if python_rng else work
        )

    chosen: Callable[..., Any]
    if takes_generator(function):
        chosen = draw_given
    elif written_out is not None:
        chosen = draw_written_out
    elif is_from_torch(function):
        chosen = draw
    else:
        if not can_replay_checkpoints():
            _warn_of_checkpoints(function)
        chosen = draw_alone
    name = function if isinstance(function, str) else opname(function)
    chosen.__name__ = chosen.__qualname__ = f"seeded_{name}"
    chosen.__module__ = __name__
    chosen.drawing = RandomCall(ordinal, function)  # type: ignore[attr-defined]
    return chosen


# -- properties of functions -----------------------------------------------------------------------------------------


def is_from_torch(function: Callable[..., Any] | str) -> bool:
    """Returns whether a function is torch's own, which does nothing with generators but draw from them."""
    if isinstance(function, str):
        return True
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return _namespace_of(function) == "aten"
    return str(getattr(function, "__module__", None) or "torch").partition(".")[0] == "torch"


def takes_generator(function: Callable[..., Any] | str) -> bool:
    """Returns whether it takes `generator=`. Functions written in Python do not count: some pass it on by place."""
    if isinstance(function, OpOverload):
        return is_from_torch(function) and _generator_place(function) is not None
    is_python = hasattr(function, "__code__")
    packet = function if isinstance(function, str) else opname(function)
    return is_from_torch(function) and not is_python and _has_generator_overload(packet)


@functools.cache
def _has_generator_overload(packet: str) -> bool:
    """Returns whether this function of aten has an overload that takes a generator."""
    operator = getattr(torch.ops.aten, packet, None)
    overloads = (
        [getattr(operator, name) for name in operator.overloads()] if isinstance(operator, OpOverloadPacket) else []
    )
    return any(_SEEDED in o.tags and _generator_place(o) is not None for o in overloads)


def _generator_place(overload: OpOverload) -> int | None:
    places = (k for k, argument in enumerate(schema_of(overload).arguments) if argument.name == "generator")
    return next(places, None)


def _namespace_of(function: OpOverload | OpOverloadPacket) -> str:
    overload = function if isinstance(function, OpOverload) else getattr(function, function.overloads()[0])
    return str(overload.namespace)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any], default: torch.device) -> torch.device:
    """Returns the device on which a function draws: that of `device=`, or else that of its tensors."""
    device: torch.device | None = kwargs.get("device")
    if device is None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                return value.device
    return device or default


# -- generators ------------------------------------------------------------------------------------------------------


class _ThreadGenerators(threading.local):
    """The generators that a thread draws with."""

    def __init__(self) -> None:
        self.generators: dict[torch.device, torch.Generator] = {}  # its own: seeded anew by each node
        self.lent_generators: Sequence[
            torch.Generator
        ] = ()  # those in the places of the process's, in `_lend_generators`


_thread_generators = _ThreadGenerators()


def _own_generator(device: torch.device) -> torch.Generator:
    """This thread's generator of a device; what draws from it seeds it first."""
    generators = _thread_generators.generators
    if device not in generators:
        generators[device] = torch.Generator(device)
    return generators[device]


def _process_generator(device: torch.device) -> accelerator.GeneratorState:
    return accelerator.default_generator(device)


def _lend_generator(generator: torch.Generator, call: Callable[[], Any]) -> Any:
    """Calls with the process's generator standing where this one does, and takes over where it has come to."""
    device = generator.device
    process = _process_generator(device)
    with generator_lock(device):
        before = process.get_state()
        process.set_state(generator.get_state())
        try:
            return call()
        finally:
            generator.set_state(process.get_state())
            process.set_state(before)


def _lend_generators(generators: Sequence[torch.Generator], call: Callable[[], Any]) -> Any:
    """Lends several generators, always in the same order, around Python that may do anything."""
    outer, _thread_generators.lent_generators = _thread_generators.lent_generators, generators
    try:
        for generator in reversed(generators):
            call = functools.partial(_lend_generator, generator, call)
        with replay_checkpoints(_replay_with_own_generators):
            return call()
    finally:
        _thread_generators.lent_generators = outer


def _call_with_python_rng(seed: int, call: Callable[[], Any]) -> Any:
    with seeded_python_rng(seed):
        return call()


@contextlib.contextmanager
def seeded_python_rng(seed: int) -> Iterator[None]:
    """A block in which Python's and numpy's random numbers start from a seed."""
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), numpy and numpy.random.get_state()
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before[0])
        if numpy:
            numpy.random.set_state(before[1])


# -- checkpoints inside of Python kept whole -------------------------------------------------------------------------

# `torch.utils.checkpoint` puts torch's own generator back to where it was, in the middle of a backward, while other
# stages draw from it. So what a random node checkpoints is recomputed with a generator of its own, which begins where
# that of the node was. Torch's checkpoints are taken over while a random node runs that may use them, and no longer.


# No model of the zoo: a checkpoint in a module kept whole that draws needs it (unit/rewriting/test_rng.py).
def _replay_with_own_generators(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that a checkpoint which a random node makes recomputes."""
    states = [(g.device, _process_generator(g.device).get_state()) for g in _thread_generators.lent_generators]

    def replay(*args: Any, **kwargs: Any) -> Any:
        return _lend_generators(
            [_generator_at(*place) for place in states], functools.partial(function, *args, **kwargs)
        )

    return replay


def _generator_at(device: torch.device, state: torch.Tensor) -> torch.Generator:
    return torch.Generator(device).set_state(state)


def _warn_of_checkpoints(function: Any) -> None:
    warnings.warn(
        f"{opname(function)}, kept whole, draws random numbers, and torch {torch.__version__} (fxpipe is tested with "
        f"{TESTED_VERSIONS}) does not let fxpipe see what it checkpoints: if it uses torch.utils.checkpoint, that may "
        "be recomputed with other random numbers where another stage draws at the same time; use no checkpoint in it",
        stacklevel=2,
    )


# -- Python that should draw nothing ---------------------------------------------------------------------------------


@functools.cache
def _draws_random_numbers(overload: OpOverload) -> bool:
    """Returns whether an overload draws. `_fused_sdp_choice` is tagged as if it did, and returns a number."""
    return _SEEDED in overload.tags and any("Tensor" in str(r.type) for r in schema_of(overload).returns)


def _call_under(mode: TorchDispatchMode, call: Callable[[], Any]) -> Any:
    """Calls under a mode.

    A `with` would set flags of the process, too, by which torch.compile stands aside; threads that leave in another
    order than they entered would leave them set for good.
    """
    push_dispatch_mode(mode)
    try:
        return call()
    finally:
        pop_dispatch_mode()


class _NoRandomNumbers(TorchDispatchMode):
    """Raises where something draws random numbers."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _draws_random_numbers(func):
            return func(*args, **kwargs)
        device = _device_of(args, kwargs, _CPU)
        process = _process_generator(device)
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
    """Wraps an opaque call that drew no random numbers while it was traced: in a step that recomputes it may not.

    Its numbers come from torch's generator and not from the seed of the micro-batch, so it may not be run again.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not stage_context.recomputes:
            return function(*args)
        return _call_under(_NoRandomNumbers(function.__name__), functools.partial(function, *args))

    return call
