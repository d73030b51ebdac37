"""Rows of a model from a process of its own: where it crashes or hangs, that is a row, and the next go on in another.

`python -m zoo.processes` answers a line as `gpt2 fxpipe train 3` with a row.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from helpers.answering import AnsweringProcess, NoAnswerError, serve

from zoo.entry import Entry, Row, Task


def rows_of(entry: Entry, tasks: Sequence[Task], limit: float) -> list[Row]:
    """A row for each task. `limit`: seconds that one may take."""
    rows: list[Row] = []
    with contextlib.closing(AnsweringProcess("zoo.processes", limit=limit)) as process:
        for way, mode, stages in tasks:
            try:
                rows.append(Row(**process.ask(f"{entry.name} {way} {mode} {stages}")))
            except NoAnswerError as error:
                rows.append(Row(entry.name, entry.family, way, mode, stages, error.kind, str(error)))
    return rows


@functools.cache
def _entry(name: str) -> tuple[Entry, str]:
    """An entry, and why it cannot be built; empty if it can."""
    from zoo import BY_NAME

    if name in BY_NAME:
        return BY_NAME[name], ""
    from tools.drawn_models import entry_of

    entry = entry_of(name)
    try:
        entry.build()
    except Exception as error:  # of sizes that do not fit each other
        return entry, f"{type(error).__name__}: {error}"
    return entry, ""


def _answer(line: str) -> dict[str, Any]:
    from zoo.ways import run

    name, way, mode, stages = line.rsplit(maxsplit=3)
    entry, why_not_built = _entry(name)
    if why_not_built:
        row = Row(entry.name, entry.family, way, mode, int(stages), "not built", why_not_built[:300])
    else:
        row = run(entry, way, mode, int(stages))
    return dataclasses.asdict(row)


if __name__ == "__main__":
    serve(_answer)
