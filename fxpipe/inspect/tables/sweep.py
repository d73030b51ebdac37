"""How many devices? The same model cut for 1, 2, 4, 8 ... of them, and as many as were asked for, in every schedule.

Each number of devices is planned anew. Schedules that have their stages on the same devices share a plan, but where one
does not fit into memory with it: then it is planned for that schedule. What does not fit at all is listed with the
bytes that it is over by, for that is what one asks next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from fxpipe.errors import FxpipeError, MemoryLimitError
from fxpipe.inspect.tables.comparing import Run, run_of
from fxpipe.scheduling import SCHEDULES

if TYPE_CHECKING:
    from fxpipe.plans import Plan

USUAL = 8  # devices that a sweep goes up to, where fewer were asked for

PlanFor: TypeAlias = "Callable[[int, str], Plan]"  # (devices, schedule)


@dataclass(frozen=True, slots=True)
class Row:
    """One number of devices and one schedule."""

    devices: int
    schedule: str
    run: Run | None = None  # None: there is no such plan
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


def sweep(counts: tuple[int, ...], schedules: tuple[str, ...], per_device: int | None, plan_for: PlanFor) -> list[Row]:
    """A row for each number of devices and schedule; for one device, where all are alike, a single one.

    Args:
        schedules: the user's first.
        per_device: stages on each device, where the user says so.
        plan_for: makes a plan, or raises a `FxpipeError`.
    """
    rows: list[Row] = []
    for count in counts:
        rows += _rows(count, schedules[:1] if count == 1 else schedules, per_device, plan_for)
    alone = next((row.run for row in rows if row.devices == 1), None)
    if alone is None:
        return rows
    return [replace(row, speedup=alone.step_seconds / row.run.step_seconds) if row.run else row for row in rows]


def _rows(count: int, schedules: tuple[str, ...], per_device: int | None, plan_for: PlanFor) -> list[Row]:
    plans: dict[tuple[int, ...], Plan] = {}  # by where the stages are asked to be
    rows = []
    for schedule in schedules:
        recipe = SCHEDULES[schedule]
        placement = recipe.placement(count, per_device or recipe.per_device)
        shared = plans.get(placement)
        row = None if shared is None else _row(count, schedule, shared)
        if row is None or not row.fits:
            try:
                plan = plan_for(count, schedule)
                plans.setdefault(placement, plan)
                row = _row(count, schedule, plan)
            except MemoryLimitError as error:
                row = row or Row(count, schedule, over_bytes=error.over, problem="" if error.over else error.brief)
            except FxpipeError as error:
                row = Row(count, schedule, problem=" ".join(str(error).split()))
        rows.append(row)
    return rows


def _row(count: int, schedule: str, plan: Plan) -> Row:
    import fxpipe

    try:
        run = run_of(fxpipe.simulate(plan, schedule=schedule), plan)
    except FxpipeError as error:  # it cannot have its stages where the plan has them
        return Row(count, schedule, problem=" ".join(str(error).split()))
    return Row(count, schedule, run, plan, over_bytes=run.over_bytes)
