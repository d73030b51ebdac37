"""The text of a sweep: a row for each number of devices and schedule."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fxpipe.drawing.columns import NOTHING, table, wrapped
from fxpipe.inspect.tables.steps import fits_cell
from fxpipe.inspect.tables.sweep import Row
from fxpipe.units import counted, human_bytes, human_seconds, percent

HEADERS = (
    "devices",
    "schedule",
    "micro-\nbatches",
    "checkpoint",
    "step",
    "speed-up",
    "bubble",
    "peak memory",
    "fits",
)


def sweep_table(rows: Sequence[Row]) -> str:
    """A `*` marks the fastest that fits of each number of devices."""
    best = {row.devices: row for row in sorted(rows, key=_slowness, reverse=True) if row.fits}
    firsts = [k == 0 or rows[k - 1].devices != row.devices for k, row in enumerate(rows)]
    cells = [_cells(row, best.get(row.devices) is row, first) for row, first in zip(rows, firsts, strict=True)]
    notes = [wrapped(f"- {line}") for line in _problems(rows)]
    legend = ("* the fastest that fits" if best else "nothing fits") + _cores(rows)
    head = "numbers of devices and schedules, as simulated; each number is cut anew, once for schedules placed alike"
    lines = [head, "", table(cells, HEADERS, left=("schedule", "checkpoint")), "", legend]
    return "\n".join(lines + (["", "no plan for", *notes] if notes else []))


def _cores(rows: Sequence[Row]) -> str:
    """What is measured on a CPU holds for CPU devices that have a core each."""
    cores, plans = os.cpu_count() or 1, [row.plan for row in rows if row.plan is not None]
    are_here = [plan for plan in plans if not plan.estimated_for and {*plan.workers} == {"cpu"}]
    if all(len(plan.workers) <= cores for plan in are_here):
        return ""
    return f"\nCPU devices are simulated as if each had a core; there {'is' if cores == 1 else 'are'} {cores} here"


def _problems(rows: Sequence[Row]) -> list[str]:
    """Why there is no plan, once for each number of devices and reason."""
    found: dict[tuple[int, str], list[str]] = {}
    for row in rows:
        if row.problem:
            found.setdefault((row.devices, row.problem), []).append(row.schedule)
    return [f"{counted(n, 'device')}, {', '.join(names)}: {problem}" for (n, problem), names in found.items()]


def _slowness(row: Row) -> float:
    return row.run.step_seconds if row.run is not None else 0.0


def _cells(row: Row, is_best: bool, is_first: bool) -> tuple[str, ...]:
    number = str(row.devices) if is_first else ""
    name = f"{row.schedule} *" if is_best else row.schedule
    run = row.run
    if run is None:
        fits = fits_cell(None, row.over_bytes)
        return (number, name, *[NOTHING] * 6, fits)
    return (
        number,
        name,
        str(run.micro_batches),
        run.checkpoint,
        human_seconds(run.step_seconds),
        NOTHING if row.speedup is None else f"{row.speedup:.2f}",
        percent(run.bubble),
        human_bytes(run.peak_bytes),
        fits_cell(run.limit_bytes, row.over_bytes),
    )
