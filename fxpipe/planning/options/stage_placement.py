"""The requested schedule, and the placement of stages on workers that follows from it.

A named schedule defines the number of stages of each worker and their placement; a table has them in its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fxpipe.errors import ArgumentError
from fxpipe.scheduling import (
    SCHEDULES,
    STREAM_POLICIES,
    ActionKind,
    Schedule,
    ScheduleLike,
    as_schedule_like,
    check_placement,
    make_schedule,
    placement_of,
)

if TYPE_CHECKING:
    from fxpipe.planning.plans import Plan

TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != "inference")
# Schedules whose steps are compared: a step of a stream is a step of 1F1B.
COMPARED_SCHEDULES = tuple(name for name in TRAINING_SCHEDULES if name not in STREAM_POLICIES)


# The order of a call and its backward, and of a step whose loss needs all samples: every F before the first B.
DROP_IN_SCHEDULE = "gpipe"


def parse_training_schedule(value: Any) -> ScheduleLike:
    """Checks a name, a table or a function that `forward_backward` can run."""
    if value == "inference":
        raise ArgumentError(
            f"schedule={value!r} is unknown for training; accepted are {', '.join(map(repr, TRAINING_SCHEDULES))}; "
            "to evaluate, call the pipe under torch.no_grad()"
        )
    schedule = as_schedule_like(value, TRAINING_SCHEDULES)
    if isinstance(schedule, Schedule):
        _check_for_training(schedule)
    return schedule


def _check_for_training(schedule: Schedule) -> None:
    actions = [action for row in schedule.rows for action in row]
    update = next((action for action in actions if action.kind is ActionKind.UPDATE), None)
    if update is not None:
        raise ArgumentError(
            f"schedule {schedule.name!r} holds {update}, but weights are updated by your optimizer, when the step has "
            "ended: take all U out"
        )
    if not any(action.kind is ActionKind.BACKWARD for action in actions):
        raise ArgumentError(f"schedule {schedule.name!r} has no B, and so trains nothing: add every B")
    if not all(schedule.rows):
        raise ArgumentError(
            f"schedule {schedule.name!r} leaves device {schedule.rows.index(())} idle: give it a stage, or take its "
            "row out and leave it out of devices"
        )


def worker_count_for(stages: int, schedule: ScheduleLike, per_device: int | None) -> int:
    if isinstance(schedule, Schedule):
        return len(schedule.rows)
    each = _stages_per_worker(schedule, per_device)
    if stages % each:
        by = "" if per_device else f", as {schedule!r} has it"
        raise ArgumentError(
            f"stages={stages} cannot be shared out with stages_per_device={each}{by}; give a multiple of it"
        )
    return stages // each


def chunks_of_schedule(schedule: ScheduleLike, chunks: int | str, plan: Plan | None = None) -> int | str:
    """Returns the number of micro-batches if `chunks` is "auto": a table's or the plan's; 1 for PipeDream.

    The result of a stream depends on the number, so a plan's number is used even if it was made for another schedule.
    """
    if schedule == "pipedream" and chunks == "auto":
        return plan.chunks if plan is not None and plan.schedule == schedule else 1
    if not isinstance(schedule, Schedule):
        return chunks
    if chunks not in ("auto", schedule.micro_batches):
        raise ArgumentError(
            f"chunks={chunks!r}, but schedule {schedule.name!r} is a table for {schedule.micro_batches} micro-batches: "
            "leave chunks out, or give a function (micro_batches, stages) -> table"
        )
    return schedule.micro_batches


def place_stages(
    workers: int, per_device: int | None, schedule: ScheduleLike, chunks: int, plan: Plan | None
) -> tuple[int, ...]:
    """Places each stage on a worker, as the schedule or the plan defines.

    Raises:
        ArgumentError: the schedule does not support this placement.
        ScheduleError: a user's schedule cannot run.
    """
    if plan is not None and per_device is None:
        placement, accepted = plan.placement, max(plan.placement) + 1
        if workers != accepted:
            shared = f" on {accepted} devices" if accepted < len(placement) else ""
            raise ArgumentError(
                f"plan has {len(placement)} stages{shared}, but devices has {workers} entries; give {accepted}"
            )
    else:
        placement = _placement(workers, per_device, schedule, chunks)
    if plan is not None and len(plan.stages) != len(placement):
        raise ArgumentError(
            f"plan has {len(plan.stages)} stages, but devices has {workers} entries and "
            f"stages_per_device={per_device}, which makes {len(placement)}; leave stages_per_device to the plan"
        )
    if isinstance(schedule, str):  # named schedules run on any placement that they support
        check_placement(schedule, placement)
        return placement
    rows = make_schedule(schedule, len(placement), chunks, placement=placement)
    if callable(schedule):
        _check_for_training(rows)
    return placement


def _placement(workers: int, per_device: int | None, schedule: ScheduleLike, chunks: int) -> tuple[int, ...]:
    each = _stages_per_worker(schedule, per_device)
    if isinstance(schedule, str):
        return SCHEDULES[schedule].placement(workers, each)
    table = schedule if isinstance(schedule, Schedule) else make_schedule(schedule, workers * each, chunks)
    if len(table.rows) != workers:
        raise ArgumentError(
            f"schedule {table.name!r} has rows for {len(table.rows)} devices, but devices has {workers} entries: give "
            f"{len(table.rows)}"
        )
    if per_device is not None and table.stages != workers * per_device:
        raise ArgumentError(
            f"schedule {table.name!r} has {table.stages} stages, but with stages_per_device={per_device} there are "
            f"{workers * per_device}: leave stages_per_device out"
        )
    return placement_of(table)


def _stages_per_worker(schedule: ScheduleLike | Callable[..., Any], per_device: int | None) -> int:
    if per_device is not None:
        return per_device
    return SCHEDULES[schedule].stages_per_device if isinstance(schedule, str) else 1
