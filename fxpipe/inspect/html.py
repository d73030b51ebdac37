"""HTML out of values: text that cannot become markup, and tables whose cells know the number that they show.

All text of a page passes through `escape_markup`: names of modules, source lines and devices are the user's, and a
module may be called `<script>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.inspect.svg import escape_markup
from fxpipe.utils import units
from fxpipe.utils.units import human_bytes, human_seconds

MISSING_TEXT = "–"


@dataclass(frozen=True, slots=True)
class HtmlCell:
    """A cell of a table: what it shows, and the value that it is sorted by."""

    text: str
    value: float | None = None  # None: it is text
    is_code: bool = False
    is_prose: bool = False  # a sentence, which goes over several lines
    is_marked: bool = False  # one looks here first
    note: str = ""  # smaller, behind it


@dataclass(frozen=True, slots=True)
class HtmlTable:
    headers: tuple[str, ...]
    rows: tuple[tuple[HtmlCell, ...], ...]


def text_cell(value: object) -> HtmlCell:
    return HtmlCell(str(value))


def code_cell(value: str) -> HtmlCell:
    return HtmlCell(value, is_code=True)


def number_cell(value: float, note: str = "") -> HtmlCell:
    return HtmlCell(f"{value:,}".replace(",", "\u2009"), value, note=note)


def bytes_cell(value: float, note: str = "") -> HtmlCell:
    return HtmlCell(human_bytes(value), value, note=note)


def seconds_cell(value: float) -> HtmlCell:
    return HtmlCell(human_seconds(value), value)


def percent_cell(value: float) -> HtmlCell:
    """Makes the cell of a share, 0 to 1."""
    return HtmlCell(units.percent(value), value)


def missing_cell() -> HtmlCell:
    """Makes the cell of a missing number; it is sorted below all others."""
    return HtmlCell(MISSING_TEXT)


def table_markup(table: HtmlTable, attributes: str = "") -> str:
    """A `table` element. `attributes` are markup."""
    numbers = [any(row[k].value is not None for row in table.rows) for k in range(len(table.headers))]
    head = "".join(
        f'<th scope="col"{_class_attribute(number=is_number)}>{escape_markup(name)}</th>'
        for name, is_number in zip(table.headers, numbers, strict=True)
    )
    lines = [f"<table{attributes}>", f"<thead><tr>{head}</tr></thead>", "<tbody>"]
    for row in table.rows:
        lines.append(f"<tr>{''.join(map(_td_markup, row, numbers))}</tr>")
    return "\n".join([*lines, "</tbody>", "</table>"])


def list_markup(lines: Sequence[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape_markup(line)}</li>" for line in lines) + "\n</ul>"


def _td_markup(cell: HtmlCell, is_number: bool) -> str:
    shown = f"<code>{escape_markup(cell.text)}</code>" if cell.is_code else escape_markup(cell.text)
    if cell.is_prose:
        shown = f'<div class="prose">{shown}</div>'
    note = f" <small>{escape_markup(cell.note)}</small>" if cell.note else ""
    by = f' data-value="{cell.value!r}"' if cell.value is not None else ""
    return f"<td{_class_attribute(number=is_number, marked=cell.is_marked)}{by}>{shown}{note}</td>"


def _class_attribute(**which: bool) -> str:
    names = " ".join(name for name, holds in which.items() if holds)
    return f' class="{names}"' if names else ""


# A page of HTML that needs nothing else, and asks nobody else for anything: its content security policy forbids it.
#
# It can be mailed, opened from a disk, and kept.

CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def html_page(title: str, style: str, body: str, script: str) -> str:
    """The text of the file. `title` is text; the others stand in it as they are."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape_markup(title)}</title>
<style>
{style}</style>
</head>
<body>
{body}
<script>
{script}</script>
</body>
</html>
"""


# -- HTML of notebook views: of plans, pipes, simulations, records and tunings ---------------------------------------
#
# A notebook puts them in a page of its own. So they bring no style sheet, which would restyle that page, and no script,
# which it may refuse: styles stand in the elements. Colours are the page's, so that they are legible on light and dark.

_FRAME_STYLE = "overflow-x:auto;max-width:100%"
_TABLE_STYLE = "border-collapse:collapse;border:0;margin:0.4em 0;font-variant-numeric:tabular-nums"
_CELL_STYLE = (
    "padding:0.15em 0.9em 0.15em 0;border:0;border-bottom:1px solid rgba(128,128,128,.3);background:transparent;"
    "color:inherit;white-space:nowrap"
)
_PICTURE_STYLE = "overflow-x:auto;max-width:100%;background:#fff;border-radius:4px;margin:0.4em 0"


def notebook_fragment(parts: Sequence[str]) -> str:
    """Joins the parts of the view of one value."""
    return "<div>" + "".join(parts) + "</div>"


def notebook_heading(title: str, facts: str) -> str:
    """Makes the heading of a notebook view: a title and, below it, a line of facts."""
    return f"<div><b>{escape_markup(title)}</b></div>{notebook_note(facts)}"


def notebook_note(line: str) -> str:
    """A line that one may pass over."""
    return f'<div style="opacity:.75">{escape_markup(line)}</div>'


def notebook_picture(svg: str) -> str:
    """Puts a picture on white, whatever the page has."""
    return f'<div style="{_PICTURE_STYLE}">{svg}</div>'


def notebook_table(headers: Sequence[str], rows: Sequence[tuple[HtmlCell, ...]]) -> str:
    numbers = [any(row[k].value is not None for row in rows) for k in range(len(headers))]
    styles = [f"{_CELL_STYLE};text-align:{'right' if is_number else 'left'}" for is_number in numbers]
    top = "".join(
        f'<th style="{style};font-weight:normal;opacity:.75">{escape_markup(name)}</th>'
        for name, style in zip(headers, styles, strict=True)
    )
    lines = []
    for row in rows:
        cells = "".join(
            f'<td style="{style}">{_cell_markup(cell)}</td>' for cell, style in zip(row, styles, strict=True)
        )
        lines.append(f'<tr style="background:transparent">{cells}</tr>')
    body = "".join(lines)
    table = f'<table style="{_TABLE_STYLE}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div style="{_FRAME_STYLE}">{table}</div>'


def _cell_markup(cell: HtmlCell) -> str:
    shown = f"<code>{escape_markup(cell.text)}</code>" if cell.is_code else escape_markup(cell.text)
    return shown + (f" <small>{escape_markup(cell.note)}</small>" if cell.note else "")
