"""Effects of every node, observed in real runs: shared storages, in-place writes, changed buffers.

The graph runs once for each size that will occur. Whether `reshape` and `contiguous` share or copy depends on sizes, so
an effect at any size counts for all sizes. The same runs also compare graph and model.

Forward may write to inputs: a stage writes to a clone, and the pipeline returns its final value like an output. It is
copied to the caller's tensor when forward (in `forward_backward`: the step) has succeeded; the part of a micro-batch to
its rows. Refused are an input that is not split and would differ between micro-batches, one whose shape changes,
tensors that overlap in memory, and leaves that require grad, which torch does not allow to be written.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from fxpipe._torch.autograd import version_of
from fxpipe._torch.functions import opname
from fxpipe._torch.saved_tensor_hooks import NoSavedTensors, saving_block_for
from fxpipe._torch.tensor_data import StorageNumbers
from fxpipe.errors import ArgumentError, InternalError
from fxpipe.tracing.fake_tensors import in_fake_mode
from fxpipe.tracing.forward_rng import DrawStream
from fxpipe.tracing.interpreter import NodeValues, copy_as_leaf, run_node, run_nodes, writable_copy
from fxpipe.tracing.model_state import STATISTICS, equal_tensors, slots_of
from fxpipe.tracing.node_info import dependencies_of, info, named_arguments
from fxpipe.tracing.record.unrecordable import CHANGED_STATE, CannotRecord
from fxpipe.tracing.tensors import detached, storage_of, tensors_in
from fxpipe.tracing.traced import Traced, attribute_tensor, runs_python
from fxpipe.utils.progress import progress

NORM_FUNCTIONS = (F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm)


@dataclass(slots=True)
class Effects:
    """Effects of the nodes of a graph at all sizes. An alias class is a number for nodes that may share storage."""

    nodes: list[fx.Node]
    place: dict[fx.Node, int]  # node -> its index in `nodes`; a placeholder: -1
    last: dict[fx.Node, int]  # node -> place of its last user; an output of the graph: len(nodes)
    alias: dict[fx.Node, int | None]  # node -> alias class; None if it holds no tensor
    same: dict[fx.Node, fx.Node]  # node -> the argument that it returns, at every size
    written_classes: list[set[int]]  # by place: the alias classes that the node changes
    requires_grad: dict[fx.Node, bool]  # True if any tensor of the value requires grad

    @property
    def written_inputs(self) -> list[fx.Node]:
        written = set[int]().union(*self.written_classes)
        return [node for node, place in self.place.items() if place < 0 and self.alias[node] in written]

    def drop_unused(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        """Drops values that neither a later node nor the caller of the graph needs."""
        for used in (*node.all_input_nodes, node):
            if self.last[used] <= self.place[node]:
                values.pop(used, None)


@dataclass(slots=True)
class RunResult:
    outputs: list[Any]
    buffers: dict[str, torch.Tensor]  # by name: values after the run of all buffers that the graph reads or re-assigns
    inputs: dict[int, torch.Tensor]  # by index of the input leaf: the tensors after the run


@dataclass(slots=True)
class ObservedEffects:
    """Effects of nodes in one run of the graph. Each run numbers its storages separately."""

    storages: dict[fx.Node, list[int]] = field(default_factory=dict)
    changed: dict[fx.Node, set[int]] = field(default_factory=dict)  # storages that working nodes change
    returned: dict[fx.Node, fx.Node | None] = field(default_factory=dict)  # the argument that the node returns
    requires_grad: dict[fx.Node, bool] = field(default_factory=dict)  # True if any tensor of the value requires grad


@dataclass(slots=True)
class GraphRun(RunResult):
    """A run of the graph. If autograd saved tensors, `outputs` still have their autograd graph."""

    effects: ObservedEffects
    leaves: dict[int, Any]  # by index: the input leaves
    tensors: list[tuple[torch.Tensor, torch.Tensor]]  # tensors of the model, with their copies in the run
    assigned: dict[str, torch.Tensor]  # by name: the values that forward assigns to attributes


def observe_run(traced: Traced, sample: Sequence[Any], saves: bool = False) -> GraphRun:
    """Runs the graph on flattened inputs without changing the model. `saves`: autograd saves tensors for a backward."""
    values: NodeValues = {}
    leaves: dict[int, Any] = {}
    stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    storages = StorageNumbers()
    buffers: dict[int, tuple[fx.Node, torch.Tensor]] = {}
    draws, seen = DrawStream(traced.seed), ObservedEffects()
    inputs: dict[int, torch.Tensor] = {}
    sample = traced.with_head(sample, traced.batch_of(sample))

    def placeholder(node: fx.Node) -> Any:
        place = traced.place_of(node)
        leaves[place] = copy_as_leaf(sample[place])
        inputs[place] = writable_copy(leaves[place])
        return inputs[place]

    def attribute(node: fx.Node) -> torch.Tensor:
        tensor = attribute_tensor(traced, node)
        if id(tensor) in stand_ins:
            return stand_ins[id(tensor)][1]
        if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
            copy = tensor.detach().requires_grad_(tensor.requires_grad)
        else:
            copy = tensor.detach().clone()
            buffers[storages.name(copy)] = node, copy
        stand_ins[id(tensor)] = tensor, copy
        return copy

    def work(node: fx.Node, values: NodeValues) -> Any:
        read = list({id(t): t for source in node.all_input_nodes for t in tensors_in(values[source])}.values())
        versions = [version_of(t) for t in read]
        before = {key: buffers[key][1].clone() for key in map(storages.name, read) if key in buffers}
        with in_fake_mode(), contextlib.nullcontext() if saves else saving_block_for(node.target, NoSavedTensors()):
            value = run_node(node, values)
            if info(node).is_scalar_draw:
                value = draws.take(lambda: run_node(node, values))
        changed = {storages.name(t) for t, v in zip(read, versions, strict=True) if version_of(t) != v}
        changed |= {key for key, old in before.items() if not equal_tensors(buffers[key][1], old)}
        for source in node.all_input_nodes if runs_python(node) else ():  # it may write an equal value
            if info(source).storages & info(node).written_storages:
                changed |= set(map(storages.name, tensors_in(values[source])))
        if node.target in NORM_FUNCTIONS:  # update their buffers without raising the version
            changed |= {storages.name(values[b]) for b in running_statistics(node)}
        seen.changed[node] = changed
        is_one = isinstance(value, torch.Tensor)
        seen.returned[node] = next((s for s in node.all_input_nodes if is_one and values[s] is value), None)
        return value

    nodes = [*traced.graph.nodes]
    ends = [n for n in (*traced.outputs, *traced.pieces, *traced.assigned.values()) if isinstance(n, fx.Node)]
    with progress("checking", len(nodes) - 1) as step:
        for node in run_nodes(nodes, values, placeholder, attribute, work, ends):
            tensors = list(tensors_in(values[node]))
            seen.storages[node] = list(map(storages.name, tensors))
            if not isinstance(values[node], torch.Tensor):  # elements of a tuple have nodes
                del seen.storages[node][1:]  # and need not share memory
            seen.requires_grad[node] = any(t.requires_grad for t in tensors)
            step()
    after = {str(n.target): t for n, t in buffers.values()}
    after |= {name: values[n] for name, n in traced.assigned.items()}
    outputs = [values[o] if isinstance(o, fx.Node) else o for o in traced.outputs]
    handed_out, computed = [*outputs, *map(values.__getitem__, traced.pieces)], dict[str, Any]()
    for one in traced.combinations:
        if outputs[one.output] is None:  # the graph has no tail any more
            outputs[one.output] = one.of(handed_out, computed)
    if traced.update is not None and not traced.tail:
        after |= dict(zip(traced.update.names, traced.update.of_all(handed_out), strict=True))
    return GraphRun(
        outputs if saves else list(map(detached, outputs)),
        after,
        {place: detached(inputs[place]) for place in inputs if place < len(traced.leaves)},
        seen,
        leaves,
        [*stand_ins.values()],
        {name: values[node].detach() for name, node in traced.assigned.items()},
    )


def effects_of(traced: Traced, seen: Sequence[ObservedEffects]) -> Effects:
    """Merges the effects of the runs at all sizes that will occur."""
    parents: dict[tuple[int, int], tuple[int, int]] = {}  # disjoint sets of the storages of all runs

    def root_of(storage: tuple[int, int]) -> tuple[int, int]:
        while parents.setdefault(storage, storage) != storage:
            parents[storage] = parents[parents[storage]]
            storage = parents[storage]
        return storage

    first: dict[fx.Node, tuple[int, int]] = {}
    for number, one in enumerate(seen):
        for node, storages in one.storages.items():
            for storage in storages:
                parents[root_of((number, storage))] = root_of(first.setdefault(node, (number, storage)))
    numbers: dict[tuple[int, int], int] = {}
    alias = {n: numbers.setdefault(root_of(first[n]), len(numbers)) if n in first else None for n in traced.graph.nodes}
    writes, same = [], {}
    for node in traced.nodes:
        changed = (root_of((number, s)) for number, one in enumerate(seen) for s in one.changed[node])
        writes.append({numbers[root] for root in changed if root in numbers})
        source, *others = {one.returned[node] for one in seen}
        if source is not None and not others:
            same[node] = source
    requires_grad = {n: any(one.requires_grad[n] for one in seen) for n in alias if n in seen[0].requires_grad}
    return _effects(traced, alias, same, writes, requires_grad)


def effects_of_changed(traced: Traced, effects: Effects) -> Effects:
    """Returns the effects of a graph after nodes were removed, or nodes that create new tensors were added."""
    new = itertools.count(len(effects.alias))
    alias = {n: effects.alias[n] if n in effects.alias else next(new) for n in traced.graph.nodes}
    same = {n: source for n, source in effects.same.items() if n in alias}
    writes = [effects.written_classes[effects.place[n]] if n in effects.place else set() for n in traced.nodes]
    requires_grad = {n: flag for n, flag in effects.requires_grad.items() if n in alias}
    for node in traced.nodes:
        if node not in requires_grad:
            requires_grad[node] = any(requires_grad.get(n) for n in node.all_input_nodes)
    return _effects(traced, alias, same, writes, requires_grad)


def _effects(
    traced: Traced,
    alias: dict[fx.Node, int | None],
    same: dict[fx.Node, fx.Node],
    writes: list[set[int]],
    requires_grad: dict[fx.Node, bool],
) -> Effects:
    nodes = traced.nodes
    place = {n: -1 for n in traced.graph.nodes if n.op == "placeholder"} | {n: p for p, n in enumerate(nodes)}
    last = {n: max((place[u] for u in n.users if u in place), default=-1) for n in traced.graph.nodes}
    last |= {o: len(nodes) for o in [*traced.handed_out, *traced.assigned.values()] if isinstance(o, fx.Node)}
    effects = Effects(nodes, place, last, alias, same, writes, requires_grad)
    last |= dict.fromkeys(effects.written_inputs, len(nodes))  # they are returned to the caller
    return effects


def least_samples(traced: Traced) -> int:
    """Returns the samples that a micro-batch needs: 2 if training batch norm has one value per sample and channel."""
    for node in traced.graph.nodes:
        if node.target in (F.batch_norm, torch.batch_norm) and named_arguments(node).get("training"):
            source = named_arguments(node)["input"]
            for batch, *sizes in (shape.shape[:1] + shape.shape[2:] for shape in info(source).shapes):
                if sympy.Mul(batch, *sizes).subs(traced.batch, 1) == 1:
                    return 2
    return 1


def running_statistics(node: fx.Node) -> list[fx.Node]:
    if node.target not in NORM_FUNCTIONS:
        return []
    arguments = named_arguments(node)
    if not arguments.get("training", arguments.get("use_input_stats", node.target is F.instance_norm)):
        return []
    return [n for name in ("running_mean", "running_var") if isinstance(n := arguments.get(name), fx.Node)]


def repeated_state(traced: Traced) -> frozenset[str]:
    """Returns the state that each micro-batch changes alike, from its value before the step.

    It follows parameters (a teacher, spectral norm), or only counts for such state; no sample, random number or other
    state enters it.
    """
    assert traced.effects is not None
    alias, writers = traced.effects.alias, _writers_of_state(traced)
    parameters = {name for name, _ in traced.model.named_parameters()}
    sources = {n: set[fx.Node]().union(*map(dependencies_of, own)) for n, own in writers.items()}
    users = dict[fx.Node, set[fx.Node]]()
    for state, own in writers.items():
        same = [n for n in traced.graph.nodes if alias.get(n) == alias[state] or n in own]
        users[state] = {user for n in same for user in n.users if user.op != "output"}
    repeated = {*writers}
    while True:
        differing, _ = _differing(traced, {str(n.target) for n in writers.keys() - repeated})
        followers = {n for n in repeated if not parameters.isdisjoint(str(source.target) for source in sources[n])}
        needed = set[fx.Node]().union(*(sources[n] for n in followers))
        counters = {n for n in repeated - followers if users[n] <= needed}
        kept = {n for n in followers | counters if differing.isdisjoint(writers[n])}
        if kept == repeated:
            return frozenset(str(n.target) for n in repeated)
        repeated = kept


def refuse_remembered_samples(traced: Traced) -> None:
    """Raises `ArgumentError` if forward keeps samples in state and reads it: a memory bank, but not a running mean.

    Python that runs as a node counts if it reads a number of changed state, perhaps a place in a bank.
    """
    repeated = repeated_state(traced)
    frozen = {name for name, parameter in traced.model.named_parameters() if not parameter.requires_grad}
    for attribute, writers in _writers_of_state(traced).items():
        name, is_read = str(attribute.target), any(user not in writers for user in attribute.users)
        is_other = name in repeated or name.rpartition(".")[2] in STATISTICS
        for node in writers if not is_other and attribute_tensor(traced, attribute).numel() > 1 else ():
            python = info(node).opaque
            may_be_bank = is_read if python is None else CHANGED_STATE in python.why
            values = [node] if node in traced.carried_state.values() else node.all_input_nodes
            holds_samples = node.target not in NORM_FUNCTIONS and any(_holds_samples(traced, n) for n in values)
            if name in frozen or (may_be_bank and holds_samples):
                raise ArgumentError(
                    f"forward changes {name!r} at {info(node).source} and reads it, so a micro-batch would find there "
                    "what the micro-batches before have left, unlike samples of the mini-batch, and it cannot change "
                    "once for the mini-batch (layers after the change read it, it draws random numbers, or it is in "
                    "lines that run as Python: put these into a method); keep the mini-batch whole (chunks=1), to "
                    "which you can also pass micro-batches as in gradient accumulation "
                    "(forward_backward(micro_batches=...)); or give out_dims if the model is meant for micro-batches"
                )


def _writers_of_state(traced: Traced) -> dict[fx.Node, list[fx.Node]]:
    """Returns the tensors of the model that the graph changes or sets, with the nodes that do."""
    effects, carried = traced.effects, traced.carried_state
    assert effects is not None
    pairs = [*zip(effects.nodes, effects.written_classes, strict=True)]
    changed = set[int | None]().union(*effects.written_classes)
    held = [n for n in traced.graph.nodes if n.op == "get_attr" and not traced.is_whole]
    held = [n for n in held if effects.alias[n] in changed or n.target in carried]
    writers = {n: [node for node, written in pairs if effects.alias[n] in written] for n in held}
    writers = {n: [*own, *(carried[name] for name in carried if name == n.target)] for n, own in writers.items()}
    return {n: own for n, own in writers.items() if own}


_VIEWS = frozenset("getitem narrow index_select t transpose detach clone".split())


def _holds_samples(traced: Traced, node: fx.Node) -> bool:
    if any(traced.batch in size.free_symbols for shape in info(node).shapes for size in shape.shape):
        return True
    return opname(node.target).strip("_") in _VIEWS and any(_holds_samples(traced, n) for n in node.all_input_nodes[:1])


def refuse_differing_writes(traced: Traced) -> None:
    """Raises `CannotRecord` if micro-batches would write different values to an input that is not split."""
    effects, batched = traced.effects, traced.batch_placeholders
    assert effects is not None
    if traced.is_whole:
        return
    changed = set[int]().union(*effects.written_classes)
    names = {str(n.target) for n in traced.graph.nodes if n.op == "get_attr" and effects.alias[n] in changed}
    _, classes = _differing(traced, {*names, *traced.assigned})
    for node in effects.written_inputs:
        if node not in batched and effects.alias[node] in classes:
            raise CannotRecord(
                f"{_write_to(traced, effects, node)}, which is "
                "not cut into micro-batches, and what it writes depends on samples, on random numbers or on buffers "
                "that change, so that each micro-batch would leave something else in it; return the new value, keep "
                "it in a buffer (register_buffer), or give it a dimension for the samples (in_dims=)",
                is_final=True,
            )


def _differing(traced: Traced, state: Collection[str]) -> tuple[set[fx.Node], set[int | None]]:
    """Returns the nodes and alias classes that differ between micro-batches, if this state of the model does."""
    effects, batched = traced.effects, traced.batch_placeholders
    assert effects is not None
    nodes: set[fx.Node] = set()
    classes: set[int | None] = set()  # hold at some point a value that differs between micro-batches
    for node in traced.graph.nodes:
        alias = effects.alias.get(node)
        if node.op == "placeholder":
            differs = node in batched
        elif node.op == "get_attr":
            differs = alias in classes or str(node.target) in state
        elif (number := info(node).number) is not None:
            differs = bool(number.free_symbols)
        else:
            sources = node.all_input_nodes
            differs = info(node).is_random or any(
                source in nodes or effects.alias.get(source) in classes for source in sources
            )
        if differs:
            nodes.add(node)
            place = effects.place.get(node, -1)
            classes |= {alias, *(effects.written_classes[place] if place >= 0 else ())} - {None}
    return nodes, classes


def refuse_unwritable_inputs(
    traced: Traced, leaves: Sequence[Any], in_one: bool = False, others: Mapping[str, Any] | None = None
) -> None:
    """Raises `ArgumentError` if an input that the graph writes cannot be written: it requires grad, or overlaps.

    Args:
        in_one: forward and backward run in one call: then inputs that require grad are refused, else only leaves.
        others: by name, inputs of the step's other micro-batches, before any write.
    """
    effects = traced.effects
    assert effects is not None
    if not effects.written_inputs:
        return
    values = {leaf.path: value for leaf, value in zip(traced.leaves, leaves, strict=True)}
    values |= {f"the model's {slot.name!r}": tensor for slot, tensor in slots_of(traced.model).items()}
    extents = {
        name: _memory_extent(value)
        for name, value in {**values, **(others or {})}.items()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    }
    for node in effects.written_inputs:
        path, leaf = traced.leaves[traced.place_of(node)].path, leaves[traced.place_of(node)]
        what = _write_to(traced, effects, node)
        if leaf.requires_grad and leaf.is_leaf and traced.state.grad:
            raise ArgumentError(
                f"{what}, and the tensor given is a leaf that requires grad, which torch lets nobody write to; give a "
                "copy (x.clone()), or write to a copy in forward"
            )
        if leaf.requires_grad and in_one:
            raise ArgumentError(
                f"{what}, and the tensor given requires grad: forward_backward would leave it in the graph of what it "
                "was; give a copy (x.clone()), or call the pipe itself"
            )
        if any(stride == 0 and size > 1 for size, stride in zip(leaf.shape, leaf.stride(), strict=True)):
            raise ArgumentError(
                f"{what}, and the tensor given is expanded: several of its elements are one in memory; give a copy "
                "(x.clone())"
            )
        own = extents[path]
        for other, extent in extents.items():
            if other != path and own[0] == extent[0] and own[1] < extent[2] and extent[1] < own[2]:
                raise ArgumentError(
                    f"{what}, and its memory overlaps with that of {other}, which would change with it; give a copy of "
                    "one of them (x.clone())"
                )


def _write_to(traced: Traced, effects: Effects, node: fx.Node) -> str:
    classes = zip(effects.nodes, effects.written_classes, strict=True)
    writer = next(n for n, written in classes if effects.alias[node] in written)
    return f"forward writes to the input {traced.leaves[traced.place_of(node)].path} at {info(writer).source}"


def _memory_extent(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns the storage of a tensor, its first byte, and the byte after its last."""
    if not tensor.numel():
        return storage_of(tensor), 0, 0
    start = int(tensor.storage_offset())
    stop = start + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return storage_of(tensor), start * tensor.itemsize, stop * tensor.itemsize


_SHOWN_FAULTS = 8


def check_invariants(traced: Traced) -> None:
    """Raises `InternalError`, with the names of the nodes, if a pass broke an invariant."""
    faults = list(itertools.islice(find_faults(traced), _SHOWN_FAULTS + 1))
    if faults:
        lines = [*faults[:_SHOWN_FAULTS], *(["..."] if len(faults) > _SHOWN_FAULTS else [])]
        raise InternalError(
            f"the graph of {type(traced.model).__name__} is broken, which is a bug of fxpipe; please report it:\n"
            + "\n".join(f"- {line}" for line in lines)
        )


def find_faults(traced: Traced) -> Iterator[str]:
    """Yields descriptions of broken invariants whose loss would go unnoticed. Others raise where a graph runs."""
    if traced.in_dims:
        for node in traced.nodes:
            if info(node).known_shapes is None and not info(node).is_guarded_read:
                yield f"{node.name} has no shapes"
        combined = [p for p, dim in enumerate(traced.out_dims) if dim == "combined"]
        outputs = [one.output for one in traced.combinations]
        if combined != outputs:
            yield f"the outputs {combined} are combined, and there are combinations for {outputs}"
        pieces = dict(enumerate(traced.piece_dims, len(traced.outputs)))
        for one in traced.combinations:
            if [pieces.get(place, "missing") for place in one.pieces] != [*one.reductions]:
                yield f"{one.where} is combined of {one.pieces} by {one.reductions}, and the pieces are {pieces}"
    if (effects := traced.effects) is None:
        return
    if effects.nodes != traced.nodes or len(effects.written_classes) != len(effects.nodes):
        yield "the effects are those of other nodes, or of nodes in another order"
        return
    for node in traced.graph.nodes:
        after = [user.name for user in node.users if effects.place.get(user, -1) > effects.last.get(node, -1)]
        if after:
            yield f"{node.name} is used by {after[0]} behind the place of its last user"
    known = {*effects.alias.values()}
    for node, written in zip(effects.nodes, effects.written_classes, strict=True):
        if not written <= known:
            yield f"{node.name} changes the alias classes {sorted(written - known)}, in which no node is"
    for node, source in effects.same.items():
        if source not in node.all_input_nodes or effects.alias[source] != effects.alias[node]:
            yield f"{node.name} returns {source.name}, which is no argument of it in the same alias class"
