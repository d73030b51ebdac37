"""Aliases across a cut: which tensors share storage, and how a stage makes them again from one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from fxpipe.tracing.effects import Effects


def _chain(effects: Effects, member: fx.Node, root: fx.Node) -> list[fx.Node] | None:
    """The nodes that make `member` again from `root`, last first; None where views alone do not."""
    chain = []
    node = member
    while node is not root:
        source = effects.same.get(node) or next(
            (n for n in node.all_input_nodes if effects.alias[n] == effects.alias[node]), None
        )
        if source is None or (effects.writes[effects.place[node]] and node not in effects.same):
            return None
        chain.append(node)
        node = source
    return chain


def find_root(effects: Effects, members: Sequence[fx.Node]) -> tuple[fx.Node, list[fx.Node]] | None:
    """A member of an alias class from which all of `members` can be made, and the nodes for that in order."""
    for root in class_of(effects, effects.alias[members[0]]):
        chains = [_chain(effects, member, root) for member in members]
        if all(chain is not None for chain in chains):
            nodes = {node for chain in chains for node in chain or ()}
            return root, sorted(nodes, key=effects.place.__getitem__)
    return None


def class_of(effects: Effects, alias: int | None) -> list[fx.Node]:
    """Placeholders and working nodes of an alias class."""
    return [n for n in effects.place if effects.alias[n] == alias]


def written(effects: Effects, places: Iterable[int] | None = None) -> set[int]:
    """Alias classes that the nodes at `places` (all, if None) change."""
    return set().union(*(effects.writes[p] for p in (range(len(effects.writes)) if places is None else places)))
