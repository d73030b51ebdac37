"""The places where a cut is forbidden, with the reasons.

A cut is forbidden

- between a node and the parts of its result (`split(...)[1]`), so that only needed parts cross;
- among the nodes that read or change a buffer which forward changes or sets, so that they stay in sequence;
- if tensors that share storage are alive on both sides and change in place later, unless one of them can recreate the
  others as views. (Then the stage after the cut recreates them from a clone, so `x += f(x)` in every block is allowed.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import fx

from fxpipe.rewriting.aliasing import Aliases
from fxpipe.tracing.node_arguments import container_of
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify.effects import Effects

ForbiddenSpan = tuple[int, int, str]  # first place, last place, reason why no cut is allowed between them


def forbidden_cuts(traced: Traced) -> dict[int, str]:
    """Returns place -> reason why no cut is allowed before the node at this place."""
    effects = traced.effects
    assert effects is not None
    reasons: dict[int, str] = {}
    for first, last, reason in (
        *_part_spans(effects),
        *_buffer_spans(traced, effects),
        *_shared_memory_spans(traced, effects),
    ):
        for place in range(max(first, 0) + 1, last + 1):
            reasons.setdefault(place, reason)
    return reasons


def _part_spans(effects: Effects) -> Iterator[ForbiddenSpan]:
    for place, node in enumerate(effects.nodes):
        if (container := container_of(node)) is not None:
            yield effects.place[container], place, f"{node.name} is a part of {container.name}"


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
    aliases = Aliases.of(effects)
    states = {effects.alias[n] for n in traced.graph.nodes if n.op == "get_attr"}  # handled by `_buffer_spans`
    for alias, last_write in _last_writes(effects).items():
        if alias is None or alias in states:
            continue
        for first, last, crossing in _crossing_members(effects, aliases.members[alias]):
            if first < last_write and aliases.nearest_root(crossing) is None:
                names = ", ".join(n.name for n in crossing)
                yield first, min(last, last_write), f"{names} share memory that is changed later"


def _crossing_members(effects: Effects, members: Sequence[fx.Node]) -> Iterator[tuple[int, int, list[fx.Node]]]:
    """Yields the `members` that cross the cuts between two places: (first, last, members)."""
    ends = sorted({effects.place[n] for n in members} | {effects.last[n] for n in members})
    born: dict[int, list[fx.Node]] = defaultdict(list)
    for node in members:
        born[effects.place[node]].append(node)
    alive: list[fx.Node] = []
    for first, last in pairwise(ends):
        alive = [n for n in (*alive, *born[first]) if effects.last[n] > first]
        if alive:
            yield first, last, alive


def _last_writes(effects: Effects) -> dict[int | None, int]:
    """Returns alias class -> the last place that changes it."""
    return {alias: place for place, classes in enumerate(effects.written_classes) for alias in classes}
