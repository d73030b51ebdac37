"""The automatic zero bubble schedule: backward split, in an order that is searched for what the stages take.

`zero_bubble` and `zero_bubble_2p` are for stages that are all alike. Here it is known how long F, B and W of each stage
take, and how much memory there is. Stages are played out in time (`playing`), and one that is free does

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

So there are sixteen plays, and before them the two schedules made by hand, where they keep to the limits. They are
looked at in an order in which memory mostly grows, and another one is taken only where it is shorter by a thousandth;
so what is taken is hardly longer than the shortest. The search ends early where none can be shorter. Nothing is random:
the same demands, the same rows.

Source: Qi et al. 2024, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1 (ZB-1p, ZB-2p). From there are
the order of preference, W by the longest idling so far (4), an F at the price of a delay (3: there, of the first B
only), and to try all answers. There, every stage does an F and a B in each round, and may leave out an F where it is
two ahead of the next stage. Here time says whose turn it is, for stages that are not alike; and what counts is the step
from the first start on any device to the last end. Of 540 drawn sets of 2, 4 or 8 uneven stages, steps in the paper's
rounds were on average 0.3 % longer than in the better of the two orders made by hand; those of these plays 0.6 %
shorter, and 11 % at best. The gain is no larger, for mostly the slowest stage is all that a step waits for.

Of 2 or 3 stages, 2 or 3 micro-batches, and a few dozen drawn costs all orders were tried: one was shorter, by 0.5 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

from fxpipe.errors import ArgumentError
from fxpipe.scheduling.actions import Kind, Rows
from fxpipe.scheduling.by_stage import zero_bubble, zero_bubble_2p
from fxpipe.scheduling.playing import Demand, Play, Stage, played

WORTH = 1e-3  # of a step: what is shorter by less is not worth the memory that it may take


class Rule(NamedTuple):
    """The answers to the four questions."""

    runs_ahead: bool
    forward_first: bool
    delays_backward: bool
    fills_short_gaps: bool


def zero_bubble_auto(m: int, demands: Sequence[Demand]) -> Rows:
    """The rows of m micro-batches, for stages that each have a device of their own.

    Raises:
        ArgumentError: a limit does not hold a single micro-batch.
    """
    least = _least_seconds(m, demands)
    found = plays(m, demands)
    best = next(found)
    while least < (1 - WORTH) * best.seconds and (play := next(found, None)) is not None:
        if play.seconds < (1 - WORTH) * best.seconds:
            best = play
    return best.rows


def plays(m: int, demands: Sequence[Demand]) -> Iterator[Play]:
    """All that are compared, and within the limits."""
    by_hand = [played(rows(m, len(demands)), m, demands) for rows in (zero_bubble, zero_bubble_2p)]
    limits = [
        stage.most if demand.limit is None else demand.limit
        for demand, stage in zip(demands, by_hand[1].stages, strict=True)
    ]
    for j, (demand, limit) in enumerate(zip(demands, limits, strict=True)):
        if demand.taken + demand.retaken > limit:
            raise ArgumentError(
                f"demands[{j}].limit={limit!r} does not hold a single micro-batch, which takes "
                f"{demand.taken + demand.retaken!r}: give that or more"
            )
    for play in by_hand:
        if all(stage.most <= limit for stage, limit in zip(play.stages, limits, strict=True)):
            yield play
    for answers in product((False, True), repeat=len(Rule._fields)):
        yield _play(m, demands, limits, Rule(*answers))


def _least_seconds(m: int, demands: Sequence[Demand]) -> float:
    """No order is shorter: a stage waits for its first value, and then has all its work to do."""
    least = first = 0.0
    for demand in demands:
        work = m * (demand.forward + demand.recompute + demand.backward + demand.weight)
        least, first = max(least, first + work), first + demand.forward + demand.sending
    return least


def _play(m: int, demands: Sequence[Demand], limits: Sequence[float], rule: Rule) -> Play:
    play, n = Play(m, demands), len(demands)
    ahead = [m if rule.runs_ahead else 2 * (n - j) - 1 for j in range(n)]
    asked = [(0.0, j) for j in range(n)]  # (when, stage)
    while asked:
        now, j = heappop(asked)
        stage = play.stages[j]
        if stage.end > now or stage.weights == m:
            continue  # it is busy, and will be asked when it is not; or it has ended
        choice = _choice(play, stage, now, limits[j], ahead[j], rule)
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


def _choice(play: Play, stage: Stage, now: float, limit: float, ahead: int, rule: Rule) -> Kind | float:
    """What a stage that is free does now; or when to ask it again, where its neighbours do not have it asked before."""
    demand, ready = stage.demand, stage.weights < stage.backwards
    gradient = value = math.inf
    if stage.can(Kind.BACKWARD):
        gradient = stage.gradients[stage.backwards] - demand.recompute
    if stage.can(Kind.FORWARD) and stage.forwards - stage.backwards < ahead:
        value = stage.values[stage.forwards]
    has_room = stage.held + demand.taken + demand.retaken <= limit  # for F, and the next R then
    can_forward = value <= now and has_room
    if gradient <= now and not (can_forward and rule.forward_first):
        return Kind.WEIGHT if ready and stage.held + demand.retaken > limit else Kind.BACKWARD
    if can_forward:
        if gradient <= now or gradient >= now + demand.forward or rule.delays_backward:
            return Kind.FORWARD
        until = gradient
    elif value <= now and ready:
        return Kind.WEIGHT  # to make room for F
    else:
        until = min(gradient, value) if has_room else gradient
    if not ready:
        return until
    if now + demand.weight <= until or rule.fills_short_gaps:
        return Kind.WEIGHT
    idle = stage.idle + until - now
    return Kind.WEIGHT if idle > max(other.idle for other in play.stages) else until
