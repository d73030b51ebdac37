"""Functions that rewriting puts into stage code: the ends of a portal, clones, the state of the thread, random nodes.

A random node draws from a seed made of the step's seed, the micro-batch and the node's ordinal in the graph. So its
numbers hang neither on the cut nor on the schedule nor on timing, and a recomputed node draws the same ones without any
saved state.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.errors import StateError
from fxpipe.tracing.recording.draws import generator_states, same_states

T = TypeVar("T")


class _Running(threading.local):
    """What the stage that runs in this thread is run for; set by the runtime."""

    seed = 0  # of the step and micro-batch
    recomputes = False  # does the step run something twice, which must come to the same then?


running = _Running()


def stash(value: T, name: str) -> T:
    """Marks, in its maker, a value that skips stages. The runtime sends it straight to the stages that `pop` it."""
    return value


def pop(value: T, name: str) -> T:
    """Marks, in its user, a value that has skipped stages."""
    return value


def clone(value: torch.Tensor) -> torch.Tensor:
    """A copy that the stage may write to.

    It has the strides of the value, also where these leave gaps, which `Tensor.clone` closes: `contiguous` must go on
    to copy what it copied. (What overlaps itself becomes dense; torch refuses to write to it anyway.)
    """
    copy = value.clone()
    if copy.stride() == value.stride() or 0 in value.stride():
        return copy
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def set_grad(enabled: bool) -> None:
    """`no_grad`, `enable_grad` and `inference_mode` blocks of the model."""
    torch.set_grad_enabled(enabled)


def set_autocast(device: str, enabled: bool, dtype: torch.dtype, cache: bool) -> None:
    """Autocast blocks of the model; without the cache of casts, which belongs to the process and not to one worker."""
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(cache and not enabled)
    if not enabled:
        torch.clear_autocast_cache()


# -- random nodes ----------------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1
_generator_lock = threading.Lock()


def mixed(*numbers: int) -> int:
    """A seed of 63 bits. Each bit hangs on every bit of `numbers`: splitmix64 (Steele et al., OOPSLA 2014)."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


@contextlib.contextmanager
def dice_of(seed: int) -> Iterator[None]:
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


def seeded(
    ordinal: int, function: Callable[..., Any] | str, device: torch.device, dice: bool = False
) -> Callable[..., Any]:
    """`function` (or the method of that name), its random numbers taken from the seed of the running micro-batch.

    `dice`: it draws from Python's and numpy's, too.
    """
    name = function if isinstance(function, str) else getattr(function, "__name__", "function")

    def call(*args: Any, **kwargs: Any) -> Any:
        if isinstance(function, str):
            return getattr(args[0], function)(*args[1:], **kwargs)
        return function(*args, **kwargs)

    def draw(*args: Any, **kwargs: Any) -> Any:
        seed = mixed(running.seed, ordinal)
        on_cpu = device.type == "cpu"
        generator = torch.default_generator if on_cpu else torch.cuda.default_generators[device.index or 0]
        # The generator belongs to the process: another worker must not draw from it meanwhile.
        with _generator_lock:
            before = generator.get_state()
            generator.manual_seed(seed)
            try:
                with dice_of(seed) if dice else contextlib.nullcontext():
                    return call(*args, **kwargs)
            finally:
                generator.set_state(before)

    def draw_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        # What F.dropout does on CPU, bit for bit, with a generator of its own: no worker waits for another.
        if inplace or input.device.type != "cpu":
            dropped: torch.Tensor = draw(input, p, training, inplace)
            return dropped
        generator = torch.Generator()
        generator.manual_seed(mixed(running.seed, ordinal))
        kept = torch.empty_like(input).bernoulli_(1 - p, generator=generator)
        return input.mul(kept.div_(1 - p))

    chosen: Callable[..., Any] = draw_dropout if function is F.dropout else draw
    chosen.__name__ = chosen.__qualname__ = f"seeded_{name}"
    chosen.__module__ = __name__
    return chosen


class _Undrawn(TorchDispatchMode):
    """Raises where something draws random numbers."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        with _generator_lock:
            before = generator_states()
            result = func(*args, **(kwargs or {}))
            if same_states(before, generator_states()):
                return result
        raise StateError(
            f"{self.name}, kept whole, draws random numbers, which it did not when it was traced; recomputed, it would "
            "draw other ones: use checkpoint='never'"
        )


def undrawn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Python that runs as it is, and drew no random numbers while it was traced.

    Its numbers come from torch's generator and not from the seed of the micro-batch, so it may not be run again.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with _Undrawn(function.__name__) if running.recomputes else contextlib.nullcontext():
            return function(*args)

    return call
