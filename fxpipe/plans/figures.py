"""The figures that follow from a plan, for the tables and for the document.

Seconds and bytes of a plan are those of its largest micro-batch, and so all figures here err on the high side where the
micro-batches differ in size.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from fxpipe.plans.data import PlanData, Portal
from fxpipe.simulation import simulate_schedule


@dataclass(frozen=True, slots=True)
class StageFigures:
    """The figures of one stage."""

    portals_in: tuple[Portal, ...]
    portals_out: tuple[Portal, ...]
    memory_bytes: int  # at most at one time; see `Plan.memory`


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """The figures of a plan."""

    stages: tuple[StageFigures, ...]
    slowest_to_mean: float  # forward and backward seconds of the slowest stage over those of the mean stage
    bubble: tuple[float, ...]  # for each device, the share of the step in which it idles
    step_seconds: float  # as simulated: all micro-batches forward and backward, and what is sent

    @property
    def mean_bubble(self) -> float:
        return fmean(self.bubble)


def plan_figures(plan: PlanData) -> PlanFigures:
    """Simulate the plan's schedule and add up what each stage holds."""
    simulation = simulate_schedule(plan.as_schedule(), *plan.costs(), overlaps=False)
    stages = tuple(
        StageFigures(
            portals_in=tuple(portal for portal in plan.portals if portal.target == stage.index),
            portals_out=tuple(portal for portal in plan.portals if portal.source == stage.index),
            memory_bytes=int(plan.memory(stage.index, b=plan.micro_batch)),
        )
        for stage in plan.stages
    )
    return PlanFigures(stages, slowest_to_mean(plan), tuple(simulation.bubble), simulation.step_seconds)


def slowest_to_mean(plan: PlanData) -> float:
    """1 where all stages take the same time, n where one of n stages takes it all."""
    seconds = [stage.seconds for stage in plan.stages]
    return max(seconds) / fmean(seconds) if any(seconds) else 1.0
