"""What the actions of steps take of a core, whatever else the machine does; and the step that would be made of them.

A step on a machine that others use, too, is longer than its work: a worker waits for a core, and on a virtual machine a
core runs at half its speed while another machine has the other half of it. The first is no processor time. The second
is, but it comes and goes: so of all actions of one kind and stage, which do equal work, the lower quartile is taken. In
the order of the schedule they make the step of an undisturbed machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fxpipe.planning.plans import Plan
from fxpipe.runtime.run import Run
from fxpipe.scheduling import Action, ActionKind, make_schedule
from fxpipe.simulation import StageCost, simulate_schedule

Work = dict[tuple[ActionKind, int], list[float]]  # by kind and stage: seconds of a core, of each action


@contextmanager
def noted(work: Work) -> Iterator[None]:
    """Steps in this block, of any pipe, leave in `work` what each of their actions has taken."""
    perform = Run.perform

    def timed(run: Run, action: Action) -> Any:
        begin = time.thread_time()
        result = perform(run, action)
        work.setdefault((action.kind, action.stage), []).append(time.thread_time() - begin)
        return result

    Run.perform = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Run.perform = perform  # type: ignore[method-assign]


def undisturbed(plan: Plan, work: Mapping[tuple[ActionKind, int], Sequence[float]]) -> float:
    """Seconds of the plan's step, if each action takes what the like of it took when nothing disturbed it."""

    def least(kind: ActionKind, stage: int) -> float:
        found = work.get((kind, stage))
        return lower_quartile(found) if found else 0.0

    stages = []
    for j in range(len(plan.stages)):
        forward, again, back, weight = (
            least(kind, j)
            for kind in (ActionKind.FORWARD, ActionKind.RECOMPUTE, ActionKind.BACKWARD, ActionKind.WEIGHT)
        )
        stages.append(StageCost(forward, back + weight, recompute=again, weight=weight))
    schedule = make_schedule(plan.schedule, len(stages), plan.micro_batches, plan.checkpoint, plan.placement)
    return simulate_schedule(schedule, stages).step_seconds


def lower_quartile(values: Sequence[float]) -> float:
    """A quarter of the values are below it.

    >>> lower_quartile([1.0, 2.0, 3.0, 4.0, 50.0])
    2.0
    """
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]
