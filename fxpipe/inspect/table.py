"""Tables of columns that read a figure from each row; shown as text, in a notebook and in a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fxpipe.inspect.svg import escape_markup
from fxpipe.simulation import Simulation
from fxpipe.simulation.timeline import MEMORY_PARTS, MemoryParts, StepTimeline
from fxpipe.utils.text_table import EMPTY_CELL, bytes_of_limit, text_table
from fxpipe.utils.units import human_bytes, human_seconds, percent

Row = TypeVar("Row")
ReadRow = TypeVar("ReadRow", contravariant=True)

LONG_TABLE_ROWS = 24  # longer tables in a report scroll


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell: the text that it shows, and the number by which a report sorts it."""

    text: str
    value: float | None = None  # None: sorted by the text
    note: str = ""  # after the text; smaller in HTML
    is_code: bool = False
    is_prose: bool = False  # a sentence, which HTML wraps
    is_marked: bool = False  # bold in a report


@dataclass(frozen=True, slots=True)
class Column(Generic[ReadRow]):
    """A column. `cell` makes the cell of a row; None if the value is missing."""

    name: str  # may have line breaks, which only text shows
    cell: Callable[[ReadRow], Cell | None]
    is_left: bool = False  # aligned to the left in text


def text_column(
    name: str, read: Callable[[Row], object], *, is_left: bool = True, is_code: bool = False
) -> Column[Row]:
    """Makes a column of text; for code, an empty text counts as missing."""

    def cell(row: Row) -> Cell | None:
        value = read(row)
        return None if value is None or (is_code and not value) else Cell(str(value), is_code=is_code)

    return Column(name, cell, is_left)


def number_column(name: str, read: Callable[[Row], float | None], show: Callable[[float], str] = str) -> Column[Row]:
    def cell(row: Row) -> Cell | None:
        value = read(row)
        return None if value is None else Cell(show(value), value)

    return Column(name, cell)


def bytes_column(
    name: str, read: Callable[[Row], float | None], limit: Callable[[Row], float | None] = lambda row: None
) -> Column[Row]:
    """Makes a column of bytes, with limits if there are any: `3.1 of 8.0 GiB`."""

    def cell(row: Row) -> Cell | None:
        size, most = read(row), limit(row)
        if size is None:
            return None
        return Cell(human_bytes(size) if most is None else bytes_of_limit(size, most), size)

    return Column(name, cell)


@dataclass(frozen=True, slots=True)
class Table(Generic[Row]):
    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    keys: int = 1  # number of first columns that are repeated if text is split into parts
    missing: str = EMPTY_CELL  # the text of a missing value

    def __str__(self) -> str:
        missing = Cell(self.missing)
        shown = [[column.cell(row) or missing for column in self.columns] for row in self.rows]
        cells = [[f"{cell.text} {cell.note}".rstrip() for cell in row] for row in shown]
        names = [column.name for column in self.columns]
        return text_table(cells, names, [column.name for column in self.columns if column.is_left], keys=self.keys)

    def for_notebook(self) -> str:
        """Formats the table as HTML with inline styles, without style sheet and script."""
        style = [f"{_CELL_STYLE};text-align:{side}" for side in ("left", "right")]
        table = self._html(
            f'<table style="{_TABLE_STYLE}">',
            lambda name, is_number: f'<th style="{style[is_number]};font-weight:normal;opacity:.75">{name}</th>',
            '<tr style="background:transparent">',
            lambda cell, is_number: f'<td style="{style[is_number]}">{_markup(cell)}</td>',
        )
        return f'<div style="overflow-x:auto;max-width:100%">{table}</div>'

    def for_report(self, label: str) -> str:
        """Formats the table as HTML of a report, whose script sorts it; wide and long tables scroll."""
        which = "wide long" if len(self.rows) > LONG_TABLE_ROWS else "wide"
        opening = f'<div class="{which}" role="region" aria-label="{escape_markup(label)}" tabindex="0">'

        def classes(is_number: bool, is_marked: bool = False) -> str:
            names = " ".join(name for name, holds in (("number", is_number), ("marked", is_marked)) if holds)
            return f' class="{names}"' if names else ""

        def report_cell(cell: Cell, is_number: bool) -> str:
            shown = f'<div class="prose">{_markup(cell)}</div>' if cell.is_prose else _markup(cell)
            by = "" if cell.value is None else f' data-value="{cell.value!r}"'
            return f"<td{classes(is_number, cell.is_marked)}{by}>{shown}</td>"

        table = self._html(
            '<table class="sortable">',
            lambda name, is_number: f'<th scope="col"{classes(is_number)}>{name}</th>',
            "<tr>",
            report_cell,
        )
        return f"{opening}\n{table}\n</div>"

    def _html(self, table: str, header: Callable[[str, bool], str], row: str, cell: Callable[[Cell, bool], str]) -> str:
        """Formats the table with these opening tags, headers and cells; a column is of numbers or of text."""
        cells = [[column.cell(row) or _MISSING for column in self.columns] for row in self.rows]
        numbers = [any(row[k].value is not None for row in cells) for k in range(len(self.columns))]
        names = [escape_markup(column.name.replace("-\n", "-").replace("\n", " ")) for column in self.columns]
        head = f"<thead><tr>{''.join(map(header, names, numbers))}</tr></thead>"
        rows = [f"{row}{''.join(map(cell, own, numbers))}</tr>" for own in cells]
        return "\n".join([table, head, "<tbody>", *rows, "</tbody>", "</table>"])


_MISSING = Cell("–")
_TABLE_STYLE = "border-collapse:collapse;border:0;margin:0.4em 0;font-variant-numeric:tabular-nums"
_CELL_STYLE = (
    "padding:0.15em 0.9em 0.15em 0;border:0;border-bottom:1px solid rgba(128,128,128,.3);background:transparent;"
    "color:inherit;white-space:nowrap"
)


def _markup(cell: Cell) -> str:
    shown = f"<code>{escape_markup(cell.text)}</code>" if cell.is_code else escape_markup(cell.text)
    return shown + (f" <small>{escape_markup(cell.note)}</small>" if cell.note else "")


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    index: int
    name: str
    busy: float  # seconds
    bubble: float  # share of the step
    parts: MemoryParts  # at the peak
    limit: float | None  # bytes


def _part_column(part: str) -> Column[DeviceFigures]:
    return bytes_column(part, lambda row: getattr(row.parts, part) or None)


DEVICE_COLUMNS: tuple[Column[DeviceFigures], ...] = (
    number_column("device", lambda row: row.index),
    text_column("", lambda row: row.name),
    number_column("busy", lambda row: row.busy, human_seconds),
    number_column("bubble", lambda row: row.bubble, percent),
    bytes_column("peak memory", lambda row: row.parts.total, lambda row: row.limit),
    *map(_part_column, MEMORY_PARTS),
)


def device_table(step: Simulation | StepTimeline, *without: str) -> Table[DeviceFigures]:
    """Makes a table of devices: time and, if known, peak memory by part. Omits the columns named in `without`."""
    n, memory = len(step.devices), step.memory
    parts = [one.at_peak for one in memory] or [MemoryParts()] * n
    hidden = {*without} if memory else {*without, "peak memory", *MEMORY_PARTS}
    rows = zip(range(n), step.devices, step.busy, step.bubble, parts, step.limits or (None,) * n, strict=True)
    columns = [column for column in DEVICE_COLUMNS if column.name not in hidden]
    return Table(columns, [DeviceFigures(*row) for row in rows])
