"""What a plan comes to: the figures that follow from it, for the tables and for the document.

Seconds and bytes of a plan are those of its largest micro-batch, and so all figures here err on the high side where the
micro-batches differ in size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from fxpipe.scheduling.actions import Action, Kind

if TYPE_CHECKING:
    from fxpipe.plans import Plan, Portal, StagePlan


@dataclass(frozen=True, slots=True)
class StageFigures:
    """What one stage comes to."""

    portals_in: tuple[Portal, ...]
    portals_out: tuple[Portal, ...]
    in_flight: int  # micro-batches that have gone forward and not yet back, at most
    memory_bytes: int  # at most at one time; see `stage_memory`


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
    from fxpipe.scheduling.schedules import make_schedule
    from fxpipe.simulation import simulate_schedule

    schedule = make_schedule(plan.schedule, len(plan.stages), plan.chunks, plan.checkpoint, plan.placement)
    simulation = simulate_schedule(
        schedule, [s.forward_seconds for s in plan.stages], [s.backward_seconds for s in plan.stages]
    )
    actions: dict[int, list[Action]] = {stage.index: [] for stage in plan.stages}
    for row in schedule.rows:
        for action in row:
            actions[action.stage].append(action)
    stages = tuple(_stage_figures(plan, stage, actions[stage.index]) for stage in plan.stages)
    return PlanFigures(stages, slowest_to_mean(plan), tuple(simulation.bubble), simulation.step_seconds)


def slowest_to_mean(plan: Plan) -> float:
    """1 where all stages take the same time, n where one of n stages takes it all."""
    seconds = [stage.forward_seconds + stage.backward_seconds for stage in plan.stages]
    return max(seconds) / fmean(seconds) if any(seconds) else 1.0


def received_bytes(plan: Plan, stage: int) -> int:
    """What a stage receives for one micro-batch: from the stage before it and through portals."""
    before = plan.stages[stage - 1].sent_bytes if stage > 0 else 0
    return before + sum(portal.bytes for portal in plan.portals if portal.target == stage)


def stage_memory(parameters: int, activations: int, received: int, actions: Iterable[Action]) -> tuple[int, int]:
    """Most micro-batches in flight, and most bytes held at one time, by a stage that runs `actions` in this order.

    The bytes are

        2 x parameters  +  the most, over the actions, of the sum over micro-batches i in flight of held(i)

    A gradient is as large as its parameter, hence the 2. Between its F and its B a micro-batch holds

        received + activations      where it is not recomputed,
        received                    where it is, up to its R, and received + activations from R to B.

    `activations` has all that the stage's nodes make, also what it sends. So a stage with f micro-batches in flight
    holds f x (received + activations) under checkpoint "never", and f x received + activations under "always". f is m
    under GPipe and min(n - j, m) under 1F1B, which is not assumed here but counted.

    Where nothing goes back (`inference`), there are no gradients, and a micro-batch is held by its F only.

    Not counted: inputs of the mini-batch (the caller's), gradients of activations, the optimizer's state, the
    allocator's rest, and what the F of a recomputed micro-batch holds for a moment (at most what its R will hold).
    """
    actions = tuple(actions)
    kinds = {action.kind for action in actions}
    recomputed = {action.micro_batch for action in actions if action.kind is Kind.RECOMPUTE}
    # Where backward is split, a micro-batch is done with the last piece of it.
    last = next((kind for kind in (Kind.WEIGHT, Kind.BACKWARD) if kind in kinds), None)
    if last is None:
        return 1, parameters + received + activations
    held: dict[int, int] = {}
    total = most_bytes = most_in_flight = 0
    for action in actions:
        before = held.get(action.micro_batch, 0)
        if action.kind is Kind.FORWARD:
            held[action.micro_batch] = received + (0 if action.micro_batch in recomputed else activations)
        elif action.kind is Kind.RECOMPUTE:
            held[action.micro_batch] = received + activations
        elif action.kind is last:
            del held[action.micro_batch]
        total += held.get(action.micro_batch, 0) - before
        most_bytes = max(most_bytes, total)
        most_in_flight = max(most_in_flight, len(held))
    return most_in_flight, 2 * parameters + most_bytes


def _stage_figures(plan: Plan, stage: StagePlan, actions: Iterable[Action]) -> StageFigures:
    in_flight, memory_bytes = stage_memory(
        stage.parameter_bytes, stage.activation_bytes, received_bytes(plan, stage.index), actions
    )
    return StageFigures(
        portals_in=tuple(portal for portal in plan.portals if portal.target == stage.index),
        portals_out=tuple(portal for portal in plan.portals if portal.source == stage.index),
        in_flight=in_flight,
        memory_bytes=memory_bytes,
    )
