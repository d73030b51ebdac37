"""What a tuner found: a row for each candidate, and the one that it chose."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tabulate import tabulate

from fxpipe.tuning.rows import Row
from fxpipe.units import human_bytes, human_seconds, percent

SHOWN = 20  # rows of the printed table, beside the chosen one


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
        from fxpipe.tuning.html import tuning_html

        return tuning_html(self.rows, self.best, self.batch, len(self.devices))

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
