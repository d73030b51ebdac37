"""The search: every candidate, the most promising first, until none that is left can be faster.

A candidate is simulated on the cut for its placement and its size of micro-batches, with nothing recomputed. If that
does not fit into memory it is tried with what planning makes of the limit: cuts that move, stages of which some
recompute. Only where all have to, or nothing fits, everything is recomputed, and all but the last micro-batch.

To cut a graph takes a hundred times as long as to simulate a schedule. So before it is cut, a candidate is asked what
it can come to at best: no less than all work shared out evenly, and hardly less than its schedule takes with stages
that are as even as the nodes allow and send nothing. (Hardly: stages of a certain unevenness may suit a schedule.)
Those for which that is more than the best steps so far are left out, unless another candidate has the same cut.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fxpipe.errors import ArgumentError, PartitionError, ScheduleError
from fxpipe.plans import Plan
from fxpipe.plans.simulating import simulate
from fxpipe.progress import nothing
from fxpipe.scheduling import ScheduleLike, is_searched
from fxpipe.tuning.candidates import Candidate
from fxpipe.tuning.plans import Mode, Plans, with_limits
from fxpipe.tuning.rows import SAME, Row

HOPEFUL = 1.5  # times the best step without sending: what cannot undercut that is not simulated to see what it can
EVEN = 0.98  # of the step without sending: unevenness saves no more
NO_SHORTER = "no step of it can be as short as those of the best"
Limits = Sequence[float | None]  # bytes by worker; None: no limit


def search(
    candidates: Iterable[Candidate],
    plans: Plans,
    limits: Limits,
    *,
    modes: Sequence[Mode] | None = None,
    others: Mapping[str, Any] | None = None,
    wanted: int = 1,
    step: Callable[[], object] = nothing,
) -> tuple[Row, ...]:
    """A row for each candidate and mode that was looked at.

    Args:
        modes: of recomputing; None: as much as memory asks for.
        wanted: how many of the best are to be found for certain.
        step: called after each candidate.
    """
    rows: list[Row] = []
    hoped = math.inf
    steps: list[float] = []  # of the best that fit, as many as are wanted
    waiting: list[tuple[float, int, Candidate]] = []
    bounds = [(plans.bound(candidate), number, candidate) for number, candidate in enumerate(candidates)]
    for bound, number, candidate in sorted(bounds, key=lambda one: one[:2]):
        if bound > HOPEFUL * hoped:
            waiting.append((bound, number, candidate))
            continue
        with contextlib.suppress(ArgumentError, PartitionError, ScheduleError):  # it will be said when it is cut
            bound = max(bound, EVEN * plans.without_sending(candidate))
        hoped = min(hoped, bound)
        waiting.append((bound, number, candidate))
    for bound, _, candidate in sorted(waiting, key=lambda one: one[:2]):
        best = steps[-1] if len(steps) == wanted else math.inf
        if bound > (1 + SAME) * best and not plans.has(candidate):
            rows.append(_not_cut(candidate, NO_SHORTER, bound))
        else:
            found = list(_rows_of(candidate, plans, limits, modes, others or {}, best))
            rows += found
            steps = sorted([*steps, *(row.step_seconds for row in found if row.fits)])[:wanted]
        step()
    return tuple(rows)


def _rows_of(
    candidate: Candidate,
    plans: Plans,
    limits: Limits,
    modes: Sequence[Mode] | None,
    others: Mapping[str, Any],
    best: float,
) -> Iterator[Row]:
    try:
        if modes is not None:
            for mode in modes:
                row = _row(candidate, plans.plan(candidate, mode), limits, others)
                yield row
                if not row.fits:
                    yield from _within_limits(candidate, plans, limits, mode, others)
            return
        row = _row(candidate, plans.plan(candidate, "never"), limits, others)
        yield row
        if row.fits or row.step_seconds > (1 + SAME) * best:
            return  # recomputing takes time, and so does what a limit asks for
        found = list(_within_limits(candidate, plans, limits, "auto", others))
        yield from found
        if any(row.fits and row.checkpoint != "always" for row in found):
            return  # no stage recomputes without need
        for mode in ("except_last", "always"):
            yield _row(candidate, plans.plan(candidate, mode), limits, others)
    except (ArgumentError, PartitionError, ScheduleError) as error:
        yield _not_cut(candidate, str(error).partition("\n")[0])


def _within_limits(
    candidate: Candidate, plans: Plans, limits: Limits, mode: Mode, others: Mapping[str, Any]
) -> Iterator[Row]:
    with contextlib.suppress(ArgumentError, PartitionError, ScheduleError):  # what it lacks, the rows before say
        plan = plans.within_limits(candidate, mode)
        if plan is not None:
            yield _row(candidate, plan, limits, others)


def _row(candidate: Candidate, plan: Plan, limits: Limits, others: Mapping[str, Any]) -> Row:
    if is_searched(plan.schedule):
        plan = with_limits(plan, limits)  # its order hangs on them
    simulation = simulate(plan)
    memory = tuple(held.peak for held in simulation.memory)
    lacks = max(
        (peak - limit for peak, limit in zip(memory, limits, strict=True) if limit is not None), default=-float("inf")
    )
    return Row(
        plan.schedule,
        candidate.chunks,
        candidate.stages_per_device,
        plan.checkpoint,
        plan,
        simulation.step_seconds,
        memory,
        max(0.0, lacks),
        others=others,
    )


def _not_cut(candidate: Candidate, why: str, seconds: float = 0.0) -> Row:
    return Row(_name(candidate.schedule), candidate.chunks, candidate.stages_per_device, why=why, step_seconds=seconds)


def _name(schedule: ScheduleLike) -> str:
    return schedule if isinstance(schedule, str) else getattr(schedule, "__name__", None) or str(schedule)
