"""The simulation of a schedule, from the costs of its stages."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.scheduling import Schedule, validate
from fxpipe.simulation.critical import critical_legs
from fxpipe.simulation.events import Walk
from fxpipe.simulation.needs import seconds_of, ways_of
from fxpipe.simulation.results import Simulation
from fxpipe.stage_costs import StageCost, Transfer, check_costs


def simulate_schedule(
    schedule: Schedule,
    stages: Sequence[StageCost],
    transfers: Sequence[Transfer] = (),
    *,
    overlaps: bool = True,
) -> Simulation:
    """When every action of `schedule` runs, and what follows from that.

    The costs are those of the stages, whatever the schedule: so the same ones compare schedules with each other.

    Args:
        schedule: any that would run.
        stages: for each stage what it costs.
        transfers: what goes between stages, one way each; `transfers_of` makes those of a value and its gradient.
            Nothing is sent between stages on one device, and no gradient where the schedule has no backward.
        overlaps: transfers run beside computation, on their links. If not, the device that receives spends the time of
            all that an action is sent before it computes, one after the other, as the runtime does.

    Raises:
        ArgumentError: not one cost for each stage, a number that is negative or not finite, a stage that is not there.
        ScheduleError: a schedule that would not run.
    """
    validate(schedule)
    check_costs(stages, transfers, schedule.stages)
    begun = Walk(schedule, seconds_of(schedule, stages), ways_of(schedule, transfers), overlaps).run()
    spans = tuple(one.span for row in begun for one in row)
    end = max(row[-1].span.end for row in begun if row)
    return Simulation(schedule, tuple(stages), tuple(transfers), spans, end, critical_legs(begun))
