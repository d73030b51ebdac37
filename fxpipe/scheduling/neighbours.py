"""Neighbouring stages on one device: where a device has no others, they are as one stage in a schedule.

Nothing is between them that another device does. So the device runs F through all of them before it takes up anything
else, and B all the way back:

    placement (0, 0, 1), as two stages      and as three
    AF0 AF1 AB0 AB1                         0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1
    CF0 CB0 CF1 CB1                         2F0 2B0 2F1 2B1

So each keeps as few micro-batches as the one stage would, where 1F1B of three stages keeps three in the first: a stage
that is cut in two on its device, because a part of it recomputes, costs no memory. Of all placements of 2 to 6 stages
so on up to 3 devices, with equal stages and 1, 3 or 8 micro-batches, none keeps more than by turns (`merging`), and few
take longer (8 % at most, with 3 micro-batches). A device that also has stages elsewhere in the row is better off with
turns: with (0, 1, 1, 0) a step of 1F1B would take up to 19 % longer.
"""

from __future__ import annotations

from itertools import groupby

from fxpipe.scheduling.actions import Action, Kind, Rows

Groups = tuple[tuple[int, ...], ...]  # of stages, in order


def neighbours(placement: tuple[int, ...]) -> Groups:
    """The longest runs of stages on one device.

    >>> neighbours((0, 0, 1, 0))
    ((0, 1), (2,), (3,))
    """
    return tuple(tuple(run) for _, run in groupby(range(len(placement)), key=lambda j: placement[j]))


def as_one(rows: Rows, groups: Groups) -> Rows:
    """Rows of stages from rows of groups: F goes through a group forwards, all else backwards."""

    def each(action: Action) -> tuple[Action, ...]:
        stages = groups[action.stage]
        in_order = stages if action.kind is Kind.FORWARD else stages[::-1]
        return tuple(Action(action.kind, j, action.micro_batch) for j in in_order)

    return tuple(tuple(new for action in row for new in each(action)) for row in rows)
