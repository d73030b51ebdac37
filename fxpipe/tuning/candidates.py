"""What a tuner tries, as plain data: schedules, stages on a device, numbers of micro-batches.

Of the numbers of micro-batches those are tried that double, 1, 2, 4, ..., up to the samples of the mini-batch. Where a
divisor of the mini-batch is near it stands in for the power of two: micro-batches are then all of one size, and none
waits for a larger one.

>>> chunks_for_batch(32, most=64)
(1, 2, 4, 8, 16, 32)
>>> chunks_for_batch(120, most=40)
(1, 2, 4, 8, 15, 30)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxpipe.errors import ArgumentError
from fxpipe.plans import Plan
from fxpipe.scheduling import SCHEDULES, ScheduleLike, check_placement

NEAR = 2**0.5  # times a power of two, up or down, is nearer to it than to the next
PER_WORKER = 32  # micro-batches for each worker: with more there is nearly no bubble left to fill
STAGES_PER_DEVICE = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to train: all that is free before stages are cut, but for what is recomputed."""

    schedule: ScheduleLike  # a name, or the user's own
    chunks: int
    stages_per_device: int


def candidates(
    schedules: Sequence[ScheduleLike], chunks: Sequence[int], stages_per_device: Sequence[int]
) -> Iterator[Candidate]:
    """All that a schedule can have."""
    for schedule in schedules:
        for each in stages_per_device:
            if isinstance(schedule, str) and not _goes_with(schedule, each):
                continue
            for count in chunks:
                yield Candidate(schedule, count, each)


def _goes_with(schedule: str, each: int) -> bool:
    recipe = SCHEDULES[schedule]
    return not recipe.is_bound or recipe.per_device <= each <= (recipe.most or each)


def candidates_of_plan(plan: Plan, schedules: Sequence[str], chunks: Sequence[int]) -> Iterator[Candidate]:
    """All that the stages of a plan can have where they are."""
    each = max(map(plan.placement.count, plan.placement))
    for schedule in schedules:
        with contextlib.suppress(ArgumentError):
            check_placement(schedule, plan.placement)
            yield from (Candidate(schedule, count, each) for count in chunks)


def chunks_for_batch(batch: int, most: int) -> tuple[int, ...]:
    """Numbers of micro-batches for mini-batches of so many samples, at most `most`."""
    divisors = [d for d in range(1, batch + 1) if batch % d == 0]
    found = []
    power = 1
    while power <= batch:
        near = [d for d in divisors if power / NEAR < d < power * NEAR]
        found.append(min(near, key=lambda d: (abs(d - power), d), default=power))
        power *= 2
    found.append(batch)
    return tuple(count for count in dict.fromkeys(found) if count <= max(1, most))
