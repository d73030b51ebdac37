"""Orders items so that few bytes are alive at any cut. Works on plain numbers, without a graph.

    item      a    b    c    d            a makes 1 byte for b and c, b makes 10 for d, c 100 for d
    work      1    3    5    4
    alive        1   11  110              before b, c and d: the bytes that a cut there sends
    weight       4    8    9              the work of its neighbours: a cut by costs is more likely there
    cost         4 + 88 + 990

An output of the model stays alive to the end. The order with the least cost is a linear arrangement problem, which is
hard. `arrange_items` is greedy. It builds the order from its end: of the items whose users are all placed it selects
the one that leaves the fewest bytes alive before it. So everything runs as late as possible, next to its use, unless
its inputs are larger than its result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class ItemValue:
    """A value that an item makes for others."""

    bytes: int
    maker: int
    users: tuple[int, ...]  # items, each once; empty: only an output
    is_output: bool  # it is alive to the end


@dataclass(frozen=True, slots=True)
class Items:
    """The items to order: 0 to n - 1, numbered in a valid order."""

    weights: tuple[int, ...]  # by item: its work, in any unit
    values: tuple[ItemValue, ...]
    after: tuple[tuple[int, ...], ...]  # by item: the items that must run after it, including all users of its values


def order_cost(items: Items, order: Sequence[int]) -> int:
    """Sums over all cuts the bytes alive, times the work between the middles of the two items next to the cut."""
    work = [*accumulate((items.weights[item] for item in order), initial=0)]
    middle = [0] * len(order)  # by item: twice the work from the start to its middle
    for item, twice in zip(order, map(operator.add, work, work[1:]), strict=True):
        middle[item] = twice
    ends = (2 * work[-1] if v.is_output else max(map(middle.__getitem__, v.users)) for v in items.values)
    return sum(v.bytes * (end - middle[v.maker]) for v, end in zip(items.values, ends, strict=True))


# A rule selects the item to place next, by the least key of: the bytes that become alive before it, its work, when it
# became ready (later is less), and its place in the given order. Each rule is the best for some models. All but the
# first continue the branch that was begun: the second compares bytes with the work during which they live, the third
# continues until more bytes become alive, the fourth always.
_Rule = Callable[[int, int, int, int], tuple[float, ...]]
_RULES: tuple[_Rule, ...] = (
    lambda grown, work, since, place: (grown, -place),
    lambda grown, work, since, place: (grown / max(work, 1), since, -place),
    lambda grown, work, since, place: (grown > 0, since, -place),
    lambda grown, work, since, place: (since, grown, place),
)


def arrange_items(items: Items) -> tuple[int, ...]:
    """Returns the items in a cheaper order, or in the given order if none is found."""
    order = tuple(range(len(items.weights)))
    while True:
        # The given order is first, so it wins ties, and the result is a fixed point.
        candidates = (order, *(_order_by(rule, items, order) for rule in _RULES))
        best = min(candidates, key=partial(order_cost, items))
        if best is order:
            return order
        order = best


def _order_by(rule: _Rule, items: Items, order: Sequence[int]) -> tuple[int, ...]:
    """Builds an order from the end by one rule."""
    place = {item: at for at, item in enumerate(order)}
    before: list[list[int]] = [[] for _ in order]
    for item, later in enumerate(items.after):
        for other in later:
            before[other].append(item)
    reads: list[list[int]] = [[] for _ in order]  # by item: indices of values
    grown = [0] * len(order)  # by item: the bytes that become alive before it, minus the bytes that it makes
    for index, value in enumerate(items.values):
        grown[value.maker] -= value.bytes
        for user in value.users:
            reads[user].append(index)
            grown[user] += 0 if value.is_output else value.bytes
    is_alive = [value.is_output for value in items.values]
    unplaced_users = list(map(len, items.after))
    since: dict[int, int] = {}  # ready item -> the step at which it became ready
    # The key of a ready item only falls, as its inputs become alive. So its first entry in the heap is the valid one.
    heap: list[tuple[tuple[float, ...], int]] = []

    def push(item: int) -> None:
        heappush(heap, (rule(grown[item], items.weights[item], -since[item], place[item]), item))

    backwards: list[int] = []

    def make_ready(candidates: Iterable[int]) -> None:
        for item in candidates:
            if not unplaced_users[item]:
                since[item] = len(backwards)
                push(item)

    make_ready(order)
    while heap:
        _, item = heappop(heap)
        if since.pop(item, None) is None:
            continue  # an older entry of a placed item
        backwards.append(item)
        for index in reads[item]:
            if not is_alive[index]:
                is_alive[index] = True
                value = items.values[index]
                for user in value.users:
                    grown[user] -= value.bytes
                    if user in since:
                        push(user)
        for other in before[item]:
            unplaced_users[other] -= 1
        make_ready(before[item])
    return tuple(reversed(backwards))
