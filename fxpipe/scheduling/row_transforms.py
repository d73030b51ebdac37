"""Rows made from other rows: stages that share a device, groups of neighbours, recomputation, updates.

Schedules are made as if each stage had a separate device. Stages of one device take turns (`merge_stage_rows`): the
devices are simulated with actions of equal length, and each selects, from the next actions of its stages, one whose
dependencies have ended, B before F, W last, since nothing waits for it, and a later stage before an earlier one, so
that micro-batches leave early. The rows keep this order, so they cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal, TypeAlias

from fxpipe.errors import ArgumentError
from fxpipe.scheduling.actions import Action, ActionKind, Rows, Schedule
from fxpipe.scheduling.validation import dependencies


def merge_stage_rows(rows: Rows, placement: tuple[int, ...]) -> Rows:
    """Makes rows of devices from rows of stages. `placement` gives the device of each stage."""
    devices = max(placement) + 1
    if devices == len(placement):
        ordered: list[tuple[Action, ...]] = [()] * devices
        for row, d in zip(rows, placement, strict=True):
            ordered[d] = row
        return tuple(ordered)
    stages_of = [[j for j, d in enumerate(placement) if d == e] for e in range(devices)]
    by_urgency = (ActionKind.WEIGHT, ActionKind.FORWARD, ActionKind.BACKWARD)
    held = {action for row in rows for action in row}
    ended: set[Action] = set()  # before this clock
    place = [0] * len(rows)
    device_rows: list[list[Action]] = [[] for _ in stages_of]
    while len(ended) < len(held):
        started = []
        for d, stages in enumerate(stages_of):
            heads = (rows[j][place[j]] for j in stages if place[j] < len(rows[j]))
            ready = [a for a in heads if all(b in ended or b not in held for b in dependencies(a, len(rows)))]
            if ready:
                action = max(ready, key=lambda a: (by_urgency.index(a.kind), a.stage))
                place[action.stage] += 1
                device_rows[d].append(action)
                started.append(action)
        assert started, "rows of stages that wait for each other"
        ended.update(started)
    return tuple(map(tuple, device_rows))


# -- Neighbouring stages on one device: if the device has no others, a schedule treats them as one stage --------------
#
# So the device runs F through all of them before anything else, and B all the way back:
#
#     placement (0, 0, 1), as two stages      and as three
#     AF0 AF1 AB0 AB1                         0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1
#     CF0 CB0 CF1 CB1                         2F0 2B0 2F1 2B1
#
# Each then keeps no more micro-batches than the one stage, while 1F1B of three stages keeps three in the first: to
# cut a stage in two on its device, because a part of it recomputes, costs no memory. Few placements take longer than
# with turns (at most 8 %). A device with other stages, as in (0, 1, 1, 0), is better with turns (up to 19 %).

StageGroups = tuple[tuple[int, ...], ...]  # stages, in order


def neighbour_groups(placement: tuple[int, ...]) -> StageGroups:
    """Returns the longest runs of stages on one device.

    >>> neighbour_groups((0, 0, 1, 0))
    ((0, 1), (2,), (3,))
    """
    return tuple(tuple(run) for _, run in groupby(range(len(placement)), key=lambda j: placement[j]))


def expand_groups(rows: Rows, groups: StageGroups) -> Rows:
    """Makes rows of stages from rows of groups: F goes through a group forwards, all else backwards."""

    def each(action: Action) -> tuple[Action, ...]:
        stages = groups[action.stage]
        in_order = stages if action.kind is ActionKind.FORWARD else stages[::-1]
        return tuple(Action(action.kind, j, action.micro_batch) for j in in_order)

    return tuple(tuple(new for action in row for new in each(action)) for row in rows)


def round_robin(devices: int, per_device: int) -> tuple[int, ...]:
    """Places stage after stage in loops over the devices.

    >>> round_robin(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(devices)) * per_device


def there_and_back(devices: int, per_device: int) -> tuple[int, ...]:
    """Places every other loop backwards, so that neighbours at the turn share a device.

    >>> there_and_back(3, 2)
    (0, 1, 2, 2, 1, 0)
    """
    there = tuple(range(devices))
    return tuple(d for k in range(per_device) for d in (there[::-1] if k % 2 else there))


Checkpoint: TypeAlias = Literal["always", "except_last", "never"]

# In GPipe's order, backward of the last micro-batch comes right after its forward: keeping its activations costs no
# more memory than recomputing them, and saves a forward.
CHECKPOINTS: tuple[Checkpoint, ...] = ("always", "except_last", "never")


def with_recompute(rows: Rows, m: int, modes: Sequence[Checkpoint]) -> Rows:
    """Inserts R directly before its B: R waits for no other stage, so it runs while the gradient is on its way.

    `modes` has one mode for each stage. An R already in the rows stays. If the gradient comes through later stages on
    the same device without recomputation, R goes before their B.
    """
    recomputed = [{"always": m, "except_last": m - 1, "never": 0}[mode] for mode in modes]
    there = {action for row in rows for action in row if action.kind is ActionKind.RECOMPUTE}
    filled: list[list[Action]] = [[] for _ in rows]
    for row, actions in zip(rows, filled, strict=True):
        for action in row:
            kind, j, i = action
            again = Action(ActionKind.RECOMPUTE, j, i)
            if kind is ActionKind.BACKWARD and i < recomputed[j] and again not in there:
                actions.insert(_recompute_place(actions, action, recomputed), again)
            actions.append(action)
    return tuple(map(tuple, filled))


def _recompute_place(row: Sequence[Action], action: Action, recomputed: Sequence[int]) -> int:
    """Returns the position of the first B, among those at the end of the row, that pass the gradient to `action`."""
    i, place = action.micro_batch, len(row)
    for stage in range(action.stage + 1, len(recomputed)):
        if not place or i < recomputed[stage] or row[place - 1] != Action(ActionKind.BACKWARD, stage, i):
            break
        place -= 1
    return place


def with_updates(schedule: Schedule) -> Schedule:
    """Adds U of each stage at the end of its device's row, in the order in which the stages have gone back.

    So U waits for no other device and delays none: on a device with several stages, other devices may wait for the
    backward of its next stage.

    >>> from fxpipe.scheduling import make_schedule
    >>> print(with_updates(make_schedule("interleaved_1f1b", stages=4, micro_batches=2)))
    interleaved_1f1b: 4 stages, 2 micro-batches
    device 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 2U1 0U1
    device 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 3U1 1U1
    """
    last = schedule.micro_batches - 1
    last_row = {j: d for (j, i), d in schedule.row_of.items() if i == last}  # with replicas: of the last micro-batch
    rows = []
    for d, row in enumerate(schedule.rows):
        back = (a.stage for a in reversed(row) if a.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT))
        own = [j for j in dict.fromkeys(back) if last_row[j] == d]
        rows.append((*row, *(Action(ActionKind.UPDATE, j, last) for j in own[::-1])))
    return replace(schedule, rows=tuple(rows))


def forward_part(schedule: Schedule) -> Rows:
    """Returns the actions of each row before its first R or B; `ArgumentError` if an F follows (`1f1b`)."""
    return tuple(row[:cut] for row, cut in zip(schedule.rows, _forward_ends(schedule), strict=True))


def backward_part(schedule: Schedule) -> Rows:
    """Returns the actions of each row from its first R or B on; see `forward_part`."""
    return tuple(row[cut:] for row, cut in zip(schedule.rows, _forward_ends(schedule), strict=True))


def _forward_ends(schedule: Schedule) -> list[int]:
    cuts = [next((p for p, a in enumerate(row) if a.kind is not ActionKind.FORWARD), len(row)) for row in schedule.rows]
    for row, cut in zip(schedule.rows, cuts, strict=True):
        late = next((action for action in row[cut:] if action.kind is ActionKind.FORWARD), None)
        if late is not None:
            raise ArgumentError(
                f"schedule {schedule.name!r} cannot be run as forward, then backward: {late} stands behind {row[cut]}. "
                f"Use make_schedule('gpipe', stages={schedule.stages}, micro_batches={schedule.micro_batches})"
            )
    return cuts
