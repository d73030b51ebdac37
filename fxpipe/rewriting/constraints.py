"""What the order of a graph must keep, beside that a value is made before it is used.

- Nodes that touch memory which is written to: all of one alias class keep their order. So what is read is what was
  read, and views that autograd makes anew after a write are made in the same order.
- Nodes that use one value or parameter that requires grad. Autograd runs backward in the reverse order of forward, and
  adds the gradients of a value in the order in which they come: in another order, they have other last bits.
- Nodes that may do more than they return: Python that runs as it is (modules kept whole, hooks, functions that are not
  torch's), values that are compared, numbers drawn for decisions.

A random function of torch is free: it draws from a seed of its own, by the ordinal that it was recorded with.

Parts of what one node returned go with it: a *unit* is a node with its parts. A unit is *pinned* where it makes nothing
that anyone waits for, or touches a buffer that forward changes or sets, whose users should stay together.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from fxpipe.rewriting.aliases import VIEWS
from fxpipe.tracing.checking.effects import Effects
from fxpipe.tracing.functions import opname
from fxpipe.tracing.traced import Traced

_PURE = ("torch", "_operator", "builtins", "math")  # where functions come from that do nothing but return


@dataclass(frozen=True, slots=True)
class Units:
    """The working nodes of a graph, each with its parts, and what of their order must stay."""

    nodes: tuple[tuple[fx.Node, ...], ...]  # by unit
    of: dict[fx.Node, int]
    after: tuple[tuple[int, ...], ...]  # by unit: those that have to run after it, ascending
    pinned: frozenset[int]

    @classmethod
    def of_graph(cls, traced: Traced) -> Units:
        effects = traced.effects
        assert effects is not None
        nodes = _units(effects.nodes)
        of = {node: unit for unit, members in enumerate(nodes) for node in members}
        written = written_classes(effects)
        after: list[set[int]] = [set() for _ in nodes]
        for node in effects.nodes:
            for user in node.users:
                if user in of and of[user] != of[node]:
                    after[of[node]].add(of[user])
        for row in (*_touching(effects, written), *_sharing_gradients(effects), _acting(effects)):
            places = list(dict.fromkeys(of[node] for node in row))
            for one, other in itertools.pairwise(places):
                after[one].add(other)
        pinned = {of[node] for node in _pinned(traced, effects, written, of)}
        return cls(nodes, of, tuple(tuple(sorted(later)) for later in after), frozenset(pinned))


def _units(nodes: Sequence[fx.Node]) -> tuple[tuple[fx.Node, ...], ...]:
    """Nodes, each with those of its parts that stand right behind it, as recorded ones do."""
    units: list[list[fx.Node]] = []
    for node in nodes:
        if units and _is_part(node) and node.args[0] in units[-1]:
            units[-1].append(node)
        else:
            units.append([node])
    return tuple(map(tuple, units))


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node)


def written_classes(effects: Effects) -> set[int]:
    """Alias classes that some node changes. A method may change more than values: `requires_grad_`, `detach_`."""
    found = set[int]().union(*effects.writes)
    for node in effects.nodes:
        name = opname(node.target)
        if name.endswith("_") and not name.endswith("__") and isinstance(first := _first(node), fx.Node):
            alias = effects.alias[first]
            found |= {alias} if alias is not None else set()
    return found


def _first(node: fx.Node) -> object:
    return node.args[0] if node.args else None


def _touching(effects: Effects, written: set[int]) -> Iterable[list[fx.Node]]:
    """For each alias class that is written to: who makes, reads or changes it."""
    found: dict[int, list[fx.Node]] = {alias: [] for alias in sorted(written)}
    classes = classes_touched(effects)
    for place, node in enumerate(effects.nodes):
        for alias in sorted(classes[node] & written | effects.writes[place]):
            found[alias].append(node)
    return found.values()


def classes_touched(effects: Effects) -> dict[fx.Node, frozenset[int]]:
    """By node: the alias classes of what it makes and reads; a tuple that it reads has those of its parts, too."""
    of: dict[fx.Node, set[int]] = {n: set() if alias is None else {alias} for n, alias in effects.alias.items()}
    for node in reversed(effects.nodes):  # parts of parts first
        if _is_part(node) and isinstance(first := node.args[0], fx.Node):
            of[first] |= of[node]
    return {n: frozenset(of[n].union(*map(of.__getitem__, n.all_input_nodes))) for n in effects.nodes}


def _sharing_gradients(effects: Effects) -> Iterable[list[fx.Node]]:
    """For each value that requires grad: its users that do, too."""
    one: dict[fx.Node, fx.Node] = {}  # node -> the first node that returned this very tensor, or the tuple it is in
    users: dict[fx.Node, list[fx.Node]] = {}
    for place, node in enumerate(effects.nodes):
        sources = dict.fromkeys(one.get(n, n) for n in node.all_input_nodes if effects.requires_grad.get(n))
        if _is_part(node) and isinstance(first := node.args[0], fx.Node):
            one[node] = one.get(first, first)
        elif (same := _returned(effects, node)) is not None:
            one[node] = one.get(same, same)
        if effects.requires_grad.get(node) or effects.writes[place]:
            for source in sources:
                users.setdefault(source, []).append(node)
    return users.values()


def _returned(effects: Effects, node: fx.Node) -> fx.Node | None:
    """The argument that a node returns, at some sizes at least (`contiguous`, `to`)."""
    if node in effects.same:
        return effects.same[node]
    alias = effects.alias.get(node)
    if alias is None or opname(node.target) in VIEWS:
        return None
    return next((n for n in node.all_input_nodes if effects.alias[n] == alias), None)


def _acting(effects: Effects) -> list[fx.Node]:
    return [n for n in effects.nodes if acts(n) or (not n.users and _module(n) == "builtins")]  # `print`


def acts(node: fx.Node) -> bool:
    """Does a node more than to return something, as far as one can tell, or is it something that must not see it?"""
    if any(node.meta.get(key) for key in ("opaque", "hook", "whole", "dice", "draw")):
        return True
    return node.op == "call_function" and _module(node) not in _PURE


def _module(node: fx.Node) -> str:
    """Whose function it is; torch's, where that has no module (methods of tensors)."""
    return str(getattr(node.target, "__module__", None) or "torch").partition(".")[0]


def _pinned(traced: Traced, effects: Effects, written: set[int], of: dict[fx.Node, int]) -> Iterator[fx.Node]:
    attributes = [n for n in traced.graph.nodes if n.op == "get_attr"]
    states = {effects.alias[n] for n in attributes} & written
    assigned = traced.carried
    reassigned = {n for n in attributes if str(n.target) in assigned}
    outputs = {o for o in (*traced.handed_out, *traced.left.values()) if isinstance(o, fx.Node)}
    classes = classes_touched(effects)
    for node in effects.nodes:
        parts = [user for user in node.users if _is_part(user)]
        if not node.users.keys() - {traced.graph.output_node()} and node not in outputs and not _is_part(node):
            yield node
        if not states.isdisjoint(classes[node]) or not reassigned.isdisjoint(node.all_input_nodes):
            yield node
        if node in assigned.values():
            yield node
        if any(of[part] != of[node] for part in parts):
            yield from (node, *parts)
