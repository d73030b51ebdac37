"""Parameters of a model that does not fit on a device: each is there while it is used.

A model is recorded, compared and counted where its stages will run (`model_state.model_on`), since what forward does
may depend on the kind of device, and on values. One that is too large comes there parameter by parameter, from wherever
it is: the CPU, or the devices of its stages.

    home      weight 0    weight 1    weight 2    …
                              │           │
    device    (nothing)   weight 1    weight 2           `room` bytes at most

All the while a parameter is the same object, on the device, of its sizes and with one storage, whose memory comes and
goes. It is fetched when

- an operator of torch's is given it or a view of it, forward or back: a dispatch mode sees that;
- an `autograd.Function` takes it as an argument or reads it from `ctx.saved_tensors`, or forward reads it from its
  module: the kernel that uses it then may be one that torch does not know.

Then others leave. Nothing is written back: forward may only read parameters (`Snapshot`).

Fake tensors would need no memory. But they have no values, which forward reads and goes by, and which are what graph
and model are compared by; so they stand for models without values alone.

No time can be measured meanwhile, as operators run slower and wait for what they use: `parameters_at_home`.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpipe._torch.autograd_functions import Apply, FunctionClass, intercept_apply, watch_saved_tensors
from fxpipe._torch.dispatch_modes import TorchDispatchMode, dispatch_modes_suspended
from fxpipe._torch.function_modes import without_torch_function
from fxpipe._torch.operators import DETACH
from fxpipe._torch.storages import storage_address
from fxpipe._torch.tensor_data import replace_data
from fxpipe.tracing.tensors import tensors_in
from fxpipe.utils import accelerator
from fxpipe.utils.locks import DISPATCH_MODE_LOCK

# Storages that were read last, of modules or of what autograd has saved, and stay: nobody sees when a kernel that torch
# does not know has used them.
_RECENTLY_READ = 8
_LEAST_READ = 3  # of them, where memory runs out
_LATEST_SHARE = 1 / 4  # of the room, for what was used last


@dataclass(slots=True, eq=False)
class _Offloaded:
    """A storage on the device, which has its memory or none."""

    storage: torch.UntypedStorage
    home: torch.Tensor  # bytes
    users: int = 0  # operators that run on it
    stream: torch.Stream | None = None  # on which it was fetched; None: it is not there

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
    """A block in which no mode sees what is called, nor autograd."""
    with dispatch_modes_suspended(), without_torch_function(), torch.no_grad(), torch.inference_mode(False):
        yield


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def can_be_offloaded(tensor: torch.Tensor) -> bool:
    """Returns whether the memory of a tensor can come and go: that of a parameter of torch's own kind."""
    return type(tensor) is nn.Parameter and _is_plain(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_own_kind = type(tensor) in (torch.Tensor, nn.Parameter)
    return is_own_kind and tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg())


class OffloadedParameters:
    """Parameters that are on a device while they are used."""

    def __init__(self, device: torch.device, room: int):
        self._device, self._room = device, room
        self._of_home: dict[int, _Offloaded] = {}  # by address of the storage at home
        self._by_address: dict[int, _Offloaded] = {}  # of the storage on the device
        self._fetched: dict[_Offloaded, None] = {}  # those that are there, the one used last at the end
        self._bytes = 0  # that they take
        self._has_released = False  # since casts of them were forgotten
        self._read: deque[_Offloaded] = deque(maxlen=_RECENTLY_READ)
        self._homes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # parameter, data at home and here
        self._lock = threading.RLock()  # backward has threads of its own

    def add(self, parameter: torch.Tensor) -> None:
        """Takes a parameter to the device, without its values."""
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
        storage.resize_(0)  # only now: torch gives a storage memory when a tensor is set to it
        replace_data(parameter, here)
        self._homes.append((parameter, home, here))

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """A block in which they are fetched when they are used."""
        read_attribute = nn.Module.__getattr__
        # Nodes that are recorded meanwhile keep `apply`, and would keep all parameters. Other threads may be in either
        # function while the block ends: so both ask `here` once.
        here = [self]

        def getattr_of_module(module: nn.Module, name: str) -> Any:
            value = read_attribute(module, name)
            if isinstance(value, torch.Tensor):
                for parameters in here:
                    parameters.read([value])
            return value

        def apply(plain: Apply, function: FunctionClass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with contextlib.ExitStack() as stack:
                for parameters in here:
                    stack.enter_context(parameters.in_use(tensors_in((args, kwargs))))
                return plain(function, *args, **kwargs)

        outer, _current.parameters = _current.parameters, self
        nn.Module.__getattr__ = getattr_of_module  # type: ignore[method-assign]
        try:
            with intercept_apply(apply), watch_saved_tensors(self.read), _FetchMode(self):
                yield
        finally:
            nn.Module.__getattr__ = read_attribute  # type: ignore[method-assign]
            here.clear()
            _current.parameters = outer

    @contextlib.contextmanager
    def in_use(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """A block in which those of these tensors have their values."""
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
        """Fetches those of these tensors, for a kernel that nobody sees."""
        used = self._of(tensors)
        with self._lock:
            self._read.extend(used)
            self._fetch(used)
            has_released, self._has_released = self._has_released, False
        if has_released:
            # Of casts of what has left. Not where that leaves: autocast may be about to cast, and hold its lock.
            torch.clear_autocast_cache()

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Fetches those of these tensors for good."""
        for one in self._of(tensors):
            self._fetch([one])
            del self._by_address[storage_address(_bytes_of(one.storage))], self._fetched[one]

    def release_all(self) -> None:
        """Gives all memory back, also that of what has run and knows itself: there is little."""
        with self._lock:
            self._read.clear()
            self._release(0)
        gc.collect()

    @contextlib.contextmanager
    def at_home(self) -> Iterator[None]:
        """A block in which they are where they came from, and the device has no memory for them."""
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
                if one.stream is None:
                    self._release(self._room - one.home.nbytes)
                    self._fetch_absent(one)
                    self._bytes += one.home.nbytes
                else:
                    one.fetch(self._device)
                    del self._fetched[one]
                self._fetched[one] = None

    def _fetch_absent(self, one: _Offloaded) -> None:
        try:
            one.fetch(self._device)
        except torch.OutOfMemoryError:  # others need more of it than they were left
            while len(self._read) > _LEAST_READ:
                self._read.popleft()
            self._release(0)
            one.fetch(self._device)

    def _release(self, most: int) -> None:
        """Releases some that nobody needs now, until the others take so many bytes."""
        for one in self._leaving() if self._bytes > most else ():
            if self._bytes <= most:
                break
            if not one.users and one not in self._read:
                del self._fetched[one]
                one.release()
                self._bytes -= one.home.nbytes
                self._has_released = True

    def _leaving(self) -> list[_Offloaded]:
        """Those on the device, in the order in which they should leave.

        The model runs again and again, so what was used last is needed last; but a part of the room is for loops.
        """
        latest: list[_Offloaded] = []
        size = 0
        for one in reversed(self._fetched):
            size += one.home.nbytes
            if size > _LATEST_SHARE * self._room:
                break
            latest.append(one)
        others = [*self._fetched][: len(self._fetched) - len(latest)]
        return [*reversed(others), *reversed(latest)]


class _Current(threading.local):
    parameters: OffloadedParameters | None = None


_current = _Current()


def parameters_at_home() -> contextlib.AbstractContextManager[None]:
    """A block in which no parameter is offloaded: those that are come back to where they were, without a copy."""
    return contextlib.nullcontext() if _current.parameters is None else _current.parameters.at_home()


@contextlib.contextmanager
def offload_parameters(
    parameters: Sequence[torch.Tensor], device: torch.device, room: int
) -> Iterator[OffloadedParameters]:
    """A block in which parameters are on a device while they are used, which then have `room` bytes of its memory.

    Whoever opens it puts their data back.
    """
    with DISPATCH_MODE_LOCK:
        offloaded = OffloadedParameters(device, room)
        for parameter in parameters:
            offloaded.add(parameter)
        try:
            with offloaded.following():
                yield offloaded
        finally:
            offloaded.release_all()


class _FetchMode(TorchDispatchMode):
    """Fetches what operators are given."""

    supports_higher_order_operators = True

    def __init__(self, parameters: OffloadedParameters):
        super().__init__()
        self._parameters = parameters

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DETACH:  # of every parameter, for snapshots; other views ask how much memory there is
            return func(*args, **kwargs)
        with self._parameters.in_use(tensors_in((args, kwargs))):
            return func(*args, **kwargs)
