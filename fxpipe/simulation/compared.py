"""What was simulated beside what was measured, device by device.

print(fxpipe.simulate(pipe.plan).compared(pipe.last_step))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tabulate import tabulate

from fxpipe.errors import ArgumentError
from fxpipe.scheduling import Action, Kind
from fxpipe.timelines import Span
from fxpipe.timelines.steps import Step
from fxpipe.units import human_seconds, percent

QUIET = 0.95  # actions have a core for so much of their time, where nothing else wants it


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
    on_core: Pair | None = None  # seconds of all actions; measured: in which their workers had a core. Not on GPUs

    @property
    def core_share(self) -> float:
        """Of the seconds of all actions, those in which their workers had a core; less than 1 on a busy machine."""
        took = sum(pair.measured for pair in self.kinds.values())
        return 1.0 if self.on_core is None or not took else self.on_core.measured / took

    def __str__(self) -> str:
        rows = [("step", *_seconds(self.step), "", "", "")]
        for k, one in enumerate(self.devices):
            shares = (percent(one.bubble.measured), percent(one.bubble.simulated))
            rows.append((f"device {k} {one.name}".rstrip(), *_seconds(one.busy), "", *shares))
        rows += [(f"all {kind}", *_seconds(pair), "", "", "") for kind, pair in self.kinds.items()]
        headers = ("seconds", "measured", "simulated", "ratio", "", "bubble", "simulated")
        align = ("left", "right", "right", "right", "left", "right", "right")
        return "\n".join([self.schedule, tabulate(rows, headers, colalign=align, disable_numparse=True), *self._busy()])

    def _busy(self) -> Iterator[str]:
        """That the machine was, and what is left of the difference without that."""
        if self.on_core is not None and self.core_share < QUIET:
            measured, simulated, ratio = _seconds(self.on_core)
            yield f"The actions had a core for {self.core_share:.0%} of their time: others wanted it, too."
            yield f"On it they took {measured}, simulated {simulated}: {ratio}"


def compared(simulated: Step, measured: Step) -> Comparison:
    """A step as it was simulated beside one that ran the same actions.

    Raises:
        ArgumentError: it ran others.
    """
    thought, ran = (Counter(span.action for span in of.spans) for of in (simulated, measured))
    if ran != thought:
        raise ArgumentError(
            f"the step ran {measured.schedule} with {_described(ran)}, the simulation is of {simulated.schedule} "
            f"with {_described(thought)}: simulate with the schedule, chunks, batch and checkpoint of the step"
        )
    pairs = (
        map(Pair, one, other) for one, other in ((measured.busy, simulated.busy), (measured.bubble, simulated.bubble))
    )
    devices = tuple(map(DeviceComparison, measured.devices, *pairs))
    was, will_be = _by_kind(measured.spans), _by_kind(simulated.spans)
    kinds = {kind: Pair(was[kind], will_be[kind]) for kind in Kind if was[kind] or will_be[kind]}
    on_core = Pair(sum(measured.on_core), sum(will_be.values())) if measured.on_core else None
    return Comparison(measured.schedule, Pair(measured.seconds, simulated.seconds), devices, kinds, on_core)


def _by_kind(spans: Iterable[Span]) -> dict[Kind, float]:
    found = dict.fromkeys(Kind, 0.0)
    for span in spans:
        found[span.action.kind] += span.seconds
    return found


def _described(actions: Counter[Action]) -> str:
    if not actions:
        return "no actions"
    stages, m = {a.stage for a in actions}, {a.micro_batch for a in actions}
    return f"{actions.total()} actions of {len(stages)} stages and {len(m)} micro-batches"


def _seconds(pair: Pair) -> tuple[str, str, str]:
    return human_seconds(pair.measured), human_seconds(pair.simulated), f"{pair.ratio:.2f}"
