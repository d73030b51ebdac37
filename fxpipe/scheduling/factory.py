"""`make_schedule`: from the name of a schedule or a custom table to a validated schedule.

It inserts recomputation before backward, validates the result, and refuses placements that the schedule cannot have. A
custom schedule is a table (a `Schedule`, or its text, a line for each device), or a pure function (micro-batches m,
stages n) -> rows: text, a `Schedule`, or a row of actions for each device. If there are fewer micro-batches than in the
table, the others are dropped: an action needs only actions of its micro-batch.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias, cast

from fxpipe.errors import ArgumentError, ArgumentTypeError, ScheduleError
from fxpipe.scheduling.actions import Action, Rows, Schedule
from fxpipe.scheduling.registry import BIDIRECTIONAL, ONE_F_ONE_B, SCHEDULES, Placement
from fxpipe.scheduling.replicas import one_f_one_b_of_replicas, rows_of_replicas
from fxpipe.scheduling.row_transforms import CHECKPOINTS, Checkpoint, expand_groups, neighbour_groups, with_recompute
from fxpipe.scheduling.streams import is_stream, steady_micro_batches, stream_flights, stream_schedule
from fxpipe.scheduling.validation import validate
from fxpipe.utils.units import did_you_mean, parse_count

_HEAD = re.compile(r"(?P<name>.+): (?P<stages>\d+) stages?, (?P<micro_batches>\d+) micro-batch(es)?")
_DEVICE = re.compile(r"device (?P<device>\d+):")
_BETWEEN_ACTIONS = re.compile(r"[\s,;(]+|\)OVERLAP_F_B\b")
# Actions of torch's tables that fxpipe does implicitly: transfers, and gradient sums of replicas.
_IMPLIED_ACTION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d+)")


def parse_schedule(text: str, name: str = "custom") -> Schedule:
    """Parses and validates a schedule: one line for each device, its actions in order.

    The output of `print(schedule)` parses, too: its first line gives name, stages and micro-batches. Without it the
    name is `name`, and the counts are taken from the actions. Empty lines are ignored.

    Tables of `torch.distributed.pipelining` parse as well: with commas between actions, `1I0` for a B with a separate
    W, and `(0F1;3B0)OVERLAP_F_B` for two actions that overlap there and run in sequence here. Transfers and sums of
    gradients (`0SEND_F1`, `0REDUCE_GRAD`) are skipped, since the runtime does them implicitly.

    Raises:
        ScheduleError: a word is not an action, rows are not in the order of their labels, or the schedule cannot run.

    >>> print(parse_schedule("0F0 0F1 0B1 0B0 \\n 1F0 1F1 1B1 1B0", name="mine"))
    mine: 2 stages, 2 micro-batches
    device 0: 0F0 0F1 0B1 0B0
    device 1: 1F0 1F1 1B1 1B0
    """
    schedule = read_schedule(text, name)
    validate(schedule)
    return schedule


def read_schedule(text: str, name: str) -> Schedule:
    """Parses a schedule like `parse_schedule`, without validation."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    head = _HEAD.fullmatch(lines[0]) if lines else None
    rows: list[tuple[Action, ...]] = []
    for d, line in enumerate(lines[1:] if head else lines):
        label = _DEVICE.match(line)
        if label and int(label["device"]) != d:
            where = f"expected the row of device {d} here, rows stand in the order of the devices"
            raise ScheduleError(f"{line!r}: {where}")
        rows.append(_parse_actions(line[label.end() :] if label else line))
    actions = [action for row in rows for action in row]
    if not actions:
        raise ScheduleError("no actions: expected one line for each device, as in '0F0 0F1 0B0 0B1'")
    if head:
        return Schedule(head["name"], int(head["stages"]), int(head["micro_batches"]), tuple(rows))
    stages, micro_batches = max(a.stage for a in actions) + 1, max(a.micro_batch for a in actions) + 1
    return Schedule(name, stages, micro_batches, tuple(rows))


ScheduleFunction: TypeAlias = Callable[[int, int], Schedule | str | Iterable[str | Iterable[Action | str]]]
ScheduleLike: TypeAlias = str | Schedule | ScheduleFunction  # a name or text, a table, a function

_ANY_ACTION = re.compile(r"(?<![^\s,(])\d+[FRBIWU]\d+(?![^\s,;])")


def as_schedule_like(schedule: object, known: Iterable[str] = SCHEDULES) -> ScheduleLike:
    """Returns a known name, a table or a function; text is parsed. `known`: names for the error message."""
    if isinstance(schedule, str) and schedule not in SCHEDULES and _ANY_ACTION.search(schedule):
        return parse_schedule(schedule)
    if isinstance(schedule, Schedule):
        in_tuples = isinstance(schedule.rows, tuple) and all(isinstance(row, tuple) for row in schedule.rows)
        return schedule if in_tuples else replace(schedule, rows=tuple(map(tuple, schedule.rows)))  # used as a key
    if (isinstance(schedule, str) and schedule in SCHEDULES) or (callable(schedule) and isinstance(schedule, Hashable)):
        return schedule
    refuse_bidirectional(schedule)
    raise ArgumentError(
        f"schedule={schedule!r} is unknown; there are {', '.join(map(repr, known))}; or give your own: a table "
        "('0F0 0F1 0B0 0B1', a line for each device), or a function (micro_batches, stages) -> table"
        f"{did_you_mean(schedule, known)}"
    )


def refuse_bidirectional(schedule: object) -> None:
    """Raises `ArgumentError` for the name of a schedule that needs each stage on two devices."""
    if isinstance(schedule, str) and schedule in BIDIRECTIONAL:
        raise ArgumentError(
            f"schedule={schedule!r} is bidirectional: micro-batches go in at both ends, so each stage is on two "
            f"devices, with its weights on both, and here a stage is on one. Use {BIDIRECTIONAL[schedule]!r}, which "
            "does the same there and back with each stage in one place"
        )


def _custom_schedule(schedule: Schedule | ScheduleFunction, n: int, m: int) -> Schedule:
    """Makes the table for n stages and m micro-batches, without validation."""
    table = schedule if isinstance(schedule, Schedule) else _call_function(schedule, n, m)
    if table.replicas:
        raise ArgumentError(
            f"schedule {table.name!r} is a table with replicas, which a plan has, not a table: give the rows of "
            "devices without, one for each"
        )
    if table is not schedule:
        return Schedule(table.name, n, m, table.rows)
    if table.stages != n:
        raise ArgumentError(f"schedule {table.name!r} is a table for {table.stages} stages, but there are {n}")
    if table.micro_batches < m:
        raise ArgumentError(
            f"schedule {table.name!r} is a table for {table.micro_batches} micro-batches, but there are {m}: "
            f"give so many (chunks={table.micro_batches}), a longer table, or a function (micro_batches, stages) -> "
            "table"
        )
    rows = tuple(tuple(action for action in row if action.micro_batch < m) for row in table.rows)
    return Schedule(table.name, n, m, rows)


def _call_function(function: ScheduleFunction, n: int, m: int) -> Schedule:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        result = function(m, n)
    except Exception as error:
        error.add_note(f"fxpipe: raised by the schedule function {name!r}, called with micro_batches={m}, stages={n}")
        raise
    if isinstance(result, str):
        result = read_schedule(result, name)
    if isinstance(result, Schedule):
        return result
    try:
        rows: Rows = tuple(_parse_actions(row) for row in result)
    except TypeError:
        raise ScheduleError(
            f"schedule function {name!r} returned {result!r} for micro_batches={m}, stages={n}; expected text, a "
            "Schedule, or a row of actions for each device"
        ) from None
    return Schedule(name, n, m, rows)


def _parse_actions(row: str | Iterable[Action | str]) -> tuple[Action, ...]:
    words = [word for word in _BETWEEN_ACTIONS.split(row) if word] if isinstance(row, str) else row
    explicit = (word for word in words if isinstance(word, Action) or not _IMPLIED_ACTION.fullmatch(word))
    return tuple(word if isinstance(word, Action) else Action.parse(word) for word in explicit)


def placement_of(schedule: Schedule) -> Placement:
    device_of = {action.stage: d for d, row in enumerate(schedule.rows) for action in row}
    return tuple(device_of[j] for j in range(schedule.stages))


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
        schedule: one of `SCHEDULES`, or a custom table or function (see `fxpipe.scheduling.factory`).
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
    placed = None if placement is None else _check_device_numbers(placement, n)
    if placed is None and isinstance(known_schedule, str):  # a custom schedule contains its placement
        recipe = SCHEDULES[known_schedule]
        each = recipe.stages_per_device
        if n % each:
            raise ArgumentError(
                f"schedule {known_schedule!r} has {each} stages on each device, and {n} cannot be shared out so: give "
                f"a multiple of {each}"
            )
        placed = recipe.placement(n // each, each)
    modes = _check_modes(checkpoint, n)
    counts = tuple(parse_count("replicas", count, "a whole number of devices for each") for count in replicas)
    return _make_schedule(known_schedule, n, m, modes, placed, counts if max(counts, default=1) > 1 else ())


def steady_schedule(
    schedule: ScheduleLike,
    micro_batches: int,
    modes: tuple[str, ...],
    placement: Placement,
    replicas: tuple[int, ...] = (),
    is_joint: bool = False,
) -> Schedule:
    """Makes the schedule of a step; of a stream, with as many mini-batches as are in flight. `replicas`: of devices."""
    n, of_stages = len(placement), tuple(replicas[k] for k in placement) if replicas else ()
    if is_joint and isinstance(schedule, str) and is_stream(schedule):
        count = stream_flights(n, of_stages, micro_batches)[0]
        return stream_schedule(schedule, n, micro_batches, count, modes, of_stages, is_joint)
    m = steady_micro_batches(schedule, n, micro_batches, of_stages)
    return make_schedule(schedule, n, m, modes, placement, replicas)


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
        plain = _custom_schedule(schedule_like, n, m)
        validate(plain)
        if placement not in (None, placement_of(plain)):
            raise ArgumentError(
                f"schedule {plain.name!r} has its stages on devices {placement_of(plain)}, and they are on "
                f"{placement}: give each row the stages of its device"
            )
    if replicas:
        plain = _with_replicas(plain, replicas, schedule_like in ONE_F_ONE_B)
    schedule = replace(plain, rows=with_recompute(plain.rows, m, modes))
    validate(schedule)
    return replace(schedule, is_validated=True)


def check_placement(name: str, placement: Placement) -> None:
    """Raises `ArgumentError` if the schedule of that name cannot have its stages on these devices."""
    recipe, n, devices = SCHEDULES[name], len(placement), max(placement) + 1
    each, least = n // devices, recipe.stages_per_device
    is_number = not recipe.takes(each)
    if recipe.has_fixed_placement and (is_number or placement != recipe.placement(devices, each)):
        there = recipe.placement(devices, least)
        remedy = f"give as many (stages_per_device={least})" if is_number else "put them there"
        words = f"{least} stage{'' if least == 1 else 's'}" if least == recipe.most else f"{least} or more stages"
        raise ArgumentError(
            f"schedule {name!r} needs {words} on each device, placed as in {there}, but is given {n} "
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
