"""What was simulated beside what was measured, device by device.

print(fxpipe.simulate(pipe.plan).compared(pipe.last_step))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tabulate import tabulate

from fxpipe.errors import ArgumentError
from fxpipe.scheduling import Action, Kind
from fxpipe.units import human_seconds, percent

if TYPE_CHECKING:
    from fxpipe.runtime.record import StepRecord
    from fxpipe.simulation.results import Simulation


@dataclass(frozen=True, slots=True)
class Pair:
    """A figure, twice: seconds, or a share from 0 to 1."""

    measured: float
    simulated: float

    @property
    def ratio(self) -> float:
        """Simulated over measured."""
        return self.simulated / self.measured if self.measured else float("nan")


@dataclass(frozen=True, slots=True)
class DeviceComparison:
    """One device."""

    name: str
    busy: Pair
    bubble: Pair


@dataclass(frozen=True, slots=True)
class Comparison:
    """A step as it was, and as it was simulated. `print` shows a table."""

    schedule: str
    step: Pair
    devices: tuple[DeviceComparison, ...]
    kinds: dict[Kind, Pair]  # seconds of all actions of a kind together

    def __str__(self) -> str:
        rows = [("step", *_seconds(self.step), "", "", "")]
        for k, one in enumerate(self.devices):
            shares = (percent(one.bubble.measured), percent(one.bubble.simulated))
            rows.append((f"device {k} {one.name}".rstrip(), *_seconds(one.busy), "", *shares))
        rows += [(f"all {kind}", *_seconds(pair), "", "", "") for kind, pair in self.kinds.items()]
        headers = ("seconds", "measured", "simulated", "ratio", "", "bubble", "simulated")
        align = ("left", "right", "right", "right", "left", "right", "right")
        return f"{self.schedule}\n{tabulate(rows, headers, colalign=align, disable_numparse=True)}"


def compared(simulation: Simulation, record: StepRecord) -> Comparison:
    """The simulation beside a step that ran the same actions.

    Raises:
        ArgumentError: it ran others.
    """
    ran, thought = (Counter(one.action for one in of) for of in (record.actions, simulation.spans))
    if ran != thought:
        raise ArgumentError(
            f"the step ran {record.schedule} with {_described(ran)}, the simulation is of {simulation.schedule.name} "
            f"with {_described(thought)}: simulate with the schedule, chunks, batch and checkpoint of the step"
        )
    devices = tuple(
        DeviceComparison(one.name, Pair(one.busy, busy), Pair(record.bubble(d), bubble))
        for d, (one, busy, bubble) in enumerate(zip(record.devices, simulation.busy, simulation.bubble, strict=True))
    )
    measured = _by_kind((a.action, a.end - a.start) for a in record.actions)
    simulated = _by_kind((span.action, span.seconds) for span in simulation.spans)
    kinds = {kind: Pair(measured[kind], simulated[kind]) for kind in Kind if measured[kind] or simulated[kind]}
    return Comparison(record.schedule, Pair(record.seconds, simulation.step_seconds), devices, kinds)


def _by_kind(seconds: Iterable[tuple[Action, float]]) -> dict[Kind, float]:
    found = dict.fromkeys(Kind, 0.0)
    for action, time in seconds:
        found[action.kind] += time
    return found


def _described(actions: Counter[Action]) -> str:
    if not actions:
        return "no actions"
    stages, m = {a.stage for a in actions}, {a.micro_batch for a in actions}
    return f"{actions.total()} actions of {len(stages)} stages and {len(m)} micro-batches"


def _seconds(pair: Pair) -> tuple[str, str, str]:
    return human_seconds(pair.measured), human_seconds(pair.simulated), f"{pair.ratio:.2f}"
