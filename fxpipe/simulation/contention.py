"""Slows down actions on devices that share memory and caches, as workers on CPUs do.

An action takes longer while others are at work, and when these are depends on how long actions take. So the schedule is
walked again with durations that follow from the walk before, a few times.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from fxpipe.scheduling import Action, ActionKind
from fxpipe.simulation.costs import StageCost
from fxpipe.simulation.events import StartedAction

CONTENTION_ROUNDS = 4  # after which durations of usual schedules hardly change


def contended_durations(
    durations: Mapping[Action, float], begun: Sequence[Sequence[StartedAction]], stages: Sequence[StageCost]
) -> dict[Action, float]:
    """Computes the seconds of each action, from those that it takes alone and from when others are at work.

    With all others at work the whole time it takes `StageCost.contention` times as long; else less, in proportion.
    """
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
    """The time in which a device is at work, from spans in order."""

    def __init__(self, spans: Sequence[tuple[float, float]]):
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]
        self._sums = [0.0, *accumulate(end - start for start, end in spans)]

    def between(self, start: float, end: float) -> float:
        return self._until(end) - self._until(start)

    def _until(self, time: float) -> float:
        """Computes the seconds at work before a time."""
        k = bisect_right(self._starts, time)
        return self._sums[k] - (max(0.0, self._ends[k - 1] - time) if k else 0.0)
