"""A step as the tuner simulates it: with what it takes to start an action.

Without that many small actions would cost no more than few large ones, and the more micro-batches and stages on a
device, the better a step would seem. What a node costs however small its micro-batch is (`Seconds.fixed`) is in the
seconds of the stages already; this is what the runtime adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxpipe.plans import Plan
from fxpipe.scheduling import Kind, Schedule, make_schedule
from fxpipe.simulation import Simulation, StageCost, Transfer, simulate_schedule

ACTION_SECONDS = 1e-4  # tools/bench/README.md, "what the runtime costs": of this order


def simulated(plan: Plan) -> Simulation:
    """A step of the plan."""
    stages, transfers = plan.costs()
    schedule = make_schedule(plan.schedule, len(plan.stages), plan.micro_batches, plan.checkpoint, plan.placement)
    return run(schedule, stages, transfers)


def run(schedule: Schedule, stages: Sequence[StageCost], transfers: Sequence[Transfer] = ()) -> Simulation:
    """A step of stages that cost so much without that."""
    split = {action.stage for row in schedule.rows for action in row if action.kind is Kind.WEIGHT}
    costs = [_started(cost, j in split) for j, cost in enumerate(stages)]
    return simulate_schedule(schedule, costs, transfers, overlaps=False)


def _started(cost: StageCost, is_split: bool) -> StageCost:
    """With the time to start each of its actions."""
    weight = cost.backward / 2 if cost.weight is None else cost.weight
    recompute = cost.forward if cost.recompute is None else cost.recompute
    return replace(
        cost,
        forward=cost.forward + ACTION_SECONDS,
        recompute=recompute + ACTION_SECONDS,
        backward=cost.backward + ACTION_SECONDS * (2 if is_split else 1),
        weight=weight + ACTION_SECONDS if is_split else cost.weight,
    )
