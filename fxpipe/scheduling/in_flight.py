"""How many micro-batches a stage holds at once, and of how many it has all activations: counted, not assumed."""

from __future__ import annotations

from functools import lru_cache

from fxpipe.scheduling.actions import Kind, Schedule


@lru_cache(maxsize=16)  # who prints a plan asks once for each stage
def micro_batches_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each stage the most micro-batches that are between the start of F and the end of their last backward.

    Where backward is split the last piece is W. Where nothing goes back a micro-batch is there during its F only.

    >>> from fxpipe.scheduling import make_schedule
    >>> micro_batches_in_flight(make_schedule("1f1b", stages=3, micro_batches=8))
    (3, 2, 1)
    """
    kinds = {(action.stage, action.kind) for row in schedule.rows for action in row}
    trains = any(kind is Kind.BACKWARD for _, kind in kinds)
    last = [Kind.WEIGHT if (j, Kind.WEIGHT) in kinds else Kind.BACKWARD for j in range(schedule.stages)]
    now, most = [0] * schedule.stages, [0] * schedule.stages
    for action in (action for row in schedule.rows for action in row):
        j = action.stage
        if action.kind is Kind.FORWARD:
            now[j] += 1
            most[j] = max(most[j], now[j])
        elif action.kind is last[j]:
            now[j] -= 1
    return tuple(most) if trains else (1,) * schedule.stages


@lru_cache(maxsize=16)
def activations_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each stage of how many micro-batches it has all that backward needs, at most.

    That is from F on or, where the micro-batch is recomputed, from R on. Where backward is split it is to the end of W,
    which needs less than all: what weights were applied to, and the gradients of what came out.

    >>> from fxpipe.scheduling import make_schedule
    >>> activations_in_flight(make_schedule("1f1b", stages=3, micro_batches=8, checkpoint="always"))
    (1, 1, 1)
    """
    recomputed = {
        (action.stage, action.micro_batch) for row in schedule.rows for action in row if action.kind is Kind.RECOMPUTE
    }
    split = {action.stage for row in schedule.rows for action in row if action.kind is Kind.WEIGHT}
    now, most = [0] * schedule.stages, [0] * schedule.stages
    for action in (action for row in schedule.rows for action in row):
        j, last = action.stage, Kind.WEIGHT if action.stage in split else Kind.BACKWARD
        made = Kind.RECOMPUTE if (j, action.micro_batch) in recomputed else Kind.FORWARD
        now[j] += (action.kind is made) - (action.kind is last)
        most[j] = max(most[j], now[j])
    return tuple(most)
