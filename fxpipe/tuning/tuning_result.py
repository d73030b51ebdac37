"""The result of a tuner: a row for each candidate, and the one that it chose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.tuning.candidates import CandidateResult
from fxpipe.utils.text_table import text_table, wrap_text
from fxpipe.utils.units import count_text, human_bytes, human_seconds, percent
from fxpipe.viz.html import (
    bytes_cell,
    code_cell,
    missing_cell,
    notebook_fragment,
    notebook_heading,
    notebook_table,
    number_cell,
    percent_cell,
    seconds_cell,
    text_cell,
)

MAX_PRINTED_CANDIDATES = 20  # rows of the printed table, beside the chosen one


@dataclass(frozen=True, slots=True)
class Tuning:
    """The candidates that `fxpipe.tune` tried, and the best. `print` shows the table that it chose from."""

    best: CandidateResult
    rows: tuple[
        CandidateResult, ...
    ]  # in the order of `in_order`: what fits comes first, the shortest step first of all
    batch: int  # samples of the mini-batch, of all replicas
    devices: tuple[str, ...]  # by worker, of one replica
    estimated_for: str = ""  # the hardware for which the seconds were estimated; empty where they were measured

    def __str__(self) -> str:
        is_measured = any(row.measured_seconds is not None for row in self.rows)
        shown = self.rows[:MAX_PRINTED_CANDIDATES] + tuple(
            row for row in self.rows[MAX_PRINTED_CANDIDATES:] if row is self.best
        )
        replicas = ["pipeline x data"] * self._has_replicas
        headers = ["", *replicas, "schedule", "chunks", "checkpoint", "stages per device", "step"]
        headers += ["measured"] * is_measured + ["idle", "peak memory", "lacks"]
        table = text_table(
            [self._line(row, is_measured) for row in shown],
            headers,
            left=("", "pipeline x data", "schedule", "checkpoint"),
        )
        lines = [self._head(), table]
        if len(self.rows) > len(shown):
            lines.append(f"{len(self.rows) - len(shown)} more are in .rows")
        if any(row.plan is None for row in shown):
            lines.append("≥: at least so long, and so not looked at closer; .rows says why")
        if self.best.plan is not None and self.best.simulation.host_note:
            lines.append(wrap_text(f"the chosen way is {self.best.simulation.host_note}"))
        return "\n".join(lines)

    def _repr_html_(self) -> str:

        return tuning_html(self.rows, self.best, self.batch, len(self.devices) * self.best.data_parallel)

    @property
    def _has_replicas(self) -> bool:
        return any(row.data_parallel > 1 for row in self.rows)

    def _head(self) -> str:
        kinds = Counter(name.partition(":")[0] for name in self.devices)
        data = self.best.data_parallel
        listed = ", ".join(f"{count * data} x {kind}" for kind, count in kinds.items())
        how = f", seconds estimated for {self.estimated_for}" if self.estimated_for else ""
        return f"mini-batches of {self.batch} on {listed}{how}; the chosen way is marked"

    def _line(self, row: CandidateResult, is_measured: bool) -> list[str]:
        measured = "" if row.measured_seconds is None else human_seconds(row.measured_seconds)
        return [
            "->" if row is self.best else "",
            *[self._replicas_text(row)] * self._has_replicas,
            row.schedule if "\n" not in row.schedule else row.schedule.partition(":")[0],
            str(row.chunks),
            row.checkpoint if isinstance(row.checkpoint, str) else _modes_text(row.checkpoint),
            str(row.stages_per_device),
            _step_text(row),
            *[measured] * is_measured,
            "" if row.plan is None else percent(row.simulation.mean_bubble),
            "" if row.plan is None else human_bytes(row.peak),
            human_bytes(row.lacks) if row.lacks > 0 else "",
        ]

    def _replicas_text(self, row: CandidateResult) -> str:
        """`8 x 4, data outside`: the devices of a replica, how many replicas, and how they stand."""
        devices = len(self.devices) * self.best.data_parallel
        order = f", {row.mesh[0]} outside" if devices > row.data_parallel > 1 else ""
        return f"{devices // row.data_parallel} x {row.data_parallel}{order}"


MAX_LISTED_STAGES = 8  # of more, how many recompute is told


def _modes_text(modes: tuple[str, ...]) -> str:
    """`0, 2 always` of ("always", "never", "always"); of many stages `20 of 43`."""
    if len(modes) > MAX_LISTED_STAGES:
        return f"{sum(mode != 'never' for mode in modes)} of {len(modes)} stages"
    texts = [f"{', '.join(str(j) for j, m in enumerate(modes) if m == mode)} {mode}" for mode in dict.fromkeys(modes)]
    return "; ".join(text for text in texts if not text.endswith("never"))


def _step_text(row: CandidateResult) -> str:
    least = "≥ " if row.plan is None else ""
    return least + human_seconds(row.step_seconds) if row.step_seconds else ""


# -- The result of a tuner in notebooks ------------------------------------------------------------------------------

MAX_HTML_CANDIDATES = 12  # rows


def tuning_html(rows: Sequence[CandidateResult], best: CandidateResult, batch: int, devices: int) -> str:
    """The best of what was tried, the chosen one marked."""
    cut = [row for row in rows if row.plan is not None]
    shown = cut[:MAX_HTML_CANDIDATES] + [row for row in cut[MAX_HTML_CANDIDATES:] if row is best]
    headers = ("", "schedule", "replicas", "chunks", "checkpoint", "stages per device", "step", "measured")
    lines = [
        (
            text_cell("→" if row is best else ""),
            code_cell(row.schedule.partition(":")[0]),
            number_cell(row.data_parallel),
            number_cell(row.chunks),
            text_cell(row.checkpoint if isinstance(row.checkpoint, str) else "by stage"),
            number_cell(row.stages_per_device),
            seconds_cell(row.step_seconds),
            missing_cell() if row.measured_seconds is None else seconds_cell(row.measured_seconds),
            percent_cell(row.simulation.mean_bubble),
            bytes_cell(row.peak),
            text_cell(f"lacks {human_bytes(row.lacks)}" if row.lacks > 0 else ""),
        )
        for row in shown
    ]
    chunks = count_text(best.chunks, "micro-batch", "es")
    title = f"{best.schedule.partition(':')[0]}, {chunks}: step {human_seconds(best.step_seconds)}"
    more = f", of which {len(shown)} are shown" if len(cut) > len(shown) else ""
    ways, samples = count_text(len(cut), "way"), count_text(batch, "sample")
    facts = f"chosen from {ways}{more}, for {samples} on {count_text(devices, 'device')}"
    return notebook_fragment(
        [notebook_heading(title, facts), notebook_table((*headers, "bubble", "memory", ""), lines)]
    )
