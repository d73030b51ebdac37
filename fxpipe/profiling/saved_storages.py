"""Observes the storages that autograd saves in a run of the graph, by `torch.autograd.graph.saved_tensors_hooks`.

A saved tensor keeps its full storage, which counts once for any number of saved views:

    h = x @ w                  h: a new storage
    a, g = h.chunk(2, -1)      two views of h
    y = a * g.sigmoid()        saves a, g.sigmoid() and, for sigmoid, its result again: two storages, h and the sigmoid

A storage belongs to the node whose value contains it, or else (statistics of a norm, a dropout mask, casts under
autocast) to the node that saves it. Tensors of the model do not count. The hooks keep no tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.autograd import KEPT_TENSOR, saved_names, version_of
from fxpipe._torch.error_messages import forbids_saved_tensor_hooks
from fxpipe._torch.tensor_data import StorageNumbers, storages_of
from fxpipe._torch.thread_state import set_thread_state
from fxpipe.errors import StateError
from fxpipe.profiling.node_kinds import TensorSignature, kind_of_node, map_tensors_in
from fxpipe.profiling.probe import Probe, detached_alone, probe_node
from fxpipe.tracing.fake_tensors import WithoutProducts, fake_if_active, is_faked
from fxpipe.tracing.forward_rng import DrawStream
from fxpipe.tracing.interpreter import naming_node
from fxpipe.tracing.model_state import container_tensors, slots_of
from fxpipe.tracing.node_info import info, state_of
from fxpipe.tracing.shapes.symbolic_run import ChangedInPlaceError
from fxpipe.tracing.tensors import bytes_in, hidden_tensors, tensors_in
from fxpipe.tracing.traced import Traced, attribute_tensor, call_node
from fxpipe.tracing.verify.effects import Effects

INPUT_PLACE = -1  # the maker of an input


@dataclass(frozen=True, slots=True)
class StorageLabel:
    """Identifies a storage in all runs: of a tensor in the value of a node or an input, or saved by a node."""

    node: fx.Node
    index: int  # of the tensor in the value; if it is only saved: number of tensors that the node has saved before it
    part: int = 0  # of the storages of the tensor
    is_in_value: bool = True


@dataclass(slots=True)
class ObservedStorage:
    """One storage in one run."""

    label: StorageLabel
    bytes: int
    maker: int  # place of the node that created it; for an input that is written to, of the first writer
    writers: list[int] = field(default_factory=list)  # places, ascending
    savers: list[int] = field(default_factory=list)  # places of the nodes whose backward needs it, ascending
    users: set[int] = field(default_factory=set)  # places of its readers; the number of nodes: the model's output
    returns: bool = False  # it receives a gradient


@dataclass(slots=True)
class StorageObservations:
    seen: dict[Hashable, ObservedStorage]  # by label, in order of appearance; without the model's tensors
    probes: dict[fx.Node, Probe]
    same: dict[fx.Node, fx.Node]  # nodes that did not run, and the node of their kind that ran
    value_bytes: dict[fx.Node, int]
    outputs: dict[fx.Node, Any]  # the model's outputs, detached; empty unless they are kept

    def bytes(self, label: StorageLabel) -> int | None:
        """Returns the bytes of a storage; None if it does not exist."""
        storage = self.seen.get(replace(label, node=self.same.get(label.node, label.node)))
        return None if storage is None else storage.bytes


def observe_storages(
    traced: Traced,
    effects: Effects,
    leaves: Sequence[Any],
    once: bool = False,
    keeps_outputs: bool = False,
    without_products: bool = False,
) -> StorageObservations:
    """Runs the graph, and one node of each kind separately, forward and backward (`probe_node`).

    Call it in a block of `in_fake_mode`. The model and random states change as in any forward.

    Args:
        leaves: flattened inputs.
        once: run one node of each kind only, and use its value for the others. For runs in which no values are read,
            and sharing of memory between them does not matter.
        keeps_outputs: keep the outputs of the model.
        without_products: do not compute products of matrices (`WithoutProducts`).

    Both may raise `ValuesNeededError`; `once` also `ChangedInPlaceError`: a node changes more of arguments than values.
    """
    observer = _StorageObserver(traced, effects, once, keeps_outputs)
    try:
        with WithoutProducts(is_blind=True) if once or without_products else contextlib.nullcontext():
            return observer.run(leaves)
    finally:  # break a reference cycle: values refer to their history, it to the hooks, and these to the observer
        for values in (observer.values, observer.first, observer.outputs):
            values.clear()


class _StorageObserver:
    def __init__(self, traced: Traced, effects: Effects, once: bool, keeps_outputs: bool):
        self.traced, self.effects, self.once = traced, effects, once
        self.first: dict[Hashable, tuple[fx.Node, Any]] = {}  # by kind: the first node and, with `once`, its value
        self.written = set().union(*effects.written_classes)
        self.storages = StorageNumbers()
        self.own: set[int] = set()  # numbers of the storages of the model's tensors
        self.seen: dict[int, ObservedStorage] = {}  # by number: all others
        self.values: dict[fx.Node, Any] = {}
        self.saved: list[list[torch.Tensor]] = []  # by tensor that the running node saves: it, while the node runs
        self.probes: dict[fx.Node, Probe] = {}
        self.same: dict[fx.Node, fx.Node] = {}
        self.draws = DrawStream(traced.seed)
        self.by_roles: dict[Hashable, Probe] = {}  # by kind and roles of the inputs
        self.value_bytes: dict[fx.Node, int] = {}
        self.fixed: set[fx.Node] = set()  # independent of inputs: their gradients are of parameters
        self.handed_out = {n for n in traced.handed_out if isinstance(n, fx.Node) and keeps_outputs}
        self.outputs: dict[fx.Node, Any] = {}
        ends = (*traced.handed_out, *traced.assigned.values(), *effects.written_inputs)
        self._outputs = {o for o in ends if isinstance(o, fx.Node)}

    def run(self, leaves: Sequence[Any]) -> StorageObservations:
        self._begin(leaves)
        place = self.effects.place
        last = {n: max((place[u] for u in n.users if u in place), default=-1) for n in self.traced.graph.nodes}
        for at, node in enumerate(self.effects.nodes):
            with naming_node(node, "looking at what is saved by"):
                self._visit(node, at)
            for used in (*node.all_input_nodes, node):
                if last[used] <= at:
                    self._release(used)
        outputs = self.outputs | {n: self.values[n] for n in self.handed_out if n in self.values}
        for storage in self.seen.values():
            if storage.maker < 0 and storage.writers:
                storage.maker = storage.writers[0]  # a stage that writes to an input writes to a clone
        return StorageObservations(
            {s.label: s for s in self.seen.values()},
            self.probes,
            self.same,
            self.value_bytes,
            {n: map_tensors_in(detached_alone, value) for n, value in outputs.items()},
        )

    def _visit(self, node: fx.Node, place: int) -> None:
        inputs = node.all_input_nodes
        written = [n for n in inputs if self.effects.alias[n] in self.effects.written_classes[place]]
        kind = kind_of_node(self.traced, node, (node.args, node.kwargs), self.values, written)
        roles = kind, tuple(n in self.fixed for n in inputs)
        if roles not in self.by_roles:
            self.by_roles[roles] = probe_node(node, written, self.values, self.fixed)
        self.probes[node] = self.by_roles[roles]
        if all(n in self.fixed for n in inputs):
            self.fixed.add(node)
        if self.once and kind in self.first and self.effects.alias[node] not in self.written:
            first, value = self.first[kind]
            self.values[node] = value if is_faked() else pytree.tree_map_only(torch.Tensor, _alias_of, value)
            self.same[node] = first
            self.value_bytes[node] = self.value_bytes[first]
            return
        before = self._signatures(inputs)
        self.values[node] = self._step(node, place)
        if self.once and before != self._signatures(inputs):
            raise ChangedInPlaceError
        self.value_bytes[node] = bytes_in(self.values[node])
        self.first.setdefault(kind, (node, self.values[node] if self.once else None))

    def _signatures(self, nodes: Sequence[fx.Node]) -> list[TensorSignature]:
        return list(map(TensorSignature.of, tensors_in([self.values[n] for n in nodes])))

    def _release(self, node: fx.Node) -> None:
        """Releases a value after its last user; the model's output also counts as a user."""
        value = self.values.pop(node, None)
        if node in self.handed_out:
            self.outputs.setdefault(node, value)
        if node in self._outputs:
            for seen in self._all(tensors_in(value)):
                seen.users.add(len(self.effects.nodes))

    def _begin(self, leaves: Sequence[Any]) -> None:
        traced, effects, written = self.traced, self.effects, self.written
        for tensor in (*slots_of(traced.model).values(), *container_tensors(traced.model).values()):
            self.own.update(self.storages.numbers(tensor))
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                leaf = leaves[traced.place_of(node)]
                value = leaf.detach().clone().requires_grad_(leaf.requires_grad)
                if leaf.requires_grad and effects.alias[node] in written:
                    value = value.clone()  # writes to a leaf are forbidden
                self._note_value(node, INPUT_PLACE, value)
                self.values[node] = value
            elif node.op == "get_attr":
                tensor = fake_if_active(attribute_tensor(traced, node))
                needs_grad = tensor.requires_grad
                # An inference tensor cannot be saved for backward; its copy can.
                is_copied = (effects.alias[node] in written and not needs_grad) or tensor.is_inference()
                held = tensor.detach().clone() if is_copied else tensor.detach()
                self.values[node] = held.requires_grad_(needs_grad)
                self.fixed.add(node)
                self.own.update(self.storages.numbers(held))

    def _step(self, node: fx.Node, place: int) -> Any:
        read = list({id(t): t for n in node.all_input_nodes for t in tensors_in(self.values[n])}.values())
        for seen in self._all(read):
            seen.users.add(place)
        versions = [_version_of(t) for t in read]
        self.saved = []
        with set_thread_state(state_of(node)):
            try:
                with saved_tensors_hooks(self._pack, _unpack):
                    value = self._call(node)
            except RuntimeError as error:
                if not forbids_saved_tensor_hooks(error):
                    raise
                value = self._call(node)  # `torch.func.grad` supports no hooks
                self.saved = [[tensor] for tensor in tensors_saved_between(value, read)]
        for tensor, version in zip(read, versions, strict=True):
            if _version_of(tensor) != version:
                for seen in self._all([tensor]):
                    seen.writers.append(place)
        self._note_value(node, place, value)
        self._note_saved(node, place, value)
        for seen in self._all(t for t in tensors_in([value, read]) if t.requires_grad):
            seen.returns = True
        return value

    def _call(self, node: fx.Node) -> Any:
        if info(node).is_scalar_draw:
            return self.draws.take(lambda: call_node(node, self.values.__getitem__))
        return call_node(node, self.values.__getitem__)

    def _pack(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.saved.append([tensor])
        return self.saved[-1]

    def _note_value(self, node: fx.Node, place: int, value: Any) -> None:
        for index, tensor in enumerate(tensors_in(value)):
            for part, storage in enumerate(storages_of(tensor)):
                number = self.storages.number(storage)
                if number not in self.seen and number not in self.own:
                    self.seen[number] = ObservedStorage(StorageLabel(node, index, part), storage.nbytes(), place)

    def _note_saved(self, node: fx.Node, place: int, value: Any) -> None:
        packed = [tensor for token in self.saved for tensor in token]
        for context in {id(t.grad_fn): t.grad_fn for t in tensors_in(value)}.values():
            if isinstance(context, torch.autograd.function.BackwardCFunction):
                packed += hidden_tensors(vars(context))  # attributes of its context, which hooks do not see
                vars(context).clear()
        for index, tensor in enumerate(packed):
            for storage in storages_of(tensor):
                number = self.storages.number(storage)
                if number in self.own:
                    continue
                if number not in self.seen:
                    label = StorageLabel(node, index, is_in_value=False)
                    self.seen[number] = ObservedStorage(label, storage.nbytes(), place)
                if place not in self.seen[number].savers[-1:]:
                    self.seen[number].savers.append(place)
        for token in self.saved:
            token.clear()

    def _all(self, tensors: Iterable[torch.Tensor]) -> Iterator[ObservedStorage]:
        for tensor in tensors:
            for number in self.storages.numbers(tensor):
                if number in self.seen:
                    yield self.seen[number]


def _alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns another tensor on the same memory, so that a node that gets both gets two."""
    if tensor.layout != torch.strided:
        return tensor
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach()


def tensors_saved_between(value: Any, inputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields the tensors that the autograd functions between `inputs` and `value` save."""
    seen = {t.grad_fn for t in inputs} | {None}
    waiting = [t.grad_fn for t in tensors_in(value)]
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        waiting += [following for following, _ in function.next_functions]
        for name in saved_names(function):
            yield from tensors_in(getattr(function, name))


def _unpack(token: list[torch.Tensor]) -> torch.Tensor:
    if not token:
        raise StateError(KEPT_TENSOR)
    return token[0]


def _version_of(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)
