"""Parameters of a model that does not fit on a device: each is on the device only while it is used.

A model is recorded, compared and counted on the device of its stages (`model_state.model_on`), because forward may
depend on the device type and on values. A parameter remains the same object with the same sizes and storage on the
device; only the memory of the storage is allocated and freed. It is fetched when

- an operator of torch receives it or a view of it, in forward or backward: a dispatch mode intercepts the operator;
- an `autograd.Function` receives it as an argument or reads it from `ctx.saved_tensors`, or forward reads it from its
  module: it may be used by a kernel that torch does not dispatch.

Other parameters are then released. Nothing is written back: forward must not write to parameters (`Snapshot`).
Operators wait for copies meanwhile: measure times only inside `parameters_at_home`.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from fxpipe._torch.autograd_functions import Apply, FunctionClass, intercept_apply, watch_saved_tensors
from fxpipe._torch.modes import TorchDispatchMode, dispatch_modes_suspended, without_torch_function
from fxpipe._torch.operators import DETACH
from fxpipe._torch.tensor_data import replace_data, storage_address
from fxpipe.tracing.tensors import tensors_in
from fxpipe.utils import accelerator
from fxpipe.utils.locks import DISPATCH_MODE_LOCK

# Storages that modules or saved tensors read last. They stay, because the end of a kernel outside torch is unknown.
_RECENTLY_READ = 8
_LEAST_READ = 3  # minimum if memory runs out
_LATEST_SHARE = 1 / 4  # share of the room for the most recently used parameters


@dataclass(slots=True, eq=False)
class _Offloaded:
    """A storage on the device, with or without memory."""

    storage: torch.UntypedStorage
    home: torch.Tensor
    users: int = 0  # running operators that use it
    stream: torch.Stream | None = None  # stream of the fetch; None: not on the device

    def fetch(self, device: torch.device) -> None:
        stream = accelerator.current_stream(device)
        with _unseen(), accelerator.current_device(device):
            if self.stream is None:
                self.storage.resize_(self.home.nbytes)
                try:
                    _bytes_of(self.storage).copy_(self.home)
                except BaseException:
                    self.storage.resize_(0)
                    raise
                self.stream = stream
            elif self.stream != stream:
                stream.wait_stream(self.stream)
                accelerator.keep_for_stream(_bytes_of(self.storage), stream)

    def release(self) -> None:
        with _unseen(), accelerator.current_device(self.storage.device):
            self.storage.resize_(0)
        self.stream = None


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """A block hidden from all modes and from autograd."""
    with dispatch_modes_suspended(), without_torch_function(), torch.no_grad(), torch.inference_mode(False):
        yield


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def can_be_offloaded(tensor: torch.Tensor) -> bool:
    """Returns whether the memory of a tensor can be freed and restored: only for plain parameters."""
    return type(tensor) is nn.Parameter and _is_plain(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_own_kind = type(tensor) in (torch.Tensor, nn.Parameter)
    return is_own_kind and tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg())


class OffloadedParameters:
    """Parameters that are on a device only while they are used."""

    def __init__(self, device: torch.device, room: int):
        self._device, self._room = device, room
        self._of_home: dict[int, _Offloaded] = {}  # by address at home
        self._by_address: dict[int, _Offloaded] = {}  # by address on the device
        self._fetched: dict[_Offloaded, None] = {}  # storages on the device, most recently used last
        self._bytes = 0  # their total size
        self._has_released = False  # since the autocast cache was cleared
        self._read: deque[_Offloaded] = deque(maxlen=_RECENTLY_READ)
        self._homes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # parameter, home data, device data
        self._lock = threading.RLock()  # backward has threads of its own

    def add(self, parameter: torch.Tensor) -> None:
        """Moves a parameter to the device, without its values."""
        home = parameter.data
        address = storage_address(home)
        if address not in self._of_home:
            memory = torch.empty(home.untyped_storage().nbytes(), dtype=torch.uint8, device=self._device)
            storage = memory.untyped_storage()
            offloaded = _Offloaded(storage, _bytes_of(home.untyped_storage()))
            self._of_home[address] = self._by_address[storage_address(memory)] = offloaded
        storage = self._of_home[address].storage
        if not storage.nbytes():
            storage.resize_(home.untyped_storage().nbytes())
        here = torch.empty(0, dtype=home.dtype, device=self._device)
        here = here.set_(storage, home.storage_offset(), home.shape, home.stride())
        storage.resize_(0)  # only now: setting a tensor to a storage allocates its memory
        replace_data(parameter, here)
        self._homes.append((parameter, home, here))

    @contextlib.contextmanager
    def following(self, parameters: Iterable[torch.Tensor] = ()) -> Iterator[OffloadedParameters]:
        """A block in which these parameters are fetched on use. The caller restores their data."""
        # Recorded nodes keep `apply`, and would keep all parameters alive. Other threads may be in either function when
        # the block ends, so both read `here` only once.
        here = [self]

        def getattr_of_module(module: nn.Module, name: str) -> Any:
            value = read_attribute(module, name)
            if isinstance(value, torch.Tensor):
                for offloaded in here:
                    offloaded.read([value])
            return value

        def apply(plain: Apply, function: FunctionClass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with contextlib.ExitStack() as stack:
                for offloaded in here:
                    stack.enter_context(offloaded.in_use(tensors_in((args, kwargs))))
                return plain(function, *args, **kwargs)

        with DISPATCH_MODE_LOCK:
            for parameter in parameters:
                self.add(parameter)
            read_attribute, outer = nn.Module.__getattr__, _current.parameters
            nn.Module.__getattr__ = getattr_of_module  # type: ignore[method-assign]
            _current.parameters = self
            try:
                with intercept_apply(apply), watch_saved_tensors(self.read), _FetchMode(self):
                    yield self
            finally:
                nn.Module.__getattr__ = read_attribute  # type: ignore[method-assign]
                _current.parameters = outer
                here.clear()
                self.release_all()

    @contextlib.contextmanager
    def in_use(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """A block in which the offloaded tensors among these have their values."""
        used = self._of(tensors)
        with self._lock:
            for one in used:
                one.users += 1
        try:
            self._fetch(used)
            yield
        finally:
            with self._lock:
                for one in used:
                    one.users -= 1

    def read(self, tensors: Iterable[torch.Tensor]) -> None:
        """Fetches the offloaded tensors among these, for a kernel that torch does not dispatch."""
        used = self._of(tensors)
        with self._lock:
            self._read.extend(used)
            self._fetch(used)
            has_released, self._has_released = self._has_released, False
        if has_released:
            # Drop casts of released parameters. Not in `_release`: autocast may be about to cast, and hold its lock.
            torch.clear_autocast_cache()

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Fetches the offloaded tensors among these permanently."""
        for one in self._of(tensors):
            self._fetch([one])
            del self._by_address[storage_address(_bytes_of(one.storage))], self._fetched[one]

    def release_all(self) -> None:
        """Frees all memory, including the memory in reference cycles."""
        with self._lock:
            self._read.clear()
            self._release(0)
        gc.collect()

    @contextlib.contextmanager
    def at_home(self) -> Iterator[None]:
        """A block in which all parameters are back at home, without memory on the device."""
        with dispatch_modes_suspended():
            self.release_all()
            for parameter, home, _ in self._homes:
                replace_data(parameter, home)
            try:
                yield
            finally:
                for parameter, _, here in self._homes:
                    replace_data(parameter, here)

    def _of(self, tensors: Iterable[torch.Tensor]) -> list[_Offloaded]:
        addresses = (storage_address(t) for t in tensors if t.device == self._device and _is_plain(t))
        return [self._by_address[address] for address in dict.fromkeys(addresses) if address in self._by_address]

    def _fetch(self, used: Sequence[_Offloaded]) -> None:
        with self._lock:
            for one in used:
                if one.stream is not None:
                    one.fetch(self._device)
                    self._fetched[one] = self._fetched.pop(one)  # most recently used
                    continue
                self._release(self._room - one.home.nbytes)
                try:
                    one.fetch(self._device)
                except torch.OutOfMemoryError:  # other allocations need more memory than `room` leaves
                    while len(self._read) > _LEAST_READ:
                        self._read.popleft()
                    self._release(0)
                    one.fetch(self._device)
                self._bytes += one.home.nbytes
                self._fetched[one] = None

    def _release(self, most: int) -> None:
        """Releases unused storages until the fetched ones take at most `most` bytes."""
        for one in self._leaving() if self._bytes > most else ():
            if self._bytes <= most:
                break
            if not one.users and one not in self._read:
                del self._fetched[one]
                one.release()
                self._bytes -= one.home.nbytes
                self._has_released = True

    def _leaving(self) -> list[_Offloaded]:
        """Returns the storages on the device, in the order of release.

        The model runs repeatedly, so the most recently used storage is needed last; but a part of the room is for
        loops.
        """
        fetched = [*reversed(self._fetched)]
        sizes = accumulate(one.home.nbytes for one in fetched)
        latest = sum(size <= _LATEST_SHARE * self._room for size in sizes)
        return [*fetched[latest:], *reversed(fetched[:latest])]


class _Current(threading.local):
    parameters: OffloadedParameters | None = None


_current = _Current()


def parameters_at_home() -> contextlib.AbstractContextManager[None]:
    """A block in which parameters are back at home, without a copy, if they are offloaded."""
    return contextlib.nullcontext() if _current.parameters is None else _current.parameters.at_home()


class _FetchMode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, parameters: OffloadedParameters):
        super().__init__()
        self._parameters = parameters

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DETACH:  # snapshots detach every parameter; other views query the size of the memory
            return func(*args, **kwargs)
        with self._parameters.in_use(tensors_in((args, kwargs))):
            return func(*args, **kwargs)
