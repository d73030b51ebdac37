"""Sweeps over numbers of devices: plans for 1, 2, 4, 8 ... and the requested number, in every schedule.

Schedules with the same placement of stages share a plan; a schedule that does not fit into memory with it has a
separate plan. Rows that do not fit show the bytes over the limit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from fxpipe.errors import FxpipeError, MemoryLimitError
from fxpipe.inspect.request import as_options
from fxpipe.inspect.step_summary import Outcome, run_columns, summarize_step
from fxpipe.inspect.table import Cell, Column, Table, number_column, text_column
from fxpipe.scheduling import SCHEDULES
from fxpipe.utils.text_table import wrap_text
from fxpipe.utils.units import count_text

if TYPE_CHECKING:
    from fxpipe.planning.plans import Plan


USUAL_DEVICES = 8  # devices that a sweep reaches if fewer were requested

PlanFor: TypeAlias = "Callable[[int, str], Plan]"  # (devices, schedule)


def counts_up_to(most: int, asked: int) -> tuple[int, ...]:
    """Returns 1, 2, 4, 8 ... up to `most`, and the requested number."""
    return tuple(sorted({*(2**power for power in range(most.bit_length())), asked}))


def sweep_devices(
    counts: tuple[int, ...],
    schedules: tuple[str, ...],
    per_device: int | None,
    plan_for: PlanFor,
    shares_plans: bool = True,
) -> list[Outcome]:
    """Returns a row for each number of devices and schedule; for one device, where schedules are equal, one row.

    Args:
        schedules: the user's schedule first.
        per_device: stages on each device, if the user sets it.
        plan_for: makes a plan, or raises a `FxpipeError`.
        shares_plans: schedules with the same placement of stages share a plan.
    """
    rows: list[Outcome] = []
    for count in counts:
        rows += _rows_of_count(count, schedules[:1] if count == 1 else schedules, per_device, plan_for, shares_plans)
    alone = next((row.run for row in rows if row.devices == 1), None)
    return rows if alone is None else with_speedups(rows, alone.step_seconds)


def with_speedups(rows: Sequence[Outcome], seconds: float) -> list[Outcome]:
    """Returns the rows with their speed-ups over a step of these seconds."""
    return [replace(row, speedup=seconds / row.run.step_seconds) if row.run else row for row in rows]


def _rows_of_count(
    count: int, schedules: tuple[str, ...], per_device: int | None, plan_for: PlanFor, shares_plans: bool
) -> list[Outcome]:
    plans: dict[tuple[int, ...], Plan] = {}  # by placement of stages
    rows = []
    for schedule in schedules:
        recipe = SCHEDULES[schedule]
        placement = recipe.placement(count, per_device or recipe.stages_per_device)
        shared = plans.get(placement) if shares_plans else None
        row = None if shared is None else outcome_of(count, schedule, shared)
        if row is None or not row.fits:
            try:
                plan = plan_for(count, schedule)
                plans.setdefault(placement, plan)
                row = outcome_of(count, schedule, plan)
            except MemoryLimitError as error:
                row = row or Outcome(schedule, count, lacks=error.over, problem="" if error.over else error.brief)
            except FxpipeError as error:
                row = Outcome(schedule, count, problem=" ".join(str(error).split()))
        rows.append(row)
    return rows


def outcome_of(count: int, schedule: str, plan: Plan) -> Outcome:
    import fxpipe

    try:
        run = summarize_step(fxpipe.simulate(plan, schedule=schedule), plan)
    except FxpipeError as error:  # the schedule does not allow the plan's placement
        return Outcome(schedule, count, problem=" ".join(str(error).split()))
    return Outcome(schedule, count, run, plan)


def sweep_table(rows: Sequence[Outcome]) -> Table[Outcome]:
    """Returns a table with a row for each number of devices and schedule; `*` marks the fastest that fits."""
    best = {row.devices: row for row in sorted(rows, key=_step_seconds, reverse=True) if row.fits}
    firsts = {row.devices: row for row in reversed(rows)}

    def number(row: Outcome) -> Cell:
        return Cell(str(row.devices) if firsts[row.devices] is row else "", row.devices)

    step, bubble, peak, fits = run_columns(rows)
    columns: list[Column[Outcome]] = [
        Column("devices", number),
        text_column("schedule", lambda row: f"{row.schedule} *" if best.get(row.devices) is row else row.schedule),
        number_column("micro-\nbatches", lambda row: None if row.run is None else row.run.micro_batches),
        text_column("checkpoint", lambda row: None if row.run is None else row.run.checkpoint),
        step,
        number_column("speed-up", lambda row: row.speedup, "{:.2f}".format),
        bubble,
        peak,
        fits,
    ]
    return Table(columns, rows, keys=2)


def sweep_text(rows: Sequence[Outcome]) -> str:
    head = "numbers of devices and schedules, as simulated; each number is cut anew, once for schedules placed alike"
    legend = ("* the fastest that fits" if any(row.fits for row in rows) else "nothing fits") + _cores_note(rows)
    notes = [wrap_text(f"- {line}") for line in _problem_lines(rows)]
    problems = ["\n".join(["no plan for", *notes])] if notes else []
    return "\n\n".join([wrap_text(head), str(sweep_table(rows)), legend, *problems])


def _cores_note(rows: Sequence[Outcome]) -> str:
    """Warns if plans for CPUs have more devices than cores: measurements assume one core for each device."""
    cores, plans = os.cpu_count() or 1, [row.plan for row in rows if row.plan is not None]
    are_here = [plan for plan in plans if not plan.estimated_for and {*plan.workers} == {"cpu"}]
    if all(len(plan.workers) <= cores for plan in are_here):
        return ""
    return f"\nCPU devices are simulated as if each had a core; there {'is' if cores == 1 else 'are'} {cores} here"


def _problem_lines(rows: Sequence[Outcome]) -> list[str]:
    """Formats why there is no plan, once for each number of devices and reason."""
    schedules: dict[tuple[int, str], list[str]] = {}
    for row in rows:
        if row.problem:
            schedules.setdefault((row.devices, row.problem), []).append(row.schedule)
    return [
        f"{count_text(n, 'device')}, {', '.join(names)}: {as_options(problem)}"
        for (n, problem), names in schedules.items()
    ]


def _step_seconds(row: Outcome) -> float:
    return row.run.step_seconds if row.run is not None else 0.0
