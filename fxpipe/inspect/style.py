"""The colours, text widths, axes and legends of pictures.

Colours differ in lightness, and so in grey, too. They are based on Okabe and Ito, "Color Universal Design", 2008.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.inspect.svg import Item, Line, Rect, Text
from fxpipe.scheduling.actions import ActionKind

INK = "#222222"
FAINT = "#6b6b6b"  # secondary text; legible on white
GRID = "#e3e3e3"
LIMIT_COLOUR = "#b3261e"  # lines of limits

KIND_COLOURS = {
    ActionKind.FORWARD: "#6fbdf0",
    ActionKind.RECOMPUTE: "#f0e050",
    ActionKind.BACKWARD: "#0a5c99",
    ActionKind.WEIGHT: "#d9701c",
    ActionKind.UPDATE: "#2b2b2b",
}
RECEIVING_COLOUR = "#c9c9c9"
DARK_KINDS = (ActionKind.BACKWARD, ActionKind.UPDATE)  # boxes with white text

MEMORY_COLOURS = {  # static parts are grey
    "parameters": "#3f4a5a",
    "gradients": "#7d8a9c",
    "optimizer": "#b9c2cd",
    "activations": "#009e73",
    "portals": "#8fdcc2",
    "working": "#a23f8c",
}


# -- Width of a text, for layouts ------------------------------------------------------------------------------------
#
# The widths are from DejaVu Sans, which matplotlib and most Linux systems include. Verdana has nearly the same widths,
# and other fonts of browsers are narrower, so a text that fits by these widths is never cut off.

# Widths of the printable ASCII characters, from the space on, in hundredths of the font size.
WIDTHS = (
    32, 40, 46, 84, 64, 95, 78, 27, 39, 39, 50, 84, 32, 36, 32, 34, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 34, 34, 84,
    84, 84, 53, 100, 68, 69, 70, 77, 63, 58, 77, 75, 29, 29, 66, 56, 86, 75, 79, 60, 79, 69, 63, 61, 73, 68, 99, 69, 61,
    69, 39, 34, 39, 84, 50, 50, 61, 63, 55, 63, 62, 35, 63, 63, 28, 28, 58, 28, 97, 63, 61, 63, 63, 41, 52, 39, 63, 59,
    82, 59, 59, 52, 64, 34, 64, 84,
)  # fmt: skip
WIDEST_BOLD = 1.28  # bold letters are at most this many times wider
OTHER_WIDTHS = {"·": 38, "–": 50, "—": 100, "…": 100, "µ": 74, "×": 84, "→": 84, "−": 84}
WIDEST_LETTER = 100  # any other character


def text_width(text: str, size: float, *, is_bold: bool = False) -> float:
    """Returns the width of a text, or a bit more if it is bold, in the unit of `size`."""
    width = sum(WIDTHS[ord(c) - 32] if " " <= c <= "~" else OTHER_WIDTHS.get(c, WIDEST_LETTER) for c in text)
    return width * size / 100 * (WIDEST_BOLD if is_bold else 1)


def fit_text(text: str, width: float, size: float, *, is_bold: bool = False) -> str:
    """Shortens `text` in the middle, with an ellipsis, to at most `width`; empty if nothing fits."""
    if text_width(text, size, is_bold=is_bold) <= width:
        return text
    for kept in range(len(text) - 1, 0, -1):
        tail = kept // 2
        shorter = f"{text[: kept - tail]}…{text[len(text) - tail :]}"
        if text_width(shorter, size, is_bold=is_bold) <= width:
            return shorter
    return ""


TIME_UNITS = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))


def time_ticks(seconds: float, most: int) -> tuple[tuple[float, str], ...]:
    """Chooses at most `most` + 1 positions from 0 to `seconds`, with labels: `20 ms`."""
    if seconds <= 0:
        return ((0.0, "0"),)
    least = seconds / max(1, most)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= least * (1 - 1e-9))
    size, unit = next((one for one in reversed(TIME_UNITS) if one[0] <= seconds * (1 + 1e-9)), TIME_UNITS[0])
    places = max(0, -math.floor(math.log10(step / size) + 1e-9))
    count = int(seconds / step * (1 + 1e-9))
    return ((0.0, "0"), *((k * step, f"{k * step / size:.{places}f} {unit}") for k in range(1, count + 1)))


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
