"""Memory over time below a timeline: a panel for each device, by parts; of many devices, those closest to their limits.

All panels share one scale and the time axis of the timeline. A limit is a dashed line, unless it is so far above the
curves that they would be flat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

from fxpipe.inspect.scene import Area, Item, Line, Point, Rect, Text
from fxpipe.inspect.style import FAINT, INK, LIMIT_COLOUR, MEMORY_COLOURS, LegendEntry, TimeAxis, legend_items
from fxpipe.simulation.timeline import MEMORY_PARTS, MemoryParts, MemoryTimeline, fullest_devices
from fxpipe.utils.units import human_bytes

MAX_PANELS = 8  # devices
PANEL_HEIGHT, PANEL_GAP = 46.0, 10.0
CHART_HEAD = 38.0  # height of the title and the legend
FLAT_LIMIT_RATIO = 3.0  # a limit above this many times the peak is not drawn
PANEL_COLOUR = "#f7f7f7"


def memory_chart(
    memory: Sequence[MemoryTimeline], limits: Sequence[float | None], frame: TimeAxis, y: float
) -> tuple[list[Item], float]:
    """Draws the memory of each device, with its parts stacked, from `y` downwards; also returns the bottom."""
    peaks, limits = [one.peak for one in memory], limits or (None,) * len(memory)
    peak, shown = max(peaks), sorted(fullest_devices(peaks, limits)[:MAX_PANELS])
    known = {d: limit for d in shown if (limit := limits[d]) is not None}
    drawn = {d: limit for d, limit in known.items() if limit <= FLAT_LIMIT_RATIO * peak}
    scale = PANEL_HEIGHT / (max([peak, *drawn.values()]) * 1.04)  # points for each byte
    parts = [name for name in MEMORY_PARTS if any(getattr(size, name) for d in shown for _, size in memory[d].steps)]

    heading = "memory" if len(memory) == 1 else "memory, all on one scale"
    if len(shown) < len(memory):
        heading += f", of the {len(shown)} devices closest to their limits"
    if len(drawn) < len(known):
        above = min(limit for d, limit in known.items() if d not in drawn)
        heading += f"; the limit of {human_bytes(above)} lies above"
    entries = [LegendEntry(name, MEMORY_COLOURS[name]) for name in parts]
    if drawn:
        sizes = list(dict.fromkeys(map(human_bytes, (min(drawn.values()), max(drawn.values())))))
        name = f"limit{'s' if len(sizes) > 1 else ''} {' to '.join(sizes)}"
        entries.append(LegendEntry(name, LIMIT_COLOUR, is_line=True))
    items: list[Item] = [Text(frame.left, y + 12, heading, is_bold=True)]
    items += legend_items(entries, frame.left, y + 28, frame.width)
    for place, d in enumerate(shown):
        base = y + CHART_HEAD + (place + 1) * PANEL_HEIGHT + place * PANEL_GAP
        middle, right, label = base - PANEL_HEIGHT / 2, frame.right + 8, f"device {d}"
        items.append(Rect(frame.left, base - PANEL_HEIGHT, frame.width, PANEL_HEIGHT, PANEL_COLOUR))
        items += _stacked_areas(memory[d], parts, frame, base, scale, label)
        if d in drawn:
            level, title = base - drawn[d] * scale, f"the limit, {human_bytes(drawn[d])}"
            items.append(Line(((frame.left, level), (frame.right, level)), LIMIT_COLOUR, 1.2, (5, 3), title))
        is_over = d in drawn and peaks[d] > drawn[d]
        items.append(Text(frame.left - 8, middle + 4, label, 10, anchor="end"))
        items.append(Text(right, middle, "peak", 9, FAINT))
        items.append(Text(right, middle + 12, human_bytes(peaks[d]), 10, LIMIT_COLOUR if is_over else INK))
    return items, y + CHART_HEAD + len(shown) * (PANEL_HEIGHT + PANEL_GAP)


def _stacked_areas(
    memory: MemoryTimeline, parts: Sequence[str], frame: TimeAxis, base: float, scale: float, label: str
) -> Iterator[Item]:
    kept = _thin_steps(memory, frame)
    sums = [(0.0, *accumulate(float(getattr(size, name)) for name in parts)) for _, size in kept]
    times = [time for time, _ in kept]
    for k, name in enumerate(parts):
        if all(row[k] == row[k + 1] for row in sums):
            continue
        upper = _stair_points(times, [row[k + 1] for row in sums], frame, base, scale)
        lower = _stair_points(times, [row[k] for row in sums], frame, base, scale)
        most = human_bytes(max(row[k + 1] - row[k] for row in sums))
        yield Area((*upper, *reversed(lower)), MEMORY_COLOURS[name], title=f"{label}: {name}, at most {most}")


def _thin_steps(memory: MemoryTimeline, frame: TimeAxis) -> list[tuple[float, MemoryParts]]:
    """Keeps the largest and the last of the steps on the same point of the picture."""
    kept: list[tuple[float, MemoryParts]] = []
    for _, group in groupby(memory.steps, key=lambda step: int(frame.x(step[0]))):
        steps = list(group)
        highest = max(steps, key=lambda step: step[1].total)
        kept += [highest] if highest is steps[-1] else [highest, steps[-1]]
    return kept


def _stair_points(
    times: Sequence[float], sizes: Sequence[float], frame: TimeAxis, base: float, scale: float
) -> tuple[Point, ...]:
    points: list[Point] = []
    level = sizes[0]
    for time, size in zip(times, sizes, strict=True):
        x = frame.x(time)
        if size != level:
            points.append((x, base - level * scale))
        if size != level or not points:
            points.append((x, base - size * scale))
        level = size
    return (*points, (frame.right, base - level * scale))
