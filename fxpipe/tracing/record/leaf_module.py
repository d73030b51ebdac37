"""Opaque modules: one node for each call.

A module is kept opaque if its Python must run each time: it reads values that only the stages have, draws Python's
random numbers, or uses `torch.func`. Its parameters and buffers are arguments of the node, so that the stage is a pure
function; a replica of the module holds them during a call. The replica is a deep copy, including methods bound in
`__init__` and modules in plain lists. It shares all objects without modules (tensors, configurations, locks, hooks).
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from fxpipe._torch.functions import PLAIN_TYPES
from fxpipe._torch.module_internals import MODULE_DICT_KEYS, is_compiled_module, original_module
from fxpipe.tracing.model_state import Slot, container_tensors, slots_of
from fxpipe.tracing.node_info import opaque_call_of, update_info
from fxpipe.tracing.record.opaque_call import OpaqueRun, OpaqueStateError, call_opaque
from fxpipe.tracing.record.recorder import Recorder, RunningModule
from fxpipe.utils.locks import call_in_forked_child

_locks_lock = threading.Lock()
# A module that is called in two stages runs in one at a time: it may have no replica, and shares what it keeps.
_locks: weakref.WeakKeyDictionary[nn.Module, threading.Lock] = weakref.WeakKeyDictionary()
call_in_forked_child(_locks.clear)
LEAF_MODULE_REASON = "asked for by leaf_modules"


def call_leaf_module(
    recorder: Recorder, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    asked = recorder.whole[path] == LEAF_MODULE_REASON
    slots = {slot: tensor for slot, tensor in slots_of(module).items() if not _is_made_anew(slot, tensor)}
    recorder.stack.append(RunningModule.now(path, module))
    try:
        for inner in module.modules():
            _note_attributes(recorder, inner)
        with recorder.pause():
            run = replica_of(recorder.model, module, tuple(slots))
        result, node = call_opaque(
            recorder, run, type(module).__name__, list(slots.values()), args, kwargs, final=asked
        )
    finally:
        recorder.stack.pop()
    update_info(node, opaque=replace(opaque_call_of(node), module=path, why=recorder.whole[path]))
    return result


def _note_attributes(recorder: Recorder, module: nn.Module) -> None:
    """Records attributes that the replica copies: numbers, and objects that hold modules. It shares all others."""
    for key, value in module.__dict__.items():
        if key in MODULE_DICT_KEYS:
            continue
        modules = list(_modules_in(value))
        if value is None or type(value) in PLAIN_TYPES or modules:
            recorder.python_reads.add_attribute(module.__dict__, key)
        hidden = {id(m): m for outer in modules for m in outer.modules() if id(m) not in recorder.paths}
        for inner in hidden.values():
            for name, kept in inner.__dict__.items():
                if name == "training" or (name not in MODULE_DICT_KEYS and (kept is None or type(kept) in PLAIN_TYPES)):
                    recorder.python_reads.add_attribute(inner.__dict__, name)


def _forward(replica: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return replica(*args, **kwargs)


def replica_of(
    model: nn.Module,
    module: nn.Module,
    slots: tuple[Slot, ...],
    forward: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any] = _forward,
    without: Sequence[str] = (),
) -> OpaqueRun:
    """Returns a function that runs `forward` of a replica of `module` on the tensors passed for its slots.

    `without`: paths of inner modules whose tensors have no values unless passed.
    """
    tensors = [*slots_of(model).values(), *container_tensors(model).values()]
    memo: dict[int, Any] = {id(t): t for t in tensors}
    shared: list[tuple[str, str]] = []
    for path, inner in module.named_modules():
        for key, value in inner.__dict__.items():
            if key.endswith("_hooks"):  # calls the user's hooks, not copies
                memo[id(value)] = value
            elif (
                key not in MODULE_DICT_KEYS
                and not isinstance(value, torch.Tensor)
                and not any(True for _ in _modules_in(value))
            ):
                memo[id(value)] = value
                shared.append((path, key))
    try:
        replica = copy.deepcopy(module, memo)
        _drop_values(replica, slots, without)
    except Exception:  # the module cannot be copied, so it runs itself
        if without:
            raise
        replica = module
    if replica is not module:
        for inner in filter(is_compiled_module, replica.modules()):  # stages do not compile
            inner.__dict__["forward"] = original_module(inner)
    anew = {(slot.path, slot.key) for slot, tensor in slots_of(module).items() if _is_made_anew(slot, tensor)}
    pairs = [(replica.get_submodule(path), module.get_submodule(path), key) for path, key in shared]
    torchs = {path for path, m in module.named_modules() if type(m).__module__.startswith("torch.nn.")}  # an LSTM sorts

    def run(values: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _lock_of(module):
            for mine, theirs, key in pairs:
                if key in theirs.__dict__:
                    mine.__dict__[key] = theirs.__dict__[key]
            stores = [slot.store(replica) for slot in slots]
            before = [(path, inner, dict(inner.__dict__)) for path, inner in replica.named_modules()]
            kept = [store[slot.key] for slot, store in zip(slots, stores, strict=True)]
            try:
                for slot, store, tensor in zip(slots, stores, values, strict=True):
                    store[slot.key] = tensor
                result = forward(replica, args, kwargs)
                for slot, store, tensor in zip(slots, stores, values, strict=True):
                    _copy_buffer(slot, store.get(slot.key), tensor)
            finally:
                for slot, store, tensor in zip(slots, stores, kept, strict=True):
                    store[slot.key] = tensor
                keys = [
                    (path, key) for path, inner, attributes in before for key in _restore_attributes(inner, attributes)
                ]
                changed = [key for path, key in keys if (path, key) not in anew and path not in torchs]
            if changed:
                raise OpaqueStateError(f"sets its attribute {changed[0]!r}")
            return result

    return run


def _lock_of(module: nn.Module) -> threading.Lock:
    with _locks_lock:
        return _locks.setdefault(module, threading.Lock())


def _drop_values(replica: nn.Module, slots: Collection[Slot], without: Sequence[str]) -> None:
    """Removes the values of tensors that are not passed, so that their use is an error, not a lost gradient."""
    for slot, tensor in slots_of(replica).items():
        if slot not in slots and any(slot.path == path or slot.path.startswith(f"{path}.") for path in without):
            slot.store(replica)[slot.key] = torch.empty_like(tensor, device="meta")


def _is_made_anew(slot: Slot, tensor: torch.Tensor) -> bool:
    """Returns whether each forward computes the tensor before its use, as in pruning, and ignores its value."""
    return slot.kind == "attribute" and tensor.requires_grad


def _copy_buffer(slot: Slot, after: Any, tensor: torch.Tensor) -> None:
    if after is tensor:
        return
    if slot.kind != "buffer" or not isinstance(after, torch.Tensor):
        raise OpaqueStateError(f"sets its {slot.kind} {slot.name!r}")
    if after.shape != tensor.shape or after.dtype != tensor.dtype:
        raise OpaqueStateError(f"sets its buffer {slot.name!r} to one of another shape or dtype")
    with torch.no_grad():
        tensor.copy_(after)


def _restore_attributes(module: nn.Module, before: dict[str, Any]) -> Iterator[str]:
    """Restores the attributes of a module; yields the names of those that were changed."""
    now = module.__dict__
    if now.keys() == before.keys() and all(now[key] is value for key, value in before.items()):
        return
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(key, module), now.get(key, module)
        if old is not new and not (type(old) in PLAIN_TYPES and type(new) is type(old) and old == new):
            yield key
    now.clear()
    now.update(before)


def _modules_in(value: Any, depth: int = 4) -> Iterator[nn.Module]:
    """Yields the modules in any object. Skips closures of functions, which copies share."""
    if isinstance(value, nn.Module):
        yield value
        return
    if not depth or isinstance(value, (type, torch.Tensor, *PLAIN_TYPES)):
        return
    inside: list[Any] = [*getattr(value, "__dict__", {}).values()]
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside += value
    elif isinstance(value, MethodType):
        inside.append(value.__self__)
    elif isinstance(value, functools.partial):
        inside += [value.func, *value.args, *value.keywords.values()]
    for item in inside:
        yield from _modules_in(item, depth - 1)
