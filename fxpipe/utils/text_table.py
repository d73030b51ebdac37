"""Tables and wrapped text of a given width."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from tabulate import tabulate

from fxpipe.utils.units import human_bytes

TEXT_WIDTH = 120  # characters per line if the width of the window is unknown
LEAST_TEXT_WIDTH = 40  # in narrower windows the terminal breaks lines
MAX_LIST_LINES = 10
MAX_NAME_LENGTH = 40  # characters
MAX_SOURCE_LINE_LENGTH = 32  # characters of the path and number of a source line
EMPTY_CELL = "-"

_width: ContextVar[int] = ContextVar("_width", default=TEXT_WIDTH)


def text_width() -> int:
    return _width.get()


@contextlib.contextmanager
def use_text_width(width: int) -> Iterator[None]:
    """A block in which lines and tables fit a window of `width` characters."""
    token = _width.set(max(width, LEAST_TEXT_WIDTH))
    try:
        yield
    finally:
        _width.reset(token)


def text_table(
    rows: Sequence[Sequence[str]],
    headers: Sequence[str],
    left: Collection[str] = (),
    *,
    has_rule: bool = True,
    keys: int = 1,
) -> str:
    """Formats a table.

    A table that is too wide for the window is divided into several, one below the other, without empty columns.

    Args:
        rows: cells of each row.
        headers: headers of the columns.
        left: headers of the left-aligned columns.
        has_rule: True for a line between the headers and the rows.
        keys: number of first columns that identify a row; each part of a divided table repeats them.
    """

    def with_columns(columns: Sequence[int]) -> str:
        cells, names = [[row[k] for k in columns] for row in rows], [headers[k] for k in columns]
        alignment = ["left" if name in left else "right" for name in names] if rows else None
        # Cells are text: tabulate would otherwise parse a node named `1e5` as a number.
        if not has_rule:
            return tabulate([names, *cells], tablefmt="plain", colalign=alignment, disable_numparse=True)
        return tabulate(cells, names, tablefmt="simple", colalign=alignment, disable_numparse=True)

    def is_too_wide(text: str) -> bool:
        return max(map(len, text.splitlines()), default=0) > text_width()

    whole = with_columns(range(len(headers)))
    if not is_too_wide(whole):
        return whole
    parts: list[str] = []
    shown = list(range(keys))
    telling = [k for k in range(keys, len(headers)) if any(row[k] not in ("", EMPTY_CELL) for row in rows)]
    for column in telling:
        if len(shown) > keys and is_too_wide(with_columns([*shown, column])):
            parts.append(with_columns(shown))
            shown = list(range(keys))
        shown.append(column)
    return "\n\n".join([*parts, with_columns(shown)])


def shorten_name(name: str) -> str:
    """Shortens a name in the middle: it begins with a module path and ends with a number."""
    tail = (MAX_NAME_LENGTH - 3) // 2
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 3 - tail]}...{name[-tail:]}"


def wrap_text(line: str) -> str:
    """Wraps a line to the text width, with continuation lines indented."""
    return textwrap.fill(line, text_width(), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def shorten_source_line(line: str) -> str:
    """Shortens a path with a line number to its end, the file and line."""
    if len(line) <= MAX_SOURCE_LINE_LENGTH:
        return line
    end = line[3 - MAX_SOURCE_LINE_LENGTH :]
    return f"...{end[max(0, end.find('/')) :]}"  # starts at a folder


def number_ranges(numbers: Sequence[int]) -> str:
    """Formats 0, 1, 2, 5 as `0-2, 5`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


def bytes_of_limit(size: float, limit: float) -> str:
    """Formats a size and its limit as `3.1 of 8.0 GiB`."""
    number, unit = human_bytes(size).split()
    most = human_bytes(limit)
    return f"{number} of {most}" if most.endswith(f" {unit}") else f"{number} {unit} of {most}"


def show_as_printed(shown: object, printer: Any, cycle: bool) -> None:
    """Shows a result in IPython as `print` does: the `_repr_pretty_` of classes that print as tables."""
    printer.text(str(shown))
