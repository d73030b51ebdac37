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

from fxpipe.scheduling.actions import ActionKind
from fxpipe.simulation.text_timeline import (
    TIMELINE_COLUMNS,
    column_extents,
    span_names,
    span_per_column,
    span_rows,
    timeline_lines,
)
from fxpipe.simulation.timeline import HasTimeline, StepTimeline
from fxpipe.utils.units import human_seconds, percent
from fxpipe.viz.axes import time_ticks

NARROWEST_COLUMNS = 20  # columns of time; a narrower window breaks the lines
WIDEST_COLUMNS = 200
# Of the 256 colours that terminals have in common those nearest to `style.KIND_COLOURS`; and the letters on them.
KIND_SHADES = {
    ActionKind.FORWARD: 117,
    ActionKind.RECOMPUTE: 221,
    ActionKind.BACKWARD: 25,
    ActionKind.WEIGHT: 166,
    ActionKind.UPDATE: 236,
}
BLACK, WHITE = 16, 231
KIND_INKS = {
    ActionKind.FORWARD: BLACK,
    ActionKind.RECOMPUTE: BLACK,
    ActionKind.BACKWARD: WHITE,
    ActionKind.WEIGHT: BLACK,
    ActionKind.UPDATE: WHITE,
}
RESET = "\x1b[0m"
HALF, EDGE = "▌", "▕"


@dataclass(frozen=True, slots=True)
class TerminalCell:
    """One character of the window."""

    text: str = " "
    ink: int | None = None  # None: the terminal's own
    shade: int | None = None  # behind it


def timeline_text(source: HasTimeline, stream: TextIO | None = None) -> str:
    """Formats the timeline for `stream`, standard output if not given: coloured where it shows colours, else plain."""
    stream = sys.stdout if stream is None else stream
    columns = shutil.get_terminal_size((TIMELINE_COLUMNS, 24)).columns if _is_terminal(stream) else None
    if shows_colours(stream):
        return coloured_timeline(
            source, columns=columns or TIMELINE_COLUMNS, has_blocks=_can_write(HALF + EDGE, stream)
        )
    return plain_timeline(source, columns=columns)


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


def plain_timeline(source: HasTimeline, *, columns: int | None = None) -> str:
    """A line for each device: what it does when, and how long it is busy. `columns` is the width of the window."""
    step = source.as_step(has_memory=False)
    before, behind = _row_ends(step)
    room = TIMELINE_COLUMNS if columns is None else columns - len(before[0]) - len(behind[0]) - 3 if before else 0
    lines = timeline_lines(step.spans, len(step.devices), step.seconds, columns=max(NARROWEST_COLUMNS, room))
    return "\n".join(f"{a}|{line}| {b}" for a, line, b in zip(before, lines, behind, strict=True))


def coloured_timeline(source: HasTimeline, *, columns: int = TIMELINE_COLUMNS, has_blocks: bool = True) -> str:
    """The same with the codes of a terminal's colours, a time axis, and what the colours mean.

    Args:
        columns: of the window.
        has_blocks: may have characters beyond ASCII.
    """
    step = source.as_step(has_memory=False)
    before, behind = _row_ends(step)
    width = min(
        WIDEST_COLUMNS,
        max(NARROWEST_COLUMNS, columns - max(map(len, before), default=0) - max(map(len, behind), default=0) - 2),
    )
    lines = [
        f"{a} {_paint_cells(cells)} {b}"
        for a, cells, b in zip(before, _cell_rows(step, width, has_blocks), behind, strict=True)
    ]
    indent = " " * (len(before[0]) + 1 if before else 0)
    kinds = {span.action.kind for span in step.spans}
    legend = [
        _paint_cells([TerminalCell(f" {kind} ", KIND_INKS[kind], KIND_SHADES[kind])]) + f" {kind.words}"
        for kind in KIND_SHADES
        if kind in kinds
    ]
    return "\n".join(
        [*lines, f"{indent}{_axis_line(step.seconds, width)}".rstrip(), (indent + "  ".join(legend)).rstrip()]
    )


def _row_ends(step: StepTimeline) -> tuple[list[str], list[str]]:
    """Formats the texts before and behind each row."""
    digits = len(str(len(step.devices) - 1))
    busy = [human_seconds(seconds) for seconds in step.busy]
    longest = max(map(len, busy), default=0)
    bubbles = [percent(share) for share in step.bubble]
    width = max(map(len, bubbles), default=0)
    before = [f"device {d:>{digits}} " for d in range(len(step.devices))]
    return before, [f"busy {a:>{longest}}, bubble {b:>{width}}" for a, b in zip(busy, bubbles, strict=True)]


def _cell_rows(step: StepTimeline, width: int, has_blocks: bool) -> Iterator[list[TerminalCell]]:
    names = span_names(step.spans)
    parts = 2 if has_blocks else 1  # of a character
    for row in span_rows(step.spans, len(step.devices)):
        spans = [step.spans[k] for k in row]
        owners = span_per_column(spans, step.seconds, width * parts)
        kinds = [None if k is None else spans[k].action.kind for k in owners]
        cells = [_cell_of(kinds[c * parts], kinds[c * parts + parts - 1]) for c in range(width)]
        for k, (first, length) in column_extents(owners).items():
            begin, end = -(-first // parts), (first + length) // parts  # the characters that are its own
            kind = spans[k].action.kind
            follows = kinds[end * parts] if end < width else None
            _write_name(cells, begin, end - (follows is kind), names[row[k]], KIND_INKS[kind])
        if has_blocks:
            _part_spans(cells, owners, kinds)
        yield cells


def _cell_of(left: ActionKind | None, right: ActionKind | None) -> TerminalCell:
    if left is right:
        return TerminalCell(shade=None if left is None else KIND_SHADES[left])
    if left is None:
        return TerminalCell("▐", None if right is None else KIND_SHADES[right])
    return TerminalCell(HALF, KIND_SHADES[left], None if right is None else KIND_SHADES[right])


def _write_name(cells: list[TerminalCell], begin: int, end: int, name: str, ink: int) -> None:
    """The name in the middle, if there is room for it."""
    if end - begin < len(name):
        return
    begin += (end - begin - len(name)) // 2
    for place, letter in enumerate(name, begin):
        cells[place] = TerminalCell(letter, ink, cells[place].shade)


def _part_spans(cells: list[TerminalCell], owners: Sequence[int | None], kinds: Sequence[ActionKind | None]) -> None:
    """A fine edge where an action follows one of its kind at once, if that is between two characters."""
    for unit, (one, two) in enumerate(pairwise(owners)):
        place = unit // 2
        is_long = owners[max(0, unit - 2)] == one is not None
        if one != two and unit % 2 and kinds[unit] is kinds[unit + 1] and is_long and cells[place].text == " ":
            cells[place] = TerminalCell(EDGE, WHITE, cells[place].shade)


def _paint_cells(cells: Sequence[TerminalCell]) -> str:
    """Joins cells, with codes only where colours change."""
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


def _axis_line(seconds: float, width: int) -> str:
    """Writes round times below the columns that they fall on."""
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
