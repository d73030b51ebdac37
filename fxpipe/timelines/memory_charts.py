"""Memory over time below a timeline: of a few devices a panel each, by parts; of many the lines in one chart.

All panels have one scale, so that devices compare, and the time axis of the timeline. A limit is a dashed line, unless
it lies so far above that the curves would be flat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, groupby

from fxpipe.drawing.axes import byte_ticks
from fxpipe.drawing.colours import FAINT, GRID, LIMIT, MEMORY, on_ramp
from fxpipe.drawing.legends import Entry, legend
from fxpipe.drawing.scene import Area, Item, Line, Point, Rect, Text
from fxpipe.timelines import Memory, Parts
from fxpipe.timelines.frames import Frame
from fxpipe.units import human_bytes

MOST_PANELS = 8  # devices
PANEL, GAP = 46.0, 10.0
CHART = 200.0
GRAIN = 4.0  # points, of which a line of many shows the most
HEAD = 38.0  # of the title and the legend
FLAT = 3.0  # a limit so many times the peak would leave the curves flat
PARTS = tuple(field.name for field in fields(Parts))
SMALL = 9.0


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn, and how high."""

    moving: tuple[Item, ...]  # stands on the time axis
    still: tuple[Item, ...]  # stands beside it
    height: float


@dataclass(frozen=True, slots=True)
class _Scale:
    """What bytes are in a chart of some height."""

    top: float  # bytes at its upper edge
    limits: tuple[float | None, ...]  # by device; None: not known, or far above
    remark: str  # on limits that are not drawn

    @property
    def entries(self) -> list[Entry]:
        """Of the legend."""
        levels = sorted({limit for limit in self.limits if limit is not None})
        if not levels:
            return []
        sizes = list(dict.fromkeys(map(human_bytes, (levels[0], levels[-1]))))
        return [Entry(f"limit{'s' if len(sizes) > 1 else ''} {' to '.join(sizes)}", LIMIT, is_line=True)]


def memory_chart(
    memory: Sequence[Memory],
    limits: Sequence[float | None],
    labels: Sequence[str],
    frame: Frame,
    y: float,
) -> Chart:
    """Of the devices, whose names are `labels`, from `y` downwards."""
    scale = _scale([one.peak for one in memory], limits or (None,) * len(memory))
    draw = _panels if len(memory) <= MOST_PANELS else _lines
    return draw(memory, labels, scale, frame, y)


def _scale(peaks: Sequence[float], limits: Sequence[float | None]) -> _Scale:
    peak = max(peaks)
    drawn = tuple(None if limit is None or limit > FLAT * peak else limit for limit in limits)
    above = [limit for limit, level in zip(limits, drawn, strict=True) if limit is not None and level is None]
    remark = f"; the limit of {human_bytes(min(above))} lies above" if above else ""
    return _Scale(max(peak, *(limit or 0.0 for limit in drawn)) * 1.04, drawn, remark)


def _panels(memory: Sequence[Memory], labels: Sequence[str], scale: _Scale, frame: Frame, y: float) -> Chart:
    """A panel for each device: its parts, one on the other."""
    parts = [name for name in PARTS if any(getattr(size, name) for one in memory for _, size in one.steps)]
    heading = "memory" if len(memory) == 1 else "memory, all on one scale"
    still: list[Item] = [Text(frame.left, y + 12, f"{heading}{scale.remark}", is_bold=True)]
    entries = [*(Entry(name, MEMORY[name]) for name in parts), *scale.entries]
    still += legend(entries, frame.left, y + 28, frame.width)
    moving: list[Item] = []
    for d, (one, label) in enumerate(zip(memory, labels, strict=True)):
        base = y + HEAD + (d + 1) * PANEL + d * GAP
        moving.append(Rect(frame.left, base - PANEL, frame.width, PANEL, "#f7f7f7"))
        moving += _stacked(one, parts, frame, base, PANEL / scale.top, label)
        limit = scale.limits[d]
        if limit is not None:
            moving.append(_level(limit, frame, base - limit * PANEL / scale.top))
        still.append(Text(frame.left - 8, base - PANEL / 2 + 4, label, 10, anchor="end"))
        still.append(Text(frame.right + 8, base - PANEL / 2, "peak", SMALL, FAINT))
        colour = LIMIT if limit is not None and one.peak > limit else "#222222"
        still.append(Text(frame.right + 8, base - PANEL / 2 + 12, human_bytes(one.peak), 10, colour))
    return Chart(tuple(moving), tuple(still), HEAD + len(memory) * (PANEL + GAP))


def _stacked(
    memory: Memory, parts: Sequence[str], frame: Frame, base: float, scale: float, label: str
) -> Iterator[Item]:
    kept = _thinned(memory, frame)
    sums = [(0.0, *accumulate(float(getattr(size, name)) for name in parts)) for _, size in kept]
    times = [time for time, _ in kept]
    for k, name in enumerate(parts):
        if all(row[k] == row[k + 1] for row in sums):
            continue
        upper = _stairs(times, [row[k + 1] for row in sums], frame, base, scale)
        lower = _stairs(times, [row[k] for row in sums], frame, base, scale)
        most = human_bytes(max(row[k + 1] - row[k] for row in sums))
        yield Area((*upper, *reversed(lower)), MEMORY[name], title=f"{label}: {name}, at most {most}")


def _lines(memory: Sequence[Memory], labels: Sequence[str], scale: _Scale, frame: Frame, y: float) -> Chart:
    """One chart with a line for each device, from light to dark, and a name for the one that needs most."""
    head, base = y + HEAD, y + HEAD + CHART
    peaks = [one.peak for one in memory]
    most = max(range(len(memory)), key=peaks.__getitem__)
    told = f"memory of each device: at most {human_bytes(peaks[most])}, on device {most}{scale.remark}"
    still: list[Item] = [Text(frame.left, y + 12, told, is_bold=True)]
    entries = [Entry("device 0", on_ramp(0), is_line=True), Entry("…", on_ramp(0.5), is_line=True)]
    entries.append(Entry(f"device {len(memory) - 1}", on_ramp(1), is_line=True))
    entries += scale.entries
    still += legend(entries, frame.left, y + 28, frame.width)

    moving: list[Item] = []
    for size, name in byte_ticks(scale.top, 5):
        at = base - size * CHART / scale.top
        moving.append(Line(((frame.left, at), (frame.right, at)), GRID))
        still.append(Text(frame.left - 8, at + 3, name, SMALL, FAINT, anchor="end"))
    for d in sorted(range(len(memory)), key=lambda d: d == most):  # the greatest on top of all
        kept = _envelope(memory[d], frame)
        points = _stairs([time for time, _ in kept], [size for _, size in kept], frame, base, CHART / scale.top)
        title = f"{labels[d]}: peak {human_bytes(peaks[d])}"
        moving.append(Line(points, on_ramp(d / (len(memory) - 1)), 1.8 if d == most else 0.9, title=title))
    for limit in sorted({limit for limit in scale.limits if limit is not None}):
        moving.append(_level(limit, frame, base - limit * CHART / scale.top))
    return Chart(tuple(moving), tuple(still), base - head + HEAD)


def _level(limit: float, frame: Frame, y: float) -> Line:
    title = f"the limit, {human_bytes(limit)}"
    return Line(((frame.left, y), (frame.right, y)), LIMIT, 1.2, (5, 3), title)


def _thinned(memory: Memory, frame: Frame) -> list[tuple[float, Parts]]:
    """Of all steps that fall on one point of the picture the greatest and the last: what one would see of them."""
    kept: list[tuple[float, Parts]] = []
    for found in _grains(memory, frame, 1.0):
        highest = max(found, key=lambda step: step[1].total)
        kept += [highest] if highest is found[-1] else [highest, found[-1]]
    return kept


def _envelope(memory: Memory, frame: Frame) -> list[tuple[float, float]]:
    """The most within every few points: many lines would be too restless with each rise and fall."""
    return [(found[0][0], max(size.total for _, size in found)) for found in _grains(memory, frame, GRAIN)]


def _grains(memory: Memory, frame: Frame, grain: float) -> Iterator[list[tuple[float, Parts]]]:
    """The steps, those together that fall on the same `grain` points of the picture."""
    for _, group in groupby(memory.steps, key=lambda step: int(frame.x(step[0]) / grain)):
        yield list(group)


def _stairs(
    times: Sequence[float], sizes: Sequence[float], frame: Frame, base: float, scale: float
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
