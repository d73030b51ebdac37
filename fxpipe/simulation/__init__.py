"""Simulates schedules by discrete events over their rows: the time of a step, its bubbles, and memory by device.

An action starts when its device has finished the action before, and everything that it needs has arrived.

>>> from fxpipe.scheduling import make_schedule
>>> print(simulate_schedule(make_schedule("1f1b", stages=3, micro_batches=4), [StageCost(forward=1, backward=2)] * 3))
1f1b: 3 stages, 4 micro-batches
device 0 |F0 F1 F2 ............B0=== F3 B1=== ...B2=== ...B3=== |  busy 12.0 s, bubble 33.3 %
device 1 |...F0 F1 ......B0=== F2 B1=== F3 B2=== ...B3=== ......|  busy 12.0 s, bubble 33.3 %
device 2 |......F0 B0=== F1 B1=== F2 B2=== F3 B3=== ............|  busy 12.0 s, bubble 33.3 %
step 18.0 s, mean bubble 33.3 %
critical path: B 66.7 %, F 33.3 %

F and B of a stage depend on its neighbours' F and B, and on `transfers`. A transfer occupies a link, one for each
direction of each pair of devices, and resources that links share (`Transfer.over`: the network adapter of a node). Each
carries one transfer at a time, in the order in which they are sent. Replicas of a pipeline reduce the gradients of
their stages (`ReductionSpan`). Actions also need the host that queues them (`HostCost`).

Simplifications: a stage takes equally long for every micro-batch, without the loss; copies do not slow down
computation; a loss takes no time unless the plan has it; values in transfer, and gradients of values,
take no memory; if the loss uses an output of an earlier stage, the gradient of the output leaves with B of the last
stage.

`events.py` runs the events, `simulation_result.py` holds the result with the critical path, `simulate_stream` simulates
streams of mini-batches, and `fxpipe.planning.plans.simulate_plan` simulates plans (`fxpipe.simulate`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from fxpipe.scheduling import ActionKind, Schedule, validate
from fxpipe.scheduling.streams import SteadyWindow, stream_schedule
from fxpipe.simulation.costs import HostCost, StageCost, Transfer, check_costs, transfers_of
from fxpipe.simulation.events import ReductionSpan
from fxpipe.simulation.simulation_result import CriticalLeg, MemoryFit, Simulation, SteadyState, simulate_checked
from fxpipe.simulation.timeline import MemoryParts, MemoryTimeline, Span


def simulate_schedule(
    schedule: Schedule,
    stages: Sequence[StageCost],
    transfers: Sequence[Transfer] = (),
    *,
    overlaps: bool = True,
    one_interpreter: bool = True,
) -> Simulation:
    """Computes when every action of `schedule` runs.

    The costs do not depend on the schedule, so the same costs compare schedules.

    Args:
        schedule: any valid schedule.
        stages: the cost of each stage.
        transfers: transfers between stages, each in one direction; `transfers_of` makes the transfers of a value and
            its gradient. Nothing is sent between stages on one device, and no gradient without a backward.
        overlaps: transfers overlap computation. If not, the receiving device spends the time of all transfers to
            an action before it computes, as the runtime does.
        one_interpreter: the workers of all devices take turns at one host, for the times in `StageCost.host`; else each
            device has its own host.

    Raises:
        ArgumentError: not one cost for each stage, a number that is negative or not finite, or an unknown stage.
        ScheduleError: the schedule would not run.
    """
    if not schedule.is_validated:  # validation takes as long as the simulation
        validate(schedule)
    check_costs(stages, transfers, schedule.stages)
    return simulate_checked(schedule, tuple(stages), tuple(transfers), overlaps, one_interpreter)


def simulate_stream(
    name: str,
    stages: Sequence[StageCost],
    transfers: Sequence[Transfer] = (),
    *,
    micro_batches: int,
    modes: Sequence[str] | None = None,
    overlaps: bool = True,
    one_interpreter: bool = True,
    replicas: Sequence[int] = (),
    is_joint: bool = False,
) -> Simulation:
    """Computes when every action of a stream runs, and the time of a mini-batch in the steady state.

    A stream never flushes. It begins and ends with an empty pipeline, and is long enough for a steady state, in which
    no device waits for a first or last mini-batch:

    >>> print(simulate_stream("pipedream", [StageCost(forward=1, backward=2, update=1)] * 2, micro_batches=1))
    pipedream: 2 stages, 5 mini-batches of 1 micro-batch
    device 0 |F0 F1 ......B0=== U0 F2 B1=== U1 F3 B2=== U2 F4 B3=== U3 ...B4=== U4 |  busy 4000 ms, bubble 0.0 %
    device 1 |...F0 B0=== U0 F1 B1=== U1 F2 B2=== U2 F3 B3=== U3 F4 B4=== U4 ......|  busy 4000 ms, bubble 0.0 %
    warm-up 1000 ms, drain 2000 ms; between them a mini-batch takes 4000 ms, with its update, mean bubble 0.0 %
    critical path: B 52.2 %, F 26.1 %, U 21.7 %

    Mini-batches take turns at the replicas of a stage, which is updated once per round. U includes the time to reduce
    gradients over replicas.

    Args:
        name: the schedule, one of `STREAM_POLICIES`.
        micro_batches: the number in a mini-batch.
        modes: the checkpoint mode of each stage.
        stages, transfers, overlaps, one_interpreter: as for `simulate_schedule`.
        replicas: the number for each stage; empty: one each.
        is_joint: the mini-batches are joint; see `fxpipe.scheduling.streams`.
    """
    n = len(stages)
    check_costs(stages, transfers, n)
    stages = [replace(cost, update=cost.update + cost.reduction, reduction=0.0) for cost in stages]
    window = SteadyWindow.of(name, n, micro_batches, replicas, is_joint)
    schedule = stream_schedule(name, n, micro_batches, window.mini_batches, modes, replicas, is_joint)
    whole = simulate_checked(schedule, tuple(stages), tuple(transfers), overlaps, one_interpreter)
    count, devices = window.last - window.first, range(len(whole.schedule.rows))
    starts, ends = (dict.fromkeys(devices, limit) for limit in (whole.seconds, 0.0))
    updated: dict[int, float] = {}  # by mini-batch: the end of the update of stage 0
    busy: defaultdict[int, float] = defaultdict(float)
    for span in whole.spans:
        kind, stage, i = span.action
        t, d = i // micro_batches, span.device
        starts[d], ends[d] = min(starts[d], span.start), max(ends[d], span.end)
        if kind is ActionKind.UPDATE and not stage:
            updated[t] = span.end
        if window.first < t <= window.last:
            busy[d] += span.seconds
    steady = SteadyState(
        window.mini_batches,
        micro_batches,
        window.first,
        window.last,
        (updated[window.last] - updated[window.first]) / count,
        tuple(busy[d] / count for d in devices),
        warm_up=max(starts.values()),
        drain=whole.seconds - min(ends.values()),
    )
    return replace(whole, steady=steady)


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
