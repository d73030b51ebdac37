"""The search over candidates, the most promising first, until no remaining candidate can be faster.

A candidate is simulated on the cut for its placement and size of micro-batches, without recomputation. If it does not
fit into memory, it is planned within the limit: cuts move, and some stages recompute. Only if all stages must
recompute, or nothing fits, two more modes are tried: recompute everything, or all but the last micro-batch.

Cutting a graph takes a hundred times as long as simulating a schedule. So a candidate is cut only if its lower bounds
are below the best steps so far: all work shared evenly, and its schedule with the most even stages that send nothing (a
heuristic bound: uneven stages may suit a schedule).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fxpipe.errors import ArgumentError, PartitionError, ScheduleError
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.retarget import resize_plan
from fxpipe.planning.plans.simulate_plan import simulate
from fxpipe.planning.tuning.candidate_plans import CheckpointMode, PlanSource
from fxpipe.planning.tuning.candidates import SAME_STEP_TOLERANCE, Candidate, CandidateResult
from fxpipe.utils.progress import ignore_progress
from fxpipe.utils.units import human_bytes, size_at_least

# Candidates whose first bound exceeds the best second bound by this factor skip the simulation of the second bound.
PROMISING_FACTOR = 1.5
EVEN_STAGES_SHARE = 0.98  # share of the step without sending that is a bound: uneven stages save no more
NO_SHORTER = "no step of it can be as short as those of the best"
MemoryLimits = Sequence[float | None]  # bytes by worker, of the longest pipeline to try; None: no limit


def search_candidates(
    candidates: Iterable[Candidate],
    plans_of: Callable[[Candidate], PlanSource],
    limits: MemoryLimits,
    *,
    modes: Sequence[CheckpointMode] | None = None,
    others: Mapping[str, Any] | None = None,
    wanted: int = 1,
    least_gain: float = 0.0,
    step: Callable[[], object] = ignore_progress,
) -> tuple[CandidateResult, ...]:
    """Returns a row for each candidate and mode.

    Args:
        modes: of recomputation; None: the least that memory requires.
        wanted: the number of best candidates to find with certainty.
        least_gain: a candidate is cut only if its step can be shorter than the best by this share.
        step: called after each candidate.
    """
    rows: list[CandidateResult] = []
    hoped = math.inf
    steps: list[float] = []  # the `wanted` best steps that fit
    waiting: list[tuple[float, int, Candidate]] = []
    bounds = [(plans_of(candidate).bound(candidate), number, candidate) for number, candidate in enumerate(candidates)]
    for bound, number, candidate in sorted(bounds, key=lambda one: one[:2]):
        if bound > PROMISING_FACTOR * hoped:
            waiting.append((bound, number, candidate))
            continue
        with contextlib.suppress(ArgumentError, PartitionError, ScheduleError):  # reported when it is cut
            bound = max(bound, EVEN_STAGES_SHARE * plans_of(candidate).bound_without_sending(candidate))
        hoped = min(hoped, bound)
        waiting.append((bound, number, candidate))
    for bound, _, candidate in sorted(waiting, key=lambda one: one[:2]):
        best = steps[-1] if len(steps) == wanted else math.inf
        if bound > (1 + SAME_STEP_TOLERANCE - least_gain) * best:
            rows.append(_skipped_candidate(candidate, NO_SHORTER, bound))
        else:
            results = list(_try_candidate(candidate, plans_of(candidate), limits, modes, others or {}, best))
            rows += results
            steps = sorted([*steps, *(row.step_seconds for row in results if row.fits)])[:wanted]
        step()
    return tuple(rows)


def _try_candidate(
    candidate: Candidate,
    plans: PlanSource,
    limits: MemoryLimits,
    modes: Sequence[CheckpointMode] | None,
    others: Mapping[str, Any],
    best: float,
) -> Iterator[CandidateResult]:
    try:
        if modes is not None:
            for mode in modes:
                row = _simulate_candidate(candidate, plans.plan(candidate, mode), limits, others)
                yield row
                if not row.fits:
                    yield from _try_within_limits(candidate, plans, limits, mode, others)
            return
        row = _simulate_candidate(candidate, plans.plan(candidate, "never"), limits, others)
        yield row
        if row.fits or row.step_seconds > (1 + SAME_STEP_TOLERANCE) * best:
            return  # recomputation and memory limits only make it slower
        results = list(_try_within_limits(candidate, plans, limits, "auto", others))
        yield from results
        if any(row.fits and row.checkpoint != "always" for row in results):
            return  # a stage recomputes only if it must
        for mode in ("except_last", "always"):
            yield _simulate_candidate(candidate, plans.plan(candidate, mode), limits, others)
    except (ArgumentError, PartitionError, ScheduleError) as error:
        yield _skipped_candidate(candidate, str(error).partition("\n")[0])


def _try_within_limits(
    candidate: Candidate, plans: PlanSource, limits: MemoryLimits, mode: CheckpointMode, others: Mapping[str, Any]
) -> Iterator[CandidateResult]:
    with contextlib.suppress(ArgumentError, PartitionError, ScheduleError):  # earlier rows report the missing memory
        plan = plans.within_limits(candidate, mode)
        if plan is not None:
            yield _simulate_candidate(candidate, plan, limits, others)


def _simulate_candidate(
    candidate: Candidate, plan: Plan, limits: MemoryLimits, others: Mapping[str, Any]
) -> CandidateResult:
    simulation = simulate(plan, updates=False)  # for a schedule that is not a stream, the update follows the step
    largest = resize_plan(plan, plan.micro_batch, sizes=plan.largest_sizes)  # memory limits apply to the largest sizes
    memory = tuple(held.peak for held in (simulation if largest is plan else simulate(largest)).memory)
    turns = plan.turns or (1,) * len(memory)
    own = [limit for limit, count in zip(limits, turns, strict=False) for _ in range(count)]  # one for each row
    lacks = max(
        (peak - limit for peak, limit in zip(memory, own, strict=True) if limit is not None), default=-float("inf")
    )
    return replace(
        _skipped_candidate(candidate, "", simulation.step_seconds),
        schedule=plan.schedule,
        checkpoint=plan.checkpoint,
        plan=plan,
        memory=memory,
        lacks=max(0.0, lacks),
        others=others,
    )


def _skipped_candidate(candidate: Candidate, why: str, seconds: float = 0.0) -> CandidateResult:
    schedule = candidate.schedule
    return CandidateResult(
        schedule if isinstance(schedule, str) else getattr(schedule, "__name__", None) or str(schedule),
        candidate.chunks,
        candidate.stages_per_device,
        why=why,
        step_seconds=seconds,
        data_parallel=candidate.data_parallel,
        mesh=candidate.mesh,
    )


# -- The message if no candidate fits into memory: the least sufficient limit ------------------------------------------


def shortage_message(rows: Sequence[CandidateResult], limits: MemoryLimits) -> str:
    """Describes the candidate with the least excess, and the memory that it needs."""
    tried = [row for row in rows if row.plan is not None]
    nearest = min(tried, key=lambda row: (row.lacks, row.step_seconds))
    limits = limits[: len(nearest.memory)]
    over = [
        f"device {k} {human_bytes(peak)} of {human_bytes(limit)}"
        for k, (peak, limit) in enumerate(zip(nearest.memory, limits, strict=True))
        if limit is not None and peak > limit
    ]
    return (
        f"none of the {len(tried)} ways to train that were tried fits into memory. The one that lacks least is "
        f"{nearest}, which needs on {', '.join(over)}: memory_limit={_sufficient_limit(nearest, limits)} would do, "
        "or more devices, smaller mini-batches (batch_size), an optimizer that keeps less (optimizer_state)"
    )


def _sufficient_limit(row: CandidateResult, limits: MemoryLimits) -> str:
    needed = [None if limit is None else max(limit, peak) for peak, limit in zip(row.memory, limits, strict=True)]
    if len({*limits}) == 1:
        return repr(size_at_least(max(row.memory)))
    return "[" + ", ".join("None" if need is None else repr(size_at_least(need)) for need in needed) + "]"
