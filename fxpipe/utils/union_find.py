"""Sets of things that are found to belong together, pair by pair.

networkx has the same. It is not used here, as every `fxpipe.trace` comes by: to import networkx takes longer than to
trace a small model.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class UnionFind(Generic[T]):
    """Disjoint sets. What was not met before is a set of its own."""

    def __init__(self) -> None:
        self._parent: dict[T, T] = {}

    def find(self, item: T) -> T:
        """The item that stands for the set of this one."""
        parent = self._parent
        parent.setdefault(item, item)
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def unite(self, one: T, other: T) -> None:
        """Makes one set of the sets of both."""
        self._parent[self.find(one)] = self.find(other)
