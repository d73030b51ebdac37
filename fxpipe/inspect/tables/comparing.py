"""Ways to run a step, side by side: how long each takes, what idles, whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.errors import ArgumentError, ScheduleError

if TYPE_CHECKING:
    from fxpipe.plans import Plan
    from fxpipe.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Run:
    """One way, as simulated. Memory is that of the device that comes closest to its limit, or is furthest over it."""

    schedule: str  # a name
    micro_batches: int
    checkpoint: str
    step_seconds: float
    bubble: float  # share of the device time of a step that is idle
    device: int
    peak_bytes: int
    limit_bytes: int | None  # None: none is known

    @property
    def over_bytes(self) -> int:
        """0 where it fits."""
        return 0 if self.limit_bytes is None else max(0, self.peak_bytes - self.limit_bytes)


def run_of(simulation: Simulation, plan: Plan) -> Run:
    """What a simulated step of the plan comes to."""
    limits, peaks = simulation.limits, [memory.peak for memory in simulation.memory]

    def closeness(device: int) -> tuple[float, float]:
        limit = limits[device]
        return (0.0 if not limit else peaks[device] / limit, peaks[device])

    device = max(range(len(peaks)), key=closeness)
    limit = limits[device]
    return Run(
        schedule=simulation.schedule.name,
        micro_batches=simulation.schedule.micro_batches,
        checkpoint=mode_text(plan),
        step_seconds=simulation.step_seconds,
        bubble=simulation.mean_bubble,
        device=device,
        peak_bytes=round(peaks[device]),
        limit_bytes=None if limit is None else round(limit),
    )


def mode_text(plan: Plan) -> str:
    """One mode; `some` where stages differ."""
    modes = {*plan.modes}
    return modes.pop() if len(modes) == 1 else "some"


def compare_schedules(plan: Plan, simulation: Simulation) -> tuple[Run, ...]:
    """The step of the plan, first, and other schedules that can have the stages where they are, by time."""
    import fxpipe
    from fxpipe.placing import TRAINING_SCHEDULES

    own, others = run_of(simulation, plan), list[Run]()
    if len(plan.workers) == 1:  # one after the other, whatever the schedule
        return (own,)
    for name in TRAINING_SCHEDULES:
        if name == own.schedule:
            continue
        try:
            others.append(run_of(fxpipe.simulate(plan, schedule=name), plan))
        except (ArgumentError, ScheduleError):  # it wants its stages elsewhere
            continue
    return (own, *sorted(others, key=lambda run: run.step_seconds))
