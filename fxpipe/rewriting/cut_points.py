"""The places where a cut is forbidden, with the reasons.

A cut is forbidden

- between a node and the parts of its result (`split(...)[1]`), so that only needed parts cross;
- among the nodes that read or change a buffer which forward changes or sets, so that they stay in sequence;
- if tensors that share storage are alive on both sides and change in place later, unless one of them can recreate the
  others as views. (Then the stage after the cut recreates them from a clone, so `x += f(x)` in every block is allowed.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise

from torch import fx

from fxpipe._torch.functions import opname
from fxpipe.tracing.node_info import container_of, state_of
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify.effects import Effects

# Functions that return a view at every size and for all strides. `reshape`, `contiguous` and `to` may copy, and a copy
# has the old values.
VIEW_FUNCTIONS = frozenset(
    "__getitem__ adjoint chunk detach diagonal dsplit expand expand_as getattr getitem hsplit imag movedim moveaxis "
    "narrow permute real select split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind "
    "unflatten unfold unsqueeze view view_as view_as_complex view_as_real vsplit".split()
)


class Aliases:
    """Storage that a graph's placeholders and working nodes share, and how a stage recreates it from one of them.

        x = conv(h)         x ◀── v ◀── w     `w` is a view of `v`, which is a view of `x`; `y` *is* `x`, changed in
        v = x[:, :3]        ▲                 place. After a cut where `w` and `y` are alive, a stage that will write
        w = v.t()           └──── y           to them only needs a clone of `x`: it recreates `v`, `w` and `y`. If only
        y = x.add_(1)                         `w` is alive, a clone of `w` is enough.

    The *nearest* node from which all can be made is cloned. So less is sent, and the stage that wrote last has it.

    `x.detach()` shares the memory of `x`, but not its history. After something with a gradient has been written to it,
    no clone of `x` recreates it.
    """

    def __init__(self, effects: Effects):
        self.members: dict[int, list[fx.Node]] = defaultdict(list)  # alias class -> its nodes in order
        self.source: dict[fx.Node, fx.Node] = {}  # node -> the node that it is, or is a view of
        self.place = effects.place
        for node in effects.place:
            alias = effects.alias[node]
            if alias is not None:
                self.members[alias].append(node)
                name, base = opname(node.target), None  # the node that this one is, or is a view of, at any size
                if node in effects.same:
                    base = effects.same[node] if name != "contiguous" else None
                elif name in VIEW_FUNCTIONS:
                    base = next((n for n in node.all_input_nodes if effects.alias[n] == alias), None)
                if base is not None:
                    self.source[node] = base
        for node in _detached_with_history(effects, self.source):
            del self.source[node]

    def nearest_root(self, nodes: Collection[fx.Node]) -> tuple[fx.Node, list[fx.Node]] | None:
        """Returns the nearest node whose views give all of `nodes`, and the nodes to recreate, in order; or None."""
        remaining, again = set(nodes), []
        # Of a tuple, list or dict of tensors only the parts can be cloned.
        while len(remaining) > 1 or any(container_of(user) is not None for n in remaining for user in n.users):
            last = max(remaining, key=self.place.__getitem__)
            if last not in self.source:
                return None
            remaining.remove(last)
            remaining.add(self.source[last])
            again.append(last)
        return remaining.pop(), again[::-1]


def _detached_with_history(effects: Effects, source: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """Finds detached views to which something with a gradient is written."""
    with_gradient = {effects.alias[node] for node, requires_grad in effects.requires_grad.items() if requires_grad}
    detached: dict[fx.Node, fx.Node] = {}  # node -> the nearest detached view that it is, or is a view of
    written_to = set[fx.Node]()
    for place, node in enumerate(effects.nodes):
        if node in source:
            name = opname(node.target)
            detaches = name == "detach" or (name == "getattr" and node.args[1:2] == ("data",))
            nearest = node if detaches else detached.get(source[node])
            if nearest is not None:
                detached[node] = nearest
        written = effects.written_classes[place]
        targets = {detached[n] for n in node.all_input_nodes if n in detached and effects.alias[n] in written}
        has_gradient = any(
            effects.requires_grad.get(n) or (effects.alias[n] in with_gradient and effects.alias[n] not in written)
            for n in node.all_input_nodes
        )
        if targets and has_gradient and state_of(node).grad:
            written_to |= targets
            with_gradient |= written
    return written_to


ForbiddenSpan = tuple[int, int, str]  # first place, last place, reason why no cut is allowed between them


def forbidden_cuts(traced: Traced) -> dict[int, str]:
    """Returns place -> reason why no cut is allowed before the node at this place."""
    effects = traced.effects
    assert effects is not None
    reasons: dict[int, str] = {}
    parts = (
        (effects.place[container], place, f"{node.name} is a part of {container.name}")
        for place, node in enumerate(effects.nodes)
        if (container := container_of(node)) is not None
    )
    for first, last, reason in (*parts, *_buffer_spans(traced, effects), *_shared_memory_spans(traced, effects)):
        for place in range(max(first, 0) + 1, last + 1):
            reasons.setdefault(place, reason)
    return reasons


def _buffer_spans(traced: Traced, effects: Effects) -> Iterator[ForbiddenSpan]:
    attributes = {str(n.target): n for n in traced.graph.nodes if n.op == "get_attr"}
    uses: dict[int | None, list[int]] = defaultdict(list)  # alias class -> the places that read or change it
    for place, node in enumerate(effects.nodes):
        for alias in {effects.alias[source] for source in node.all_input_nodes}:
            uses[alias].append(place)
    last_writes = _last_writes(effects)
    for name, node in attributes.items():
        places = uses[effects.alias[node]]
        if effects.alias[node] in last_writes:
            yield places[0], places[-1], f"the buffer {name!r} is changed here and there"
    for name, value in traced.assigned.items():
        if name not in attributes:
            continue  # only set
        reads = [effects.place[user] for user in attributes[name].users if user in effects.place]
        if value.op == "get_attr":
            sets = uses[effects.alias[value]]
        else:
            sets = [effects.place[value], last_writes.get(effects.alias[value], -1)]
        if reads:
            yield (
                min(reads + [p for p in sets if p >= 0]),
                max(reads + sets),
                f"the buffer {name!r} is read and set anew",
            )


def _shared_memory_spans(traced: Traced, effects: Effects) -> Iterator[ForbiddenSpan]:
    aliases = Aliases(effects)
    states = {effects.alias[n] for n in traced.graph.nodes if n.op == "get_attr"}  # handled by `_buffer_spans`
    for alias, last_write in _last_writes(effects).items():
        if alias is None or alias in states:
            continue
        members = aliases.members[alias]
        ends = sorted({effects.place[n] for n in members} | {effects.last[n] for n in members})
        born: dict[int, list[fx.Node]] = defaultdict(list)
        for node in members:
            born[effects.place[node]].append(node)
        crossing: list[fx.Node] = []
        for first, last in pairwise(ends):
            crossing = [n for n in (*crossing, *born[first]) if effects.last[n] > first]
            if crossing and first < last_write and aliases.nearest_root(crossing) is None:
                names = ", ".join(n.name for n in crossing)
                yield first, min(last, last_write), f"{names} share memory that is changed later"


def _last_writes(effects: Effects) -> dict[int | None, int]:
    return {alias: place for place, classes in enumerate(effects.written_classes) for alias in classes}
