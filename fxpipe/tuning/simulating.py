"""A plan as the simulator sees it."""

from __future__ import annotations

from fxpipe.plans import Plan
from fxpipe.scheduling import make_schedule
from fxpipe.simulation import Simulation, simulate_schedule


def simulated(plan: Plan) -> Simulation:
    """A step of the plan."""
    stages, transfers = plan.costs()
    schedule = make_schedule(plan.schedule, len(plan.stages), plan.micro_batches, plan.checkpoint, plan.placement)
    return simulate_schedule(schedule, stages, transfers, overlaps=False)
