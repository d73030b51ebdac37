"""Slows down actions on devices that share memory and caches, such as workers on CPUs.

An action takes longer while other devices are busy, which depends on the durations of their actions. So the schedule is
simulated a few times, each time with durations computed from the simulation before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from fxpipe.scheduling import Action, ActionKind
from fxpipe.simulation.costs import StageCost
from fxpipe.simulation.events import StartedAction

CONTENTION_ROUNDS = 4  # after these, the durations of usual schedules hardly change


def contended_durations(
    durations: Mapping[Action, float], begun: Sequence[Sequence[StartedAction]], stages: Sequence[StageCost]
) -> dict[Action, float]:
    """Slows down each action by up to `StageCost.contention`, in proportion to the busy time of the other devices."""
    sharing = [d for d, row in enumerate(begun) if any(stages[one.span.action.stage].contention > 1 for one in row)]
    busy = {d: _BusyTime([(one.span.start, one.span.end) for one in begun[d]]) for d in sharing}
    contended = dict(durations)
    for d in sharing if len(sharing) > 1 else ():
        for one in begun[d]:
            action, start, end = one.span.action, one.span.start, one.span.end
            if end > start and action.kind is not ActionKind.UPDATE:
                others = sum(busy[other].between(start, end) for other in sharing if other != d)
                share = others / (len(sharing) - 1) / (end - start)
                contended[action] *= 1 + (stages[action.stage].contention - 1) * share
    return contended


class _BusyTime:
    def __init__(self, spans: Sequence[tuple[float, float]]):
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]
        self._sums = [0.0, *accumulate(end - start for start, end in spans)]

    def between(self, start: float, end: float) -> float:
        return self._until(end) - self._until(start)

    def _until(self, time: float) -> float:
        """Computes the busy seconds before a time."""
        k = bisect_right(self._starts, time)
        return self._sums[k] - (max(0.0, self._ends[k - 1] - time) if k else 0.0)
