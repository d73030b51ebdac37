"""A schedule as forward, then backward: how the drop-in runs it, with the caller's loss in between."""

from __future__ import annotations

from fxpipe.errors import ArgumentError
from fxpipe.scheduling.actions import Kind, Rows, Schedule


def forward_part(schedule: Schedule) -> Rows:
    """What each row does before its first R or B. `backward_part` is the rest.

    No F may stand in the rest: `ArgumentError` where one does (`1f1b`).
    """
    return tuple(row[:cut] for row, cut in zip(schedule.rows, _cuts(schedule), strict=True))


def backward_part(schedule: Schedule) -> Rows:
    """What each row does from its first R or B on; see `forward_part`."""
    return tuple(row[cut:] for row, cut in zip(schedule.rows, _cuts(schedule), strict=True))


def _cuts(schedule: Schedule) -> list[int]:
    cuts = [next((p for p, a in enumerate(row) if a.kind is not Kind.FORWARD), len(row)) for row in schedule.rows]
    for row, cut in zip(schedule.rows, cuts, strict=True):
        late = next((action for action in row[cut:] if action.kind is Kind.FORWARD), None)
        if late is not None:
            raise ArgumentError(
                f"schedule {schedule.name!r} cannot be run as forward, then backward: {late} stands behind {row[cut]}. "
                f"Use make_schedule('gpipe', stages={schedule.stages}, micro_batches={schedule.micro_batches})"
            )
    return cuts
