"""The search over candidates, the most promising first, until no remaining candidate can be faster.

A candidate is simulated on the cut for its placement and size of micro-batches, without recomputation. If it does not
fit into memory, it is planned within the limit: cuts move, and some stages recompute. Only if all stages must
recompute, or nothing fits, two more modes are tried: recompute everything, or all but the last micro-batch.

Cutting a graph takes a hundred times as long as simulating a schedule. So a candidate is cut only if its lower bounds
are below the best steps so far: all work shared evenly, and its schedule with the most even stages that send nothing (a
heuristic bound: uneven stages may suit a schedule).

`prepare_best` chooses the options left to planning (`chunks="auto"`, `schedule="auto"`), always the same for a profile.
The graph was compared with the model only for the usual micro-batches, so it is compared again for others; if they
differ, or the model rejects the size, the next best candidate is tried. If none fits into memory, planning continues
with the usual values, and reports the shortage.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fxpipe.errors import ArgumentError, PartitionError, ScheduleError
from fxpipe.planning.cost_model import planned_workers
from fxpipe.planning.options.parse import COMPARED_SCHEDULES, place_stages
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.passes import PreparedGraph, ProfiledModel, holds_for_chunks, prepare_profiled
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.retarget import resize_plan
from fxpipe.planning.plans.simulate_plan import simulate
from fxpipe.planning.tuning.candidates import (
    MAX_CHUNKS_PER_WORKER,
    SAME_STEP_TOLERANCE,
    TRIED_STAGES_PER_DEVICE,
    Candidate,
    CandidateResult,
    CheckpointMode,
    ModelPlans,
    PlanSource,
    PlanVariants,
    candidates_of_model,
    candidates_of_plan,
    chunks_for_batch,
    memory_limits_of,
    rank_fitting,
    with_memory_limits,
)
from fxpipe.tracing import Traced
from fxpipe.utils.progress import ignore_progress, progress
from fxpipe.utils.units import human_bytes, size_at_least

# Candidates whose first bound exceeds the best second bound by this factor skip the simulation of the second bound.
PROMISING_FACTOR = 1.5
EVEN_STAGES_SHARE = 0.98  # share of the step without sending that is a bound: uneven stages save no more
IMPOSSIBLE = (ArgumentError, PartitionError, ScheduleError)
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
    """Returns a row for each candidate and mode of recomputation; `modes` None: the least that memory requires.

    The `wanted` best candidates are found with certainty. A candidate is cut only if its step can be shorter than the
    best by the share `least_gain`.
    """
    rows: list[CandidateResult] = []
    hoped = math.inf
    steps: list[float] = []  # the `wanted` best steps that fit
    waiting: list[tuple[float, int, Candidate]] = []
    bounds = list[tuple[float, int, Candidate]]()
    for number, candidate in enumerate(candidates):
        plans = plans_of(candidate)  # of a plan a bound costs no less than a simulation
        bounds.append((plans.bound(candidate) if isinstance(plans, ModelPlans) else 0.0, number, candidate))
    for bound, number, candidate in sorted(bounds, key=lambda one: one[:2]):
        plans = plans_of(candidate)
        if bound <= PROMISING_FACTOR * hoped:
            if isinstance(plans, ModelPlans):
                with contextlib.suppress(*IMPOSSIBLE):  # reported when it is cut
                    bound = max(bound, EVEN_STAGES_SHARE * plans.bound_without_sending(candidate))
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
    def within_limits(mode: CheckpointMode) -> Iterator[CandidateResult]:
        with contextlib.suppress(*IMPOSSIBLE):  # earlier rows report the missing memory
            if isinstance(plans, ModelPlans):
                yield _simulate_candidate(candidate, plans.plan(candidate, mode, is_limited=True), limits, others)

    try:
        if modes is not None:
            for mode in modes:
                row = _simulate_candidate(candidate, plans.plan(candidate, mode), limits, others)
                yield row
                if not row.fits:
                    yield from within_limits(mode)
            return
        row = _simulate_candidate(candidate, plans.plan(candidate, "never"), limits, others)
        yield row
        if row.fits or row.step_seconds > (1 + SAME_STEP_TOLERANCE) * best:
            return  # recomputation and memory limits only make it slower
        results = list(within_limits("auto"))
        yield from results
        if any(row.fits and row.checkpoint != "always" for row in results):
            return  # a stage recomputes only if it must
        for mode in ("except_last", "always"):
            yield _simulate_candidate(candidate, plans.plan(candidate, mode), limits, others)
    except IMPOSSIBLE as error:
        yield _skipped_candidate(candidate, str(error).partition("\n")[0])


def _simulate_candidate(
    candidate: Candidate, plan: Plan, limits: MemoryLimits, others: Mapping[str, Any]
) -> CandidateResult:
    simulation = simulate(plan, updates=False)  # for a schedule that is not a stream, the update follows the step
    # Memory limits apply to the largest sizes.
    largest = resize_plan(plan, plan.micro_batch, sizes={one.name: one.largest for one in plan.sizes})
    memory = tuple(held.peak for held in (simulation if largest is plan else simulate(largest)).memory)
    turns = plan.turns or (1,) * len(memory)
    own = [limit for limit, count in zip(limits, turns, strict=False) for _ in range(count)]  # one for each row
    lacks = [peak - limit for peak, limit in zip(memory, own, strict=True) if limit is not None]
    return replace(
        _skipped_candidate(candidate, "", simulation.step_seconds),
        schedule=plan.schedule,
        checkpoint=plan.checkpoint,
        plan=plan,
        memory=memory,
        lacks=max((0.0, *lacks)),
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
    needed = [None if limit is None else max(limit, peak) for peak, limit in zip(nearest.memory, limits, strict=True)]
    enough = "[" + ", ".join("None" if need is None else repr(size_at_least(need)) for need in needed) + "]"
    if len({*limits}) == 1:
        enough = repr(size_at_least(max(nearest.memory)))
    return (
        f"none of the {len(tried)} ways to train that were tried fits into memory. The one that lacks least is "
        f"{nearest}, which needs on {', '.join(over)}: memory_limit={enough} would do, "
        "or more devices, smaller mini-batches (batch_size), an optimizer that keeps less (optimizer_state)"
    )


# -- Options left to planning: `chunks="auto"`, `schedule="auto"` ------------------------------------------------------


def prepare_best(
    profiled: ProfiledModel, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> PreparedGraph:
    """Plans the model; the tuner chooses the options in `settings.left`."""
    usual, left, batch = replace(settings, left=frozenset()), settings.left, profiled.batch
    plans, limits = ModelPlans(profiled, usual), [worker.memory for worker in planned_workers(usual)]
    each = len(settings.placement) // len(settings.workers)
    candidates = list(
        candidates_of_model(
            COMPARED_SCHEDULES if "schedule" in left else (settings.schedule,),
            _chunks_to_try(batch, settings) if "chunks" in left else (settings.chunks,),
            TRIED_STAGES_PER_DEVICE if "stages_per_device" in left else (each,),
        )
    )
    modes = (settings.checkpoint,) if isinstance(settings.checkpoint, str) else ("never",)  # modes are in settings
    with progress("tuning", len(candidates), "candidates") as step:
        rows = search_candidates(
            candidates, lambda _: plans, limits, modes=None if modes == ("auto",) else modes, step=step
        )
    for row in rank_fitting(rows):
        assert row.plan is not None
        ready = plans.prepared(row.plan)
        ready = replace(ready, plan=with_memory_limits(row.plan, limits))
        are_usual = ready.settings.micro_batches(batch) == usual.micro_batches(batch)
        if not are_usual and not holds_for_chunks(profiled.traced, batch, args, kwargs, row.chunks, settings):
            continue
        if "chunks" in left and batch <= ready.settings.chunks and batch < usual.chunks:
            # Each micro-batch has one sample already; larger mini-batches may use the usual number.
            settings = replace(ready.settings, chunks=usual.chunks)
            return replace(ready, settings=settings, plan=replace(ready.plan, chunks=usual.chunks))
        return ready
    return prepare_profiled(profiled, usual)


def _chunks_to_try(batch: int, settings: Settings) -> Iterator[int]:
    workers = len(settings.workers)
    for count in chunks_for_batch(batch, MAX_CHUNKS_PER_WORKER * len(settings.row_devices)):
        if callable(settings.schedule):
            try:
                place_stages(workers, len(settings.placement) // workers, settings.schedule, count, None)
            except Exception:
                continue  # the function has no rows for this number
        yield count


def with_best_chunks(
    plan: Plan, traced: Traced, batch: int, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> Plan:
    """Returns the plan for mini-batches of `batch` samples: the same stages, with the best number of micro-batches.

    Returns the plan unchanged if no number fits into memory, or the model accepts none.
    """
    each = max(map(plan.placement.count, plan.placement))
    ways = [Candidate(settings.schedule, count, each) for count in _chunks_to_try(batch, settings)]
    plans = PlanVariants(plan, batch)
    rows = search_candidates(ways, lambda _: plans, memory_limits_of(plan), modes=(settings.checkpoint,))
    for row in rank_fitting(rows):
        assert row.plan is not None
        if holds_for_chunks(traced, batch, args, kwargs, row.chunks, settings):
            return row.plan
    return plan


def with_best_schedule(plan: Plan, settings: Settings) -> Settings:
    """Sets the best schedule for the stages of a plan; the usual schedule if none fits into memory."""
    batch = plan.batch or settings.chunks * plan.micro_batch
    modes = None if settings.checkpoint == "auto" else (settings.checkpoint,)
    candidates, plans = candidates_of_plan(plan, COMPARED_SCHEDULES, (settings.chunks,)), PlanVariants(plan, batch)
    rows = search_candidates(candidates, lambda _: plans, memory_limits_of(plan), modes=modes)
    best = next((row.schedule for row in rank_fitting(rows)), settings.schedule)
    return replace(settings, schedule=best, left=frozenset())
