"""Devices other than the CPU, and seeds. fxpipe calls devices only through these functions.

They use torch's interface for all accelerators (`torch.accelerator`, `torch.Stream`, `torch.Event`), and functions of
backend modules by convention (`torch.get_device_module`). So CUDA, ROCm, XPU and out-of-tree backends run the same
code. torch has one accelerator at a time; other device types, and backends without streams, events or generators, are
refused (`missing_support`). Devices have an index (`with_index`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from fxpipe.errors import ArgumentError, StateError
from fxpipe.utils.locks import call_in_forked_child

# -- Devices -----------------------------------------------------------------------------------------------------------


def accelerator_type() -> str | None:
    """Returns the type of torch's accelerator ("cuda"), even without a device; None if torch has no accelerator."""
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def device_count(device_type: str | None = None) -> int:
    """Returns the number of available devices of the accelerator; 0 for another device type."""
    if accelerator_type() is None or device_type not in (None, accelerator_type()):
        return 0
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def local_devices() -> tuple[torch.device, ...]:
    """Returns all devices of the accelerator; an empty tuple if stages cannot run on them."""
    kind = accelerator_type()
    devices = tuple(torch.device(str(kind), index) for index in range(device_count()))
    return () if not devices or missing_support(devices[0]) else devices


def first_devices(count: int | None) -> tuple[torch.device, ...]:
    """Returns the first devices of the accelerator, at most `count`; without devices CPU workers, by default 2."""
    devices = local_devices()
    return devices[:count] if devices else (torch.device("cpu"),) * (2 if count is None else count)


_missing_support: dict[str, str | None] = {}  # by device type


def missing_support(device: torch.device) -> str | None:
    """Returns what torch's backend for an available device lacks for stages; None if nothing. Uses no other device."""
    if device.type not in _missing_support:
        _missing_support[device.type] = _find_missing_support(device)
    return _missing_support[device.type]


def _find_missing_support(device: torch.device) -> str | None:
    if device.type != accelerator_type():
        return f"torch's accelerator is {accelerator_type()!r}, and it has one at a time"
    needed: tuple[tuple[str, Callable[[torch.device], Any]], ...] = (
        ("current streams (torch.accelerator.current_stream)", current_stream),
        ("streams (torch.Stream)", new_stream),
        ("events with times (torch.Event)", lambda device: record_event(current_stream(device), timing=True)),
        ("random generators (torch.Generator)", torch.Generator),
        (
            "its own random generator (default_generators or get_rng_state)",
            lambda device: default_generator(device).get_state(),
        ),
        (  # a tensor without memory: all may be in use
            "tensors that remember a stream (Tensor.record_stream)",
            lambda device: torch.empty(0, device=device).record_stream(current_stream(device)),
        ),
    )
    for name, attempt in needed:
        try:
            attempt(device)
        except (RuntimeError, AttributeError, TypeError) as error:
            first = str(error).strip().partition("\n")[0]
            return f"torch's backend {device.type!r} lacks {name}: {first}"
    return None


def with_index(device: torch.device) -> torch.device:
    """Returns the device with its index, by default the current device's; the CPU has no index."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is not None:
        return device
    is_here = device.type == accelerator_type() and torch.accelerator.is_available()
    return torch.device(device.type, torch.accelerator.current_device_index() if is_here else 0)


def parse_device(argument: str, value: str | torch.device, anywhere: bool = False) -> torch.device:
    """Checks a device that a user passes, and returns it with its index. `anywhere`: it need not be available."""
    if isinstance(value, torch.Tensor):
        raise ArgumentError(f"{argument} has a tensor; inputs to plan with are example_args=(x,)")
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError):
        raise ArgumentError(f"{argument}: {value!r} is no device of torch's; 'cpu' and 'cuda:0' are") from None
    if device.type == "meta":
        raise ArgumentError(f"{argument}: {value!r} is not supported; stages run on 'cpu' and on accelerators")
    if device.type == "cpu":
        return torch.device("cpu")
    if (device.index or 0) < 0:  # torch has 7 bits for it, and cuda:128 is cuda:-128
        raise ArgumentError(f"{argument}: {value!r}: torch has no index above 127 for a device")
    if anywhere:
        return torch.device(device.type, device.index or 0)
    count = device_count(device.type)
    if (device.index or 0) >= count:
        raise ArgumentError(
            f"{argument}: {value!r} is not available: there are {count} {device.type.upper()} devices here; 'cpu' "
            "always works"
        )
    device = with_index(device)
    if lacking := missing_support(device):
        raise ArgumentError(f"{argument}: {value!r} is not supported: {lacking}; 'cpu' always works")
    return device


def device_name(device: torch.device) -> str | None:
    module = torch.get_device_module(device.type) if device_count(device.type) else None
    function = getattr(module, "get_device_name", None)
    return None if function is None else str(function(device))


def device_uuid(device: torch.device) -> str | None:
    """Returns the UUID of a device, equal in all processes; None if unknown."""
    module = torch.get_device_module(device.type) if device_count(device.type) else None
    uuid = getattr(getattr(module, "get_device_properties", lambda device: None)(device), "uuid", None)
    return None if uuid is None else str(uuid)


def set_current_device(device: torch.device) -> None:
    torch.accelerator.set_device_index(device.index)


def current_device(device: torch.device) -> torch.accelerator.device_index:
    """A block in which a device is current; does nothing for the CPU. Leaving it creates no context."""
    return torch.accelerator.device_index(None if device.type == "cpu" else device.index)


def synchronize(*devices: torch.device) -> None:
    """Waits until these devices have finished all queued work, on all streams. Does nothing for the CPU."""
    for device in dict.fromkeys(devices):
        if device.type != "cpu":
            torch.accelerator.synchronize(device.index)


# -- Streams and events ------------------------------------------------------------------------------------------------


def current_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device.index)


def new_stream(device: torch.device) -> torch.Stream:
    """Returns a stream of a device, from torch's stream pool."""
    return torch.Stream(device=device)


class current_streams:
    """A block in which these streams are current on their devices, and the last stream's device is current.

    `with stream:` would save the previous stream in `stream`, which several threads share.
    """

    __slots__ = ("_before", "_device", "_streams")

    def __init__(self, *streams: torch.Stream):
        self._streams = streams
        self._device = torch.accelerator.device_index(streams[-1].device_index if streams else None)

    def __enter__(self) -> None:
        self._device.__enter__()
        self._before = [torch.accelerator.current_stream(stream.device_index) for stream in self._streams]
        for stream in self._streams:
            torch.accelerator.set_stream(stream)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for stream in reversed(self._before):
            torch.accelerator.set_stream(stream)
        self._device.__exit__(kind, error, at)


def record_event(stream: torch.Stream, timing: bool = False) -> torch.Event:
    """Records an event after all work queued on a stream. `timing`: the event has a time."""
    event = torch.Event(device=stream.device, enable_timing=timing)
    event.record(stream)
    return event


def seconds_between(earlier: torch.Event, later: torch.Event) -> float:
    """Returns the seconds from one event to another; waits for the later event."""
    later.synchronize()
    return float(earlier.elapsed_time(later)) / 1e3  # from milliseconds


_SHORTEST_SLEEP, _LONGEST_SLEEP = 1e-5, 2e-4  # seconds


def wait_on_host(event: torch.Event, timeout: float | None = None) -> bool:
    """Lets the host sleep until an event has passed; returns False after `timeout` seconds.

    `torch.Event` ignores `blocking=`, so `event.synchronize()` spins on a core that another stage may need.
    """
    pause = _SHORTEST_SLEEP
    deadline = None if timeout is None else time.monotonic() + timeout
    while not event.query():
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SLEEP)
    event.synchronize()  # returns immediately; race detectors (torch's sanitizer) recognize only this call
    return True


def copy_to(memory: torch.Tensor, target: torch.device) -> torch.Tensor:
    """Starts a copy on the current streams, into memory of the current stream or into pinned CPU memory."""
    result = torch.empty(memory.shape, dtype=memory.dtype, device=target, pin_memory=target.type == "cpu")
    return result.copy_(memory, non_blocking=True)


def keep_for_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Keeps the memory of a tensor, once freed, from reuse until the work queued on the stream is done."""
    tensor.record_stream(stream)


def pinned(memory: torch.Tensor) -> torch.Tensor:
    """Returns CPU memory that devices can read asynchronously: `memory` if it is pinned, else a pinned copy."""
    if memory.is_pinned():
        return memory
    return torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True).copy_(memory)


def refuse_capture(devices: Iterable[torch.device]) -> None:
    """Raises `StateError` if this thread captures a graph (`torch.cuda.graph`) on the current or one of `devices`."""
    kind = accelerator_type()
    if kind is None:
        return
    is_capturing = getattr(torch.get_device_module(kind), "is_current_stream_capturing", None)
    if is_capturing is None or not _is_initialized(kind):
        return
    here = (device.index for device in devices if device.type == kind and device.index < device_count())
    for index in dict.fromkeys((None, *here)):  # not all devices: one that becomes current gets a context, and memory
        with torch.accelerator.device_index(index):
            if is_capturing():
                device = torch.device(kind, torch.accelerator.current_device_index())
                raise StateError(
                    f"a graph is being captured on the current stream of {device} (torch.cuda.graph), and no step of a "
                    "pipe can be part of it: stages run in threads and on streams of their own, and the host waits for "
                    "some. Call the pipe outside the capture; compile=True is what makes launches fewer"
                )


# -- Memory ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """The memory of a device, in bytes."""

    free: int  # unused by any process
    total: int
    allocated: int  # tensors of this process
    reserved: int  # held by torch's allocator in this process

    @property
    def available(self) -> int:
        """Bytes for further tensors of this process: free memory, and memory that torch holds unused."""
        return self.free + max(0, self.reserved - self.allocated)


@functools.cache
def _memory_function(device_type: str, name: str) -> Callable[[torch.device], Any] | None:
    """Returns the memory function of this name for a device type; None if no function works."""
    function: Callable[[torch.device], Any] | None = getattr(torch.get_device_module(device_type), name, None)
    if function is not None:
        return function
    # These functions support only torch's allocators.
    function = getattr(torch.accelerator, "get_memory_info" if name == "mem_get_info" else name, None)
    try:
        if function is not None:
            function(torch.device(device_type, 0))
    except RuntimeError:  # not torch's allocator
        return None
    return function


def memory_figures(device: torch.device) -> MemoryFigures | None:
    """Returns the memory figures of a device; None if it is not an accelerator, or the backend has no figures."""
    if device.type != accelerator_type():
        return None
    names = ("mem_get_info", "memory_allocated", "memory_reserved")
    figures, allocated, reserved = (_memory_function(device.type, name) for name in names)
    if figures is None or allocated is None or reserved is None:
        return None
    free, total = figures(device)
    return MemoryFigures(int(free), int(total), int(allocated(device)), int(reserved(device)))


def counts_memory(device: torch.device) -> bool:
    """Returns True if the backend reports allocated bytes and their peak."""
    names = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")
    return device.type == accelerator_type() and all(_memory_function(device.type, name) for name in names)


def _memory_figure(name: str, device: torch.device) -> int:
    function = _memory_function(device.type, name)
    if function is None:
        raise StateError(f"torch's backend {device.type!r} lacks {name}")
    return int(function(device) or 0)


allocated_bytes = functools.partial(_memory_figure, "memory_allocated")
peak_allocated_bytes = functools.partial(_memory_figure, "max_memory_allocated")
peak_reserved_bytes = functools.partial(_memory_figure, "max_memory_reserved")
reset_peak = functools.partial(_memory_figure, "reset_peak_memory_stats")  # torch cannot restore these statistics


@functools.cache
def allocation_unit(device: torch.device) -> int:
    """Returns the bytes of the smallest allocation on a device; sizes are multiples of it."""
    before = allocated_bytes(device)
    smallest = torch.empty(1, dtype=torch.uint8, device=device)
    unit = allocated_bytes(device) - before
    del smallest
    return max(1, unit)


# -- Random generators -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ModuleGenerator:
    """The generator of a device whose backend exposes only its state."""

    device: torch.device

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = torch.get_device_module(self.device.type).get_rng_state(self.device)
        return state

    def set_state(self, state: torch.Tensor) -> None:
        torch.get_device_module(self.device.type).set_rng_state(state, self.device)


_Generator = torch.Generator | _ModuleGenerator


def default_generator(device: torch.device) -> _Generator:
    if device.type == "cpu":
        return torch.default_generator
    generators = getattr(torch.get_device_module(device.type), "default_generators", None)
    return _ModuleGenerator(device) if generators is None else generators[device.index or 0]


def used_generators() -> list[_Generator]:
    """Returns the generators of the accelerator's devices; an empty list if the accelerator was not used yet."""
    kind = accelerator_type()
    if kind is None or not device_count() or not _is_initialized(kind) or not _has_generators(kind):
        return []
    return [default_generator(torch.device(kind, index)) for index in range(device_count())]


@functools.cache
def _has_generators(device_type: str) -> bool:
    try:
        default_generator(torch.device(device_type, 0)).get_state()
    except (RuntimeError, AttributeError, TypeError):
        return False
    return True


def generator_position(generator: _Generator) -> Any:
    """Returns a value that changes with each draw from a generator; without a copy of its state if possible."""
    try:
        return generator.get_offset()  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # has no offset, such as the CPU's
        return generator.get_state().tolist()


@contextlib.contextmanager
def restore_generators(generators: Iterable[_Generator]) -> Iterator[None]:
    """A block that restores the states of these generators and the CPU's generator at its end."""
    states = [(generator, generator.get_state()) for generator in (torch.default_generator, *generators)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _is_initialized(device_type: str) -> bool:
    """Returns True if the backend is initialized; most other queries would initialize it."""
    function = getattr(torch.get_device_module(device_type), "is_initialized", None)
    return function is None or bool(function())


# -- Seeds, and locks for the default generators of the process ------------------------------------------------------

_MASK = (1 << 64) - 1


def mix_seed(*numbers: int) -> int:
    """Computes a 63-bit seed, each bit of which depends on all `numbers`: splitmix64 (Steele et al., OOPSLA 2014)."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draws the seed of a step, by default from the process's generator."""
    return int(torch.randint(2**62, (), generator=generator, device="cpu").item())


def peek_seed() -> int:
    """Returns the next number of torch's generator without advancing it: the step draws from it."""
    generator = torch.Generator()
    generator.set_state(torch.default_generator.get_state())
    return draw_seed(generator)


def comparison_seed() -> int:
    """Returns the seed for comparing a model and its graph: a number that forward is unlikely to set itself."""
    return mix_seed(torch.default_generator.initial_seed()) % 2**31


_generator_locks: dict[torch.device, contextlib.AbstractContextManager[Any]] = {}  # for the default generators
call_in_forked_child(_generator_locks.clear)


def generator_lock(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Returns the lock to hold while drawing from the default generator of a device."""
    lock = _generator_locks.get(device)
    if lock is None:
        # `setdefault`: two threads that create a lock at the same time get the same.
        lock = _generator_locks.setdefault(device, threading.RLock())
    return lock
