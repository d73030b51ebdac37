"""A schedule of one's own: a table, or a pure function that makes tables.

    a table         `Schedule`, or its text, a line for each device
    a function      (micro-batches m, stages n) -> rows: text, a `Schedule`, or a row of actions for each device

A table is for so many micro-batches. Of fewer, as in the last mini-batch of an epoch, the first ones stay and the
others are left out: what is left still stands in an order that can run, since an action needs those of its own
micro-batch only. A function is asked again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TypeAlias

from fxpipe.errors import ArgumentError, ScheduleError
from fxpipe.scheduling.actions import Action, Rows, Schedule
from fxpipe.scheduling.known import SCHEDULES, Placement
from fxpipe.scheduling.text import parse_schedule, read_schedule

Function: TypeAlias = Callable[[int, int], "Schedule | str | Iterable[str | Iterable[Action | str]]"]
ScheduleLike: TypeAlias = "str | Schedule | Function"  # a name or text, a table, a function

_SOME_ACTION = re.compile(r"(?<!\S)\d+[FRBWU]\d+(?!\S)")


def as_schedule_like(given: object, known: Iterable[str] = SCHEDULES) -> ScheduleLike:
    """A name that is known, a table that can run, or a function: text is parsed. `known`: the names to tell of.

    Raises:
        ArgumentError: an unknown name, or something else.
        ScheduleError: text that is no schedule, or a schedule that would not run.
    """
    if isinstance(given, str) and given not in SCHEDULES and _SOME_ACTION.search(given):
        return parse_schedule(given)
    if isinstance(given, Schedule):
        in_tuples = isinstance(given.rows, tuple) and all(isinstance(row, tuple) for row in given.rows)
        return given if in_tuples else replace(given, rows=tuple(map(tuple, given.rows)))  # it is to be a key
    if (isinstance(given, str) and given in SCHEDULES) or (callable(given) and isinstance(given, Hashable)):
        return given
    raise ArgumentError(
        f"schedule={given!r} is unknown; there are {', '.join(map(repr, known))}; or give your own: a table "
        "('0F0 0F1 0B0 0B1', a line for each device), or a function (micro_batches, stages) -> table"
    )


def own_schedule(given: Schedule | Function, n: int, m: int) -> Schedule:
    """The table for n stages and m micro-batches; not validated."""
    if not isinstance(given, Schedule):
        return _made(given, n, m)
    if given.stages != n:
        raise ArgumentError(f"schedule {given.name!r} is a table for {given.stages} stages, but there are {n}")
    if given.micro_batches < m:
        raise ArgumentError(
            f"schedule {given.name!r} is a table for {given.micro_batches} micro-batches, but there are {m}: give "
            f"chunks={given.micro_batches}, a longer table, or a function (micro_batches, stages) -> table"
        )
    rows = tuple(tuple(action for action in row if action.micro_batch < m) for row in given.rows)
    return Schedule(given.name, n, m, rows)


def _made(function: Function, n: int, m: int) -> Schedule:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        made = function(m, n)
    except Exception as error:
        error.add_note(f"fxpipe: raised by the schedule function {name!r}, called with micro_batches={m}, stages={n}")
        raise
    if isinstance(made, str):
        made = read_schedule(made, name)
    if isinstance(made, Schedule):
        return Schedule(made.name, n, m, made.rows)
    try:
        rows: Rows = tuple(_row(row) for row in made)
    except TypeError:
        raise ScheduleError(
            f"schedule function {name!r} returned {made!r} for micro_batches={m}, stages={n}; expected text, a "
            "Schedule, or a row of actions for each device"
        ) from None
    return Schedule(name, n, m, rows)


def _row(row: str | Iterable[Action | str]) -> tuple[Action, ...]:
    words = row.split() if isinstance(row, str) else row
    return tuple(word if isinstance(word, Action) else Action.parse(word) for word in words)


def placement_of(schedule: Schedule) -> Placement:
    """For each stage the device in whose row it is."""
    device_of = {action.stage: d for d, row in enumerate(schedule.rows) for action in row}
    return tuple(device_of[j] for j in range(schedule.stages))
