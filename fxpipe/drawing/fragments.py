"""Pieces of HTML for notebooks, which show plans, pipes, simulations, records and tunings by them.

A notebook puts them in a page of its own. So they bring no style sheet, which would restyle that page, and no script,
which it may refuse: styles stand in the elements. Colours are the page's, so that they are legible on light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.drawing.markup import Cell
from fxpipe.drawing.svg import escaped

FRAME = "overflow-x:auto;max-width:100%"
TABLE = "border-collapse:collapse;border:0;margin:0.4em 0;font-variant-numeric:tabular-nums"
CELL = (
    "padding:0.15em 0.9em 0.15em 0;border:0;border-bottom:1px solid rgba(128,128,128,.3);background:transparent;"
    "color:inherit;white-space:nowrap"
)
PICTURE = "overflow-x:auto;max-width:100%;background:#fff;border-radius:4px;margin:0.4em 0"


def fragment(parts: Sequence[str]) -> str:
    """All that is shown of one value."""
    return "<div>" + "".join(parts) + "</div>"


def head(title: str, facts: str) -> str:
    """What it is and, below, what there is to say of it in a line."""
    return f"<div><b>{escaped(title)}</b></div>{aside(facts)}"


def aside(line: str) -> str:
    """A line that one may pass over."""
    return f'<div style="opacity:.75">{escaped(line)}</div>'


def picture(svg: str) -> str:
    """On white, whatever the page has."""
    return f'<div style="{PICTURE}">{svg}</div>'


def table(headers: Sequence[str], rows: Sequence[tuple[Cell, ...]]) -> str:
    numbers = [any(row[k].value is not None for row in rows) for k in range(len(headers))]
    styles = [f"{CELL};text-align:{'right' if is_number else 'left'}" for is_number in numbers]
    top = "".join(
        f'<th style="{style};font-weight:normal;opacity:.75">{escaped(name)}</th>'
        for name, style in zip(headers, styles, strict=True)
    )
    lines = []
    for row in rows:
        cells = "".join(f'<td style="{style}">{_shown(cell)}</td>' for cell, style in zip(row, styles, strict=True))
        lines.append(f'<tr style="background:transparent">{cells}</tr>')
    body = "".join(lines)
    found = f'<table style="{TABLE}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div style="{FRAME}">{found}</div>'


def _shown(cell: Cell) -> str:
    shown = f"<code>{escaped(cell.text)}</code>" if cell.is_code else escaped(cell.text)
    return shown + (f" <small>{escaped(cell.note)}</small>" if cell.note else "")
