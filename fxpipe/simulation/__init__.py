"""Simulates schedules by discrete events over their rows: how long a step takes, its bubbles, and memory by device.

An action starts as soon as its device has ended the action before, and all that it needs has ended and has arrived.

>>> from fxpipe.scheduling import make_schedule
>>> print(simulate_schedule(make_schedule("1f1b", stages=3, micro_batches=4), [StageCost(forward=1, backward=2)] * 3))
1f1b: 3 stages, 4 micro-batches
device 0 |F0 F1 F2 ............B0=== F3 B1=== ...B2=== ...B3=== |  busy 12.0 s, bubble 33.3 %
device 1 |...F0 F1 ......B0=== F2 B1=== F3 B2=== ...B3=== ......|  busy 12.0 s, bubble 33.3 %
device 2 |......F0 B0=== F1 B1=== F2 B2=== F3 B3=== ............|  busy 12.0 s, bubble 33.3 %
step 18.0 s, mean bubble 33.3 %
critical path: B 66.7 %, F 33.3 %

F and B of a stage need those of its neighbours, and what `transfers` bring them. A transfer takes a link, one for each
direction of each pair of devices, and what several links share (`Transfer.over`: the network adapter of a node). Each
carries one transfer at a time, in the order in which they are sent. Replicas of a pipeline reduce the gradients of
their stages (`reductions.py`). Actions also need the host that queues them (`HostCost`).

Simplified: a stage takes as long for every micro-batch; copies do not slow down computation; a loss takes no time
unless the plan knows it; values on their way, and gradients of values, take no memory; the gradient of an output that
the loss takes from an earlier stage leaves with the last stage's B.

`events.py` walks from event to event; `simulation_result.py` holds the result, with the critical path: what the end of
the step depends on. `stream_simulation.py` simulates a stream of mini-batches, which has no flush.
`fxpipe.planning.plans.simulate_plan` is `fxpipe.simulate`: the same for a plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.scheduling import Schedule, validate
from fxpipe.simulation.costs import HostCost, StageCost, Transfer, check_costs, transfers_of
from fxpipe.simulation.reductions import ReductionSpan
from fxpipe.simulation.simulation_result import CriticalLeg, MemoryFit, Simulation, SteadyState, simulate_checked
from fxpipe.simulation.stream_simulation import simulate_stream
from fxpipe.simulation.timeline import MemoryParts, MemoryTimeline, Span

# -- The simulation of a schedule, from the costs of its stages ------------------------------------------------------


def simulate_schedule(
    schedule: Schedule,
    stages: Sequence[StageCost],
    transfers: Sequence[Transfer] = (),
    *,
    overlaps: bool = True,
    one_interpreter: bool = True,
) -> Simulation:
    """Computes when every action of `schedule` runs, and what follows from that.

    The costs do not depend on the schedule, so the same costs compare schedules.

    Args:
        schedule: any that would run.
        stages: for each stage what it costs.
        transfers: what goes between stages, one way each; `transfers_of` makes those of a value and its gradient.
            Nothing is sent between stages on one device, and no gradient where the schedule has no backward.
        overlaps: transfers run while devices compute. If not, the receiving device spends the time of all transfers to
            an action before it computes, as the runtime does.
        one_interpreter: the workers of all devices take turns at the host, for what `StageCost.host` says; else each
            device has a host of its own.

    Raises:
        ArgumentError: not one cost for each stage, a number that is negative or not finite, a stage that is not there.
        ScheduleError: a schedule that would not run.
    """
    if not schedule.is_validated:  # it takes as long as the simulation
        validate(schedule)
    check_costs(stages, transfers, schedule.stages)
    return simulate_checked(schedule, tuple(stages), tuple(transfers), overlaps, one_interpreter)


__all__ = [
    "CriticalLeg",
    "HostCost",
    "MemoryFit",
    "MemoryParts",
    "MemoryTimeline",
    "ReductionSpan",
    "Simulation",
    "Span",
    "StageCost",
    "SteadyState",
    "Transfer",
    "simulate_schedule",
    "simulate_stream",
    "transfers_of",
]
