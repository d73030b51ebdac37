"""Simulates a stream of mini-batches, which never flushes: the time of a mini-batch once all devices are busy.

The stream begins and ends with an empty pipeline, and is long enough for a steady state, in which no device waits for a
first or last mini-batch. The figures of a mini-batch are from the steady state:

>>> from fxpipe.simulation.costs import StageCost
>>> print(simulate_stream("pipedream", [StageCost(forward=1, backward=2, update=1)] * 2, micro_batches=1))
pipedream: 2 stages, 5 mini-batches of 1 micro-batch
device 0 |F0 F1 ......B0=== U0 F2 B1=== U1 F3 B2=== U2 F4 B3=== U3 ...B4=== U4 |  busy 4000 ms, bubble 0.0 %
device 1 |...F0 B0=== U0 F1 B1=== U1 F2 B2=== U2 F3 B3=== U3 F4 B4=== U4 ......|  busy 4000 ms, bubble 0.0 %
warm-up 1000 ms, drain 2000 ms; between them a mini-batch takes 4000 ms, with its update, mean bubble 0.0 %
critical path: B 52.2 %, F 26.1 %, U 21.7 %

Mini-batches take turns at the replicas of a stage, which is updated once per round. U includes the time to reduce
gradients over replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from fxpipe.scheduling import ActionKind, SteadyWindow, stream_schedule
from fxpipe.simulation.costs import StageCost, Transfer, check_costs
from fxpipe.simulation.simulation_result import Simulation, SteadyState, simulate_checked


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
) -> Simulation:
    """Computes when every action of a stream runs, and the time of a mini-batch in the steady state.

    Args:
        name: the schedule, one of `STREAM_POLICIES`.
        micro_batches: the number in a mini-batch.
        modes: the checkpoint mode of each stage.
        stages, transfers, overlaps, one_interpreter: as for `simulate_schedule`.
        replicas: the number for each stage; empty: one each.
    """
    n = len(stages)
    check_costs(stages, transfers, n)
    stages = [replace(cost, update=cost.update + cost.reduction, reduction=0.0) for cost in stages]
    window = SteadyWindow.of(name, n, micro_batches, replicas)
    schedule = stream_schedule(name, n, micro_batches, window.mini_batches, modes, replicas)
    whole = simulate_checked(schedule, tuple(stages), tuple(transfers), overlaps, one_interpreter)
    return replace(whole, steady=_steady_state(whole, window, micro_batches))


def _steady_state(whole: Simulation, window: SteadyWindow, micro_batches: int) -> SteadyState:
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
    return SteadyState(
        window.mini_batches,
        micro_batches,
        window.first,
        window.last,
        (updated[window.last] - updated[window.first]) / count,
        tuple(busy[d] / count for d in devices),
        warm_up=max(starts.values()),
        drain=whole.seconds - min(ends.values()),
    )
