"""`torch.sim`: the simulated devices as torch's modules of devices (`torch.cuda`, `torch.xpu`) present theirs."""

import contextlib
import ctypes
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from simulated import build, host_order

NAME = "sim"
DEVICES = 4
_ROOM = 1 << 16  # characters for races

Device = torch.device | str | int | None


class SimulatedMachine:
    """The machine, as tests ask it."""

    device_count = DEVICES

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        library.sim_host_tells.argtypes = library.sim_host_hears.argtypes = [ctypes.c_uint64]
        library.sim_device_bytes.restype = library.sim_count.restype = ctypes.c_int64
        library.sim_set_device_bytes.argtypes = [ctypes.c_int64, ctypes.c_int]
        library.sim_take_races.argtypes = [ctypes.c_char_p, ctypes.c_size_t]

    def races(self) -> list[str]:
        """Returns what was not ordered since it was last asked."""
        text = ctypes.create_string_buffer(_ROOM)
        self._library.sim_take_races(text, _ROOM)
        return text.value.decode().splitlines()

    def count(self, what: str) -> int:
        """Returns how often something has happened since `begin`.

        Counted are "waits" of streams, "host waits", "host blocks", "copies between devices", "record_stream", and
        "bytes from the host", "bytes to the host" and "bytes between devices".
        """
        count: int = self._library.sim_count(what.encode())
        return count

    def begin(self, host_ahead: bool = False) -> None:
        """Forgets what has happened, as if everything had been waited for.

        `host_ahead`: devices are far behind what they are given, else by chance: an event has passed when it is asked
        for long enough, not at once now and then.
        """
        self._library.sim_forget()
        self._library.sim_set_host_ahead(host_ahead)

    def tell(self, channel: object) -> None:
        """Lets this thread of the host tell what it has waited for; who hears on the channel knows it, too."""
        self._library.sim_host_tells(hash(channel) & (2**64 - 1))

    def hear(self, channel: object) -> None:
        self._library.sim_host_hears(hash(channel) & (2**64 - 1))

    def set_sync_debug_mode(self, mode: str) -> None:
        self._library.sim_set_sync_debug_mode({"default": 0, "error": 1}[mode])

    @property
    def device_bytes(self) -> int:
        total: int = self._library.sim_device_bytes()
        return total

    def set_device_bytes(self, total: int, devices: Iterable[int] = range(DEVICES)) -> None:
        """Lets these devices have so much memory each, until `begin`, of which the allocator keeps none unused."""
        torch.accelerator.empty_cache()
        for index in devices:
            self._library.sim_set_device_bytes(total, index)


_machine: SimulatedMachine | None = None


def machine() -> SimulatedMachine:
    """Returns the machine, which is loaded when it is first asked for; before any backward, see `_load`."""
    global _machine
    if _machine is None:
        _machine = _load()
    return _machine


def _load() -> SimulatedMachine:
    """Loads the backend.

    Autograd makes its threads at the first backward, one for each device that there is. Devices that come later would
    have none.
    """
    loaded = SimulatedMachine(ctypes.CDLL(str(build.library())))
    torch.utils.rename_privateuse1_backend(NAME)
    module = _module(loaded)
    torch._register_device_module(NAME, module)
    sys.modules[f"torch.{NAME}"] = module
    torch.utils.generate_methods_for_privateuse1_backend()
    host_order.follow(loaded.tell, loaded.hear)
    return loaded


def _index(device: Device = None) -> int:
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    return torch.accelerator.current_device_index() if index is None else index


def _module(loaded: SimulatedMachine) -> types.ModuleType:
    """Makes the module. Most of it is torch's generic interface under the names that torch.cuda has for it."""
    generic = torch.accelerator
    generators = tuple(torch.ops.simulated.default_generator(index) for index in range(DEVICES))

    class Stream(torch.Stream):
        def __new__(cls, device: Device = None, **options: Any) -> Any:
            return torch.Stream(torch.device(NAME, _index(device)), **options)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            return torch.Event(NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    @contextlib.contextmanager
    def device(device: Device) -> Iterator[None]:
        before = generic.current_device_index()
        generic.set_device_index(_index(device))
        try:
            yield
        finally:
            generic.set_device_index(before)

    @contextlib.contextmanager
    def stream(stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        with device(stream.device):
            before = generic.current_stream(stream.device)
            generic.set_stream(stream)
            try:
                yield
            finally:
                generic.set_stream(before)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
        generators[_index(device)].set_state(state)

    module = types.ModuleType(f"torch.{NAME}", "Four simulated devices.")
    members: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "device": device,
        "stream": stream,
        "default_generators": generators,
        "OutOfMemoryError": torch.OutOfMemoryError,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "_initialized": True,
        "device_count": lambda: DEVICES,
        "current_device": generic.current_device_index,
        "set_device": lambda device: generic.set_device_index(_index(device)),
        "get_device_name": lambda device=None: "simulated",
        "synchronize": lambda device=None: generic.synchronize(_index(device)),
        "current_stream": lambda device=None: generic.current_stream(_index(device)),
        "set_stream": generic.set_stream,
        "default_stream": lambda device=None: torch.Stream(
            stream_id=0, device_index=_index(device), device_type=generic.current_stream().device_type
        ),
        "memory_stats": lambda device=None: generic.memory_stats(_index(device)),
        "memory_allocated": lambda device=None: generic.memory_allocated(_index(device)),
        "max_memory_allocated": lambda device=None: generic.max_memory_allocated(_index(device)),
        "memory_reserved": lambda device=None: generic.memory_reserved(_index(device)),
        "max_memory_reserved": lambda device=None: generic.max_memory_reserved(_index(device)),
        "reset_peak_memory_stats": lambda device=None: generic.reset_peak_memory_stats(_index(device)),
        "mem_get_info": lambda device=None: generic.get_memory_info(_index(device)),
        "empty_cache": generic.empty_cache,
        "manual_seed": lambda seed: generators[_index()].manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device=None: generators[_index(device)].get_state(),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state": set_rng_state,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "set_sync_debug_mode": loaded.set_sync_debug_mode,
        "_sleep": lambda cycles: None,  # what a device is late for is never there in time here
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module
