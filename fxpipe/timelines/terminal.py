"""A timeline in a terminal: coloured blocks as wide as the window; plain text wherever it is no terminal.

A block may change colour in the middle of a character (`▌`), so that a window of 100 columns shows 200 steps of time.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TextIO

from fxpipe.drawing.axes import time_ticks
from fxpipe.scheduling.actions import Kind
from fxpipe.timelines.steps import Step, Timed
from fxpipe.timelines.text import COLUMNS, extents, names_of, owners_of, rows_of, timeline
from fxpipe.units import human_seconds, percent

NARROWEST = 20  # columns of time; a narrower window breaks the lines
WIDEST = 200
# Of the 256 colours that terminals have in common those nearest to `colours.KINDS`; and the letters on them.
SHADES = {Kind.FORWARD: 117, Kind.RECOMPUTE: 221, Kind.BACKWARD: 25, Kind.WEIGHT: 166, Kind.UPDATE: 236}
BLACK, WHITE = 16, 231
INKS = {Kind.FORWARD: BLACK, Kind.RECOMPUTE: BLACK, Kind.BACKWARD: WHITE, Kind.WEIGHT: BLACK, Kind.UPDATE: WHITE}
RESET = "\x1b[0m"
HALF, EDGE = "▌", "▕"


@dataclass(frozen=True, slots=True)
class Cell:
    """One character of the window."""

    text: str = " "
    ink: int | None = None  # None: the terminal's own
    shade: int | None = None  # behind it


def timeline_text(source: Timed, stream: TextIO | None = None) -> str:
    """What to print to `stream`, standard output if not given: coloured where it shows colours, else plain."""
    stream = sys.stdout if stream is None else stream
    columns = shutil.get_terminal_size((COLUMNS, 24)).columns if _is_terminal(stream) else None
    if shows_colours(stream):
        return coloured(source, columns=columns or COLUMNS, has_blocks=_can_write(HALF + EDGE, stream))
    return plain(source, columns=columns)


def shows_colours(stream: TextIO) -> bool:
    """A terminal does, unless the user says otherwise: `NO_COLOR`, `FORCE_COLOR` and `TERM=dumb` are heeded."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    if os.environ.get("TERM") == "dumb" or not _is_terminal(stream):
        return False
    if sys.platform == "win32":  # an old console would print the codes
        return any(os.environ.get(name) for name in ("WT_SESSION", "ANSICON", "TERM", "TERM_PROGRAM"))
    return True


def plain(source: Timed, *, columns: int | None = None) -> str:
    """A line for each device: what it does when, and how long it is busy. `columns` is the width of the window."""
    step = source.as_step(has_memory=False)
    before, behind = _beside(step)
    room = COLUMNS if columns is None else columns - len(before[0]) - len(behind[0]) - 3 if before else 0
    lines = timeline(step.spans, len(step.devices), step.seconds, columns=max(NARROWEST, room))
    return "\n".join(f"{a}|{line}| {b}" for a, line, b in zip(before, lines, behind, strict=True))


def coloured(source: Timed, *, columns: int = COLUMNS, has_blocks: bool = True) -> str:
    """The same with the codes of a terminal's colours, a time axis, and what the colours mean.

    Args:
        columns: of the window.
        has_blocks: may have characters beyond ASCII.
    """
    step = source.as_step(has_memory=False)
    before, behind = _beside(step)
    width = min(
        WIDEST, max(NARROWEST, columns - max(map(len, before), default=0) - max(map(len, behind), default=0) - 2)
    )
    lines = [
        f"{a} {_painted(cells)} {b}" for a, cells, b in zip(before, _rows(step, width, has_blocks), behind, strict=True)
    ]
    indent = " " * (len(before[0]) + 1 if before else 0)
    kinds = {span.action.kind for span in step.spans}
    legend = [
        _painted([Cell(f" {kind} ", INKS[kind], SHADES[kind])]) + f" {kind.words}" for kind in SHADES if kind in kinds
    ]
    return "\n".join([*lines, f"{indent}{_axis(step.seconds, width)}".rstrip(), (indent + "  ".join(legend)).rstrip()])


def _beside(step: Step) -> tuple[list[str], list[str]]:
    """What stands before and behind each row."""
    digits = len(str(len(step.devices) - 1))
    busy = [human_seconds(seconds) for seconds in step.busy]
    longest = max(map(len, busy), default=0)
    bubbles = [percent(share) for share in step.bubble]
    width = max(map(len, bubbles), default=0)
    before = [f"device {d:>{digits}} " for d in range(len(step.devices))]
    return before, [f"busy {a:>{longest}}, bubble {b:>{width}}" for a, b in zip(busy, bubbles, strict=True)]


def _rows(step: Step, width: int, has_blocks: bool) -> Iterator[list[Cell]]:
    names = names_of(step.spans)
    parts = 2 if has_blocks else 1  # of a character
    for row in rows_of(step.spans, len(step.devices)):
        spans = [step.spans[k] for k in row]
        owners = owners_of(spans, step.seconds, width * parts)
        kinds = [None if k is None else spans[k].action.kind for k in owners]
        cells = [_cell(kinds[c * parts], kinds[c * parts + parts - 1]) for c in range(width)]
        for k, (first, length) in extents(owners).items():
            begin, end = -(-first // parts), (first + length) // parts  # the characters that are its own
            kind = spans[k].action.kind
            follows = kinds[end * parts] if end < width else None
            _write(cells, begin, end - (follows is kind), names[row[k]], INKS[kind])
        if has_blocks:
            _part(cells, owners, kinds)
        yield cells


def _cell(left: Kind | None, right: Kind | None) -> Cell:
    if left is right:
        return Cell(shade=None if left is None else SHADES[left])
    if left is None:
        return Cell("▐", None if right is None else SHADES[right])
    return Cell(HALF, SHADES[left], None if right is None else SHADES[right])


def _write(cells: list[Cell], begin: int, end: int, name: str, ink: int) -> None:
    """The name in the middle, if there is room for it."""
    if end - begin < len(name):
        return
    begin += (end - begin - len(name)) // 2
    for place, letter in enumerate(name, begin):
        cells[place] = Cell(letter, ink, cells[place].shade)


def _part(cells: list[Cell], owners: Sequence[int | None], kinds: Sequence[Kind | None]) -> None:
    """A fine edge where an action follows one of its kind at once, if that is between two characters."""
    for unit, (one, two) in enumerate(pairwise(owners)):
        place = unit // 2
        is_long = owners[max(0, unit - 2)] == one is not None
        if one != two and unit % 2 and kinds[unit] is kinds[unit + 1] and is_long and cells[place].text == " ":
            cells[place] = Cell(EDGE, WHITE, cells[place].shade)


def _painted(cells: Sequence[Cell]) -> str:
    """With codes only where colours change."""
    parts: list[str] = []
    ink = shade = None
    for cell in cells:
        if (cell.ink, cell.shade) != (ink, shade):
            ink, shade = cell.ink, cell.shade
            codes = [
                "0",
                *([f"38;5;{ink}"] if ink is not None else []),
                *([f"48;5;{shade}"] if shade is not None else []),
            ]
            parts.append(f"\x1b[{';'.join(codes)}m")
        parts.append(cell.text)
    return "".join(parts) + (RESET if (ink, shade) != (None, None) else "")


def _axis(seconds: float, width: int) -> str:
    """Round times below the columns that they fall on."""
    line = [" "] * (width + 12)
    free = 0
    for time, name in time_ticks(seconds, width // 12):
        place = round(time / seconds * width) if seconds else 0
        if place >= free and place + len(name) <= len(line):
            line[place : place + len(name)] = name
            free = place + len(name) + 1
    return "".join(line).rstrip()


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # a stand-in, or closed
        return False


def _can_write(text: str, stream: TextIO) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
