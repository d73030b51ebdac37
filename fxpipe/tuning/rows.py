"""The candidates of a tuner, and what each one's step comes to: a row for each, and which are better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fxpipe.plans import Plan
from fxpipe.plans.simulating import simulate
from fxpipe.simulation import Simulation

SAME = 0.001  # steps that differ by less are equally long: then the one that needs less memory is better


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate, and what its step comes to. One without a plan was not cut; `why` says why."""

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

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.lacks <= 0

    @property
    def peak(self) -> float:
        """Bytes on the device that holds most."""
        return max(self.memory, default=0.0)

    @property
    def simulation(self) -> Simulation:
        """When its actions run, and what its devices hold; made anew each time."""
        if self.plan is None:
            raise ValueError(f"this candidate was not cut: {self.why}")
        return simulate(self.plan)

    @property
    def arguments(self) -> dict[str, Any]:
        """For `fxpipe.pipeline`: the plan, and beside it what a plan does not say."""
        return {"plan": self.plan, "schedule": self.schedule, **self.others}

    def __str__(self) -> str:
        return (
            f"schedule={self.schedule!r}, chunks={self.chunks}, checkpoint={self.checkpoint!r}, "
            f"stages_per_device={self.stages_per_device}"
        )


def preferred(rows: Iterable[Row]) -> list[Row]:
    """Those that fit, the best first: the shortest step; of about equally long ones that with least memory.

    Where some were run, these are all there is, by what was measured.
    """
    fitting = [row for row in rows if row.fits]
    measured = [row for row in fitting if row.measured_seconds is not None]
    if measured:
        return sorted(measured, key=lambda row: row.measured_seconds or 0.0)
    least = min((row.step_seconds for row in fitting), default=0.0)

    def order(row: Row) -> tuple[float, ...]:
        is_least = row.step_seconds <= (1 + SAME) * least
        return (0.0 if is_least else row.step_seconds, row.peak, row.chunks, row.stages_per_device, row.step_seconds)

    return sorted(fitting, key=order)


def in_order(rows: Iterable[Row]) -> tuple[Row, ...]:
    """As a table has them: what fits, what is too slow to look at, what does not fit, what cannot be."""

    def order(row: Row) -> tuple[float, ...]:
        kind = (0 if row.fits else 2) if row.plan is not None else (1 if row.step_seconds else 3)
        return (kind, row.lacks, row.step_seconds, row.peak, row.chunks)

    return tuple(sorted(rows, key=order))
