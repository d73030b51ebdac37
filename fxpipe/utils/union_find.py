"""Union-find.

networkx has one too, but every `fxpipe.trace` uses this module, and importing networkx takes longer than tracing a
small model.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class UnionFind(Generic[T]):
    """Disjoint sets. A new item is a set by itself."""

    def __init__(self) -> None:
        self._parent: dict[T, T] = {}

    def find(self, item: T) -> T:
        parent = self._parent
        parent.setdefault(item, item)
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def unite(self, one: T, other: T) -> None:
        self._parent[self.find(one)] = self.find(other)
