"""Text in columns and lines of one width: tables, and what is made to fit into them."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar

from tabulate import tabulate

from fxpipe.utils.units import human_bytes

TEXT_WIDTH = 120  # characters a line, where nobody says how wide the window is
LEAST_TEXT_WIDTH = 40  # in narrower windows lines are broken by the terminal
MAX_LIST_LINES = 10  # of a list
MAX_NAME_LENGTH = 40  # characters
MAX_SOURCE_LINE_LENGTH = 32  # characters of where the user's line is
EMPTY_CELL = "-"


_width: ContextVar[int] = ContextVar("_width", default=TEXT_WIDTH)


def text_width() -> int:
    """Returns how many characters a line may have."""
    return _width.get()


@contextlib.contextmanager
def use_text_width(width: int) -> Iterator[None]:
    """A block in which lines and tables are made for a window of so many characters."""
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
    """Formats every table that is printed.

    One that is too wide for the window becomes several, one below the other, without columns that are empty.

    Args:
        rows: their cells.
        headers: of the columns.
        left: the headers of those columns whose cells stand at the left.
        has_rule: is there a line between the headers and the rows.
        keys: so many columns, the first, say what a row is about, and stand in each part of a table that is divided.
    """
    whole = _one_table(rows, headers, left, has_rule)
    if _width_of(whole) <= text_width():
        return whole
    parts: list[str] = []
    shown = list(range(keys))
    telling = [k for k in range(keys, len(headers)) if any(row[k] not in ("", EMPTY_CELL) for row in rows)]
    for column in telling:
        wider = _some_columns(rows, headers, left, has_rule, [*shown, column])
        if len(shown) > keys and _width_of(wider) > text_width():
            parts.append(_some_columns(rows, headers, left, has_rule, shown))
            shown = list(range(keys))
        shown.append(column)
    return "\n\n".join([*parts, _some_columns(rows, headers, left, has_rule, shown)])


def _some_columns(
    rows: Sequence[Sequence[str]], headers: Sequence[str], left: Collection[str], has_rule: bool, columns: Sequence[int]
) -> str:
    return _one_table([[row[k] for k in columns] for row in rows], [headers[k] for k in columns], left, has_rule)


def _width_of(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)


def _one_table(rows: Sequence[Sequence[str]], headers: Sequence[str], left: Collection[str], has_rule: bool) -> str:
    alignment = ["left" if header in left else "right" for header in headers] if rows else None
    # Cells are text already: left to itself, tabulate would read a node named `1e5` as a number.
    if not has_rule:
        return tabulate([headers, *rows], tablefmt="plain", colalign=alignment, disable_numparse=True)
    return tabulate(rows, headers, tablefmt="simple", colalign=alignment, disable_numparse=True)


def shorten_name(name: str, length: int = MAX_NAME_LENGTH) -> str:
    """Shortens a name to `length` characters, in the middle: names begin with a module path and end with a number."""
    if len(name) <= length:
        return name
    tail = (length - 3) // 2
    return f"{name[: length - 3 - tail]}...{name[-tail:]}"


def wrap_text(line: str) -> str:
    """Wraps a line into as many lines as it takes, the others indented."""
    return textwrap.fill(line, text_width(), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def shorten_source_line(line: str) -> str:
    """Shortens a path and a line number to the end, which says the file and line."""
    if len(line) <= MAX_SOURCE_LINE_LENGTH:
        return line
    end = line[3 - MAX_SOURCE_LINE_LENGTH :]
    return f"...{end[max(0, end.find('/')) :]}"  # from a folder on


def number_ranges(numbers: Sequence[int]) -> str:
    """`0-2, 5` of 0, 1, 2, 5."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


def bytes_of_limit(size: float, limit: float) -> str:
    """`3.1 of 8.0 GiB`."""
    number, unit = human_bytes(size).split()
    most = human_bytes(limit)
    return f"{number} of {most}" if most.endswith(f" {unit}") else f"{number} {unit} of {most}"
