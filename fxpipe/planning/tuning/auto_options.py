"""Chooses the options left to planning (`chunks="auto"`, `schedule="auto"`) for a profiled model.

The choice is deterministic for a profile. The graph was compared with the model only for the usual micro-batches, so it
is compared again for others; if they differ, or the model rejects the size, the next best candidate is tried. If none
fits into memory, planning continues with the usual values, and reports the shortage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fxpipe.planning.cost_model import planned_workers
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.options.stage_placement import COMPARED_SCHEDULES, place_stages
from fxpipe.planning.passes import PreparedGraph, ProfiledModel, holds_for_chunks, prepare_profiled
from fxpipe.planning.plans import Plan
from fxpipe.planning.tuning.candidate_plans import ModelPlans, PlanVariants, memory_limits_of, with_memory_limits
from fxpipe.planning.tuning.candidate_search import MemoryLimits, search_candidates
from fxpipe.planning.tuning.candidates import (
    MAX_CHUNKS_PER_WORKER,
    TRIED_STAGES_PER_DEVICE,
    Candidate,
    candidates_of_model,
    candidates_of_plan,
    chunks_for_batch,
    rank_fitting,
)
from fxpipe.scheduling import ScheduleLike
from fxpipe.tracing import Traced
from fxpipe.utils.progress import progress


def prepare_best(
    profiled: ProfiledModel, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> PreparedGraph:
    """Plans the model; the tuner chooses the options in `settings.left`."""
    usual = replace(settings, left=frozenset())
    plans = ModelPlans(profiled, usual)
    limits: MemoryLimits = [worker.memory for worker in planned_workers(usual)]
    candidates = list(_free_candidates(profiled, settings))
    with progress("tuning", len(candidates), "candidates") as step:
        rows = search_candidates(candidates, lambda _: plans, limits, modes=_modes_to_try(settings), step=step)
    for row in rank_fitting(rows):
        assert row.plan is not None
        ready = plans.prepared(row.plan)
        ready = replace(ready, plan=with_memory_limits(row.plan, limits))
        are_usual = ready.settings.micro_batches(profiled.batch) == usual.micro_batches(profiled.batch)
        if are_usual or holds_for_chunks(profiled.traced, profiled.batch, args, kwargs, row.chunks, settings):
            return _with_usual_chunks(ready, usual, profiled.batch) if "chunks" in settings.left else ready
    return prepare_profiled(profiled, usual)


def _with_usual_chunks(ready: PreparedGraph, usual: Settings, batch: int) -> PreparedGraph:
    """Sets the usual number of micro-batches if each has one sample already: larger mini-batches may use more."""
    if ready.settings.chunks < batch or usual.chunks <= batch:
        return ready
    settings = replace(ready.settings, chunks=usual.chunks)
    return replace(ready, settings=settings, plan=replace(ready.plan, chunks=usual.chunks))


def _free_candidates(profiled: ProfiledModel, settings: Settings) -> Iterable[Candidate]:
    left, workers = settings.left, len(settings.workers)
    each = len(settings.placement) // workers
    counts = _chunks_to_try(profiled.batch, settings) if "chunks" in left else (settings.chunks,)
    return candidates_of_model(
        COMPARED_SCHEDULES if "schedule" in left else (settings.schedule,),
        counts,
        TRIED_STAGES_PER_DEVICE if "stages_per_device" in left else (each,),
    )


def _chunks_to_try(batch: int, settings: Settings) -> tuple[int, ...]:
    workers = len(settings.workers)
    counts = chunks_for_batch(batch, MAX_CHUNKS_PER_WORKER * len(settings.row_devices))
    if not callable(settings.schedule):
        return counts
    each = len(settings.placement) // workers
    return tuple(count for count in counts if _has_rows_for(settings.schedule, workers, each, count))


def _has_rows_for(function: ScheduleLike, workers: int, each: int, chunks: int) -> bool:
    try:
        place_stages(workers, each, function, chunks, None)
    except Exception:
        return False
    return True


def _modes_to_try(settings: Settings) -> tuple[str, ...] | None:
    if settings.checkpoint == "auto":
        return None
    return (settings.checkpoint,) if isinstance(settings.checkpoint, str) else ("never",)  # modes are in settings


def with_best_chunks(
    plan: Plan, traced: Traced, batch: int, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> Plan:
    """Returns the plan for mini-batches of another size: the same stages, with the best number of micro-batches.

    Returns the plan unchanged if no number fits into memory, or the model accepts none.

    Args:
        traced: the graph that will run, compared with the model for micro-batches of the new sizes.
        batch: samples of the mini-batch in `args` and `kwargs`.
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
