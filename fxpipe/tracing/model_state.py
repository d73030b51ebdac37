"""The state of a model by name, and a snapshot that restores it after tracing.

The tensors of a model are its parameters, its buffers, and tensors in plain attributes, alone or in lists, tuples and
dicts. A snapshot stores the objects in each slot, the values of all tensors except parameters, and the default dtype.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxpipe._torch.autograd import base_of, version_of
from fxpipe._torch.error_messages import allocator_error
from fxpipe._torch.fake_tensor_mode import FakeTensor
from fxpipe._torch.functions import opname
from fxpipe._torch.module_internals import MODULE_DICT_KEYS, own_children, tensor_stores
from fxpipe._torch.tensor_data import replace_data
from fxpipe.errors import ArgumentError
from fxpipe.tracing.parameter_offload import OffloadedParameters, can_be_offloaded
from fxpipe.tracing.record.module_hooks import COMPUTATION_ATTRIBUTES, is_computation_hook
from fxpipe.tracing.record.unrecordable import CannotRecord, MakesState
from fxpipe.tracing.tensors import has_values, storage_of, tensor_bytes
from fxpipe.utils import accelerator
from fxpipe.utils.python_objects import NotKept
from fxpipe.utils.pytree import map_tensor_leaves

_KINDS = ("parameter", "buffer", "attribute")
_TIED = "a tensor that requires grad, which would tie one step's graph to the next; detach it"
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # buffers of batch norm, which may be in Python
_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True, slots=True)
class Slot:
    """The location of a tensor in a model."""

    path: str  # the module's path
    kind: str  # "parameter", "buffer" or "attribute"
    key: str

    @property
    def name(self) -> str:
        return f"{self.path}.{self.key}" if self.path else self.key

    def store(self, model: nn.Module) -> dict[str, Any]:
        return tensor_stores(model.get_submodule(self.path))[_KINDS.index(self.kind)]


def slots_of(model: nn.Module) -> dict[Slot, torch.Tensor]:
    """Returns all tensors that modules hold by name: for each module, parameters before buffers before attributes."""
    slots: dict[Slot, torch.Tensor] = {}
    for path, module in model.named_modules():
        for kind, store in zip(_KINDS, tensor_stores(module), strict=True):
            for key, value in store.items():
                if isinstance(value, torch.Tensor):
                    slots[Slot(path, kind, key)] = value
    return slots


_written = weakref.WeakValueDictionary[int, torch.Tensor]()  # by id: frozen parameters that forward may write to


def allow_writes(model: nn.Module) -> None:
    """Lets forward write to the frozen parameters of a model, as to buffers (a teacher that follows a student)."""
    _written.update({id(p): p for p in model.parameters() if not p.requires_grad})


def is_fixed(tensor: torch.Tensor) -> bool:
    """Returns whether this is a parameter that forward must not write to."""
    return isinstance(tensor, nn.Parameter) and (tensor.requires_grad or _written.get(id(tensor)) is not tensor)


def container_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns tensors by name from plain lists, tuples and dicts in modules: constants for a graph."""

    def search(value: Any, name: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif depth and type(value) in (list, tuple, dict):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from search(item, f"{name}.{key}", depth - 1)

    tensors: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key not in MODULE_DICT_KEYS and not isinstance(value, torch.Tensor):
                tensors.update(search(value, f"{path}.{key}" if path else key, 3))
    return tensors


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns all tensors that modules hold, also in containers, by name."""
    return {slot.name: tensor for slot, tensor in slots_of(model).items()} | container_tensors(model)


def equal_tensors(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Returns whether tensors (strided or sparse) are equal; NaN equals NaN, and fake tensors are always equal."""
    if isinstance(left, FakeTensor) or isinstance(right, FakeTensor):
        return True
    if left.layout != torch.strided:
        return left.shape == right.shape and equal_tensors(left.to_dense(), right.to_dense())
    return torch.equal(left, right) or (
        left.shape == right.shape and bool(((left == right) | ((left != left) & (right != right))).all())
    )


@contextlib.contextmanager
def preserve_rng() -> Iterator[None]:
    """A block after which all random states are restored. It does not initialize the accelerator."""
    before = python_rng_state()
    with accelerator.restore_generators(accelerator.used_generators()):
        try:
            yield
        finally:
            set_python_rng_state(before)


def python_rng_state() -> tuple[Any, Any]:
    """Returns the states of Python's and numpy's random numbers; None for numpy if it is not imported."""
    return random.getstate(), sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None


def set_python_rng_state(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


@contextlib.contextmanager
def seeded_python_rng(seed: int) -> Iterator[None]:
    """A context in which Python's and numpy's random numbers start from a seed."""
    before = python_rng_state()
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    try:
        yield
    finally:
        set_python_rng_state(before)


def same_python_rng_state(left: tuple[Any, Any], right: tuple[Any, Any]) -> bool:
    if left[0] != right[0] or left[1] is None or right[1] is None:
        return bool(left[0] == right[0])
    return bool((left[1][1] == right[1][1]).all()) and left[1][2:] == right[1][2:]


def _containers_in(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, Any, Any]]:
    """Yields the lists, dicts and sets in an attribute with copies, outer ones first."""
    if depth and isinstance(value, (list, dict, set, deque)):
        yield name, value, _copy_of_container(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _containers_in(f"{name}[{key!r}]", item, depth - 1)


def _copy_of_container(container: Any) -> Any:
    # copy.copy is slow for the many empty dicts of hooks.
    kind = dict if isinstance(container, dict) else set if isinstance(container, set) else list
    return kind(container)


def _same_items(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return list(left) == list(right) and all(left[key] is right[key] for key in left)
    if isinstance(left, set):
        return bool(left == right)
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def _differ_in_tensors(left: Any, right: Any) -> bool:
    """Returns whether two lists or dicts differ only in the tensors they hold."""
    if isinstance(left, dict):
        return list(left) == list(right) and _differ_in_tensors([*left.values()], [*right.values()])
    if not isinstance(left, list) or len(left) != len(right):
        return False
    return all(a is b or isinstance(a, torch.Tensor) for a, b in zip(left, right, strict=True))


def _holds_only_computation(name: str, container: Any) -> bool:
    """Returns whether a dict contains only hooks that the model registers when it needs them."""
    return name.endswith("_forward_hooks") and all(map(is_computation_hook, container.values()))


def are_equal_plainly(left: Any, right: Any) -> bool:
    """Returns whether values are equal numbers, texts, None, or lists, tuples and dicts of such."""
    if isinstance(left, dict) and type(left) is type(right):
        return list(left) == list(right) and all(are_equal_plainly(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(map(are_equal_plainly, left, right))
    # A size that is recorded is a whole number of its own class.
    is_same_kind = isinstance(right, type(left)) and isinstance(left, bool) == isinstance(right, bool)
    return type(left) in _PLAIN and is_same_kind and bool(left == right)


@dataclass(slots=True)
class _TensorCopy:
    tensor: torch.Tensor
    version: int
    alias: torch.Tensor  # keeps the original storage if forward sets `.data`
    value: torch.Tensor | None  # None for parameters, which forward must not write
    requires_grad: bool


@dataclass(slots=True)
class Snapshot:
    """The state of a model at one moment. `restore` restores it and records the changes in the other fields."""

    model: nn.Module
    slots: dict[Slot, torch.Tensor]
    written_attributes: list[str] = field(default_factory=list)  # values that are not tensors: counters, caches
    _numbers: set[str] = field(default_factory=set)  # `written_attributes` that are numbers
    refilled_containers: list[str] = field(default_factory=list)  # lists and dicts that hold other tensors
    # Path of a module, one of its dicts (attributes, parameters, ...), a copy of the dict.
    dicts: list[tuple[str, dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    _copies: list[tuple[str, _TensorCopy]] = field(default_factory=list)
    _containers: list[tuple[str, Any, Any]] = field(default_factory=list)  # name, container, copy
    _dtype: torch.dtype = torch.float32
    _errors: dict[int, CannotRecord] = field(default_factory=dict)  # for other changes, by rank: the least is raised

    @classmethod
    def take(cls, model: nn.Module) -> Snapshot:
        slots = slots_of(model)
        snapshot = cls(model, slots, _dtype=torch.get_default_dtype())
        for slot, tensor in slots.items():
            if slot.kind == "parameter" or has_values(tensor):
                snapshot._copy(slot.name, tensor, is_fixed(tensor))
        for name, tensor in container_tensors(model).items():
            if has_values(tensor) and not tensor.requires_grad:
                snapshot._copy(name, tensor)
        for path, module in model.named_modules():
            for store in (*tensor_stores(module), own_children(module)):
                snapshot.dicts.append((path, store, dict(store)))
            for key, value in module.__dict__.items():
                if key not in MODULE_DICT_KEYS or "hooks" in key:  # forward may register hooks
                    snapshot._containers.extend(_containers_in(f"{path}.{key}" if path else key, value))
        return snapshot

    def _copy(self, name: str, tensor: torch.Tensor, is_parameter: bool = False) -> None:
        if not tensor.is_inference():  # cannot be written outside inference mode, and has no version
            value = None if is_parameter else tensor.detach().clone()
            copy = _TensorCopy(tensor, version_of(tensor), tensor.detach(), value, tensor.requires_grad)
            self._copies.append((name, copy))

    def tensors_reshaped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors whose shape has changed. Call it before `restore`."""
        for name, kept in self._copies:
            if kept.value is not None and kept.tensor.shape != kept.value.shape:
                yield name, kept.tensor

    def containers_changed(self) -> Iterator[tuple[str, Any]]:
        for name, container, before in self._containers:
            if not _same_items(container, before) and not _holds_only_computation(name, container):
                yield name, container

    def assigned(self, read: Collection[str]) -> dict[str, torch.Tensor]:
        """Returns the buffers and attributes that forward has set to other tensors, by name. Call it before `restore`.

        Raises `CannotRecord` if a graph cannot pass one on. `read`: names of the tensors that forward reads.
        """
        assigned: dict[str, torch.Tensor] = {}
        for slot, tensor in slots_of(self.model).items():
            if tensor is self.slots.get(slot):
                continue
            if slot.kind == "parameter":
                raise _final_error(f"sets the parameter {slot.name!r}; set parameters outside forward")
            if tensor.requires_grad and not (slot.kind == "attribute" and slot.name not in read):
                raise _final_error(f"sets {slot.name!r} to {_TIED}")
            before = self.slots.get(slot)
            is_read = before is not None and (slot.name in read or not before.numel())  # `if not self.mask.numel()`
            if before is not None and is_read and tensor.shape != before.shape:
                raise _reshaped_error(slot.name)
            assigned[slot.name] = tensor
        return assigned

    def keep_items(self) -> None:
        """Takes the attributes, the items of lists and dicts, and the tensors of other shapes as they are now."""
        for _, store, before in self.dicts:
            new = {key: value for key, value in store.items() if value is not before.get(key)}
            before.update({k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in new.items()})
        for index, (name, container, _) in enumerate(self._containers):
            self._containers[index] = name, container, _copy_of_container(container)
        for _, kept in self._copies:
            if kept.value is not None and kept.tensor.shape != kept.value.shape:
                kept.alias, kept.value = kept.tensor.detach(), kept.tensor.detach().clone()

    def restore(self) -> None:
        for name, _ in self.tensors_reshaped():
            self._errors.setdefault(2, _reshaped_error(name))
        cached = [*self._cached_numbers()]
        for path, store, before in self.dicts:
            for key in [*before, *(key for key in store if key not in before)]:
                old, now = before.get(key, self), store.get(key, self)
                # New tensors do not count: they are outputs of the graph.
                is_unchanged = old is now or isinstance(now, torch.Tensor) or are_equal_plainly(old, now)
                if key not in COMPUTATION_ATTRIBUTES and not is_unchanged:
                    self.written_attributes.append(f"{path}.{key}" if path else key)
                    if type(old) in (int, float) and isinstance(now, (int, float)):
                        self._numbers.add(self.written_attributes[-1])
            store.clear()
            store.update(before)
        for name, container, before in self._containers:
            if not _same_items(container, before):
                if _differ_in_tensors(container, before):
                    self.refilled_containers.append(name)
                elif not _holds_only_computation(name, container):
                    self.written_attributes.append(name)
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(before)
        for name, kept in self._copies:
            self._put_back(name, kept)
        for path, key, value in cached:
            module, alone = self.model.get_submodule(path), object()
            with preserve_rng(), contextlib.suppress(Exception):
                alone = inspect.getattr_static(type(module), key).func(module)
            if type(alone) is type(value) and alone == value:  # without what forward has set: it may stay
                module.__dict__[key] = value
                self.written_attributes.remove(f"{path}.{key}" if path else key)
        if torch.get_default_dtype() != self._dtype:
            text = "changes the default dtype; do so outside forward, or pass dtype= to the functions"
            self._errors.setdefault(4, _final_error(text))
        torch.set_default_dtype(self._dtype)

    def _cached_numbers(self) -> Iterator[tuple[str, str, Any]]:
        """Yields the new numbers and texts of a `functools.cached_property`: path of the module, name, value."""
        for path, store, before in self.dicts:
            for key in store.keys() - before.keys():
                kept = inspect.getattr_static(type(self.model.get_submodule(path)), key, None)
                if isinstance(kept, cached_property) and type(store[key]) in _PLAIN:
                    yield path, key, store[key]

    def _put_back(self, name: str, kept: _TensorCopy) -> None:
        if kept.tensor.requires_grad != kept.requires_grad:
            if kept.tensor.is_leaf:
                text = f"switches gradients of {name!r} on or off (requires_grad); do so before the model is called"
                self._errors.setdefault(1, _final_error(text))
                kept.tensor.requires_grad_(kept.requires_grad)
            else:
                self._errors.setdefault(3, _final_error(f"writes into {name!r} {_TIED}"))
                if base_of(kept.tensor) is None:  # a view cannot be detached in place
                    kept.tensor.detach_()
        changed = version_of(kept.tensor) != kept.version
        if kept.value is None:
            if changed:
                remedy = (
                    "keep what forward changes in a buffer (register_buffer), or change the parameter outside forward"
                )
                self._errors.setdefault(0, _final_error(f"writes to the parameter {name!r}; {remedy}"))
            return
        if kept.tensor.layout == torch.strided and not kept.alias.is_set_to(kept.tensor):
            kept.tensor.data = kept.alias
        # Compare values as well: batch norm changes its buffers without a new version.
        if changed or not equal_tensors(kept.tensor, kept.value):
            with torch.no_grad():
                kept.tensor.copy_(kept.value)

    def refuse_changes(self, overwritten: Collection[str] = ()) -> None:
        """Raises `CannotRecord` for changes that a graph does not make. `overwritten`: attributes that may change."""
        if self._errors:
            raise self._errors[min(self._errors)]
        if written := [name for name in self.written_attributes if name not in overwritten]:
            raise MakesState(
                f"forward changes the attribute {written[0]!r}, which is no tensor: a graph cannot "
                "carry it from step to step; keep it in a buffer (register_buffer), or set it outside forward",
                is_final=True,
                counters=frozenset(written if self._numbers.issuperset(written) else ()),
            )


@contextlib.contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """A block in which parameters start without gradients; the old gradients return after it."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _reshaped_error(name: str) -> CannotRecord:
    return MakesState(
        f"forward gives {name!r} another shape than it had: what the first call makes of it (an observer that has seen "
        "nothing yet, say) would be made for each micro-batch; call the model once (model(...)) before it is planned, "
        "or give the buffer its shape when the module is made",
        is_final=True,
    )


def _final_error(does: str) -> CannotRecord:
    return CannotRecord(f"forward {does}", is_final=True)


@contextlib.contextmanager
def preserve_state(model: nn.Module) -> Iterator[Snapshot]:
    """A block after which the model and all random states are restored."""
    snapshot = Snapshot.take(model)
    try:
        with preserve_rng():
            yield snapshot
    finally:
        snapshot.restore()


@dataclass(frozen=True, slots=True)
class TensorGuard:
    """A tensor that a graph reads, as it was during tracing. Its value may change, not its shape, dtype and names."""

    store: dict[str, Any]  # dict of its module
    key: str
    shape: torch.Size
    dtype: torch.dtype
    others: tuple[tuple[dict[str, Any], str], ...]  # other references to it

    def holds(self) -> bool:
        now = self.store.get(self.key)
        now = now.__wrapped__ if now.__class__ is NotKept else now  # while a loss function of a stream runs
        return (
            isinstance(now, torch.Tensor)
            and now.shape == self.shape
            and now.dtype == self.dtype
            and all(store.get(key) is now for store, key in self.others)
        )


def requires_grad_flags(model: nn.Module) -> tuple[bool, ...]:
    """Returns `requires_grad` of each parameter. Only a forward that reads it needs another graph for other flags."""
    return tuple(p.requires_grad for p in model.parameters())


_SWITCHES = (
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    torch.get_float32_matmul_precision,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)


def torch_switches() -> tuple[Any, ...]:
    """Returns the global settings of torch that forward may read."""
    return tuple([switch() for switch in _SWITCHES])


def tensor_guards_of(model: nn.Module, names: Iterable[str]) -> tuple[TensorGuard, ...]:
    wanted, slots, guards = set(names), slots_of(model), []
    places: dict[int, list[Slot]] = {}
    for slot, tensor in slots.items():
        places.setdefault(id(tensor), []).append(slot)
    for slot, tensor in slots.items():
        if slot.name in wanted:
            others = tuple((other.store(model), other.key) for other in places[id(tensor)] if other != slot)
            guards.append(TensorGuard(slot.store(model), slot.key, tensor.shape, tensor.dtype, others))
    return tuple(guards)


def evaluating_modules(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of the modules in evaluation mode; "" is the model."""
    return tuple(name for name, module in model.named_modules() if not module.training)


@contextlib.contextmanager
def in_mode(model: nn.Module, evaluating: Collection[str] | None) -> Iterator[None]:
    """A block in which exactly these modules are in evaluation mode; None: no change. `train()` is not called."""
    before = [(module, module.training) for module in model.modules()]
    try:
        if evaluating is not None:
            for name, module in model.named_modules():
                module.training = name not in evaluating
        yield
    except Exception as error:
        is_other_mode = any(module.training != was for module, was in before)
        if is_other_mode and not isinstance(error, ArgumentError):  # which has its own remedy
            error.add_note(
                "fxpipe: forward ran in the mode (train or eval) that the plan was made in, which is not the model's "
                "mode now; call the pipe first in that mode, or give it example_args that forward takes in both"
            )
        raise
    finally:
        for module, was in before:
            module.training = was


# A model that is spread over the devices of its stages cannot run as it is: to trace another graph (evaluation), its
# tensors temporarily move to the CPU.

RECORDING_SHARE = 0.5  # share of a device's free memory for the model; activations need the rest
SMALL_RECORDING_SHARE = 1 / 16  # fallback if memory runs out

# By function: index and name of the argument that must be on the CPU if it is a tensor.
_HOST_PARAMETERS = {
    "_pack_padded_sequence": (1, "lengths"),
    "_pad_packed_sequence": (1, "batch_sizes"),
    "tensor_split": (1, "tensor_indices_or_sections"),
}


class HostArgumentConversion(TorchFunctionMode):
    """A block in which functions get from the CPU what they need there: stages move all tensors to their device."""

    has_found = False  # True if a function in a block required an argument on the CPU

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place, name = _HOST_PARAMETERS.get(opname(func), (0, ""))
        host = args[place] if name and place < len(args) else kwargs.get(name)
        self.has_found |= isinstance(host, torch.Tensor)
        if isinstance(host, torch.Tensor) and host.device.type not in ("cpu", "meta"):
            there = host.cpu()
            args = tuple(there if value is host else value for value in args)
            kwargs = {key: there if value is host else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


def recording_device(model: nn.Module, workers: Iterable[torch.device] = ()) -> torch.device | None:
    """Returns the device for recording: a device of the stages, since forward may depend on it (autocast, `x.is_cuda`).

    Without an accelerator among the workers, the model stays in place; if it is on several devices, the CPU is used.
    None for a model without tensors or without values.
    """
    tensors = _model_tensors(model)
    if not all(map(has_values, tensors)):
        return None
    for worker in workers:
        if worker.type != "cpu" and worker in accelerator.local_devices():
            return worker
    devices = {tensor.device for tensor in tensors}
    return next(iter(devices), None) if len(devices) < 2 else torch.device("cpu")


def _model_tensors(model: nn.Module) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors_of(model).values()}.values())


@contextlib.contextmanager
def model_on(model: nn.Module, device: torch.device | None, share: float = RECORDING_SHARE) -> Iterator[None]:
    """A block in which the data of the model's tensors is on this device; None: it stays in place.

    Tensors remain the same objects, share memory as before and have no gradients. Data and gradients are restored after
    the block. Arguments that a function accepts only on the CPU are copied there. A model larger than this `share` of
    the device's free memory is offloaded (`parameter_offload`).
    """
    tensors = [] if device is None else [t for t in _model_tensors(model) if t.device != device]
    figures = None if device is None else accelerator.memory_figures(device)
    room = 0 if figures is None else int(share * figures.available)
    offloaded: list[torch.Tensor] = []
    if figures is not None and _storage_bytes(tensors) > room:
        # Not buffers, which may change, and not parameters that share memory with other tensors.
        others = {storage_of(tensor) for tensor in tensors if not can_be_offloaded(tensor)}
        offloaded = [t for t in tensors if can_be_offloaded(t) and storage_of(t) not in others]
    kinds = {id(t) for t in offloaded}
    away = [(tensor, tensor.data, tensor.grad if tensor.is_leaf else None) for tensor in tensors]
    whole = [tensor for tensor in tensors if id(tensor) not in kinds]
    if away:
        torch.clear_autocast_cache()  # casts of the old data
    try:
        for tensor, _, gradient in away:
            if gradient is not None:
                tensor.grad = None
        for tensor, copy in zip(whole, _copies_on([t.data for t in whole], device), strict=True):
            replace_data(tensor, copy)
        with contextlib.ExitStack() as stack:
            if device is not None and device.type != "cpu":
                stack.enter_context(HostArgumentConversion())
            if device is None or not offloaded:
                yield
                return
            left = max(0, room - _storage_bytes(whole))
            parameters = stack.enter_context(OffloadedParameters(device, left).following(offloaded))
            yield
            parameters.keep(t for t in _model_tensors(model) if id(t) not in kinds)  # that forward has created
    finally:
        if away:
            torch.clear_autocast_cache()  # casts of the new data
        for tensor, data, gradient in away:
            replace_data(tensor, data)
            if tensor.is_leaf:
                tensor.grad = gradient


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {
        storage_of(t): t.untyped_storage().nbytes() if t.layout == torch.strided else tensor_bytes(t) for t in tensors
    }
    return sum(storages.values())


def _copies_on(tensors: Sequence[torch.Tensor], device: torch.device | None) -> list[torch.Tensor]:
    """Copies tensors to a device; tensors that share memory share it there, too."""
    strided = [t for t in tensors if t.layout == torch.strided and not t.is_conj() and not t.is_neg()]
    sharing = Counter(map(storage_of, strided))
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        key = storage_of(tensor) if tensor.layout == torch.strided else None
        if key is None or sharing[key] < 2:
            return tensor.to(device)
        if key not in storages:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            storages[key] = whole.to(device).untyped_storage()
        part = torch.empty(0, dtype=tensor.dtype, device=device)
        return part.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())

    return [copy(tensor) for tensor in tensors]


T = TypeVar("T")


def look_on_recording_device(
    model: nn.Module,
    workers: Iterable[torch.device],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    look: Callable[[tuple[Any, ...], dict[str, Any]], T],
) -> tuple[torch.device | None, T]:
    """Moves model and inputs to the recording device; returns the device, and the result of `look` on the inputs.

    If memory runs out, `look` is called again with fewer parameters on the device. If it still fails on an accelerator,
    it is called on the CPU, for forwards that create tensors without a device or keep tensors in a list.
    """
    device = recording_device(model, workers)
    is_there = all(tensor.device == device for tensor in _model_tensors(model))
    first: Exception | None = None
    for share in (RECORDING_SHARE, SMALL_RECORDING_SHARE):
        try:
            with model_on(model, device, share):
                return device, look(*move_inputs((args, kwargs), device))
        except Exception as error:
            if device is None or device.type == "cpu":
                raise
            first = first or error
            if allocator_error(error) is None or is_there:
                break
            cause: BaseException | None = error
            while cause is not None:  # frees the objects in its frames
                traceback.clear_frames(cause.__traceback__)
                cause = cause.__cause__ or cause.__context__
    host = torch.device("cpu")
    try:
        with model_on(model, host):
            return host, look(*move_inputs((args, kwargs), host))
    except Exception as error:
        # For a model that was already on the accelerator, report the accelerator's error.
        if first is not None and is_there and allocator_error(first) is None:
            raise first from None
        if first is not None:
            error.add_note(
                f"fxpipe: on {device}, where that was tried first, it raised {type(first).__name__}: {first}"
            )
        raise error from None
    finally:
        del first  # breaks the cycle between the error and its frames


def move_inputs(inputs: Any, device: torch.device | None) -> Any:
    if device is None:
        return inputs

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == device or not has_values(tensor):
            return tensor
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    return map_tensor_leaves(move, inputs)
