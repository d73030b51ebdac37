"""What was left to planning (`chunks="auto"`, `schedule="auto"`) chosen by the tuner, once a model has been studied.

The choice hangs on the profile alone: the same profile, the same choice. The graph was compared with the model for the
usual micro-batches only, so before others are taken it is compared for them as well; where it is not the model there,
or the model refuses them (batch norm, of a single value), the next best way is tried. Where no way fits into memory
planning goes on with the usual values, and says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fxpipe.deciding.sites import workers_of
from fxpipe.placing import TRAINING_SCHEDULES, placed
from fxpipe.planning.preparing import Prepared, planned
from fxpipe.planning.studying import Studied, is_the_model
from fxpipe.plans import Plan
from fxpipe.progress import progress
from fxpipe.scheduling import ScheduleLike
from fxpipe.settings import Settings
from fxpipe.tracing import Traced
from fxpipe.tuning.candidates import (
    PER_WORKER,
    STAGES_PER_DEVICE,
    Candidate,
    candidates,
    candidates_of_plan,
    chunks_for_batch,
)
from fxpipe.tuning.plans import OfModel, OfPlan, limits_of, with_limits
from fxpipe.tuning.rows import preferred
from fxpipe.tuning.search import Limits, search


def planned_best(studied: Studied, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings) -> Prepared:
    """The plan with what `settings.left` names as the tuner would have it."""
    usual = replace(settings, left=frozenset())
    plans = OfModel(studied, usual)
    limits: Limits = [worker.memory for worker in workers_of(usual)]
    found = list(_candidates(studied, settings))
    with progress("tuning", len(found), "candidates") as step:
        rows = search(found, plans, limits, modes=_modes(settings), step=step)
    for row in preferred(rows):
        assert row.plan is not None
        ready = plans.prepared(row.plan)
        ready = replace(ready, plan=with_limits(row.plan, limits))
        are_usual = ready.settings.micro_batches(studied.batch) == usual.micro_batches(studied.batch)
        if are_usual or is_the_model(studied.traced, studied.batch, args, kwargs, row.chunks, settings):
            return _for_other_batches(ready, usual, studied.batch) if "chunks" in settings.left else ready
    return planned(studied, usual)


def _for_other_batches(ready: Prepared, usual: Settings, batch: int) -> Prepared:
    """Where each sample is a micro-batch already, more of them may be better for larger mini-batches."""
    if ready.settings.chunks < batch or usual.chunks <= batch:
        return ready
    settings = replace(ready.settings, chunks=usual.chunks)
    return replace(ready, settings=settings, plan=replace(ready.plan, chunks=usual.chunks))


def _candidates(studied: Studied, settings: Settings) -> Iterable[Candidate]:
    left, workers = settings.left, len(settings.workers)
    each = len(settings.placement) // workers
    counts = _counts(studied.batch, settings) if "chunks" in left else (settings.chunks,)
    return candidates(
        TRAINING_SCHEDULES if "schedule" in left else (settings.schedule,),
        counts,
        STAGES_PER_DEVICE if "stages_per_device" in left else (each,),
    )


def _counts(batch: int, settings: Settings) -> tuple[int, ...]:
    """The numbers of micro-batches to try, those that the schedule can have."""
    workers = len(settings.workers)
    counts = chunks_for_batch(batch, PER_WORKER * workers)
    if not callable(settings.schedule):
        return counts
    each = len(settings.placement) // workers
    return tuple(count for count in counts if _makes(settings.schedule, workers, each, count))


def _makes(function: ScheduleLike, workers: int, each: int, chunks: int) -> bool:
    """A function of the user's need not know every number of micro-batches."""
    try:
        placed(workers, each, function, chunks, None)
    except Exception:
        return False
    return True


def _modes(settings: Settings) -> tuple[str, ...] | None:
    if settings.checkpoint == "auto":
        return None
    return (settings.checkpoint,) if isinstance(settings.checkpoint, str) else ("never",)  # these are in the settings


def with_chunks_for(
    plan: Plan, traced: Traced, batch: int, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> Plan:
    """The plan for other mini-batches than it was made for: its stages, in the micro-batches that now suit them best.

    Stages, placement, schedule and checkpoint modes stay. As the plan was where none fits into memory, or the model
    takes none.

    Args:
        traced: the graph that will run, to be compared with the model for micro-batches of the new sizes.
        batch: samples of the mini-batch, which `args` and `kwargs` hold.
    """
    each = max(map(plan.placement.count, plan.placement))
    ways = [Candidate(settings.schedule, count, each) for count in _counts(batch, settings)]
    for row in preferred(search(ways, OfPlan(plan, batch), limits_of(plan), modes=(settings.checkpoint,))):
        assert row.plan is not None
        if is_the_model(traced, batch, args, kwargs, row.chunks, settings):
            return row.plan
    return plan


def with_schedule_for(plan: Plan, settings: Settings) -> Settings:
    """With the schedule that suits the stages of a plan best; the usual one where none fits into memory."""
    batch = plan.batch or settings.chunks * plan.micro_batch
    modes = None if settings.checkpoint == "auto" else (settings.checkpoint,)
    rows = search(
        candidates_of_plan(plan, TRAINING_SCHEDULES, (settings.chunks,)),
        OfPlan(plan, batch),
        limits_of(plan),
        modes=modes,
    )
    best = next((row.schedule for row in preferred(rows)), settings.schedule)
    return replace(settings, schedule=best, left=frozenset())
