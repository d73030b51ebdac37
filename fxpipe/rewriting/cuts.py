"""Where no cut may stand, and why.

A cut may stand almost anywhere. What forbids one:

- A buffer that forward changes: all nodes that read or change it share a stage, so that its states follow each other.
- Parts of what one node returned (`split(...)[1]`) stay with it, so that only the parts that are needed cross.
- Tensors that share storage, change in place later, and are alive on both sides, where views cannot make them again from
  one of them. (Where they can, the stage behind the cut does so from a clone: `x += f(x)` in every block is no obstacle.)
"""

from __future__ import annotations

import operator

from torch import fx

from fxpipe.rewriting.aliases import class_of, find_root, written
from fxpipe.tracing.traced import Traced


def forbidden_cuts(traced: Traced) -> dict[int, str]:
    """Place -> why no cut may stand before the node at this place."""
    effects = traced.effects
    assert effects is not None
    found: dict[int, str] = {}

    def forbid(first: int, last: int, reason: str) -> None:
        for place in range(first + 1, last + 1):
            found.setdefault(place, reason)

    changed = written(effects)
    attributes = [n for n in traced.graph.nodes if n.op == "get_attr"]
    states = {effects.alias[n]: str(n.target) for n in attributes}
    for alias in changed & states.keys():
        uses = [p for n, p in effects.place.items() if any(effects.alias[s] == alias for s in n.all_input_nodes)]
        forbid(min(uses), max(uses), f"the buffer {states[alias]!r} is changed here and there")
    for name, value in traced.assigned.items():
        uses = [effects.place[u] for n in attributes if n.target == name for u in n.users if u in effects.place]
        makers = [effects.place[value]] if value in effects.place and effects.place[value] >= 0 else []
        if uses + makers:
            forbid(min(uses + makers), max(uses + makers), f"the buffer {name!r} is read and set anew")
    for alias in changed - states.keys():
        members = class_of(effects, alias)
        last_write = max(p for p, classes in enumerate(effects.writes) if alias in classes)
        for place in range(min(effects.place[n] for n in members) + 1, last_write + 1):
            crossing = [n for n in members if effects.place[n] < place <= effects.last[n]]
            if crossing and find_root(effects, crossing) is None:
                names = ", ".join(n.name for n in crossing)
                found.setdefault(place, f"{names} share memory that is changed later")
    for node in effects.nodes:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            forbid(effects.place[node.args[0]], effects.place[node], f"{node.name} is a part of {node.args[0].name}")
    return found
