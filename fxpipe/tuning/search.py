"""The search: every candidate, the most promising first, until none that is left can be faster.

A candidate is simulated on the cut for its placement and its size of micro-batches, with nothing recomputed. If that
does not fit into memory it is tried with everything recomputed, with all but the last micro-batch, and with what
planning makes of the limit: cuts that move, stages of which some recompute.

To cut a graph takes a hundred times as long as to simulate a schedule. So before it is cut, a candidate is asked what
it can come to at best: no less than all work shared out evenly, and hardly less than the schedule would take with
stages that are equally long and send nothing. (Hardly: the real cut is uneven, which in rare cases suits a schedule.)
Those for which that is more than the best step so far are left out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fxpipe.errors import ArgumentError, PartitionError
from fxpipe.plans import Plan
from fxpipe.progress import nothing
from fxpipe.scheduling import ScheduleLike
from fxpipe.tuning.candidates import Candidate
from fxpipe.tuning.plans import Plans
from fxpipe.tuning.result import SAME, Row
from fxpipe.tuning.simulating import simulated

HOPEFUL = 2.0  # times the best ideal step: of what cannot undercut that, the ideal one is not simulated at once
EVEN = 0.98  # of the ideal step: what an uneven cut may save, and more than it does
NO_SHORTER = "no step of it can be shorter than the best one"
MODES = ("never", "except_last", "always")

Limits = Sequence[float | None]  # bytes by worker; None: no limit


def search(
    candidates: Iterable[Candidate],
    plans: Plans,
    limits: Limits,
    *,
    modes: Sequence[str] | None = None,
    others: Mapping[str, Any] | None = None,
    step: Callable[[], object] = nothing,
) -> tuple[Row, ...]:
    """A row for each candidate and mode that was looked at.

    Args:
        modes: of recomputing; None: as much as memory asks for.
        step: called after each candidate.
    """
    rows: list[Row] = []
    best = ideal = math.inf
    waiting: list[tuple[float, int, Candidate]] = []
    bounds = [(plans.bound(candidate), number, candidate) for number, candidate in enumerate(candidates)]
    for bound, number, candidate in sorted(bounds, key=lambda one: one[:2]):
        if bound > HOPEFUL * ideal:
            waiting.append((bound, number, candidate))
            continue
        with contextlib.suppress(ArgumentError):  # it will be said when it is cut
            bound = max(bound, EVEN * plans.ideal(candidate))
        ideal = min(ideal, bound)
        waiting.append((bound, number, candidate))
    for bound, _, candidate in sorted(waiting, key=lambda one: one[:2]):
        if bound > (1 + SAME) * best:
            rows.append(_not_cut(candidate, NO_SHORTER, bound))
        else:
            found = list(_rows_of(candidate, plans, limits, modes, others or {}, best))
            rows += found
            best = min([best, *(row.step_seconds for row in found if row.fits)])
        step()
    return tuple(rows)


def _rows_of(
    candidate: Candidate,
    plans: Plans,
    limits: Limits,
    modes: Sequence[str] | None,
    others: Mapping[str, Any],
    best: float,
) -> Iterator[Row]:
    try:
        if modes is None:
            row = _row(candidate, plans.plan(candidate, "never"), limits, others)
            yield row
            if row.fits or row.step_seconds > (1 + SAME) * best:
                return  # recomputing takes time, and so does what a limit asks for
        for mode in MODES[1:] if modes is None else modes:
            row = _row(candidate, plans.plan(candidate, mode), limits, others)
            yield row
            if modes is not None and not row.fits:
                yield from _within_limits(candidate, plans, limits, mode, others)
    except (ArgumentError, PartitionError) as error:
        yield _not_cut(candidate, str(error).partition("\n")[0])
        return
    if modes is None:
        yield from _within_limits(candidate, plans, limits, "auto", others)


def _within_limits(
    candidate: Candidate, plans: Plans, limits: Limits, mode: str, others: Mapping[str, Any]
) -> Iterator[Row]:
    with contextlib.suppress(ArgumentError, PartitionError):  # what it lacks, the rows before say
        plan = plans.within_limits(candidate, mode)
        if plan is not None:
            yield _row(candidate, plan, limits, others)


def _row(candidate: Candidate, plan: Plan, limits: Limits, others: Mapping[str, Any]) -> Row:
    simulation = simulated(plan)
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
