"""The result of a tuner: a row for each candidate, and the one that it chose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.inspect.html import (
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
from fxpipe.planning.tuning.candidates import CandidateResult
from fxpipe.utils.ipython import show_as_printed
from fxpipe.utils.text_table import text_table, wrap_text
from fxpipe.utils.units import count_text, human_bytes, human_seconds, percent

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
        return tuning_text(self)

    _repr_pretty_ = show_as_printed

    def _repr_html_(self) -> str:

        return tuning_html(self.rows, self.best, self.batch, len(self.devices) * self.best.data_parallel)


# -- The result of a tuner as text -----------------------------------------------------------------------------------


def tuning_text(tuning: Tuning, is_whole: bool = False, remaining: str = ".rows has") -> str:
    """The table that the tuner chose from: its first rows and the chosen one, or all of them.

    Args:
        is_whole: shows all rows.
        remaining: what tells of the others, and its verb.
    """
    most = len(tuning.rows) if is_whole else MAX_PRINTED_CANDIDATES
    shown = tuning.rows[:most] + tuple(row for row in tuning.rows[most:] if row is tuning.best)
    is_measured = any(row.measured_seconds is not None for row in tuning.rows)
    has_replicas = any(row.data_parallel > 1 for row in tuning.rows)
    headers = [
        "",
        "schedule",
        *["pipeline x data"] * has_replicas,
        "chunks",
        "checkpoint",
        "stages per\ndevice",
        "step",
    ]
    headers += ["measured"] * is_measured + ["idle", "peak memory"]
    headers += ["lacks"] * any(row.lacks > 0 for row in tuning.rows)
    lines = [_head(tuning), text_table(
        [_cells(tuning, row, headers) for row in shown],
        headers,
        left=("", "pipeline x data", "schedule", "checkpoint"),
        keys=2,
    )]  # fmt: skip
    if len(tuning.rows) > len(shown):
        lines.append(f"{remaining} {len(tuning.rows) - len(shown)} more")
    skipped = [row.step_seconds for row in shown if row.plan is None and row.step_seconds]
    if skipped:
        least = min(skipped) / tuning.best.step_seconds if tuning.best.step_seconds else 1.0
        gain = f", at most {percent(1 - least)} shorter than the chosen step" if least < 1 else ""
        lines.append(f"≥: lower bound, with perfectly even stages{gain}; not simulated")
    if tuning.best.plan is not None and tuning.best.simulation.host_note:
        lines.append(wrap_text(f"the chosen way is {tuning.best.simulation.host_note}"))
    return "\n".join(lines)


def _head(tuning: Tuning) -> str:
    kinds = Counter(name.partition(":")[0] for name in tuning.devices)
    data = tuning.best.data_parallel
    listed = ", ".join(f"{count * data} x {kind}" for kind, count in kinds.items())
    how = f", seconds estimated for {tuning.estimated_for}" if tuning.estimated_for else ""
    return wrap_text(f"mini-batches of {tuning.batch} on {listed}{how}; the chosen way is marked")


def _cells(tuning: Tuning, row: CandidateResult, headers: Sequence[str]) -> list[str]:
    cells = {
        "": "->" if row is tuning.best else "",
        "schedule": row.schedule if "\n" not in row.schedule else row.schedule.partition(":")[0],
        "pipeline x data": _replicas_text(tuning, row),
        "chunks": str(row.chunks),
        "checkpoint": row.checkpoint if isinstance(row.checkpoint, str) else _modes_text(row.checkpoint),
        "stages per\ndevice": str(row.stages_per_device),
        "step": _step_text(row),
        "measured": "" if row.measured_seconds is None else human_seconds(row.measured_seconds),
        "idle": "" if row.plan is None else percent(row.simulation.mean_bubble),
        "peak memory": "" if row.plan is None else human_bytes(row.peak),
        "lacks": human_bytes(row.lacks) if row.lacks > 0 else "",
    }
    return [cells[header] for header in headers]


def _replicas_text(tuning: Tuning, row: CandidateResult) -> str:
    """`8 x 4, data outside`: the devices of a replica, how many replicas, and how they stand."""
    devices = len(tuning.devices) * tuning.best.data_parallel
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
