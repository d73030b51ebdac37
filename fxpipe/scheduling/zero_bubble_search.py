"""The automatic zero bubble schedule: backward split, in an order that is searched for what the stages take.

`zero_bubble` and `zero_bubble_2p` are for stages that are all alike. Here it is known how long F, B and W of each stage
take, and how much memory there is. Stages are played out in time (`zero_bubble_search`), and one that is free does

- B, if its gradient is there: the stages before wait for it;
- else F, if its value is there and memory for it: before the first gradient comes, as many as fill the time until then;
- else W, if one is left: it fills the gap, or makes room for F;
- else nothing.

That leaves four questions, which all stages answer alike, and each answer suits some costs:

1. May F be ahead of B by as many as memory holds? If not, then by no more than in `zero_bubble_2p`.
2. Where F and B could both begin, is it F? It lets the stages behind go on, B those before.
3. Is there an F where it would delay a B that is known to come before it ends?
4. Is there a W where the gap is too short for it? If not, it is put there all the same where the stage would otherwise
   have idled longer than any so far.

So there are sixteen schedules, and before them the two made by hand, where they keep to the limits. They are
looked at in an order in which memory mostly grows, and another one is taken only where it is shorter by a thousandth;
so what is taken is hardly longer than the shortest. The search ends early where none can be shorter. Nothing is random:
the same demands, the same rows.

Source: Qi et al. 2024, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1 (ZB-1p, ZB-2p). From there are
the order of preference, W by the longest idling so far (4), an F at the price of a delay (3: there, of the first B
only), and to try all answers. There, every stage does an F and a B in each round, and may leave out an F where it is
two ahead of the next stage. Here time says whose turn it is, for stages that are not alike; and what counts is the step
from the first start on any device to the last end. Of 540 drawn sets of 2, 4 or 8 uneven stages, steps in the paper's
rounds were on average 0.3 % longer than in the better of the two orders made by hand; those of this search 0.6 %
shorter, and 11 % at best. The gain is no larger, for mostly the slowest stage is all that a step waits for.

Of 2 or 3 stages, 2 or 3 micro-batches, and a few dozen drawn costs all orders were tried: one was shorter, by 0.5 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

from fxpipe.errors import ArgumentError
from fxpipe.scheduling.actions import Action, ActionKind, Rows
from fxpipe.scheduling.builtin import zero_bubble, zero_bubble_2p

# Stages played out in time, action by action: what a schedule is made against that is made of what stages cost.
#
# Each stage has a device of its own, takes micro-batches in order, and splits backward. It needs what its neighbours
# made: the value of the stage before, the gradient of the stage behind. Both are on their way for a while, on a link
# for each direction that carries one after the other. (`fxpipe.simulation` simulates any rows, once they are there.)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Costs of the actions of a stage: seconds, and memory in any unit."""

    forward: float  # seconds of F
    backward: float  # of B, without what is left to W
    weight: float  # of W
    recompute: float = 0.0  # of R, right before B: it need not wait for the gradient
    sending: float = 0.0  # on the way to the next stage, and of a gradient from there
    forward_memory: float = 1.0  # memory that F takes
    recompute_memory: float = 0.0  # that R takes
    freed_memory: float = 0.0  # of both, what B gives back when it ends; W gives back the rest
    limit: float | None = None  # memory that may be taken at once; None: what `zero_bubble_2p` takes here


@dataclass(slots=True)
class StageState:
    """A stage, as far as it has been played."""

    demand: StageTimes
    values: list[float]  # when what F needs is here, by micro-batch, of those that have been sent
    gradients: list[float] = field(default_factory=list)  # the same of B
    row: list[Action] = field(default_factory=list)
    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    end: float = 0.0  # of its last action
    idle: float = 0.0  # seconds of waiting since its first action
    most: float = 0.0  # memory that was taken at once

    @property
    def held(self) -> float:
        """The memory that is taken."""
        demand, waiting = self.demand, self.backwards - self.weights
        return (
            demand.forward_memory * (self.forwards - self.weights)
            + (demand.recompute_memory - demand.freed_memory) * waiting
        )

    def can(self, kind: ActionKind) -> bool:
        """Returns True if what the next action of that kind needs has been made."""
        if kind is ActionKind.WEIGHT:
            return self.weights < self.backwards
        if kind is ActionKind.BACKWARD:
            return self.backwards < len(self.gradients)
        return self.forwards < len(self.values)


class PartialSchedule:
    """Stages, as far as they have been played."""

    def __init__(self, m: int, demands: Sequence[StageTimes]):
        self.stages = [StageState(demand, []) for demand in demands]
        self.stages[0].values = [0.0] * m

    @property
    def seconds(self) -> float:
        return max(stage.end for stage in self.stages)

    @property
    def rows(self) -> Rows:
        return tuple(tuple(stage.row) for stage in self.stages)

    def put(self, j: int, kind: ActionKind) -> None:
        """The next action of a stage, as soon as it can be: what it needs must have been put before."""
        stage = self.stages[j]
        if kind is ActionKind.FORWARD:
            self._forward(j, stage, stage.demand)
        elif kind is ActionKind.BACKWARD:
            self._backward(j, stage, stage.demand)
        else:
            stage.row.append(Action(kind, j, stage.weights))
            stage.weights += 1
            stage.end += stage.demand.weight

    def _forward(self, j: int, stage: StageState, demand: StageTimes) -> None:
        i = stage.forwards
        start = max(stage.end, stage.values[i])
        if i:
            stage.idle += start - stage.end
        stage.row.append(Action(ActionKind.FORWARD, j, i))
        stage.forwards += 1
        stage.most = max(stage.most, stage.held)
        stage.end = start + demand.forward
        if j + 1 < len(self.stages):
            _send(stage.end, demand.sending, self.stages[j + 1].values)
        else:
            stage.gradients.append(stage.end)

    def _backward(self, j: int, stage: StageState, demand: StageTimes) -> None:
        i, ready = stage.backwards, stage.end + demand.recompute
        start = max(ready, stage.gradients[i])
        stage.idle += start - ready
        stage.row.append(Action(ActionKind.BACKWARD, j, i))
        stage.most = max(stage.most, stage.held + demand.recompute_memory)
        stage.backwards += 1
        stage.end = start + demand.backward
        if j:
            _send(stage.end, self.stages[j - 1].demand.sending, self.stages[j - 1].gradients)


def _send(ready: float, seconds: float, arrivals: list[float]) -> None:
    arrivals.append((max(ready, arrivals[-1]) if arrivals else ready) + seconds)


def schedule_rows(rows: Rows, m: int, demands: Sequence[StageTimes]) -> PartialSchedule:
    """Rows of F, B and W, one for each stage, that can run."""
    play, place = PartialSchedule(m, demands), [0] * len(rows)
    while any(place[j] < len(row) for j, row in enumerate(rows)):
        for j, row in enumerate(rows):
            while place[j] < len(row) and play.stages[j].can(row[place[j]].kind):
                play.put(j, row[place[j]].kind)
                place[j] += 1
    return play


MIN_GAIN = 1e-3  # of a step: what is shorter by less is not worth the memory that it may take


class PriorityRule(NamedTuple):
    """The answers to the four questions."""

    runs_ahead: bool
    forward_first: bool
    delays_backward: bool
    fills_short_gaps: bool


def zero_bubble_auto(m: int, demands: Sequence[StageTimes]) -> Rows:
    """The rows of m micro-batches, for stages that each have a device of their own.

    Raises:
        ArgumentError: a limit does not hold a single micro-batch.
    """
    least = _least_seconds(m, demands)
    candidates = candidate_schedules(m, demands)
    best = next(candidates)
    while least < (1 - MIN_GAIN) * best.seconds and (play := next(candidates, None)) is not None:
        if play.seconds < (1 - MIN_GAIN) * best.seconds:
            best = play
    return best.rows


def candidate_schedules(m: int, demands: Sequence[StageTimes]) -> Iterator[PartialSchedule]:
    """Yields all candidate schedules that are compared, and within the limits."""
    by_hand = [schedule_rows(rows(m, len(demands)), m, demands) for rows in (zero_bubble, zero_bubble_2p)]
    limits = [
        stage.most if demand.limit is None else demand.limit
        for demand, stage in zip(demands, by_hand[1].stages, strict=True)
    ]
    for j, (demand, limit) in enumerate(zip(demands, limits, strict=True)):
        if demand.forward_memory + demand.recompute_memory > limit:
            raise ArgumentError(
                f"demands[{j}].limit={limit!r} does not hold a single micro-batch, which takes "
                f"{demand.forward_memory + demand.recompute_memory!r}: give that or more"
            )
    for play in by_hand:
        if all(stage.most <= limit for stage, limit in zip(play.stages, limits, strict=True)):
            yield play
    for answers in product((False, True), repeat=len(PriorityRule._fields)):
        yield _schedule_by_rule(m, demands, limits, PriorityRule(*answers))


def _least_seconds(m: int, demands: Sequence[StageTimes]) -> float:
    """No order is shorter: a stage waits for its first value, and then has all its work to do."""
    least = first = 0.0
    for demand in demands:
        work = m * (demand.forward + demand.recompute + demand.backward + demand.weight)
        least, first = max(least, first + work), first + demand.forward + demand.sending
    return least


def _schedule_by_rule(
    m: int, demands: Sequence[StageTimes], limits: Sequence[float], rule: PriorityRule
) -> PartialSchedule:
    play, n = PartialSchedule(m, demands), len(demands)
    ahead = [m if rule.runs_ahead else 2 * (n - j) - 1 for j in range(n)]
    asked = [(0.0, j) for j in range(n)]  # (when, stage)
    while asked:
        now, j = heappop(asked)
        stage = play.stages[j]
        if stage.end > now or stage.weights == m:
            continue  # it is busy, and will be asked when it is not; or it has ended
        choice = _next_kind(play, stage, now, limits[j], ahead[j], rule)
        if isinstance(choice, float):
            if choice < math.inf:
                heappush(asked, (choice, j))
            continue
        play.put(j, choice)
        heappush(asked, (stage.end, j))
        for k in (j - 1, j + 1):  # if they wait, they know now when what it makes will be there
            if 0 <= k < n and play.stages[k].end <= now:
                heappush(asked, (now, k))
    return play


def _next_kind(
    play: PartialSchedule, stage: StageState, now: float, limit: float, ahead: int, rule: PriorityRule
) -> ActionKind | float:
    """Chooses the next action of a free stage, or when to ask again, unless its neighbours have it asked before."""
    demand, ready = stage.demand, stage.weights < stage.backwards
    gradient = value = math.inf
    if stage.can(ActionKind.BACKWARD):
        gradient = stage.gradients[stage.backwards] - demand.recompute
    if stage.can(ActionKind.FORWARD) and stage.forwards - stage.backwards < ahead:
        value = stage.values[stage.forwards]
    has_room = stage.held + demand.forward_memory + demand.recompute_memory <= limit  # for F, and the next R then
    can_forward = value <= now and has_room
    if gradient <= now and not (can_forward and rule.forward_first):
        return ActionKind.WEIGHT if ready and stage.held + demand.recompute_memory > limit else ActionKind.BACKWARD
    if can_forward:
        if gradient <= now or gradient >= now + demand.forward or rule.delays_backward:
            return ActionKind.FORWARD
        until = gradient
    elif value <= now and ready:
        return ActionKind.WEIGHT  # to make room for F
    else:
        until = min(gradient, value) if has_room else gradient
    if not ready:
        return until
    if now + demand.weight <= until or rule.fills_short_gaps:
        return ActionKind.WEIGHT
    idle = stage.idle + until - now
    return ActionKind.WEIGHT if idle > max(other.idle for other in play.stages) else until
