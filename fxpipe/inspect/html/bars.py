"""What the devices of a step hold at their peaks, as stacked bars: a row for each device, its limit a line across.

A limit far above all of them would leave nothing of the bars to see: it is told, and not drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpipe.drawing.colours import GRID, INK, LIMIT, MEMORY
from fxpipe.drawing.legends import Entry, legend
from fxpipe.drawing.letters import fitted
from fxpipe.drawing.scene import Item, Line, Rect, Scene, Text
from fxpipe.timelines.memory_charts import FLAT
from fxpipe.units import human_bytes

if TYPE_CHECKING:
    from fxpipe.timelines import Parts

MARGIN, NAMES, WIDTH, AMOUNTS, LEGEND = 8.0, 116.0, 640.0, 170.0, 30.0  # points, from left to right and from the top
SIZE = 11.0  # of the letters


def memory_bars(names: Sequence[str], parts: Sequence[Parts], limits: Sequence[float | None]) -> Scene:
    """For each device its name, what it holds at its peak, and what it may hold, where that is known."""
    height = 16.0 if len(names) > 20 else 24.0
    held = [kind for kind in MEMORY if any(getattr(found, kind) for found in parts)]
    peak = max(found.total for found in parts)
    drawn = [None if limit is None or limit > FLAT * peak else limit for limit in limits]
    longest = max(peak, *(limit or 0.0 for limit in drawn)) or 1
    start, bottom = MARGIN + NAMES, LEGEND + height * len(names)
    entries = [Entry(kind, MEMORY[kind]) for kind in held]
    if any(limit is not None for limit in drawn):
        entries.append(Entry("limit", LIMIT, is_line=True))
    items: list[Item] = legend(entries, start, 16, WIDTH)
    items.append(Line(((start, LEGEND), (start, bottom)), GRID))
    for row, (name, found, limit, level) in enumerate(zip(names, parts, limits, drawn, strict=True)):
        top, x = LEGEND + row * height, start
        base = top + height / 2 + 4
        items.append(Text(MARGIN, base, fitted(name, NAMES - 8, SIZE), SIZE))
        for kind in held:
            amount = getattr(found, kind)
            width = WIDTH * amount / longest
            if width > 0.05:  # points
                title = f"{name}: {human_bytes(amount)} of {kind}"
                items.append(Rect(x, top + 3, width, height - 6, MEMORY[kind], title=title))
            x += width
        is_over = limit is not None and found.total > limit
        if level is not None:
            at = start + WIDTH * level / longest
            items.append(Line(((at, top + 1), (at, top + height - 1)), LIMIT, 2, title=f"limit {human_bytes(level)}"))
            x = max(x, at)
        of = f" of {human_bytes(limit)}" if limit is not None else ""
        items.append(Text(x + 8, base, human_bytes(found.total) + of, SIZE, LIMIT if is_over else INK))
    return Scene(start + WIDTH + AMOUNTS, bottom + MARGIN, tuple(items), "Memory of the devices at their peaks")
