"""Text in columns and lines of one width: tables, and what is made to fit into them."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence

from tabulate import tabulate

from fxpipe.utils.units import human_bytes

TEXT_WIDTH = 120  # characters, of what can be wrapped
MAX_LIST_LINES = 10  # of a list
MAX_NAME_LENGTH = 40  # characters
MAX_SOURCE_LINE_LENGTH = 32  # characters of where the user's line is
EMPTY_CELL = "-"


def text_table(
    rows: Sequence[Sequence[str]], headers: Sequence[str], left: Collection[str] = (), *, has_rule: bool = True
) -> str:
    """Formats every table that is printed.

    Args:
        rows: their cells.
        headers: of the columns.
        left: the headers of those columns whose cells stand at the left.
        has_rule: is there a line between the headers and the rows.
    """
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
    return textwrap.fill(line, TEXT_WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


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
