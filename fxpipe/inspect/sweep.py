"""Sweeps over numbers of devices: the model cut for 1, 2, 4, 8 ... and the number asked for, in every schedule.

Schedules that have their stages on the same devices share a plan, unless one does not fit into memory with it and is
planned by itself. What does not fit at all is listed with the bytes that it is over by.
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


USUAL_DEVICES = 8  # devices that a sweep goes up to, where fewer were asked for

PlanFor: TypeAlias = "Callable[[int, str], Plan]"  # (devices, schedule)


def counts_up_to(most: int, asked: int) -> tuple[int, ...]:
    """1, 2, 4, 8 ... and the number that was asked for."""
    return tuple(sorted({*(2**power for power in range(most.bit_length())), asked}))


def sweep_devices(
    counts: tuple[int, ...],
    schedules: tuple[str, ...],
    per_device: int | None,
    plan_for: PlanFor,
    shares_plans: bool = True,
) -> list[Outcome]:
    """A row for each number of devices and schedule; for one device, where all are alike, a single one.

    Args:
        schedules: the user's first.
        per_device: stages on each device, where the user says so.
        plan_for: makes a plan, or raises a `FxpipeError`.
        shares_plans: schedules that have their stages on the same devices share a plan.
    """
    rows: list[Outcome] = []
    for count in counts:
        rows += _rows_of_count(count, schedules[:1] if count == 1 else schedules, per_device, plan_for, shares_plans)
    alone = next((row.run for row in rows if row.devices == 1), None)
    return rows if alone is None else with_speedups(rows, alone.step_seconds)


def with_speedups(rows: Sequence[Outcome], seconds: float) -> list[Outcome]:
    """The rows, each with how many times as fast it is as a step of these seconds."""
    return [replace(row, speedup=seconds / row.run.step_seconds) if row.run else row for row in rows]


def _rows_of_count(
    count: int, schedules: tuple[str, ...], per_device: int | None, plan_for: PlanFor, shares_plans: bool
) -> list[Outcome]:
    plans: dict[tuple[int, ...], Plan] = {}  # by where the stages are asked to be
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
                row = row or Outcome(schedule, count, over_bytes=error.over, problem="" if error.over else error.brief)
            except FxpipeError as error:
                row = Outcome(schedule, count, problem=" ".join(str(error).split()))
        rows.append(row)
    return rows


def outcome_of(count: int, schedule: str, plan: Plan) -> Outcome:
    """The step of a plan in a schedule."""
    import fxpipe

    try:
        run = summarize_step(fxpipe.simulate(plan, schedule=schedule), plan)
    except FxpipeError as error:  # it cannot have its stages where the plan has them
        return Outcome(schedule, count, problem=" ".join(str(error).split()))
    return Outcome(schedule, count, run, plan, over_bytes=run.over_bytes)


# -- The text of a sweep: a row for each number of devices and schedule ----------------------------------------------


def sweep_table(rows: Sequence[Outcome]) -> Table[Outcome]:
    """A row for each number of devices and schedule; `*`: the fastest that fits of each number of devices."""
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
    """Warns where plans for CPUs have more devices than there are cores: measurements assume a core for each."""
    cores, plans = os.cpu_count() or 1, [row.plan for row in rows if row.plan is not None]
    are_here = [plan for plan in plans if not plan.estimated_for and {*plan.workers} == {"cpu"}]
    if all(len(plan.workers) <= cores for plan in are_here):
        return ""
    return f"\nCPU devices are simulated as if each had a core; there {'is' if cores == 1 else 'are'} {cores} here"


def _problem_lines(rows: Sequence[Outcome]) -> list[str]:
    """Says why there is no plan, once for each number of devices and reason."""
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
