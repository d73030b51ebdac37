"""A schedule read from its text form: for a table of one's own, a diff, an issue, a test."""

from __future__ import annotations

import re

from fxpipe.errors import ScheduleError
from fxpipe.scheduling.actions import Action, Schedule
from fxpipe.scheduling.validation import validate

_HEAD = re.compile(r"(?P<name>.+): (?P<stages>\d+) stages?, (?P<micro_batches>\d+) micro-batch(es)?")
_DEVICE = re.compile(r"device (?P<device>\d+):")


def parse_schedule(text: str, name: str = "custom") -> Schedule:
    """The validated schedule that `text` writes down: one line for each device, its actions in order.

    What `print(schedule)` shows parses too: the line above the rows then says name, stages and micro-batches, which
    otherwise are `name` and as many as there are. Empty lines are passed over.

    Raises:
        ScheduleError: a word that is no action, rows in another order than they say, or a schedule that would not run.

    >>> print(parse_schedule("0F0 0F1 0B1 0B0 \\n 1F0 1F1 1B1 1B0", name="mine"))
    mine: 2 stages, 2 micro-batches
    device 0: 0F0 0F1 0B1 0B0
    device 1: 1F0 1F1 1B1 1B0
    """
    schedule = read_schedule(text, name)
    validate(schedule)
    return schedule


def read_schedule(text: str, name: str) -> Schedule:
    """As `parse_schedule`, but not validated."""
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
    words = line[label.end() :] if label else line
    return tuple(map(Action.parse, words.split()))
