"""Items in a row, the values that live from one to others, and what the row costs. Plain numbers, no graph.

    item      a    b    c    d            a makes 1 byte for b and c, b makes 10 for d, c 100 for d
    work      1    3    5    4
    alive        1   11  110              before b, c and d: what a cut there would send
    weight       4    8    9              the work of its neighbours: a cut by costs falls there more often
    cost         4 + 88 + 990

An output of the model goes on living to the end, where it is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class ItemValue:
    """A value that an item makes for others."""

    bytes: int
    maker: int
    users: tuple[int, ...]  # items, each once; none: only an output
    is_output: bool  # it lives to the end


@dataclass(frozen=True, slots=True)
class Items:
    """The items to be put in order: 0 to n - 1, numbered in an order in which they can run."""

    weights: tuple[int, ...]  # by item: its work, in any unit
    values: tuple[ItemValue, ...]
    after: tuple[tuple[int, ...], ...]  # by item: those that have to run after it; users of its values are among them
    pinned: frozenset[int]  # items that are not moved themselves


@dataclass(frozen=True, slots=True)
class LinearOrder:
    """Items in an order."""

    items: Items
    order: tuple[int, ...]
    place: tuple[int, ...]  # by item
    middle: tuple[int, ...]  # by place: twice the work from the start to the middle of this item; and to the end
    cost: int  # bytes alive at each place where a cut may stand, times the work between the middles of its neighbours

    @classmethod
    def of(cls, items: Items, order: Sequence[int]) -> LinearOrder:
        place = [0] * len(order)
        for at, item in enumerate(order):
            place[item] = at
        sums = list(accumulate((items.weights[item] for item in order), initial=0))
        middle = (*map(operator.add, sums, sums[1:]), 2 * sums[-1])
        return cls(
            items, tuple(order), tuple(place), middle, _order_cost(items, [middle[at] for at in place], middle[-1])
        )

    def moved(self, anchors: Mapping[int, int]) -> LinearOrder:
        """Moves each of the items in `anchors` next to the item at that place: before it if it comes from before."""
        key = [(anchors.get(item, at), at) for at, item in enumerate(self.order)]
        return LinearOrder.of(self.items, [self.order[at] for _, at in sorted(key)])


def _order_cost(items: Items, middle: list[int], end: int) -> int:
    total = 0
    for value in items.values:
        if value.is_output:
            last = end
        elif len(value.users) == 1:
            last = middle[value.users[0]]
        else:
            last = max(map(middle.__getitem__, value.users))
        total += value.bytes * (last - middle[value.maker])
    return total
