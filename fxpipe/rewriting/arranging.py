"""Finds an order of items in which few bytes are alive at any cut. Plain numbers, no graph.

The question: items must run one after another, some of them before others. Each makes values that live until their
last user has run. Wherever the row is cut, all that is alive there has to be sent. Which order keeps little alive?

    as the model is written          embed  encode encode encode  decode         `embed` makes a value for `decode`,
    alive                                 e      e      e       e                which is alive all through `encode`
    with `embed` next to its use     encode encode encode  embed  decode
    alive                                                       e

What an order costs is the sum, over all places where a cut may stand, of the bytes that are alive there, each place
weighing as much as the work at its sides: a cut by costs falls there more often. To find the least is a linear
arrangement problem and hard. Two kinds of moves (`moves`) get near to it: items sink towards their first user, or are
hoisted to what they need. Moves that hang together are a group, done or left out as a whole, and done only where the
cost of the whole order gets less. So no order gets worse; and the end is a fixed point: what is arranged stays as it
is when it is arranged again.

What could be better: a group is left out where a part of it would have paid, and where many groups do not pay, not all
that would are found.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

_WORTH = 200  # a round of moves that saves less than this part of the cost is not done: so there are few rounds
_TRIES = 12  # for one kind of moves in one round


@dataclass(frozen=True, slots=True)
class Value:
    """What an item makes for others."""

    bytes: int
    maker: int
    users: tuple[int, ...]  # items, each once; none: only an output
    is_output: bool  # it lives to the end


@dataclass(frozen=True, slots=True)
class Items:
    """What is to be put in order: items 0 to n - 1, numbered in an order in which they can run."""

    weights: tuple[int, ...]  # by item: its work, in any unit
    values: tuple[Value, ...]
    after: tuple[tuple[int, ...], ...]  # by item: those that have to run after it; users of its values are among them
    pinned: frozenset[int]  # items that are not moved themselves


@dataclass(frozen=True, slots=True)
class Row:
    """Items in an order."""

    items: Items
    order: tuple[int, ...]
    place: tuple[int, ...]  # by item
    middle: tuple[int, ...]  # by place: twice the work from the start to the middle of this item; and to the end
    cost: int  # bytes alive at each place where a cut may stand, times the work between the middles of its neighbours

    @classmethod
    def of(cls, items: Items, order: Sequence[int]) -> Row:
        place = [0] * len(order)
        for at, item in enumerate(order):
            place[item] = at
        sums = list(accumulate((items.weights[item] for item in order), initial=0))
        middle = (*map(operator.add, sums, sums[1:]), 2 * sums[-1])
        return cls(items, tuple(order), tuple(place), middle, _cost(items, [middle[at] for at in place], middle[-1]))

    def moved(self, anchors: Mapping[int, int]) -> Row:
        """Each of the items in `anchors` next to the item at that place: before it if it comes from before."""
        key = [(anchors.get(item, at), at) for at, item in enumerate(self.order)]
        return Row.of(self.items, [self.order[at] for _, at in sorted(key)])


def arranged(items: Items) -> tuple[int, ...]:
    """The items in an order that costs no more than theirs; in theirs, where nothing is found that costs less."""
    from fxpipe.rewriting.cones import Cones, nested
    from fxpipe.rewriting.moves import Uses, hoisting, sinking

    uses, cones = Uses.of(items), Cones(items)

    def improved(row: Row) -> Row:
        for move in (sinking, hoisting):
            row = _improved(row, move(row, uses, cones))
        return row

    row = Row.of(items, range(len(items.weights)))
    while True:
        cone_by_cone = nested(row, cones)
        found = improved(row)
        if cone_by_cone.order != row.order:
            found = min(found, improved(cone_by_cone), key=lambda row: row.cost)
        if row.cost - found.cost <= row.cost // _WORTH:
            return row.order
        row = found


def _cost(items: Items, middle: list[int], end: int) -> int:
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


def _improved(row: Row, anchors: Mapping[int, int]) -> Row:
    """The row with those groups of moves done that pay: all together, else one half of them and then the other."""
    best, done = row, dict[int, int]()
    waiting = [_groups(row.items, anchors)]
    for _ in range(_TRIES):
        if not waiting:
            break
        groups = waiting.pop()
        tried = done | {item: anchors[item] for group in groups for item in group}
        found = row.moved(tried)
        if found.cost < best.cost:
            best, done = found, tried
        elif len(groups) > 1:
            middle = len(groups) // 2
            waiting += [groups[middle:], groups[:middle]]
    return best


def _groups(items: Items, moved: Mapping[int, int]) -> list[list[int]]:
    """Moved items, each together with those that have to run before or after it."""
    parent = {item: item for item in moved}

    def root(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for item in moved:
        for other in items.after[item]:
            if other in parent:
                parent[root(other)] = root(item)
    found: dict[int, list[int]] = {}
    for item in moved:
        found.setdefault(root(item), []).append(item)
    return list(found.values())
