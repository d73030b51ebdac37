"""Axes of pictures: round numbers of time and bytes with labels, and legends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.inspect.scene import Item, Line, Rect, Text
from fxpipe.inspect.style import text_width
from fxpipe.utils.units import human_bytes

TIME_UNITS = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
MINUTE_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 18000, 36000, 86400)  # seconds


def time_ticks(seconds: float, most: int) -> tuple[tuple[float, str], ...]:
    """Chooses at most `most` + 1 positions from 0 to `seconds`, with labels: `20 ms`, `1:30 min`."""
    if seconds <= 0:
        return ((0.0, "0"),)
    least = seconds / max(1, most)
    step = next((s for s in MINUTE_STEPS if s >= least), _round_up(least)) if seconds >= 120 else _round_up(least)
    count = int(seconds / step * (1 + 1e-9))
    return tuple((k * step, _time_label(k * step, step, seconds)) for k in range(count + 1))


def byte_ticks(size: float, most: int) -> tuple[tuple[float, str], ...]:
    """Chooses at most `most` + 1 positions from 0 to `size`, with labels."""
    if size <= 0:
        return ((0.0, "0"),)
    unit = 1024.0 ** max(0, min(4, math.floor(math.log(size, 1024))))
    step = _round_up(size / unit / max(1, most)) * unit
    if unit > 1 and step < unit:
        step = 2 ** math.ceil(math.log2(size / unit / max(1, most))) * unit
    return tuple((k * step, human_bytes(k * step) if k else "0") for k in range(int(size / step * (1 + 1e-9)) + 1))


def _round_up(least: float) -> float:
    """Rounds up to one of 1, 2, 5, 10, 20, 50 …, times a power of 10."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= least * (1 - 1e-9))


def _time_label(at: float, step: float, seconds: float) -> str:
    if not at:
        return "0"
    if seconds >= 120:
        minutes, rest = divmod(round(at), 60)
        return f"{minutes // 60}:{minutes % 60:02} h" if seconds >= 7200 else f"{minutes}:{rest:02} min"
    size, unit = next((one for one in reversed(TIME_UNITS) if one[0] <= seconds * (1 + 1e-9)), TIME_UNITS[0])
    return f"{_rounded_number(at / size, step / size)} {unit}"


def _rounded_number(value: float, step: float) -> str:
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{places}f}"


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """A time axis from time 0 at `left` to the end of the step at `right`."""

    left: float
    right: float
    seconds: float

    @property
    def width(self) -> float:
        return self.right - self.left

    def x(self, time: float) -> float:
        return self.left + self.width * min(1.0, max(0.0, time / self.seconds)) if self.seconds else self.left


SQUARE_SIDE = 10.0
LEGEND_TEXT_SIZE = 10.0  # font size
TEXT_GAP, ENTRY_GAP = 5.0, 18.0  # from a square to its text; to the next square


@dataclass(frozen=True, slots=True)
class LegendEntry:
    name: str
    colour: str
    border: str = ""
    is_line: bool = False


def legend_items(entries: Sequence[LegendEntry], x: float, y: float, width: float) -> list[Item]:
    """Draws a legend in one line with baseline `y`; omits entries that do not fit into `width`."""
    items: list[Item] = []
    at = x
    for entry in entries:
        end = at + SQUARE_SIDE + TEXT_GAP + text_width(entry.name, LEGEND_TEXT_SIZE)
        if end > x + width:
            break
        if entry.is_line:
            items.append(Line(((at, y - 4), (at + SQUARE_SIDE, y - 4)), entry.colour, 2))
        else:
            items.append(Rect(at, y - SQUARE_SIDE + 1, SQUARE_SIDE, SQUARE_SIDE, entry.colour, entry.border))
        items.append(Text(at + SQUARE_SIDE + TEXT_GAP, y, entry.name, LEGEND_TEXT_SIZE))
        at = end + ENTRY_GAP
    return items
