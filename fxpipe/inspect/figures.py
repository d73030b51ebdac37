"""What a plan comes to: the figures that follow from it, for the tables and for the document.

Seconds and bytes of a plan are those of its largest micro-batch, and so all figures here err on the high side where the
micro-batches differ in size.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxpipe.plans import Plan, Portal, StagePlan
    from fxpipe.simulation import StageCost


@dataclass(frozen=True, slots=True)
class StageFigures:
    """What one stage comes to."""

    portals_in: tuple[Portal, ...]
    portals_out: tuple[Portal, ...]
    in_flight: int  # micro-batches that have gone forward and not yet back, at most
    memory_bytes: int  # at most at one time; see `stage_cost`


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """What a plan comes to."""

    stages: tuple[StageFigures, ...]
    slowest_to_mean: float  # forward and backward seconds of the slowest stage over those of the mean stage
    bubble: tuple[float, ...]  # for each device, the share of the step in which it idles
    step_seconds: float  # as simulated: forward and backward of all micro-batches, sending not counted

    @property
    def mean_bubble(self) -> float:
        return fmean(self.bubble)


def plan_figures(plan: Plan) -> PlanFigures:
    """Simulate the plan's schedule and add up what each stage holds."""
    # Imported here, not above: a plan is printed by planning, which need not load all this before it is asked to.
    from fxpipe.scheduling import make_schedule, micro_batches_in_flight
    from fxpipe.simulation import simulate_schedule

    schedule = make_schedule(plan.schedule, len(plan.stages), plan.chunks, plan.checkpoint, plan.placement)
    simulation = simulate_schedule(schedule, [stage_cost(plan, stage) for stage in plan.stages])
    peaks = [round(memory.peak) for memory in simulation.stage_memory]
    stages = tuple(
        StageFigures(
            portals_in=tuple(portal for portal in plan.portals if portal.target == stage.index),
            portals_out=tuple(portal for portal in plan.portals if portal.source == stage.index),
            in_flight=in_flight,
            memory_bytes=peak,
        )
        for stage, in_flight, peak in zip(plan.stages, micro_batches_in_flight(schedule), peaks, strict=True)
    )
    return PlanFigures(stages, slowest_to_mean(plan), tuple(simulation.bubble), simulation.step_seconds)


def stage_cost(plan: Plan, stage: StagePlan) -> StageCost:
    """What the simulator is told of a stage. Its memory is then

        2 x parameters  +  the most, over time, of the sum over micro-batches i in flight of held(i)

    A gradient is as large as its parameter, hence the 2. Between its F and its B a micro-batch holds

        received + activations      where it is not recomputed,
        received                    where it is, up to its R, and received + activations from R to B.

    `activations` has all that the stage's nodes make, also what it sends. So a stage with f micro-batches in flight
    holds f x (received + activations) under checkpoint "never", and f x received + activations under "always". f is m
    under GPipe and min(n - j, m) under 1F1B, which is not assumed here but counted.

    Not counted: inputs of the mini-batch (the caller's), gradients of activations, the optimizer's state, the
    allocator's rest, and what the F of a recomputed micro-batch holds for a moment (at most what its R will hold).
    """
    from fxpipe.simulation import StageCost

    return StageCost(
        stage.forward_seconds,
        stage.backward_seconds,
        static_bytes=2 * stage.parameter_bytes,
        saved_bytes=stage.activation_bytes,
        input_bytes=received_bytes(plan, stage.index),
    )


def slowest_to_mean(plan: Plan) -> float:
    """1 where all stages take the same time, n where one of n stages takes it all."""
    seconds = [stage.forward_seconds + stage.backward_seconds for stage in plan.stages]
    return max(seconds) / fmean(seconds) if any(seconds) else 1.0


def received_bytes(plan: Plan, stage: int) -> int:
    """What a stage receives for one micro-batch: from the stage before it and through portals."""
    before = plan.stages[stage - 1].sent_bytes if stage > 0 else 0
    return before + sum(portal.bytes for portal in plan.portals if portal.target == stage)
