"""What a tuner found as notebooks show it."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.drawing.fragments import fragment, head, table
from fxpipe.drawing.markup import code, missing, number, percent, seconds, size, text
from fxpipe.tuning.rows import Row
from fxpipe.units import counted, human_bytes, human_seconds

MOST_TRIED = 12  # rows


def tuning_html(rows: Sequence[Row], best: Row, batch: int, devices: int) -> str:
    """The best of what was tried, the chosen one marked."""
    cut = [row for row in rows if row.plan is not None]
    shown = cut[:MOST_TRIED] + [row for row in cut[MOST_TRIED:] if row is best]
    headers = ("", "schedule", "chunks", "checkpoint", "stages per device", "step", "measured", "bubble", "memory", "")
    lines = [
        (
            text("→" if row is best else ""),
            code(row.schedule.partition(":")[0]),
            number(row.chunks),
            text(row.checkpoint if isinstance(row.checkpoint, str) else "by stage"),
            number(row.stages_per_device),
            seconds(row.step_seconds),
            missing() if row.measured_seconds is None else seconds(row.measured_seconds),
            percent(row.simulation.mean_bubble),
            size(row.peak),
            text(f"lacks {human_bytes(row.lacks)}" if row.lacks > 0 else ""),
        )
        for row in shown
    ]
    chunks = counted(best.chunks, "micro-batch", "es")
    title = f"{best.schedule.partition(':')[0]}, {chunks}: step {human_seconds(best.step_seconds)}"
    more = f", of which {len(shown)} are shown" if len(cut) > len(shown) else ""
    facts = (
        f"chosen from {counted(len(cut), 'way')}{more}, for {counted(batch, 'sample')} on {counted(devices, 'device')}"
    )
    return fragment([head(title, facts), table(headers, lines)])
