"""Finds an order of items in which few bytes are alive at any cut.

The question: items must run one after another, some of them before others. Each makes values that live until their
last user has run. Wherever the row is cut, all that is alive there has to be sent. Which order keeps little alive?

    as the model is written          embed  encode encode encode  decode         `embed` makes a value for `decode`,
    alive                                 e      e      e       e                which is alive all through `encode`
    with `embed` next to its use     encode encode encode  embed  decode
    alive                                                       e

What an order costs (`rows`) is a sum over all places where a cut may stand. To find the least is a linear arrangement
problem, and hard. Two ideas get near to it:

1. Whole branches run one after another, the one that leaves the least first (`cones`).
2. Single items, with what hangs on them, sink to their first user or are hoisted to what they need (`moves`). Moves
   that hang together are a group, done or left out as a whole, and done only where the cost of the whole row gets less.

Rounds of both go on while the row gets clearly better. So no order gets worse; and the end is a fixed point: what is
arranged stays as it is when it is arranged again.

On random rows of eight items this saves more than nine tenths of what the best order would. What could be better: a
group is left out where a part of it would have paid, and where many groups do not pay, not all that would are found.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxpipe.rewriting.cones import Cones, nested
from fxpipe.rewriting.moves import Uses, hoisting, sinking
from fxpipe.rewriting.rows import Items, Row

_WORTH = 200  # a round of moves that saves less than this part of the cost is not done: so there are few rounds
_TRIES = 12  # for one kind of moves in one round


def arranged(items: Items) -> tuple[int, ...]:
    """The items in an order that costs no more than theirs; in theirs, where nothing is found that costs less."""
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
