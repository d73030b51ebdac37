"""Moves of items that let fewer bytes live: down to their first user, or up to what they need.

- *Sink* an item to its first user, if that does not hold more bytes of what it reads than it saves of what it makes:
  an embedding that only the decoder uses, a mask.
- *Hoist* an item to the last one that it needs, if what it makes is less than what it frees: a size that is read of a
  tensor much later, a projection of a skip that is done at its far end.

Whether it pays to sink, a chain of items decides together. Sinking `dropout(embed(ids))` pays, sinking `dropout` alone
would only hold another value. So a first walk finds for each value the least bytes that would be held in its place if
its maker sank (`_held_instead`): for trees a least cut; where branches meet, something may count twice. As model inputs
cost nothing to hold, everything would then sink to the end: so only what is less work than that which it passes.

A second walk gives each moved item its *anchor*, a place of the row. It begins at the end for sinking, so that what an
item must run before has its anchor already (at the start for hoisting). Sorted by (anchor, place), any choice of
anchors is a valid order as long as no anchor lies behind that of an item which has to come later. How much a move gains
grows with its length less and less, since the longer the move, the more inputs are held for it alone: so the best
anchor is the first at which it stops to grow.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.rewriting.cones import Cones
from fxpipe.rewriting.rows import Items, Row


@dataclass(frozen=True, slots=True)
class Uses:
    """The items' relations, looked up from the other side. Values are known by their index."""

    before: tuple[tuple[int, ...], ...]  # by item: those that have to run before it
    made: tuple[tuple[int, ...], ...]  # by item: the values that it makes
    read: tuple[tuple[int, ...], ...]  # by item: the values that it uses
    bytes_made: tuple[int, ...]  # by item

    @classmethod
    def of(cls, items: Items) -> Uses:
        before: list[list[int]] = [[] for _ in items.weights]
        made: list[list[int]] = [[] for _ in items.weights]
        read: list[list[int]] = [[] for _ in items.weights]
        for item, later in enumerate(items.after):
            for other in later:
                before[other].append(item)
        for index, value in enumerate(items.values):
            made[value.maker].append(index)
            for user in value.users:
                read[user].append(index)
        size = (sum(items.values[index].bytes for index in own) for own in made)
        return cls(tuple(map(tuple, before)), tuple(map(tuple, made)), tuple(map(tuple, read)), tuple(size))


def sinking(row: Row, uses: Uses, cones: Cones) -> dict[int, int]:
    """Item -> the place before which it goes, of those that are better off further down."""
    items, place = row.items, row.place
    instead = _held_instead(row, uses)
    latest = _latest(row, uses, cones, instead)
    anchor = list(place)
    needed = [len(row.order) if value.is_output else -1 for value in items.values]  # by value: how far it lives anyway

    def can_follow(item: int, user: int, target: int) -> bool:
        """May an item go with a user of its value? Its other users before that one have no anchors yet."""
        return item not in items.pinned and all(
            other == user or (anchor[other] if place[other] > place[user] else latest[other]) >= target
            for other in items.after[item]
        )

    for at in range(len(row.order) - 1, -1, -1):
        item = row.order[at]
        if item not in items.pinned:
            target = min((anchor[other] for other in items.after[item]), default=len(row.order))
            if not _is_light(row, cones, item, target):
                target = at
            losses = []
            for index in uses.read[item]:
                value = items.values[index]
                if needed[index] < target:
                    held = instead[index] if can_follow(value.maker, item, target) else value.bytes
                    losses.append((max(needed[index], at), held))
            anchor[item] = _furthest(at, target, uses.bytes_made[item], losses)
        for index in uses.read[item]:
            needed[index] = max(needed[index], anchor[item])
    return {item: anchor[item] for item in row.order if anchor[item] > place[item]}


def hoisting(row: Row, uses: Uses, cones: Cones) -> dict[int, int]:
    """Item -> the place behind which it goes, of those that are better off further up."""
    items, place = row.items, row.place
    anchor = list(place)
    for at, item in enumerate(row.order):
        if item in items.pinned:
            continue
        target = max((anchor[other] for other in uses.before[item]), default=at)
        # Twice and one more: where it makes as much as it frees, what is hoisted with it may gain.
        gain, losses = 1 - 2 * uses.bytes_made[item], []
        for index in uses.read[item]:
            value = items.values[index]
            other = max((anchor[user] for user in value.users if user != item), default=-1)
            if other < at and not value.is_output:  # the last of its users
                gain += 2 * value.bytes
                losses.append((-other, 2 * value.bytes))
        if losses and target < at - 1 and gain > 0:
            anchor[item] = -_furthest(-at, -target, gain, losses)
    return {item: anchor[item] for item in row.order if anchor[item] < place[item]}


def _is_light(row: Row, cones: Cones, item: int, target: int) -> bool:
    """Is what would sink with an item less work than what it sinks past? Else it is that which should be moved."""
    weights, next_one = row.items.weights, row.order[target] if target < len(row.order) else item
    between = row.middle[target] - row.middle[row.place[item]] - weights[item]
    return 2 * cones.work[item] < between - (weights[next_one] if next_one != item else 0)


def _furthest(start: int, target: int, gain: int, losses: list[tuple[int, int]]) -> int:
    """How far to go from `start` to `target`, while each step gains. Losses: (from which place on, how much a step)."""
    losses = sorted(loss for loss in losses if loss[1])
    if not losses:
        return target
    best = start
    for place, loss in losses:
        if gain <= 0 or place >= target:
            break
        best = max(best, place)
        gain -= loss
    return target if gain > 0 else best


def _held_instead(row: Row, uses: Uses) -> list[int]:
    """By value: the least bytes that would have to be held instead of it."""
    found = [value.bytes for value in row.items.values]
    for item in row.order:
        if item not in row.items.pinned:
            read = sum(found[index] for index in uses.read[item])
            for index in uses.made[item]:
                found[index] = min(found[index], read)
    return found


def _latest(row: Row, uses: Uses, cones: Cones, instead: list[int]) -> list[int]:
    """By item: how far it would sink at most."""
    found = list(row.place)
    for item in reversed(row.order):
        if uses.bytes_made[item]:
            gains = sum(instead[index] for index in uses.made[item]) < uses.bytes_made[item]
        else:
            gains = not any(instead[index] for index in uses.read[item])
        if gains and item not in row.items.pinned:
            target = min((found[other] for other in row.items.after[item]), default=len(row.order))
            if _is_light(row, cones, item, target):
                found[item] = target
    return found
