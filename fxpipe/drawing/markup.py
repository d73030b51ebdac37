"""HTML out of values: text that cannot become markup, and tables whose cells know the number that they show.

All text of a page passes through `escaped`: names of modules, source lines and devices are the user's, and a module may
be called `<script>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe import units
from fxpipe.drawing.svg import escaped
from fxpipe.units import human_bytes, human_seconds

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell shows, and by what it is sorted."""

    text: str
    value: float | None = None  # None: it is text
    is_code: bool = False
    is_prose: bool = False  # a sentence, which goes over several lines
    is_marked: bool = False  # one looks here first
    note: str = ""  # smaller, behind it


@dataclass(frozen=True, slots=True)
class Table:
    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def text(value: object) -> Cell:
    return Cell(str(value))


def code(value: str) -> Cell:
    return Cell(value, is_code=True)


def number(value: float, note: str = "") -> Cell:
    return Cell(f"{value:,}".replace(",", "\u2009"), value, note=note)


def size(value: float, note: str = "") -> Cell:
    return Cell(human_bytes(value), value, note=note)


def seconds(value: float) -> Cell:
    return Cell(human_seconds(value), value)


def percent(value: float) -> Cell:
    """Of a share, 0 to 1."""
    return Cell(units.percent(value), value)


def missing() -> Cell:
    """Where others have a number; less than all of them."""
    return Cell(NOTHING)


def table_of(found: Table, attributes: str = "") -> str:
    """A `table` element. `attributes` are markup."""
    numbers = [any(row[k].value is not None for row in found.rows) for k in range(len(found.headers))]
    head = "".join(
        f'<th scope="col"{_classes(number=is_number)}>{escaped(name)}</th>'
        for name, is_number in zip(found.headers, numbers, strict=True)
    )
    lines = [f"<table{attributes}>", f"<thead><tr>{head}</tr></thead>", "<tbody>"]
    for row in found.rows:
        lines.append(f"<tr>{''.join(map(_cell, row, numbers))}</tr>")
    return "\n".join([*lines, "</tbody>", "</table>"])


def list_of(lines: Sequence[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escaped(line)}</li>" for line in lines) + "\n</ul>"


def _cell(cell: Cell, is_number: bool) -> str:
    shown = f"<code>{escaped(cell.text)}</code>" if cell.is_code else escaped(cell.text)
    if cell.is_prose:
        shown = f'<div class="prose">{shown}</div>'
    note = f" <small>{escaped(cell.note)}</small>" if cell.note else ""
    by = f' data-value="{cell.value!r}"' if cell.value is not None else ""
    return f"<td{_classes(number=is_number, marked=cell.is_marked)}{by}>{shown}{note}</td>"


def _classes(**which: bool) -> str:
    names = " ".join(name for name, holds in which.items() if holds)
    return f' class="{names}"' if names else ""
