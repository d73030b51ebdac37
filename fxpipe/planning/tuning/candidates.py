"""The candidates of a tuner, as plain data: schedules, stages on a device, numbers of micro-batches.

Numbers of micro-batches are powers of two up to the samples of the mini-batch, or nearby divisors of the mini-batch,
for micro-batches of equal size.

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

NEAR_POWER = 2**0.5  # numbers within this factor of a power of two are near it
MAX_CHUNKS_PER_WORKER = 32  # micro-batches for each worker: with more there is nearly no bubble left
TRIED_STAGES_PER_DEVICE = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate: all options that are set before stages are cut, except recomputation."""

    schedule: ScheduleLike  # a name, or a user's table or function
    chunks: int  # micro-batches per replica
    stages_per_device: int
    data_parallel: int = 1
    mesh: tuple[str, str] = MESHES[0]


def candidates_of_model(
    schedules: Sequence[ScheduleLike], chunks: Sequence[int], stages_per_device: Sequence[int]
) -> Iterator[Candidate]:
    """Yields the candidates of a model: all combinations that each schedule supports."""
    for schedule in schedules:
        for each in stages_per_device:
            if isinstance(schedule, str) and not SCHEDULES[schedule].takes(each):
                continue
            for count in chunks:
                yield Candidate(schedule, count, each)


def candidates_of_plan(plan: Plan, schedules: Sequence[str], chunks: Sequence[int]) -> Iterator[Candidate]:
    """Yields the candidates of a plan: all combinations that its placement supports."""
    each = max(map(plan.placement.count, plan.placement))
    for schedule in schedules:
        with contextlib.suppress(ArgumentError):
            check_placement(schedule, plan.placement)
            yield from (Candidate(schedule, count, each) for count in chunks)


def chunks_for_batch(batch: int, most: int) -> tuple[int, ...]:
    """Returns numbers of micro-batches for mini-batches of `batch` samples, at most `most`."""
    divisors = [d for d in range(1, batch + 1) if batch % d == 0]
    counts = []
    power = 1
    while power <= batch:
        near = [d for d in divisors if power / NEAR_POWER < d < power * NEAR_POWER]
        counts.append(min(near, key=lambda d: (abs(d - power), d), default=power))
        power *= 2
    counts.append(batch)
    return tuple(count for count in dict.fromkeys(counts) if count <= max(1, most))


# -- The result of each candidate: a row of the table, and the order of rows -------------------------------------------

SAME_STEP_TOLERANCE = 0.001  # steps that differ by less are equal; then less memory is better


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """The result of a candidate: the figures of its step. Without a plan it was not cut; `why` has the reason."""

    schedule: str  # a name, or a user's table as text
    chunks: int
    stages_per_device: int
    checkpoint: str | tuple[str, ...] = "never"  # one mode, or one for each stage
    plan: Plan | None = None
    step_seconds: float = 0.0  # simulated; a lower bound if the candidate was not cut
    memory: tuple[float, ...] = ()  # bytes: the simulated peak of each device
    lacks: float = 0.0  # the largest excess of a device over its memory limit, in bytes
    measured_seconds: float | None = None  # median of real steps, if measured
    why: str = ""
    others: Mapping[str, Any] = field(default_factory=dict)  # further arguments for `fxpipe.pipeline`
    data_parallel: int = 1  # number of replicas, which share the devices and the mini-batch
    mesh: tuple[str, str] = MESHES[0]  # the order of replicas; see `fxpipe.cluster`

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.lacks <= 0

    @property
    def peak(self) -> float:
        """The largest peak memory of a device, in bytes."""
        return max(self.memory, default=0.0)

    @property
    def simulation(self) -> Simulation:
        """The simulation of its plan: the times of actions and the memory of devices; computed at each access."""
        if self.plan is None:
            raise ValueError(f"this candidate was not cut: {self.why}")
        return simulate(self.plan)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for `fxpipe.pipeline`: the plan, and options that a plan does not include."""
        return {"plan": self.plan, "schedule": self.schedule, **self.others}

    def __str__(self) -> str:
        replicas = f", data_parallel={self.data_parallel}, mesh={self.mesh}" if self.data_parallel > 1 else ""
        return (
            f"schedule={self.schedule!r}, chunks={self.chunks}, checkpoint={self.checkpoint!r}, "
            f"stages_per_device={self.stages_per_device}{replicas}"
        )


@dataclass(frozen=True, slots=True)
class TuningData:
    """The result of a tuner: a row for each candidate, and the chosen row."""

    best: CandidateResult
    rows: tuple[CandidateResult, ...]  # fitting rows first, by the seconds of a step
    batch: int  # samples of the mini-batch, of all replicas
    devices: tuple[str, ...]  # by worker, of one replica
    estimated_for: str = ""  # the hardware for which the seconds were estimated; empty if they were measured


def rank_fitting(rows: Iterable[CandidateResult]) -> list[CandidateResult]:
    """Ranks rows that fit: the shortest step first; among equal steps, the least memory first.

    If some rows were measured, returns only these, ranked by the measurement.
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
    """Sorts rows for the table: fitting, too slow to cut, too large for memory, impossible."""

    def order(row: CandidateResult) -> tuple[float, ...]:
        kind = (0 if row.fits else 2) if row.plan is not None else (1 if row.step_seconds else 3)
        return (kind, row.lacks, row.step_seconds, row.peak, row.chunks)

    return tuple(sorted(rows, key=order))
