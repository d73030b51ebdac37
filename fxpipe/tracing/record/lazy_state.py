"""Lazy state, created by the first forward of a model and then kept: it is created before the model is traced.

    if self.padding is None: self.padding = (...)       an attribute that is set once
    self.cache[x.device] = bias                         an item of a dict that later calls find
    self.scale.resize_(...); self.scale.copy_(...)      the shape of a buffer that was empty (observers of weights)

A graph of the first call would create this state in every step. So the model is called once, the state stays, and the
next call is recorded. Tensors get their values back. The first call must compute what later ones do, on any samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.autograd import version_of
from fxpipe._torch.module_internals import MODULE_DICT_KEYS, own_buffers
from fxpipe.tracing.fake_tensors import is_faked
from fxpipe.tracing.interpreter import copy_of_input
from fxpipe.tracing.model_state import Snapshot, are_equal_plainly, preserve_state, slots_of, without_gradients
from fxpipe.tracing.record.module_hooks import run_model
from fxpipe.tracing.record.record_model import input_leaves
from fxpipe.tracing.record.unrecordable import CannotRecord
from fxpipe.tracing.tensors import slice_samples, storage_of
from fxpipe.tracing.traced import Traced, TraceRequest, as_given, candidate_dims
from fxpipe.tracing.verify.equivalence import is_close
from fxpipe.utils.batch_split import samples_along
from fxpipe.utils.pytree import preserve_objects


@dataclass(frozen=True, slots=True)
class LazyState:
    """The state that the first call creates, in the model until it is restored."""

    before: Snapshot
    names: frozenset[str]

    def restore_if_refilled(self, request: TraceRequest) -> bool:
        """Removes the state; returns whether calls compute without it what they compute with it.

        They are calls with fewer samples, and with other parameters and draws: forward may keep what it makes of these.
        """
        model = request.model
        leaves, spec, values = input_leaves(model, request.args, request.kwargs)
        dims = candidate_dims(leaves, request.in_dims)
        calls: list[_LazyCall] = []
        with contextlib.suppress(Exception), _other_parameters(model):  # the model raises again
            half = max(samples_along(v, dim) for v, dim in zip(values, dims, strict=True) if dim is not None) // 2
            batches = [as_given(leaves, slice_samples(values, dims, 0, half)), values] if half else []
            calls += [_call_once(model, batch, spec, seed=1) for batch in batches]
            self.before.restore()
            calls += [_call_once(model, batch, spec, seed=1) for batch in batches]
        self.before.restore()
        return len(calls) == 4 and all(map(_calls_agree, calls[:2], calls[2:]))


@contextlib.contextmanager
def _other_parameters(model: nn.Module) -> Iterator[None]:
    """A block in which parameters have other values."""
    saved = [(p, p.detach().clone()) for p in model.parameters() if p.is_floating_point()]
    try:
        for parameter, value in saved:
            parameter.data.copy_(value * 0.9 + 0.1)
        yield
    finally:
        for parameter, value in saved:
            parameter.data.copy_(value)


@dataclass(frozen=True, slots=True)
class _LazyCall:
    outputs: list[Any]  # with the inputs after the call, which may have written to them
    tensors: dict[str, torch.Tensor]  # tensors of the model after the call; parameters only if written
    created: list[str] | None  # names of created items; None: the call created state that cannot be kept


def new_attributes(traced: Traced) -> list[str]:
    """Returns the attributes that forward sets and that the model lacks, or has as a None that forward reads."""
    asked = {(id(store), name) for store, name in traced.python_state.places if store.get(name, 0) is None}
    names = []
    for name in traced.assigned:
        path, _, key = name.rpartition(".")
        own, buffers = (module := traced.model.get_submodule(path)).__dict__, own_buffers(module)
        if (key not in own and key not in buffers) or ((id(own), key) in asked and own.get(key) is None):
            names.append(name)
    return names


def make_lazy_state(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], in_dims: Any = None
) -> LazyState | None:
    """Calls the model and keeps the state that the first call creates and no later one changes.

    Returns this state; None if no call creates any, or each creates another. Raises `CannotRecord`,
    with the name of the created item, if the first call computes something else than a later one.
    """
    if is_faked():
        return None
    leaves, spec, values = input_leaves(model, args, kwargs)
    before = Snapshot.take(model)
    try:
        others = as_given(leaves, _other_samples(values, candidate_dims(leaves, in_dims)))
        first_of_others, first = _call_once(model, others, spec), _call_once(model, values, spec, keeps=True)
        later, later_of_others = _call_once(model, values, spec), _call_once(model, others, spec)
    except Exception:
        before.restore()
        return None  # the model raises again
    is_once = bool(first.created) and later.created == [] and later_of_others.created == []
    are_same = is_once and _calls_agree(first, later) and _calls_agree(first_of_others, later_of_others)
    if are_same and not _values_agree(values, others):
        return LazyState(before, frozenset(first.created or ()))
    before.restore()
    if is_once and first.created:
        raise CannotRecord(
            f"forward makes {first.created[0]!r} when it is first called, and what it computes or keeps then is not "
            "what it computes later, or that cannot be told from these samples; call the model once (model(...)) "
            "before it is planned",
            is_final=True,
        )
    return None


def _other_samples(values: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """Returns other samples of the same shapes: the first sample repeated, scaled by half."""

    def other(value: torch.Tensor, dim: int) -> torch.Tensor:
        one = value.detach().narrow(dim, 0, 1).expand_as(value).clone()
        return (one * 0.5 if one.is_floating_point() else one).requires_grad_(value.requires_grad)

    return [value if dim is None else other(value, dim) for value, dim in zip(values, dims, strict=True)]


def _call_once(
    model: nn.Module, values: Sequence[Any], spec: pytree.TreeSpec, keeps: bool = False, seed: int = 0
) -> _LazyCall:
    """Calls the model and restores it. `keeps`: what the call creates stays, if it can be kept."""
    before = {slot: _memory_of(tensor) for slot, tensor in slots_of(model).items() if slot.kind == "parameter"}
    with preserve_state(model) as snapshot, without_gradients(model), preserve_objects(spec):
        torch.manual_seed(seed)
        copies = {id(value): copy_of_input(value) for value in values}
        args, kwargs = pytree.tree_unflatten([copies[id(value)] for value in values], spec)
        result = run_model(model, args, kwargs)
        leaves = [*pytree.tree_leaves(result), *copies.values()]
        outputs = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
        # Parameters only if written: copies of all would take as much memory as the model.
        written = {s: t for s, t in slots_of(model).items() if s not in before or _memory_of(t) != before[s]}
        tensors = {slot.name: tensor.detach().clone() for slot, tensor in written.items()}
        created = _created_items(snapshot)
        if keeps and created:
            snapshot.keep_items()
        return _LazyCall(outputs, tensors, created)


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    return storage_of(tensor), -1 if tensor.is_inference() else version_of(tensor)


def _created_items(snapshot: Snapshot) -> list[str] | None:
    created = []
    for path, owner, before in snapshot.dicts:
        if before.keys() - owner.keys():
            return None
        for key, value in owner.items():
            old = before.get(key, snapshot)
            # A tensor that replaces another one is state, if that was not empty.
            is_set = isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor) and bool(old.numel())
            if value is old or is_set or are_equal_plainly(value, old):
                continue
            if isinstance(value, (nn.Module, nn.Parameter)) or key in MODULE_DICT_KEYS - {"training"}:
                return None
            created.append(f"{path}.{key}" if path else key)
    for name, tensor in snapshot.tensors_reshaped():
        if tensor.requires_grad:
            return None
        created.append(name)
    for name, container in snapshot.containers_changed():
        items = container.values() if isinstance(container, dict) else container
        is_of_hooks = not MODULE_DICT_KEYS.isdisjoint(name.split("."))
        if is_of_hooks or any(isinstance(item, torch.Tensor) and item.requires_grad for item in items):
            return None
        created.append(name)
    return created


def _values_agree(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(is_close, left, right))


def _calls_agree(left: _LazyCall, right: _LazyCall) -> bool:
    values, others = ([*call.outputs, *call.tensors.values()] for call in (left, right))
    return left.tensors.keys() == right.tensors.keys() and _values_agree(values, others)
