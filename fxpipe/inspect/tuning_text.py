"""The result of a tuner as text and in notebooks: a table of the candidates that it compared."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fxpipe.inspect.plan_text import checkpoint_text
from fxpipe.inspect.svg import notebook_view
from fxpipe.inspect.table import Cell, Column, Table, bytes_column, number_column, text_column
from fxpipe.utils.text_table import wrap_text
from fxpipe.utils.units import count_text, human_seconds, percent

if TYPE_CHECKING:
    from fxpipe.planning.tuning.candidates import CandidateResult, Tuning

MAX_PRINTED_CANDIDATES = 20  # rows of the printed table, in addition to the chosen one
MAX_HTML_CANDIDATES = 12  # rows


def tuning_table(tuning: Tuning, most: int, is_cut: bool = False) -> Table[CandidateResult]:
    """Returns a table of the first `most` candidates and the best; `is_cut`: only candidates with a plan."""
    rows = [row for row in tuning.rows if row.plan is not None or not is_cut]
    rows = rows[:most] + [row for row in rows[most:] if row is tuning.best]
    devices = len(tuning.devices) * tuning.best.data_parallel

    def replicas(row: CandidateResult) -> str:
        """Formats `8 x 4, data outside`: devices of a replica, number of replicas, and outer mesh dimension."""
        order = f", {row.mesh[0]} outside" if devices > row.data_parallel > 1 else ""
        return f"{devices // row.data_parallel} x {row.data_parallel}{order}"

    def step(row: CandidateResult) -> Cell | None:
        bound = "≥ " if row.plan is None else ""
        return Cell(bound + human_seconds(row.step_seconds), row.step_seconds) if row.step_seconds else None

    columns: list[Column[CandidateResult]] = [
        text_column("", lambda row: "->" if row is tuning.best else ""),
        text_column("schedule", lambda row: row.schedule.partition("\n")[0].partition(":")[0]),
        text_column("pipeline x data", replicas),
        number_column("chunks", lambda row: row.chunks),
        text_column("checkpoint", lambda row: checkpoint_text(row.checkpoint)),
        number_column("stages per\ndevice", lambda row: row.stages_per_device),
        Column("step", step),
        number_column("measured", lambda row: row.measured_seconds, human_seconds),
        number_column("idle", lambda row: None if row.plan is None else row.simulation.mean_bubble, percent),
        bytes_column("peak memory", lambda row: None if row.plan is None else row.peak),
        bytes_column("lacks", lambda row: row.lacks if row.lacks > 0 else None),
    ]
    hidden = {
        "pipeline x data": all(row.data_parallel == 1 for row in tuning.rows),
        "measured": all(row.measured_seconds is None for row in tuning.rows),
        "lacks": all(row.lacks <= 0 for row in tuning.rows),
    }
    return Table([column for column in columns if not hidden.get(column.name)], rows, keys=2, missing="")


def tuning_text(tuning: Tuning, is_whole: bool = False, remaining: str = ".rows has") -> str:
    """Formats the first candidates and the best, or all; `remaining` begins the line that counts omitted rows."""
    kinds = Counter(name.partition(":")[0] for name in tuning.devices)
    listed = ", ".join(f"{count * tuning.best.data_parallel} x {kind}" for kind, count in kinds.items())
    how = f", seconds estimated for {tuning.estimated_for}" if tuning.estimated_for else ""
    table = tuning_table(tuning, len(tuning.rows) if is_whole else MAX_PRINTED_CANDIDATES)
    lines = [wrap_text(f"mini-batches of {tuning.batch} on {listed}{how}; the chosen way is marked"), str(table)]
    if len(tuning.rows) > len(table.rows):
        lines.append(f"{remaining} {len(tuning.rows) - len(table.rows)} more")
    bounds = [row.step_seconds for row in table.rows if row.plan is None and row.step_seconds]
    if bounds:
        least = min(bounds) / tuning.best.step_seconds if tuning.best.step_seconds else 1.0
        gain = f", at most {percent(1 - least)} shorter than the chosen step" if least < 1 else ""
        lines.append(f"≥: lower bound, with perfectly even stages{gain}; not simulated")
    if tuning.best.plan is not None and tuning.best.simulation.host_note:
        lines.append(wrap_text(f"the chosen way is {tuning.best.simulation.host_note}"))
    return "\n".join(lines)


def tuning_html(tuning: Tuning) -> str:
    best, table = tuning.best, tuning_table(tuning, MAX_HTML_CANDIDATES, is_cut=True)
    chunks = count_text(best.chunks, "micro-batch", "es")
    title = f"{best.schedule.partition(':')[0]}, {chunks}: step {human_seconds(best.step_seconds)}"
    cut = sum(row.plan is not None for row in tuning.rows)
    more = f", of which {len(table.rows)} are shown" if cut > len(table.rows) else ""
    devices = count_text(len(tuning.devices) * best.data_parallel, "device")
    facts = f"chosen from {count_text(cut, 'way')}{more}, for {count_text(tuning.batch, 'sample')} on {devices}"
    return notebook_view(title, facts, table.for_notebook())
