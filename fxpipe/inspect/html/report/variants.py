"""The same plan with other numbers of micro-batches, schedules and devices: what a report compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.errors import FxpipeError

if TYPE_CHECKING:
    from fxpipe.plans import Plan
    from fxpipe.simulation import Simulation

MOST_CHUNKS = 512
MOST_CELLS = 10_000  # stages times micro-batches: more takes seconds to simulate, and a picture of it is grey


@dataclass(frozen=True, slots=True)
class Chunked:
    """A step with this many micro-batches."""

    chunks: int
    samples: int  # of the largest micro-batch
    simulation: Simulation


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step with this schedule, or why there is none."""

    schedule: str
    simulation: Simulation | None
    why: str = ""


def by_chunks(plan: Plan) -> tuple[Chunked, ...]:
    """1, 2, 4, ... micro-batches, and the plan's own number of them; only that where the schedule is for it alone."""
    import fxpipe

    found = []
    for chunks in numbers_of_chunks(plan):
        try:
            simulation = fxpipe.simulate(plan, chunks=chunks)
        except FxpipeError:
            if chunks == plan.micro_batches:
                raise
            continue
        batch = plan.batch or plan.micro_batch * plan.micro_batches
        found.append(Chunked(chunks, -(-batch // chunks), simulation))
    return tuple(found)


def numbers_of_chunks(plan: Plan) -> Iterator[int]:
    most = min(plan.batch or 4 * plan.chunks, MOST_CHUNKS, max(plan.micro_batches, MOST_CELLS // len(plan.stages)))
    powers = {2**k for k in range(most.bit_length()) if 2**k <= most}
    yield from sorted(powers | {plan.micro_batches})


def by_schedule(plan: Plan) -> tuple[Scheduled, ...]:
    """Every schedule there is, and one of the user's own; those that the plan's stages allow are simulated."""
    import fxpipe
    from fxpipe.scheduling import SCHEDULES

    found = []
    for name in dict.fromkeys([*(name for name in SCHEDULES if name != "inference"), plan.schedule]):
        try:
            found.append(Scheduled(name.partition(":")[0], fxpipe.simulate(plan, schedule=name)))
        except FxpipeError as error:
            found.append(Scheduled(name.partition(":")[0], None, _why(name, str(error))))
    return tuple(found)


def _why(schedule: str, error: str) -> str:
    """In short, where it is the number of stages."""
    from fxpipe.scheduling import SCHEDULES

    recipe = SCHEDULES.get(schedule)
    if recipe is None or not recipe.is_bound:
        return error
    return f"needs a plan with stages_per_device={recipe.per_device}"
