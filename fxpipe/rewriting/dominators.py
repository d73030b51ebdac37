"""Puts whole branches one after another: each item's *cone*, what runs for it alone, in one piece before it.

    a1 b1 a2 b2 a3 b3 join          two branches, recorded in turns: values of both are alive everywhere
    a1 a2 a3 b1 b2 b3 join          as cones: while one branch runs, only the result of the other is alive

The cone of an item holds all from which every way to the end leads through that item. These are the dominator trees of
the reversed graph: an item's parent is the first one in which all its ways meet (K. D. Cooper, T. J. Harvey, K.
Kennedy, "A Simple, Fast Dominance Algorithm", 2001; without loops one walk is enough, in which the parent is the lowest
common ancestor of those that come after). The jumps by which that is found also tell in which cone of a depth an item
is; `networkx.immediate_dominators` has none, and where an early item is read all along a row of 5,000 (a mask) it takes
a second, this a hundredth.

The cones of the children of one parent are then put in order. Of two of them, the one that holds fewer bytes for each
work that it does goes first, since its bytes wait while the other works (W. E. Smith, "Various Optimizers for
Single-Stage Production", 1956, for jobs of which none needs another). Where some need others this is a rule of thumb,
and the given order is kept where it costs no more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxpipe.rewriting.linear_order import Items, ItemValue, LinearOrder


class DominatorTree:
    """The tree of cones: each item below the first one in which all ways from it meet.

    The end of the row is the root, numbered like an item behind the last. Items from which no way leads to it (updates
    of buffers, what nobody uses) are in no cone.
    """

    def __init__(self, items: Items):
        end = len(items.weights)
        self.items = items
        self.parent, self.depth, self.jump = [end] * (end + 1), [0] * (end + 1), [end] * (end + 1)
        self.is_dead = [True] * end + [False]
        for value in items.values:
            self.is_dead[value.maker] &= not value.is_output
        for item in range(end - 1, -1, -1):
            above = end
            later = [other for other in items.after[item] if not self.is_dead[other]]
            if self.is_dead[item] and later:
                self.is_dead[item] = False
                above = later[-1]
                for other in later[-2::-1]:
                    above = self._meet(above, other)
            self._add(item, above)
        self.work = [*items.weights, 0]  # by item: of its cone
        for item in range(end):
            self.work[self.parent[item]] += self.work[item]

    # Ancestors by skew-binary jumps: E. W. Myers, "An applicative random-access stack", 1983.

    def _add(self, item: int, parent: int) -> None:
        depth, far = self.depth, self.jump[parent]
        self.parent[item], depth[item] = parent, depth[parent] + 1
        is_full = depth[parent] - depth[far] == depth[far] - depth[self.jump[far]]
        self.jump[item] = self.jump[far] if is_full else parent

    def at_depth(self, item: int, depth: int) -> int:
        """The ancestor of an item so deep in the tree; the item itself, if that is no deeper."""
        while self.depth[item] > depth:
            far = self.jump[item]
            item = far if self.depth[far] >= depth else self.parent[item]
        return item

    def _meet(self, one: int, other: int) -> int:
        """The lowest common ancestor."""
        one, other = self.at_depth(one, self.depth[other]), self.at_depth(other, self.depth[one])
        while one != other:
            if self.jump[one] != self.jump[other]:
                one, other = self.jump[one], self.jump[other]
            else:
                one, other = self.parent[one], self.parent[other]
        return one

    def beside(self, item: int, others: Iterable[int]) -> frozenset[int]:
        """The cones beside that of an item in which the others are; its parent for itself."""
        above, depth = self.parent[item], self.depth[item]
        alive = (other for other in others if not self.is_dead[other])
        return frozenset(other if other == above else self.at_depth(other, depth) for other in alive)


def nest_branches(row: LinearOrder, cones: DominatorTree) -> LinearOrder:
    """The row with each cone in one piece."""
    items, end = row.items, len(row.order)
    children: list[list[int]] = [[] for _ in range(end + 1)]
    for item in row.order:
        if not cones.is_dead[item]:
            children[cones.parent[item]].append(item)
    values_of: list[list[ItemValue]] = [[] for _ in row.order]
    for value in items.values:
        values_of[value.maker].append(value)
    reversed_order: list[int] = []
    waiting = [end]
    while waiting:  # from the end to the beginning
        item = waiting.pop()
        reversed_order.append(item)
        below = children[item]
        if len(below) > 1:
            ends = frozenset({item})
            group = _Siblings(
                below,
                cones.work,
                {
                    child: [
                        (v.bytes, cones.beside(child, v.users) | (ends if v.is_output else ends - ends)) for v in own
                    ]
                    for child in below
                    if (own := values_of[child])
                },
                {child: cones.beside(child, items.after[child]) - ends for child in below},
            )
            below = min(below, group.quickest_first(), key=group.cost)
        waiting += below  # the last one comes off first
    return LinearOrder.of(items, _insert_dead_items(row, reversed_order[:0:-1]))


def _insert_dead_items(row: LinearOrder, order: list[int]) -> list[int]:
    """Inserts items that are in no cone: each before the one that it stood before, or behind the last that it needs."""
    key: dict[int, tuple[int, int, int]] = {item: (at, 1, 0) for at, item in enumerate(order)}
    next_one = (len(order), 0, 0)
    next_of = {}
    for at in range(len(row.order) - 1, -1, -1):
        item = row.order[at]
        if item in key:
            next_one = (key[item][0], 0, at)
        next_of[item] = next_one
    needed = dict.fromkeys(row.order, (-1, 0, 0))
    for at, item in enumerate(row.order):
        if item not in key:
            place, side, _ = max(next_of[item], needed[item])
            key[item] = (place, side, at) if (place, side) == next_of[item][:2] else (place, 2, at)
        for other in row.items.after[item]:
            needed[other] = max(needed[other], key[item])
    return sorted(key, key=key.__getitem__)


@dataclass(frozen=True, slots=True)
class _Siblings:
    """Cones beside each other, named by their last items."""

    cones: list[int]  # in the given order
    work: Sequence[int]
    held: dict[int, list[tuple[int, frozenset[int]]]]  # by cone: bytes of values, each with its users beside it
    later: dict[int, frozenset[int]]  # by cone: those that have to come after it

    def cost(self, order: Sequence[int]) -> int:
        """Bytes of cones that wait while other cones run, times the work of these."""
        done: dict[int, int] = {}  # by cone: the work after it
        total, after = 0, 0
        for cone in reversed(order):
            for size, users in self.held.get(cone, ()):
                total += size * (after - min((done.get(user, 0) for user in users), default=after))
            done[cone] = after
            after += self.work[cone]
        return total

    def quickest_first(self) -> list[int]:
        """Orders the cones: of those that may come next always the one that lets the fewest bytes wait for its work."""
        place = {cone: at for at, cone in enumerate(self.cones)}
        missing = dict.fromkeys(self.cones, 0)
        for later in self.later.values():
            for cone in later:
                missing[cone] += 1
        holding = {cone: sum(size for size, _ in self.held.get(cone, ())) for cone in self.cones}
        left = {(cone, i): len(users) for cone in self.cones for i, (_, users) in enumerate(self.held.get(cone, ()))}
        reads: dict[int, list[tuple[int, int]]] = {cone: [] for cone in self.cones}
        for cone in self.cones:
            for i, (_, users) in enumerate(self.held.get(cone, ())):
                for user in sorted(users & place.keys(), key=place.__getitem__):
                    reads[user].append((cone, i))

        def key(cone: int) -> tuple[float, int, int]:
            return holding[cone] / max(self.work[cone], 1), place[cone], cone

        ready = [key(cone) for cone in self.cones if not missing[cone]]
        heapq.heapify(ready)
        order: list[int] = []
        done: set[int] = set()
        while ready:
            known, _, cone = heapq.heappop(ready)
            if cone in done or known != holding[cone] / max(self.work[cone], 1):
                continue  # it stands in the heap with another key, too
            order.append(cone)
            done.add(cone)
            for value in reads[cone]:
                left[value] -= 1
                maker, i = value
                size, users = self.held[maker][i]
                last = [user for user in users if user not in done]
                if left[value] == 1 and len(last) == 1 and last[0] in place:  # this one frees it
                    holding[last[0]] -= size
                    if not missing[last[0]]:
                        heapq.heappush(ready, key(last[0]))
            for other in self.later[cone]:
                missing[other] -= 1
            for other in sorted(self.later[cone], key=place.__getitem__):
                if not missing[other]:
                    heapq.heappush(ready, key(other))
        return order
