"""The colours, text widths, axes and legends of pictures.

Colours differ in lightness, and so in grey, too. They are based on Okabe and Ito, "Color Universal Design", 2008.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.inspect.scene import Item, Line, Rect, Text
from fxpipe.scheduling.actions import ActionKind
from fxpipe.utils.units import human_bytes

INK = "#222222"
FAINT = "#6b6b6b"  # secondary text; legible on white
GRID = "#e3e3e3"
PAPER = "#ffffff"
LIMIT_COLOUR = "#b3261e"  # lines of limits

KIND_COLOURS = {
    ActionKind.FORWARD: "#6fbdf0",
    ActionKind.RECOMPUTE: "#f0e050",
    ActionKind.BACKWARD: "#0a5c99",
    ActionKind.WEIGHT: "#d9701c",
    ActionKind.UPDATE: "#2b2b2b",
}
RECEIVING_COLOUR = "#c9c9c9"

MEMORY_COLOURS = {  # static parts are grey
    "parameters": "#3f4a5a",
    "gradients": "#7d8a9c",
    "optimizer": "#b9c2cd",
    "activations": "#009e73",
    "portals": "#8fdcc2",
    "working": "#a23f8c",
}

RAMP = ("#a6d3ef", "#6fbdf0", "#0a5c99", "#0b2239")  # from the first of many items to the last


def text_colour_on(fill: str) -> str:
    """Returns the text colour with the higher contrast on `fill`, which is `#rrggbb`."""
    return INK if contrast(INK, fill) >= contrast(PAPER, fill) else PAPER


def contrast(one: str, other: str) -> float:
    """Computes the contrast, 1 to 21 (black on white); text needs 4.5, large text 3 (WCAG 2.1, 1.4.3)."""
    lower, higher = sorted((_luminance(one), _luminance(other)))
    return (higher + 0.05) / (lower + 0.05)


def mix_colours(one: str, other: str, share: float) -> str:
    """Mixes two colours, from `one` (share 0) to `other` (share 1)."""
    parts = zip(_rgb(one), _rgb(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in parts)


def ramp_colour(share: float) -> str:
    """Returns the colour at `share`, 0 to 1, of `RAMP`."""
    place = min(1.0, max(0.0, share)) * (len(RAMP) - 1)
    step = min(int(place), len(RAMP) - 2)
    return mix_colours(RAMP[step], RAMP[step + 1], place - step)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    red, green, blue = (_linear_light(part / 255) for part in _rgb(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear_light(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)


# -- Width of a text, for layouts ------------------------------------------------------------------------------------
#
# The widths are from DejaVu Sans, which matplotlib and most Linux systems include. Verdana has nearly the same widths,
# and other fonts of browsers are narrower, so a text that fits by these widths is never cut off.

FONTS = ("DejaVu Sans", "Verdana", "Geneva", "sans-serif")  # in order of preference

# Widths of the printable ASCII characters, from the space on, in hundredths of the font size.
REGULAR_WIDTHS = (
    32, 40, 46, 84, 64, 95, 78, 27, 39, 39, 50, 84, 32, 36, 32, 34, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 34, 34, 84,
    84, 84, 53, 100, 68, 69, 70, 77, 63, 58, 77, 75, 29, 29, 66, 56, 86, 75, 79, 60, 79, 69, 63, 61, 73, 68, 99, 69, 61,
    69, 39, 34, 39, 84, 50, 50, 61, 63, 55, 63, 62, 35, 63, 63, 28, 28, 58, 28, 97, 63, 61, 63, 63, 41, 52, 39, 63, 59,
    82, 59, 59, 52, 64, 34, 64, 84,
)  # fmt: skip
BOLD_WIDTHS = (
    35, 46, 52, 84, 70, 100, 87, 31, 46, 46, 52, 84, 38, 42, 38, 37, 70, 70, 70, 70, 70, 70, 70, 70, 70, 70, 40, 40, 84,
    84, 84, 58, 100, 77, 76, 73, 83, 68, 68, 82, 84, 37, 37, 77, 64, 100, 84, 85, 73, 85, 77, 72, 68, 81, 77, 110, 77,
    72, 73, 46, 37, 46, 84, 50, 50, 67, 72, 59, 72, 68, 44, 72, 71, 34, 34, 67, 34, 104, 71, 69, 72, 72, 49, 60, 48, 71,
    65, 92, 65, 65, 58, 71, 37, 71, 84,
)  # fmt: skip
OTHER_WIDTHS = {"·": 38, "–": 50, "—": 100, "…": 100, "µ": 74, "×": 84, "→": 84, "−": 84}
WIDEST_LETTER = 100  # any other character
UNPRINTABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # also invalid in XML


def text_width(text: str, size: float, *, is_bold: bool = False) -> float:
    """Returns the width of a text in the unit of `size`."""
    widths = BOLD_WIDTHS if is_bold else REGULAR_WIDTHS
    return (
        sum(widths[ord(c) - 32] if " " <= c <= "~" else OTHER_WIDTHS.get(c, WIDEST_LETTER) for c in text) * size / 100
    )


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


def printable(text: str) -> str:
    """Replaces unprintable characters (control codes, lone surrogates) by a mark."""
    return UNPRINTABLE.sub("\ufffd", text)


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
