"""How wide a text is drawn: a layout has to know before there is anything that draws.

The widths are those of DejaVu Sans, which comes with matplotlib and with most Linux systems; Verdana has nearly the
same ones, and what else a browser may take is narrower: so a text that fits by these widths is never cut.
"""

from __future__ import annotations

import re

FONTS = ("DejaVu Sans", "Verdana", "Geneva", "sans-serif")  # the first that is there draws
MONOSPACE = ("DejaVu Sans Mono", "Menlo", "Consolas", "monospace")

# Of the printable characters of ASCII, from the space on, in hundredths of the size of the letters.
REGULAR = (
    32, 40, 46, 84, 64, 95, 78, 27, 39, 39, 50, 84, 32, 36, 32, 34, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 34, 34, 84,
    84, 84, 53, 100, 68, 69, 70, 77, 63, 58, 77, 75, 29, 29, 66, 56, 86, 75, 79, 60, 79, 69, 63, 61, 73, 68, 99, 69, 61,
    69, 39, 34, 39, 84, 50, 50, 61, 63, 55, 63, 62, 35, 63, 63, 28, 28, 58, 28, 97, 63, 61, 63, 63, 41, 52, 39, 63, 59,
    82, 59, 59, 52, 64, 34, 64, 84,
)  # fmt: skip
BOLD = (
    35, 46, 52, 84, 70, 100, 87, 31, 46, 46, 52, 84, 38, 42, 38, 37, 70, 70, 70, 70, 70, 70, 70, 70, 70, 70, 40, 40, 84,
    84, 84, 58, 100, 77, 76, 73, 83, 68, 68, 82, 84, 37, 37, 77, 64, 100, 84, 85, 73, 85, 77, 72, 68, 81, 77, 110, 77,
    72, 73, 46, 37, 46, 84, 50, 50, 67, 72, 59, 72, 68, 44, 72, 71, 34, 34, 67, 34, 104, 71, 69, 72, 72, 49, 60, 48, 71,
    65, 92, 65, 65, 58, 71, 37, 71, 84,
)  # fmt: skip
OTHERS = {"·": 38, "–": 50, "—": 100, "…": 100, "µ": 74, "×": 84, "→": 84, "−": 84}
WIDEST = 100  # of whatever else there is
NOT_PRINTED = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # nor may XML hold it


def text_width(text: str, size: float, *, is_bold: bool = False) -> float:
    """In the unit of `size`."""
    widths = BOLD if is_bold else REGULAR
    return sum(widths[ord(c) - 32] if " " <= c <= "~" else OTHERS.get(c, WIDEST) for c in text) * size / 100


def fitted(text: str, width: float, size: float, *, is_bold: bool = False) -> str:
    """`text`, or as much of both its ends as is no wider than `width`, around dots; nothing where not even that is."""
    if text_width(text, size, is_bold=is_bold) <= width:
        return text
    for kept in range(len(text) - 1, 0, -1):
        tail = kept // 2
        shorter = f"{text[: kept - tail]}…{text[len(text) - tail :]}"
        if text_width(shorter, size, is_bold=is_bold) <= width:
            return shorter
    return ""


def printable(text: str) -> str:
    """`text` with a mark in place of each character that is none: control codes, halves of pairs."""
    return NOT_PRINTED.sub("\ufffd", text)
