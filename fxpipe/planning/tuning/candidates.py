"""The candidates of a tuner, as plain data: schedules, stages on a device, numbers of micro-batches.

Numbers of micro-batches double, 1, 2, 4, ..., up to the samples of the mini-batch. A divisor of the mini-batch near a
power of two replaces it, so that micro-batches are all of one size.

>>> chunks_for_batch(32, most=64)
(1, 2, 4, 8, 16, 32)
>>> chunks_for_batch(120, most=40)
(1, 2, 4, 8, 15, 30)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxpipe.cluster import MESHES
from fxpipe.errors import ArgumentError
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.simulate_plan import simulate
from fxpipe.scheduling import SCHEDULES, ScheduleLike, check_placement
from fxpipe.simulation import Simulation

NEAR_POWER = 2**0.5  # times a power of two, up or down, is nearer to it than to the next
MAX_CHUNKS_PER_WORKER = 32  # micro-batches for each worker: with more there is nearly no bubble left to fill
TRIED_STAGES_PER_DEVICE = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate, one way to train: all that is free before stages are cut, but for what is recomputed."""

    schedule: ScheduleLike  # a name, or the user's own
    chunks: int  # of each replica
    stages_per_device: int
    data_parallel: int = 1  # replicas
    mesh: tuple[str, str] = MESHES[0]


def candidates_of_model(
    schedules: Sequence[ScheduleLike], chunks: Sequence[int], stages_per_device: Sequence[int]
) -> Iterator[Candidate]:
    """Yields the candidates of a model: all that a schedule can have."""
    for schedule in schedules:
        for each in stages_per_device:
            if isinstance(schedule, str) and not SCHEDULES[schedule].takes(each):
                continue
            for count in chunks:
                yield Candidate(schedule, count, each)


def candidates_of_plan(plan: Plan, schedules: Sequence[str], chunks: Sequence[int]) -> Iterator[Candidate]:
    """Yields the candidates of a plan: all that its stages can have where they are."""
    each = max(map(plan.placement.count, plan.placement))
    for schedule in schedules:
        with contextlib.suppress(ArgumentError):
            check_placement(schedule, plan.placement)
            yield from (Candidate(schedule, count, each) for count in chunks)


def chunks_for_batch(batch: int, most: int) -> tuple[int, ...]:
    """Numbers of micro-batches for mini-batches of so many samples, at most `most`."""
    divisors = [d for d in range(1, batch + 1) if batch % d == 0]
    counts = []
    power = 1
    while power <= batch:
        near = [d for d in divisors if power / NEAR_POWER < d < power * NEAR_POWER]
        counts.append(min(near, key=lambda d: (abs(d - power), d), default=power))
        power *= 2
    counts.append(batch)
    return tuple(count for count in dict.fromkeys(counts) if count <= max(1, most))


# -- The result of each candidate: a row of the table, and their order -----------------------------------------------

SAME_STEP_TOLERANCE = 0.001  # steps that differ by less are equally long: then the one that needs less memory is better


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """The result of a candidate: what its step comes to. One without a plan was not cut; `why` says why."""

    schedule: str  # a name or, of the user's own, a table as text
    chunks: int
    stages_per_device: int
    checkpoint: str | tuple[str, ...] = "never"  # or one for each stage
    plan: Plan | None = None
    step_seconds: float = 0.0  # simulated; of one that was not cut, what it takes at least
    memory: tuple[float, ...] = ()  # bytes: the simulated peak of each device
    lacks: float = 0.0  # bytes that the device which lacks most would need more than it may take
    measured_seconds: float | None = None  # of a real step, if it was run
    why: str = ""
    others: Mapping[str, Any] = field(default_factory=dict)  # what else `fxpipe.pipeline` has to be told
    data_parallel: int = 1  # replicas, among which the devices and the mini-batch are shared
    mesh: tuple[str, str] = MESHES[0]  # in which order they stand; see `fxpipe.cluster`

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.lacks <= 0

    @property
    def peak(self) -> float:
        """Bytes on the device that holds most."""
        return max(self.memory, default=0.0)

    @property
    def simulation(self) -> Simulation:
        """The simulation of its plan: the times of its actions and the memory of its devices; made anew each time."""
        if self.plan is None:
            raise ValueError(f"this candidate was not cut: {self.why}")
        return simulate(self.plan)

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the arguments for `fxpipe.pipeline`: the plan, and beside it what a plan does not say."""
        return {"plan": self.plan, "schedule": self.schedule, **self.others}

    def __str__(self) -> str:
        replicas = f", data_parallel={self.data_parallel}, mesh={self.mesh}" if self.data_parallel > 1 else ""
        return (
            f"schedule={self.schedule!r}, chunks={self.chunks}, checkpoint={self.checkpoint!r}, "
            f"stages_per_device={self.stages_per_device}{replicas}"
        )


@dataclass(frozen=True, slots=True)
class TuningData:
    """The result of a tuner: a row for each candidate, and the one that it chose."""

    best: CandidateResult
    rows: tuple[CandidateResult, ...]  # those that fit first, by the seconds of a step
    batch: int  # samples of the mini-batch, of all replicas
    devices: tuple[str, ...]  # by worker, of one replica
    estimated_for: str = ""  # the hardware for which the seconds were estimated; empty if they were measured


def rank_fitting(rows: Iterable[CandidateResult]) -> list[CandidateResult]:
    """Ranks those that fit, the best first: the shortest step; of about equally long ones that with least memory.

    Where some were run, these are all there is, by what was measured.
    """
    fitting = [row for row in rows if row.fits]
    measured = [row for row in fitting if row.measured_seconds is not None]
    if measured:
        return sorted(measured, key=lambda row: row.measured_seconds or 0.0)
    least = min((row.step_seconds for row in fitting), default=0.0)

    def order(row: CandidateResult) -> tuple[float, ...]:
        is_least = row.step_seconds <= (1 + SAME_STEP_TOLERANCE) * least
        return (0.0 if is_least else row.step_seconds, row.peak, row.chunks, row.stages_per_device, row.step_seconds)

    return sorted(fitting, key=order)


def order_for_table(rows: Iterable[CandidateResult]) -> tuple[CandidateResult, ...]:
    """Sorts rows as a table has them: what fits, what is too slow to look at, what does not fit, what cannot be."""

    def order(row: CandidateResult) -> tuple[float, ...]:
        kind = (0 if row.fits else 2) if row.plan is not None else (1 if row.step_seconds else 3)
        return (kind, row.lacks, row.step_seconds, row.peak, row.chunks)

    return tuple(sorted(rows, key=order))
