"""What a tuner found: a row for each candidate, and the one that it chose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from fxpipe.plans import Plan
from fxpipe.simulation import Simulation
from fxpipe.simulation.of_plans import simulate
from fxpipe.units import human_bytes, human_seconds, percent

SHOWN = 20  # rows of the printed table, beside the chosen one
SAME = 0.001  # steps that differ by less are equally long: then the one that needs less memory is better


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate, and what its step comes to. One without a plan was not cut; `why` says why."""

    schedule: str  # a name or, of the user's own, a table as text
    chunks: int
    stages_per_device: int
    checkpoint: str | tuple[str, ...] = "never"  # or one for each stage
    plan: Plan | None = None
    step_seconds: float = 0.0  # simulated; of one that was not cut, what it takes at least
    memory: tuple[float, ...] = ()  # bytes: the simulated peak of each device
    lacks: float = 0.0  # bytes that the device which lacks most would need more than it may take
    measured_seconds: float | None = None  # of a real step, if it was run
    why: str = ""
    others: Mapping[str, Any] = field(default_factory=dict)  # what else `fxpipe.pipeline` has to be told

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.lacks <= 0

    @property
    def peak(self) -> float:
        """Bytes on the device that holds most."""
        return max(self.memory, default=0.0)

    @property
    def simulation(self) -> Simulation:
        """When its actions run, and what its devices hold; made anew each time."""
        if self.plan is None:
            raise ValueError(f"this candidate was not cut: {self.why}")
        return simulate(self.plan)

    @property
    def arguments(self) -> dict[str, Any]:
        """For `fxpipe.pipeline`: the plan, and beside it what a plan does not say."""
        return {"plan": self.plan, "schedule": self.schedule, **self.others}

    def __str__(self) -> str:
        return (
            f"schedule={self.schedule!r}, chunks={self.chunks}, checkpoint={self.checkpoint!r}, "
            f"stages_per_device={self.stages_per_device}"
        )


@dataclass(frozen=True, slots=True)
class Tuning:
    """What `fxpipe.tune` tried. `print` shows the table that it chose from."""

    best: Row
    rows: tuple[Row, ...]  # in the order of `in_order`: what fits comes first, the shortest step first of all
    batch: int  # samples of the mini-batch
    devices: tuple[str, ...]  # by worker
    estimated_for: str = ""  # the hardware for which the seconds were estimated; empty where they were measured

    def __str__(self) -> str:
        is_measured = any(row.measured_seconds is not None for row in self.rows)
        shown = self.rows[:SHOWN] + tuple(row for row in self.rows[SHOWN:] if row is self.best)
        headers = ["", "schedule", "chunks", "checkpoint", "stages per device", "step", "idle", "peak memory", "lacks"]
        table = tabulate(
            [self._line(row, is_measured) for row in shown],
            headers=headers[:6] + ["measured"] * is_measured + headers[6:],
            colalign=("left", "left", "right", "left", *["right"] * (5 + is_measured)),
            disable_numparse=True,
        )
        lines = [self._head(), table]
        if len(self.rows) > len(shown):
            lines.append(f"{len(self.rows) - len(shown)} more are in .rows")
        if any(row.plan is None for row in shown):
            lines.append("≥: at least so long, and so not looked at closer; .rows says why")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from fxpipe.inspect.html.notebook import tuning_html

        return tuning_html(self)

    def _head(self) -> str:
        kinds = Counter(name.partition(":")[0] for name in self.devices)
        listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        how = f", seconds estimated for {self.estimated_for}" if self.estimated_for else ""
        return f"mini-batches of {self.batch} on {listed}{how}; the chosen way is marked"

    def _line(self, row: Row, is_measured: bool) -> list[str]:
        measured = "" if row.measured_seconds is None else human_seconds(row.measured_seconds)
        return [
            "->" if row is self.best else "",
            row.schedule if "\n" not in row.schedule else row.schedule.partition(":")[0],
            str(row.chunks),
            row.checkpoint if isinstance(row.checkpoint, str) else _modes(row.checkpoint),
            str(row.stages_per_device),
            _step(row),
            *[measured] * is_measured,
            "" if row.plan is None else percent(row.simulation.mean_bubble),
            "" if row.plan is None else human_bytes(row.peak),
            human_bytes(row.lacks) if row.lacks > 0 else "",
        ]


def _modes(modes: tuple[str, ...]) -> str:
    """`0, 2 always` of ("always", "never", "always")."""
    found = [f"{', '.join(str(j) for j, m in enumerate(modes) if m == mode)} {mode}" for mode in dict.fromkeys(modes)]
    return "; ".join(text for text in found if not text.endswith("never"))


def _step(row: Row) -> str:
    least = "≥ " if row.plan is None else ""
    return least + human_seconds(row.step_seconds) if row.step_seconds else ""


def preferred(rows: Iterable[Row]) -> list[Row]:
    """Those that fit, the best first: the shortest step; of about equally long ones that with least memory.

    Where some were run, these are all there is, by what was measured.
    """
    fitting = [row for row in rows if row.fits]
    measured = [row for row in fitting if row.measured_seconds is not None]
    if measured:
        return sorted(measured, key=lambda row: row.measured_seconds or 0.0)
    least = min((row.step_seconds for row in fitting), default=0.0)

    def order(row: Row) -> tuple[float, ...]:
        is_least = row.step_seconds <= (1 + SAME) * least
        return (0.0 if is_least else row.step_seconds, row.peak, row.chunks, row.stages_per_device, row.step_seconds)

    return sorted(fitting, key=order)


def in_order(rows: Iterable[Row]) -> tuple[Row, ...]:
    """As a table has them: what fits, what is too slow to look at, what does not fit, what cannot be."""

    def order(row: Row) -> tuple[float, ...]:
        kind = (0 if row.fits else 2) if row.plan is not None else (1 if row.step_seconds else 3)
        return (kind, row.lacks, row.step_seconds, row.peak, row.chunks)

    return tuple(sorted(rows, key=order))
