"""How many devices? The same model cut for 1, 2, 4, 8 ... of them, in every schedule, as simulated.

Each number of devices is planned anew, and so is each schedule that has several stages on a device; the others share
a plan. What does not fit is listed with the bytes that it is over by, for that is what one asks next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from fxpipe.errors import FxpipeError, MemoryLimitError
from fxpipe.inspect.comparing import Run, run_of
from fxpipe.scheduling import SCHEDULES

if TYPE_CHECKING:
    from fxpipe.plans import Plan

FEWEST = 8  # devices that a sweep goes up to, where fewer were asked for

PlanFor: TypeAlias = "Callable[[int, str], Plan]"  # (devices, schedule)


@dataclass(frozen=True, slots=True)
class Row:
    """One number of devices and one schedule."""

    devices: int
    schedule: str
    run: Run | None  # None: there is no such plan, and `problem` says why
    speedup: float | None = None  # over one device; None: one device cannot do it
    over_bytes: float = 0.0  # on the device that is furthest over its limit
    problem: str = ""

    @property
    def fits(self) -> bool:
        return self.run is not None and not self.over_bytes


def counts_up_to(devices: int) -> tuple[int, ...]:
    """1, 2, 4, 8 ... and the number itself."""
    most = max(devices, FEWEST) if devices & (devices - 1) == 0 else devices
    counts = {2**power for power in range(most.bit_length()) if 2**power <= most}
    return tuple(sorted(counts | {most}))


def sweep(counts: tuple[int, ...], schedules: tuple[str, ...], plan_for: PlanFor) -> tuple[Row, ...]:
    """A row for each number of devices and schedule; of one device, where all are the same, one."""
    rows: list[Row] = []
    for count in counts:
        rows += _rows(count, schedules[:1] if count == 1 else schedules, plan_for)
    alone = rows[0].run if rows and rows[0].devices == 1 else None
    if alone is None:
        return tuple(rows)
    return tuple(
        row if row.run is None else replace(row, speedup=alone.step_seconds / row.run.step_seconds) for row in rows
    )


def _rows(count: int, schedules: tuple[str, ...], plan_for: PlanFor) -> Iterator[Row]:
    import fxpipe

    plans: dict[int, Plan | FxpipeError] = {}  # by stages on each device
    for schedule in schedules:
        each = SCHEDULES[schedule].per_device
        if each not in plans:
            try:
                plans[each] = plan_for(count, schedule)
            except FxpipeError as error:
                plans[each] = error
        plan = plans[each]
        if isinstance(plan, MemoryLimitError):
            yield Row(count, schedule, None, over_bytes=plan.over, problem="does not fit")
            continue
        if isinstance(plan, FxpipeError):
            yield Row(count, schedule, None, problem=" ".join(str(plan).split()))
            continue
        try:
            run = run_of(fxpipe.simulate(plan, schedule=schedule), plan)
        except FxpipeError as error:
            yield Row(count, schedule, None, problem=" ".join(str(error).split()))
            continue
        yield Row(count, schedule, run, over_bytes=run.over_bytes)
