"""What every node shares and changes: storages, in-place writes, changed buffers. Watched, not guessed.

The graph is run for real, once for each size that will occur, and after each node one looks: which storages do its
tensors have, which of the tensors it read have a new version, which buffers have new values (batch norm changes its
buffers without raising their version; as its statistics may come out the same by chance, it is also known by name).
Whether `reshape` and `contiguous` share or copy hangs on sizes as much as on code, so what holds at any size is taken
to hold at all.

The same runs serve to compare the graph with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxpipe.progress import Step, progress
from fxpipe.tracing.containers import storage_of, tensors_in
from fxpipe.tracing.evaluation import Values, copy_of_input, evaluate, outputs_in, run
from fxpipe.tracing.recording.draws import Draws
from fxpipe.tracing.recording.fake import running
from fxpipe.tracing.snapshot import same_values
from fxpipe.tracing.traced import Traced, lookup

NORMS = (F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm)


@dataclass(slots=True)
class Effects:
    """Facts about the nodes of a graph, over all the sizes it was run at.

    An alias class is a set of nodes whose tensors may share storage; it is named by a number.
    """

    nodes: list[fx.Node]  # those that work, in order
    place: dict[fx.Node, int]  # node -> its index in `nodes`; a placeholder: -1
    last: dict[fx.Node, int]  # node -> place of its last user; an output of the graph: len(nodes)
    alias: dict[fx.Node, int | None]  # node -> alias class; None where it holds no tensor
    same: dict[fx.Node, fx.Node]  # node -> the argument that it returns, at every size
    writes: list[set[int]]  # by place: the alias classes that the node changes
    requires_grad: dict[fx.Node, bool]  # does any tensor of the value


@dataclass(slots=True)
class Run:
    """One run of a graph on real values."""

    outputs: list[Any]
    buffers: dict[str, torch.Tensor]  # by name: the values after the run, of all that the graph reads or re-assigns


@dataclass(slots=True)
class _Watch:
    nodes: list[fx.Node]
    parent: dict[Any, Any] = field(default_factory=dict)  # union-find over storages
    first: dict[fx.Node, Any] = field(default_factory=dict)  # node -> one of its storages
    changed: list[set[Any]] = field(default_factory=list)
    same: dict[fx.Node, fx.Node | None] = field(default_factory=dict)
    requires_grad: dict[fx.Node, bool] = field(default_factory=dict)

    def find(self, key: Any) -> Any:
        self.parent.setdefault(key, key)
        while self.parent[key] != key:
            self.parent[key] = self.parent[self.parent[key]]
            key = self.parent[key]
        return key

    def made(self, node: fx.Node, value: Any, keys: Iterable[Any]) -> None:
        if not isinstance(value, torch.Tensor):
            keys = list(keys)[:1]  # the parts of a tuple are nodes of their own, and need not share memory
        for key in keys:
            self.parent[self.find(key)] = self.find(self.first.setdefault(node, key))
        self.requires_grad[node] = self.requires_grad.get(node, False) or any(
            t.requires_grad for t in tensors_in(value)
        )


def watch(
    traced: Traced, samples: Sequence[Sequence[Any]], before_each: Callable[[], object] = lambda: None
) -> tuple[Effects, list[Run]]:
    """Runs the graph on each of `samples` (flattened inputs, one sample for each size). The model does not change."""
    seen = _Watch(traced.nodes, changed=[set() for _ in traced.nodes])
    runs = []
    with progress("checking", len(samples) * (len(traced.graph.nodes) - 1)) as step:
        for number, sample in enumerate(samples):
            before_each()
            runs.append(_run(traced, sample, number, seen, step))
    nodes = traced.nodes
    place = {n: -1 for n in traced.graph.nodes if n.op == "placeholder"} | {n: p for p, n in enumerate(nodes)}
    last = {n: max((place[u] for u in n.users if u in place), default=-1) for n in traced.graph.nodes}
    last |= {o: len(nodes) for o in [*traced.outputs, *traced.assigned.values()] if isinstance(o, fx.Node)}
    numbers: dict[Any, int] = {}
    alias = {
        n: numbers.setdefault(seen.find(seen.first[n]), len(numbers)) if n in seen.first else None
        for n in traced.graph.nodes
    }
    writes = [{numbers[root] for key in keys if (root := seen.find(key)) in numbers} for keys in seen.changed]
    same = {n: source for n, source in seen.same.items() if source is not None}
    return Effects(nodes, place, last, alias, same, writes, seen.requires_grad), runs


def _run(traced: Traced, sample: Sequence[Any], number: int, seen: _Watch, step: Step) -> Run:
    """Every value lives until the end of the run: else one address would name two storages."""
    values: Values = {}
    buffers: dict[int, tuple[fx.Node, torch.Tensor]] = {}  # by storage
    place = {n: p for p, n in enumerate(seen.nodes)}
    draws = Draws(traced.seed)

    def given(node: fx.Node) -> Any:
        return copy_of_input(sample[traced.place_of(node)])

    def attribute(node: fx.Node) -> torch.Tensor:
        tensor = lookup(traced, node)
        if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
            return tensor.detach().requires_grad_(tensor.requires_grad)
        copy = tensor.detach().clone()
        buffers[storage_of(copy)] = node, copy
        return copy

    def work(node: fx.Node, values: Values) -> Any:
        value, changed = _observed(node, values, buffers, draws)
        seen.changed[place[node]] |= {(number, storage) for storage in changed}
        is_one = isinstance(value, torch.Tensor)
        returned = next((s for s in node.all_input_nodes if is_one and values[s] is value), None)
        seen.same[node] = returned if seen.same.get(node, returned) is returned else None
        return value

    for node in evaluate(traced.graph.nodes, values, given, attribute, work):
        seen.made(node, values[node], ((number, storage_of(t)) for t in tensors_in(values[node])))
        step()
    after = {str(n.target): t for n, t in buffers.values()}
    after |= {name: values[n] for name, n in traced.assigned.items()}
    return Run([_bare(output) for output in outputs_in(traced, values)], after)


def _bare(value: Any) -> Any:
    """A tensor without what it was made of, which would take memory as long as it lives."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _observed(
    node: fx.Node, values: Values, buffers: dict[int, tuple[fx.Node, torch.Tensor]], draws: Draws
) -> tuple[Any, set[int]]:
    """What a node makes, and the storages that it changes."""
    read = list({id(t): t for source in node.all_input_nodes for t in tensors_in(values[source])}.values())
    versions = [t._version for t in read]
    before = {key: buffers[key][1].clone() for key in map(storage_of, read) if key in buffers}
    with running():
        value = run(node, values)
        if node.meta.get("draw"):
            value = draws.take(lambda: run(node, values))
    changed = {storage_of(t) for t, v in zip(read, versions, strict=True) if t._version != v}
    changed |= {key for key, old in before.items() if not same_values(buffers[key][1], old)}
    if node.target in NORMS:
        changed |= {storage_of(values[b]) for b in running_statistics(node)}
    return value, changed


def running_statistics(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a norm updates."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training")
    if node.target in (F.instance_norm, torch.instance_norm):
        names = (*names[:5], "use_input_stats")
    elif node.target is torch.batch_norm:
        names = ("input", "weight", "bias", "running_mean", "running_var", "training")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if not given.get(names[5], node.target is F.instance_norm):
        return []
    return [n for name in ("running_mean", "running_var") if isinstance(n := given.get(name), fx.Node)]
