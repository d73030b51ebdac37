"""The reduction of gradients over replicas: when it starts and ends, during the last backward and after it.

The gradients of a stage are reduced once for a step, in buckets of equal size. The gradients of its parameters are
complete evenly over its last action that makes them (W where backward is split, else B), so the buckets are, too:

    device    ... B5====== B6====== |B7==1==2==3==4|          four buckets, full at 1, 2, 3 and 4
    link                                  |1--|2--|3--|4--|   each reduced after the one before, and when it is full

A device reduces one bucket at a time, in the order in which they are full, while it computes. So a step waits for what
is left when its last action has ended: the last bucket at least.
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
    start: float  # of the first bucket
    end: float  # of the last one
    seconds: float  # of all its buckets together
    place: int  # in the row of its device, of the action that makes the last gradients
    since: float  # from then on it has not waited for gradients; all of the buckets before have their time in it
    follows: bool  # it has waited for the reduction before it, not for gradients


def reductions_of(begun: Sequence[Sequence[StartedAction]], stages: Sequence[StageCost]) -> tuple[ReductionSpan, ...]:
    """Computes the reductions of a step, device by device, each in order. Where nothing goes back there is none.

    A stage whose replicas have rows of their own is reduced once the last of them has its gradients.
    """
    last: list[dict[int, int]] = [{} for _ in begun]  # by device and stage, the place of its last such action
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
    """`last`: by stage, the place of its last action that makes gradients of parameters."""
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
