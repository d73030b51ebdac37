"""`make_schedule`: from the name of a schedule or a custom table to a validated schedule.

It inserts recomputation before backward, validates the result, and refuses placements that the schedule cannot have.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import cast

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.scheduling.actions import Schedule
from fxpipe.scheduling.custom import ScheduleFunction, ScheduleLike, as_schedule_like, custom_schedule, placement_of
from fxpipe.scheduling.registry import ONE_F_ONE_B, SCHEDULES, Placement
from fxpipe.scheduling.replicas import one_f_one_b_of_replicas, rows_of_replicas
from fxpipe.scheduling.row_transforms import (
    CHECKPOINTS,
    Checkpoint,
    expand_groups,
    neighbour_groups,
    with_recompute,
)
from fxpipe.scheduling.validation import validate
from fxpipe.utils.units import did_you_mean, parse_count


def make_schedule(
    schedule: ScheduleLike,
    stages: int,
    micro_batches: int,
    checkpoint: str | Sequence[str] = "never",
    placement: Sequence[int] | None = None,
    replicas: Sequence[int] = (),
) -> Schedule:
    """Makes a validated schedule. Results are cached by the arguments.

    Args:
        schedule: one of `SCHEDULES`, or a custom table or function (see `fxpipe.scheduling.custom`).
        stages: number of stages.
        micro_batches: number of micro-batches; fewer than stages is possible and idles more. A custom table may be
            for more.
        checkpoint: micro-batches to recompute before their backward: one of `CHECKPOINTS`, or one for each stage.
            "except_last" is all but the last, m - 1. A schedule without backward recomputes nothing.
        placement: the device, and so the row, of each stage. Default: the placement that the schedule requires
            (2 stages on each device in the interleaved and the V-shaped ones), else a device for each stage.
        replicas: number of replicas of each device, which take micro-batches in turn and have a row each
            (`fxpipe.scheduling.replicas`). Default: one for each.

    Raises:
        ArgumentError: an unknown name or mode, a number below 1, a device without a stage, a placement that the
            schedule cannot have, or `replicas` for another number of devices.
        ArgumentTypeError: a number that is not an integer.
        ScheduleError: a custom schedule cannot run.

    >>> print(make_schedule("inference", stages=4, micro_batches=3, placement=(0, 1, 0, 1)))
    inference: 4 stages, 3 micro-batches
    device 0: 0F0 0F1 2F0 2F1 0F2 2F2
    device 1: 1F0 1F1 3F0 3F1 1F2 3F2
    """
    known_schedule = as_schedule_like(schedule)
    n, m = parse_count("stages", stages), parse_count("micro_batches", micro_batches)
    placed = _default_placement(known_schedule, n) if placement is None else _check_device_numbers(placement, n)
    return _make_schedule(known_schedule, n, m, _check_modes(checkpoint, n), placed, _check_replicas(replicas))


def schedule_text(schedule: ScheduleLike, micro_batches: int, placement: Placement) -> str:
    """Returns an argument from which `make_schedule` makes the same schedule: a name, or the text of a custom table."""
    if isinstance(schedule, str):
        return schedule
    return str(make_schedule(schedule, len(placement), micro_batches, placement=placement))


@lru_cache(maxsize=128)
def _make_schedule(
    schedule_like: ScheduleLike,
    n: int,
    m: int,
    modes: tuple[Checkpoint, ...],
    placement: Placement | None,
    replicas: tuple[int, ...],
) -> Schedule:
    if isinstance(schedule_like, str):
        assert placement is not None
        check_placement(schedule_like, placement)
        plain = Schedule(schedule_like, n, m, SCHEDULES[schedule_like].rows(m, placement))
    else:
        plain = _checked_custom(schedule_like, n, m, placement)
    if replicas:
        plain = _with_replicas(plain, replicas, schedule_like in ONE_F_ONE_B)
    schedule = replace(plain, rows=with_recompute(plain.rows, m, modes))
    validate(schedule)
    return replace(schedule, is_validated=True)


def _default_placement(schedule: ScheduleLike, n: int) -> Placement | None:
    """Returns the placement of a schedule given by name; a custom schedule contains its placement."""
    if not isinstance(schedule, str):
        return None
    recipe = SCHEDULES[schedule]
    if n % recipe.stages_per_device:
        raise ArgumentError(
            f"schedule {schedule!r} has {recipe.stages_per_device} stages on each device, and {n} cannot be shared out "
            f"so: give a multiple of {recipe.stages_per_device}"
        )
    return recipe.placement(n // recipe.stages_per_device, recipe.stages_per_device)


def check_placement(name: str, placement: Placement) -> None:
    """Raises `ArgumentError` if the schedule of that name cannot have its stages on these devices."""
    recipe, n, devices = SCHEDULES[name], len(placement), max(placement) + 1
    if not recipe.has_fixed_placement:
        return
    each = n // devices
    is_number = not recipe.takes(each)
    if is_number or placement != recipe.placement(devices, each):
        there = recipe.placement(devices, recipe.stages_per_device)
        remedy = f"give as many (stages_per_device={recipe.stages_per_device})" if is_number else "put them there"
        raise ArgumentError(
            f"schedule {name!r} needs {recipe.stages_words} on each device, placed as in {there}, but is given {n} "
            f"stages on {devices} devices, placed as in {placement}: {remedy}, "
            "or use '1f1b' or 'zero_bubble', which take any"
        )


def _with_replicas(plain: Schedule, replicas: tuple[int, ...], is_one_f_one_b: bool) -> Schedule:
    if len(replicas) != len(plain.rows):
        raise ArgumentError(f"replicas={replicas} has {len(replicas)} entries for {len(plain.rows)} devices")
    placement = placement_of(plain)
    rows, groups = rows_of_replicas(plain.rows, replicas), neighbour_groups(placement)
    devices = [placement[group[0]] for group in groups]
    if is_one_f_one_b and devices == [*range(len(replicas))]:
        rows = expand_groups(one_f_one_b_of_replicas(plain.micro_batches, replicas), groups)
    return replace(plain, rows=rows, replicas=replicas)


def _checked_custom(custom: Schedule | ScheduleFunction, n: int, m: int, placement: Placement | None) -> Schedule:
    schedule = custom_schedule(custom, n, m)
    validate(schedule)
    if placement not in (None, placement_of(schedule)):
        raise ArgumentError(
            f"schedule {schedule.name!r} has its stages on devices {placement_of(schedule)}, and they are on "
            f"{placement}: give each row the stages of its device"
        )
    return schedule


def _check_modes(checkpoint: str | Sequence[str], n: int) -> tuple[Checkpoint, ...]:
    modes = tuple(checkpoint) if isinstance(checkpoint, (tuple, list)) else (cast(str, checkpoint),) * n
    if len(modes) != n:
        raise ArgumentError(
            f"checkpoint={checkpoint!r} has {len(modes)} modes for {n} stages: give one for each, or one for all"
        )
    for mode in modes:
        if mode not in CHECKPOINTS:
            there_are = f"there are {', '.join(map(repr, CHECKPOINTS))}{did_you_mean(mode, CHECKPOINTS)}"
            raise ArgumentError(f"checkpoint={mode!r} is unknown; {there_are}")
    return cast(tuple[Checkpoint, ...], modes)


def _check_replicas(replicas: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of replicas of each device; empty if each has one."""
    counts = tuple(parse_count("replicas", count, "a whole number of devices for each") for count in replicas)
    return counts if any(count > 1 for count in counts) else ()


def _check_device_numbers(placement: Sequence[int], n: int) -> Placement:
    if len(placement) != n:
        raise ArgumentError(f"placement has {len(placement)} entries for {n} stages: give the device of each")
    try:
        numbers = tuple(map(operator.index, placement))
    except TypeError:
        raise ArgumentTypeError(f"placement={placement!r}: expected the number of a device for each stage") from None
    if set(numbers) != set(range(max(numbers) + 1)):
        raise ArgumentError(
            f"placement={numbers} must name devices 0, 1, ... without a gap, since one without a stage would have "
            "nothing to do"
        )
    return numbers
