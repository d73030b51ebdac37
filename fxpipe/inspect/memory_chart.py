"""Memory over time below a timeline: for a few devices, a panel each, by parts; for many, lines in one chart.

All panels share one scale and the time axis of the timeline. A limit is a dashed line, unless it is so far above the
curves that they would be flat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from fxpipe.inspect.scene import Area, Item, Line, Point, Rect, Text
from fxpipe.inspect.style import (
    FAINT,
    GRID,
    LIMIT_COLOUR,
    MEMORY_COLOURS,
    LegendEntry,
    TimeAxis,
    byte_ticks,
    legend_items,
    ramp_colour,
)
from fxpipe.simulation.timeline import MEMORY_PARTS, MemoryParts, MemoryTimeline
from fxpipe.utils.units import human_bytes

MAX_PANELS = 8  # devices
PANEL_HEIGHT, PANEL_GAP = 46.0, 10.0
CHART_HEIGHT = 200.0
GRAIN = 4.0  # points over which a line of the chart of many devices shows the maximum
CHART_HEAD = 38.0  # height of the title and the legend
FLAT_LIMIT_RATIO = 3.0  # a limit above this many times the peak is not drawn
SMALL_TEXT = 9.0


@dataclass(frozen=True, slots=True)
class MemoryChart:
    """The items of a memory chart, and its height."""

    time_items: tuple[Item, ...]  # on the time axis
    fixed_items: tuple[Item, ...]  # next to it
    height: float


@dataclass(frozen=True, slots=True)
class _ByteScale:
    """The scale from bytes to the height of a chart."""

    top: float  # bytes at its upper edge
    limits: tuple[float | None, ...]  # by device; None: not known, or far above
    note: str  # about limits that are not drawn

    @property
    def entries(self) -> list[LegendEntry]:
        levels = sorted({limit for limit in self.limits if limit is not None})
        if not levels:
            return []
        sizes = list(dict.fromkeys(map(human_bytes, (levels[0], levels[-1]))))
        return [LegendEntry(f"limit{'s' if len(sizes) > 1 else ''} {' to '.join(sizes)}", LIMIT_COLOUR, is_line=True)]


def memory_chart(
    memory: Sequence[MemoryTimeline],
    limits: Sequence[float | None],
    labels: Sequence[str],
    frame: TimeAxis,
    y: float,
) -> MemoryChart:
    """Draws the memory chart of the devices with names `labels`, from `y` downwards."""
    scale = _byte_scale([one.peak for one in memory], limits or (None,) * len(memory))
    draw = _draw_panels if len(memory) <= MAX_PANELS else _draw_lines
    return draw(memory, labels, scale, frame, y)


def _byte_scale(peaks: Sequence[float], limits: Sequence[float | None]) -> _ByteScale:
    peak = max(peaks)
    drawn = tuple(None if limit is None or limit > FLAT_LIMIT_RATIO * peak else limit for limit in limits)
    above = [limit for limit, level in zip(limits, drawn, strict=True) if limit is not None and level is None]
    remark = f"; the limit of {human_bytes(min(above))} lies above" if above else ""
    return _ByteScale(max(peak, *(limit or 0.0 for limit in drawn)) * 1.04, drawn, remark)


def _draw_panels(
    memory: Sequence[MemoryTimeline], labels: Sequence[str], scale: _ByteScale, frame: TimeAxis, y: float
) -> MemoryChart:
    """Draws a panel for each device, with its parts stacked."""
    parts = [name for name in MEMORY_PARTS if any(getattr(size, name) for one in memory for _, size in one.steps)]
    heading = "memory" if len(memory) == 1 else "memory, all on one scale"
    still: list[Item] = [Text(frame.left, y + 12, f"{heading}{scale.note}", is_bold=True)]
    entries = [*(LegendEntry(name, MEMORY_COLOURS[name]) for name in parts), *scale.entries]
    still += legend_items(entries, frame.left, y + 28, frame.width)
    moving: list[Item] = []
    for d, (one, label) in enumerate(zip(memory, labels, strict=True)):
        base = y + CHART_HEAD + (d + 1) * PANEL_HEIGHT + d * PANEL_GAP
        moving.append(Rect(frame.left, base - PANEL_HEIGHT, frame.width, PANEL_HEIGHT, "#f7f7f7"))
        moving += _stacked_areas(one, parts, frame, base, PANEL_HEIGHT / scale.top, label)
        limit = scale.limits[d]
        if limit is not None:
            moving.append(_limit_line(limit, frame, base - limit * PANEL_HEIGHT / scale.top))
        still.append(Text(frame.left - 8, base - PANEL_HEIGHT / 2 + 4, label, 10, anchor="end"))
        still.append(Text(frame.right + 8, base - PANEL_HEIGHT / 2, "peak", SMALL_TEXT, FAINT))
        colour = LIMIT_COLOUR if limit is not None and one.peak > limit else "#222222"
        still.append(Text(frame.right + 8, base - PANEL_HEIGHT / 2 + 12, human_bytes(one.peak), 10, colour))
    return MemoryChart(tuple(moving), tuple(still), CHART_HEAD + len(memory) * (PANEL_HEIGHT + PANEL_GAP))


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


def _draw_lines(
    memory: Sequence[MemoryTimeline], labels: Sequence[str], scale: _ByteScale, frame: TimeAxis, y: float
) -> MemoryChart:
    """Draws one chart with a line for each device, from light to dark, and names the device that needs most."""
    head, base = y + CHART_HEAD, y + CHART_HEAD + CHART_HEIGHT
    peaks = [one.peak for one in memory]
    most = max(range(len(memory)), key=peaks.__getitem__)
    told = f"memory of each device: at most {human_bytes(peaks[most])}, on device {most}{scale.note}"
    still: list[Item] = [Text(frame.left, y + 12, told, is_bold=True)]
    entries = [LegendEntry("device 0", ramp_colour(0), is_line=True), LegendEntry("…", ramp_colour(0.5), is_line=True)]
    entries.append(LegendEntry(f"device {len(memory) - 1}", ramp_colour(1), is_line=True))
    entries += scale.entries
    still += legend_items(entries, frame.left, y + 28, frame.width)

    moving: list[Item] = []
    for size, name in byte_ticks(scale.top, 5):
        at = base - size * CHART_HEIGHT / scale.top
        moving.append(Line(((frame.left, at), (frame.right, at)), GRID))
        still.append(Text(frame.left - 8, at + 3, name, SMALL_TEXT, FAINT, anchor="end"))
    for d in sorted(range(len(memory)), key=lambda d: d == most):  # the largest on top
        kept = _envelope(memory[d], frame)
        points = _stair_points(
            [time for time, _ in kept], [size for _, size in kept], frame, base, CHART_HEIGHT / scale.top
        )
        title = f"{labels[d]}: peak {human_bytes(peaks[d])}"
        moving.append(Line(points, ramp_colour(d / (len(memory) - 1)), 1.8 if d == most else 0.9, title=title))
    for limit in sorted({limit for limit in scale.limits if limit is not None}):
        moving.append(_limit_line(limit, frame, base - limit * CHART_HEIGHT / scale.top))
    return MemoryChart(tuple(moving), tuple(still), base - head + CHART_HEAD)


def _limit_line(limit: float, frame: TimeAxis, y: float) -> Line:
    title = f"the limit, {human_bytes(limit)}"
    return Line(((frame.left, y), (frame.right, y)), LIMIT_COLOUR, 1.2, (5, 3), title)


def _thin_steps(memory: MemoryTimeline, frame: TimeAxis) -> list[tuple[float, MemoryParts]]:
    """Keeps the largest and the last of the steps on the same point of the picture."""
    kept: list[tuple[float, MemoryParts]] = []
    for steps in _steps_by_grain(memory, frame, 1.0):
        highest = max(steps, key=lambda step: step[1].total)
        kept += [highest] if highest is steps[-1] else [highest, steps[-1]]
    return kept


def _envelope(memory: MemoryTimeline, frame: TimeAxis) -> list[tuple[float, float]]:
    """Computes the maximum over every `GRAIN` points, so that many lines stay legible."""
    return [(steps[0][0], max(size.total for _, size in steps)) for steps in _steps_by_grain(memory, frame, GRAIN)]


def _steps_by_grain(memory: MemoryTimeline, frame: TimeAxis, grain: float) -> Iterator[list[tuple[float, MemoryParts]]]:
    """Yields the steps, grouped by the `grain` points of the picture that they are in."""
    for _, group in groupby(memory.steps, key=lambda step: int(frame.x(step[0]) / grain)):
        yield list(group)


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
