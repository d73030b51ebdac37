"""Custom schedules: a table, or a pure function that makes tables.

    a table         `Schedule`, or its text, a line for each device
    a function      (micro-batches m, stages n) -> rows: text, a `Schedule`, or a row of actions for each device

A table is for a number of micro-batches. If there are fewer, as in the last mini-batch of an epoch, the others are
dropped: the remaining actions can still run, since an action needs only actions of its micro-batch. A function is
called again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TypeAlias

from fxpipe.errors import ArgumentError, ScheduleError
from fxpipe.scheduling.actions import Action, Rows, Schedule
from fxpipe.scheduling.registry import BIDIRECTIONAL, SCHEDULES, Placement
from fxpipe.scheduling.validation import validate
from fxpipe.utils.units import did_you_mean

# -- Parsing the text form of a schedule: for a custom table, a diff, an issue, a test -------------------------------

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
    rows = tuple(_parse_row(d, line) for d, line in enumerate(lines[1:] if head else lines))
    actions = [action for row in rows for action in row]
    if not actions:
        raise ScheduleError("no actions: expected one line for each device, as in '0F0 0F1 0B0 0B1'")
    if head:
        return Schedule(head["name"], int(head["stages"]), int(head["micro_batches"]), rows)
    stages, micro_batches = max(a.stage for a in actions) + 1, max(a.micro_batch for a in actions) + 1
    return Schedule(name, stages, micro_batches, rows)


def _parse_row(d: int, line: str) -> tuple[Action, ...]:
    label = _DEVICE.match(line)
    if label and int(label["device"]) != d:
        raise ScheduleError(f"{line!r}: expected the row of device {d} here, rows stand in the order of the devices")
    return _parse_actions(line[label.end() :] if label else line)


ScheduleFunction: TypeAlias = Callable[[int, int], Schedule | str | Iterable[str | Iterable[Action | str]]]
ScheduleLike: TypeAlias = str | Schedule | ScheduleFunction  # a name or text, a table, a function

_ANY_ACTION = re.compile(r"(?<![^\s,(])\d+[FRBIWU]\d+(?![^\s,;])")


def as_schedule_like(schedule: object, known: Iterable[str] = SCHEDULES) -> ScheduleLike:
    """Returns a known name, a table or a function; text is parsed. `known`: names for the error message.

    Raises:
        ArgumentError: an unknown name, or an unsupported object.
        ScheduleError: text that is not a schedule, or a schedule that cannot run.
    """
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


def custom_schedule(schedule: Schedule | ScheduleFunction, n: int, m: int) -> Schedule:
    """Makes the table for n stages and m micro-batches, without validation."""
    if not isinstance(schedule, Schedule):
        return _call_function(schedule, n, m)
    _refuse_replicas(schedule)
    if schedule.stages != n:
        raise ArgumentError(f"schedule {schedule.name!r} is a table for {schedule.stages} stages, but there are {n}")
    if schedule.micro_batches < m:
        raise ArgumentError(
            f"schedule {schedule.name!r} is a table for {schedule.micro_batches} micro-batches, but there are {m}: "
            f"give so many (chunks={schedule.micro_batches}), a longer table, or a function (micro_batches, stages) -> "
            "table"
        )
    rows = tuple(tuple(action for action in row if action.micro_batch < m) for row in schedule.rows)
    return Schedule(schedule.name, n, m, rows)


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
        _refuse_replicas(result)
        return Schedule(result.name, n, m, result.rows)
    try:
        rows: Rows = tuple(_parse_actions(row) for row in result)
    except TypeError:
        raise ScheduleError(
            f"schedule function {name!r} returned {result!r} for micro_batches={m}, stages={n}; expected text, a "
            "Schedule, or a row of actions for each device"
        ) from None
    return Schedule(name, n, m, rows)


def _refuse_replicas(schedule: Schedule) -> None:
    if schedule.replicas:
        raise ArgumentError(
            f"schedule {schedule.name!r} is a table with replicas, which a plan has, not a table: give the rows of "
            "devices without, one for each"
        )


def _parse_actions(row: str | Iterable[Action | str]) -> tuple[Action, ...]:
    words = [word for word in _BETWEEN_ACTIONS.split(row) if word] if isinstance(row, str) else row
    explicit = (word for word in words if isinstance(word, Action) or not _IMPLIED_ACTION.fullmatch(word))
    return tuple(word if isinstance(word, Action) else Action.parse(word) for word in explicit)


def placement_of(schedule: Schedule) -> Placement:
    """Returns the device of each stage."""
    device_of = {action.stage: d for d, row in enumerate(schedule.rows) for action in row}
    return tuple(device_of[j] for j in range(schedule.stages))
