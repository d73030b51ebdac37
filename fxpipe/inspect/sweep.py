"""Sweeps over numbers of devices: the model cut for 1, 2, 4, 8 ... and as many as were asked for, in every schedule.

Each number of devices is planned anew. Schedules that have their stages on the same devices share a plan, but where one
does not fit into memory with it: then it is planned for that schedule. What does not fit at all is listed with the
bytes that it is over by, for that is what one asks next.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from fxpipe.errors import FxpipeError, MemoryLimitError
from fxpipe.inspect.request import as_options
from fxpipe.inspect.step_summary import StepSummary, fits_cell, summarize_step
from fxpipe.scheduling import SCHEDULES
from fxpipe.utils.text_table import EMPTY_CELL, text_table, wrap_text
from fxpipe.utils.units import count_text, human_bytes, human_seconds, percent

if TYPE_CHECKING:
    from fxpipe.planning.plans import Plan


USUAL_DEVICES = 8  # devices that a sweep goes up to, where fewer were asked for

PlanFor: TypeAlias = "Callable[[int, str], Plan]"  # (devices, schedule)


@dataclass(frozen=True, slots=True)
class SweepRow:
    """The result for one number of devices and one schedule."""

    devices: int
    schedule: str
    run: StepSummary | None = None  # None: there is no such plan
    plan: Plan | None = None  # that was run so
    speedup: float | None = None  # over one device; None: one device cannot do it
    over_bytes: float = 0.0  # on the device, or in the stage, that is furthest over its limit
    problem: str = ""  # why there is no such plan, where memory is not the reason

    @property
    def fits(self) -> bool:
        return self.run is not None and not self.over_bytes


def counts_up_to(most: int, asked: int) -> tuple[int, ...]:
    """1, 2, 4, 8 ... and the number that was asked for."""
    return tuple(sorted({*(2**power for power in range(most.bit_length())), asked}))


def sweep_devices(
    counts: tuple[int, ...],
    schedules: tuple[str, ...],
    per_device: int | None,
    plan_for: PlanFor,
    shares_plans: bool = True,
) -> list[SweepRow]:
    """A row for each number of devices and schedule; for one device, where all are alike, a single one.

    Args:
        schedules: the user's first.
        per_device: stages on each device, where the user says so.
        plan_for: makes a plan, or raises a `FxpipeError`.
        shares_plans: schedules that have their stages on the same devices share a plan.
    """
    rows: list[SweepRow] = []
    for count in counts:
        rows += _rows_of_count(count, schedules[:1] if count == 1 else schedules, per_device, plan_for, shares_plans)
    alone = next((row.run for row in rows if row.devices == 1), None)
    if alone is None:
        return rows
    return [replace(row, speedup=alone.step_seconds / row.run.step_seconds) if row.run else row for row in rows]


def _rows_of_count(
    count: int, schedules: tuple[str, ...], per_device: int | None, plan_for: PlanFor, shares_plans: bool
) -> list[SweepRow]:
    plans: dict[tuple[int, ...], Plan] = {}  # by where the stages are asked to be
    rows = []
    for schedule in schedules:
        recipe = SCHEDULES[schedule]
        placement = recipe.placement(count, per_device or recipe.stages_per_device)
        shared = plans.get(placement) if shares_plans else None
        row = None if shared is None else _sweep_row(count, schedule, shared)
        if row is None or not row.fits:
            try:
                plan = plan_for(count, schedule)
                plans.setdefault(placement, plan)
                row = _sweep_row(count, schedule, plan)
            except MemoryLimitError as error:
                row = row or SweepRow(count, schedule, over_bytes=error.over, problem="" if error.over else error.brief)
            except FxpipeError as error:
                row = SweepRow(count, schedule, problem=" ".join(str(error).split()))
        rows.append(row)
    return rows


def _sweep_row(count: int, schedule: str, plan: Plan) -> SweepRow:
    import fxpipe

    try:
        run = summarize_step(fxpipe.simulate(plan, schedule=schedule), plan)
    except FxpipeError as error:  # it cannot have its stages where the plan has them
        return SweepRow(count, schedule, problem=" ".join(str(error).split()))
    return SweepRow(count, schedule, run, plan, over_bytes=run.over_bytes)


# -- The text of a sweep: a row for each number of devices and schedule ----------------------------------------------

SWEEP_HEADERS = (
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


def sweep_table(rows: Sequence[SweepRow]) -> str:
    """A `*` marks the fastest that fits of each number of devices."""
    best = {row.devices: row for row in sorted(rows, key=_step_seconds, reverse=True) if row.fits}
    firsts = [k == 0 or rows[k - 1].devices != row.devices for k, row in enumerate(rows)]
    cells = [_sweep_cells(row, best.get(row.devices) is row, first) for row, first in zip(rows, firsts, strict=True)]
    notes = [wrap_text(f"- {line}") for line in _problem_lines(rows)]
    legend = ("* the fastest that fits" if best else "nothing fits") + _cores_note(rows)
    head = "numbers of devices and schedules, as simulated; each number is cut anew, once for schedules placed alike"
    lines = [wrap_text(head), "", text_table(cells, SWEEP_HEADERS, left=("schedule", "checkpoint"), keys=2), "", legend]
    return "\n".join(lines + (["", "no plan for", *notes] if notes else []))


def _cores_note(rows: Sequence[SweepRow]) -> str:
    """Warns where plans for CPUs have more devices than there are cores: measurements assume a core for each."""
    cores, plans = os.cpu_count() or 1, [row.plan for row in rows if row.plan is not None]
    are_here = [plan for plan in plans if not plan.estimated_for and {*plan.workers} == {"cpu"}]
    if all(len(plan.workers) <= cores for plan in are_here):
        return ""
    return f"\nCPU devices are simulated as if each had a core; there {'is' if cores == 1 else 'are'} {cores} here"


def _problem_lines(rows: Sequence[SweepRow]) -> list[str]:
    """Says why there is no plan, once for each number of devices and reason."""
    schedules: dict[tuple[int, str], list[str]] = {}
    for row in rows:
        if row.problem:
            schedules.setdefault((row.devices, row.problem), []).append(row.schedule)
    return [
        f"{count_text(n, 'device')}, {', '.join(names)}: {as_options(problem)}"
        for (n, problem), names in schedules.items()
    ]


def _step_seconds(row: SweepRow) -> float:
    return row.run.step_seconds if row.run is not None else 0.0


def _sweep_cells(row: SweepRow, is_best: bool, is_first: bool) -> tuple[str, ...]:
    number = str(row.devices) if is_first else ""
    name = f"{row.schedule} *" if is_best else row.schedule
    run = row.run
    if run is None:
        fits = fits_cell(None, row.over_bytes)
        return (number, name, *[EMPTY_CELL] * 6, fits)
    return (
        number,
        name,
        str(run.micro_batches),
        run.checkpoint,
        human_seconds(run.step_seconds),
        EMPTY_CELL if row.speedup is None else f"{row.speedup:.2f}",
        percent(run.bubble),
        human_bytes(run.peak_bytes),
        fits_cell(run.limit_bytes, row.over_bytes),
    )
