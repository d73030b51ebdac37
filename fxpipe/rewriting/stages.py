"""Cuts a traced graph into stages: pure functions, and a table of who sends what to whom.

For each stage, in this order:

1. Which earlier values do its nodes need? Each is received from the stage that made it or, where a stage in between has
   changed it in place, from the last one that did.
2. A stage that will write to memory it received clones it at entry, and makes again from the clone every alias that it, or
   a later stage, still uses. So no stage writes to what another one holds.
3. Its own nodes are copied, with the state of the thread set where it changes, random nodes seeded and devices replaced.
4. What later stages need goes out; a value that skips a stage is marked by `stash` here and `pop` there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpipe.rewriting.aliases import class_of, find_root, written
from fxpipe.rewriting.code import stage_code
from fxpipe.rewriting.devices import on_device
from fxpipe.rewriting.functions import pop, seeded, set_autocast, set_grad, stash
from fxpipe.rewriting.program import INPUT, Constant, Location, Program, Received, Skip, Stage
from fxpipe.tracing.effects import Effects
from fxpipe.thread_state import ThreadState
from fxpipe.tracing.traced import Traced


@dataclass(slots=True)
class _Draft:
    """What a stage is made of."""

    nodes: list[fx.Node]
    needs: list[fx.Node]  # received
    clones: list[fx.Node]  # received, to be cloned at entry
    again: list[fx.Node]  # views made again from the clones


@dataclass(slots=True)
class _Cut:
    """A graph with stage numbers."""

    traced: Traced
    effects: Effects
    starts: Sequence[int]

    @property
    def count(self) -> int:
        return len(self.starts)

    def stage_at(self, place: int) -> int:
        """The stage of a place; INPUT before the first node, `count` for the end of the graph."""
        if place == len(self.effects.nodes):
            return self.count
        return sum(start <= place for start in self.starts) - 1 if place >= 0 else INPUT

    def home(self, node: fx.Node) -> int:
        return self.stage_at(self.effects.place[node])

    def until(self, node: fx.Node) -> int:
        return self.stage_at(self.effects.last[node])

    def places(self, stage: int) -> range:
        end = self.starts[stage + 1] if stage + 1 < self.count else len(self.effects.nodes)
        return range(self.starts[stage], end)


def split(traced: Traced, starts: Sequence[int], devices: Sequence[torch.device]) -> Program:
    """Stages that begin at the places `starts` (the first is 0), for one device each."""
    assert traced.effects is not None
    cut = _Cut(traced, traced.effects, starts)
    changed = written(cut.effects)
    attributes = [n for n in traced.graph.nodes if n.op == "get_attr"]
    state_classes = {cut.effects.alias[n] for n in attributes}
    drafts = [_draft(cut, stage, written(cut.effects, cut.places(stage)) - state_classes) for stage in range(cut.count)]

    writes = [written(cut.effects, cut.places(stage)) for stage in range(cut.count)]

    def owner(node: fx.Node, user: int) -> int:
        later = range(cut.home(node) + 1, user)
        return max([cut.home(node), *(t for t in later if cut.effects.alias[node] in writes[t])])

    table = [[(node, owner(node, stage)) for node in draft.needs] for stage, draft in enumerate(drafts)]
    out_nodes = list(dict.fromkeys(o for o in traced.outputs if isinstance(o, fx.Node)))
    # The model may return a parameter or a buffer: the last stage hands it on.
    table.append([(o, owner(o, cut.count) if o in cut.effects.place else cut.count - 1) for o in out_nodes])
    assigned_at = {name: max(cut.home(n), 0) if n in cut.effects.place else 0 for name, n in traced.assigned.items()}
    ordinals = {n: k for k, n in enumerate(n for n in cut.effects.nodes if n.meta.get("random"))}
    skips = [Skip(n.name, source, stage) for stage, row in enumerate(table[:-1]) for n, source in row if INPUT < source < stage - 1]
    stashed = {(skip.source, skip.name) for skip in skips}
    stages = []
    for stage, draft in enumerate(drafts):
        sends = list(dict.fromkeys(n for row in table for n, source in row if source == stage))
        assigns = [name for name, at in assigned_at.items() if at == stage]
        builder = _Builder(cut, stage, devices[stage], ordinals)
        users = {*draft.nodes, *draft.again}
        own = [n for n in attributes if n in sends or any(u in users for u in n.users)]
        builder.receive(own, draft, {s.name for s in skips if s.target == stage})
        builder.copy(draft)
        builder.send(sends, assigns, {name for source, name in stashed if source == stage}, state_classes)
        graph = builder.finish()
        stages.append(
            Stage(
                fx.GraphModule({}, graph, class_name=f"Stage{stage}"),
                tuple(str(n.target) for n in own),
                tuple(Received(n.name, source) for n, source in table[stage]),
                tuple(n.name for n in sends),
                tuple(assigns),
                tuple(str(n.target) for n in own if cut.effects.alias[n] in changed),
                {n.name: Location(n.meta["module"], n.meta["source"]) for n in draft.nodes},
                stage_code(graph, stage),
            )
        )
    inputs = {place: node.name for place, node in traced.placeholders.items()}
    sources = {n: source for n, source in table[-1]}
    outputs = tuple(Received(o.name, sources[o]) if isinstance(o, fx.Node) else Constant(o) for o in traced.outputs)
    names = tuple(inputs.get(place) for place in range(len(traced.leaves)))
    return Program(tuple(stages), names, outputs, tuple(skips), bool(ordinals))


def _draft(cut: _Cut, stage: int, writes: set[int]) -> _Draft:
    effects = cut.effects
    nodes = [effects.nodes[place] for place in cut.places(stage)]
    needs = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n in effects.place and cut.home(n) < stage)
    clones: list[fx.Node] = []
    again: list[fx.Node] = []
    for alias in sorted(writes):
        members = [n for n in class_of(effects, alias) if cut.home(n) < stage <= cut.until(n)]
        if not members:
            continue
        found = find_root(effects, members)
        assert found is not None, "a cut that `forbidden_cuts` forbids"
        root, nodes_again = found
        for member in members:
            needs.pop(member, None)
        needs[root] = None
        needs |= dict.fromkeys(
            n for node in nodes_again for n in node.all_input_nodes if n in effects.place and effects.alias[n] != alias
        )
        clones.append(root)
        again += nodes_again
    return _Draft(nodes, list(needs), clones, sorted(again, key=effects.place.__getitem__))


class _Builder:
    """Writes the graph of one stage."""

    def __init__(self, cut: _Cut, stage: int, device: torch.device, ordinals: dict[fx.Node, int]):
        self.cut, self.stage, self.device, self.ordinals = cut, stage, device, ordinals
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}

    def receive(self, attributes: Sequence[fx.Node], draft: _Draft, popped: set[str]) -> None:
        for node in attributes:
            self.made[node] = self.graph.placeholder(node.name)
            self.made[node].meta["text"] = str(node.target)
        for node in draft.needs:
            self.made[node] = self.graph.placeholder(node.name)
        for node in draft.needs:
            if node.name in popped:
                self.made[node] = self.graph.create_node(
                    "call_function", pop, (self.made[node], node.name), name=f"{node.name}_popped"
                )
        for node in draft.clones:
            self.made[node] = self.graph.create_node("call_method", "clone", (self.made[node],), name=f"{node.name}_copy")
        for node in draft.again:
            same = self.cut.effects.same.get(node)
            self.made[node] = self.made[same] if same is not None else self._copied(node)

    def copy(self, draft: _Draft) -> None:
        state = self.cut.traced.state
        for node in draft.nodes:
            self._set_state(state, node.meta["state"])
            state = node.meta["state"]
            self.made[node] = self._copied(node)
            ordinal = self.ordinals.get(node)
            if ordinal is not None:
                copy = self.made[node]
                copy.op, copy.target = "call_function", seeded(ordinal, node.target, self.device)  # type: ignore[arg-type]

    def _copied(self, node: fx.Node) -> fx.Node:
        copy = self.graph.node_copy(node, self.made.__getitem__)
        on_device(copy, self.device)
        return copy

    def _set_state(self, old: ThreadState, new: ThreadState) -> None:
        if new.grad != old.grad:
            self.graph.call_function(set_grad, (new.grad,))
        for before, after in zip(old.autocast, new.autocast, strict=True):
            if after != before:
                self.graph.call_function(set_autocast, (after.device, after.enabled, after.dtype, after.cache))

    def send(self, sends: Sequence[fx.Node], assigns: Sequence[str], stashed: set[str], states: set[Any]) -> None:
        values = []
        for node in sends:
            value = self.made[node]
            if self.cut.effects.alias[node] in states:
                # Memory of a parameter or a buffer, which will be written to while others still read this value.
                value = self.graph.create_node("call_method", "clone", (value,), name=f"{node.name}_copy")
            if node.name in stashed:
                value = self.graph.create_node("call_function", stash, (value, node.name), name=f"{node.name}_stashed")
            values.append(value)
        for name in assigns:
            values.append(self.made[self.cut.traced.assigned[name]])
        self.graph.output(tuple(values))

    def finish(self) -> fx.Graph:
        self.graph.lint()
        return self.graph
