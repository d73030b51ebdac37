"""The reduction of gradients over replicas: when it starts and ends, during the last backward and after it.

The gradients of a stage are reduced once per step, in buckets of equal size. The last action that makes gradients (W if
backward is split, else B) fills the buckets at an even rate:

    device    ... B5====== B6====== |B7==1==2==3==4|          four buckets, full at 1, 2, 3 and 4
    link                                  |1--|2--|3--|4--|   each reduced once it is full, after the bucket before

A device reduces one bucket at a time, in the order in which they fill, while it computes. So after its last action a
step waits for the remaining buckets, and at least for the last bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpipe.scheduling import ActionKind
from fxpipe.simulation.costs import StageCost
from fxpipe.simulation.events import StartedAction


@dataclass(frozen=True, slots=True)
class ReductionSpan:
    """The reduction of the gradients of one stage."""

    stage: int
    device: int
    bytes: float
    start: float  # the start of the first bucket
    end: float  # the end of the last bucket
    seconds: float  # the total over its buckets
    place: int  # the index in its device's row of the action that makes the last gradients
    since: float  # from then on it does not wait for gradients
    follows: bool  # it waited for the reduction before it, not for gradients


def reductions_of(begun: Sequence[Sequence[StartedAction]], stages: Sequence[StageCost]) -> tuple[ReductionSpan, ...]:
    """Computes the reductions of a step, by device and in order. Replicas in separate rows wait for the slowest one."""
    last: list[dict[int, int]] = [{} for _ in begun]  # by device and stage: the index of its last B or W
    slowest: dict[int, tuple[float, int]] = {}  # by stage: when and on which device its last gradients are made
    for device, row in enumerate(begun):
        for place, one in enumerate(row):
            if one.span.action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT):
                stage = one.span.action.stage
                last[device][stage] = place
                slowest[stage] = max(slowest.get(stage, (0.0, 0)), (one.span.end, device))
    return tuple(
        one
        for device, row in enumerate(begun)
        for one in _reductions_of_row(
            device, row, {j: place for j, place in last[device].items() if slowest[j][1] == device}, stages
        )
    )


def _reductions_of_row(
    device: int, row: Sequence[StartedAction], last: Mapping[int, int], stages: Sequence[StageCost]
) -> list[ReductionSpan]:
    """Computes the reductions of a device. `last`: by stage, the index of its last action that makes gradients."""
    reductions, free = list[ReductionSpan](), 0.0
    for stage, place in sorted(last.items(), key=lambda item: item[1]):
        cost, span = stages[stage], row[place].span
        if not cost.reduction:
            continue
        each, begin = cost.reduction / cost.reduction_buckets, span.start + span.receiving
        first_full = begin + (span.end - begin) / cost.reduction_buckets
        start = max(free, first_full)
        end = max(start + cost.reduction, span.end + each)
        since = start if start + cost.reduction >= span.end + each else span.end
        follows = free > first_full and since == start
        free = end
        reductions.append(
            ReductionSpan(stage, device, cost.gradient_bytes, start, end, cost.reduction, place, since, follows)
        )
    return reductions
