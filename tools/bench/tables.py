"""Tables of benchmarks as data, and the one way in which they become text, JSON and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

Cell = str | int | float | None  # None: there is no such figure
EMPTY = "–"


@dataclass(frozen=True)
class Plot:
    """Bars of some columns of a table, side by side for each row."""

    label: str  # the columns that name a row, with commas
    columns: tuple[str, ...]
    axis: str


@dataclass(frozen=True)
class Table:
    """Rows of cells by the names of their columns, which all rows have in the same order."""

    title: str
    rows: tuple[Mapping[str, Cell], ...]
    notes: tuple[str, ...] = ()  # sentences
    plot: Plot | None = None

    def __post_init__(self) -> None:
        for name, cell in (pair for row in self.rows for pair in row.items()):
            if not isinstance(cell, str | int | float | None):
                raise TypeError(f"{self.title}: {name} is of type {type(cell).__name__}, which is no cell")

    def __str__(self) -> str:
        return "\n".join([self.title, "", self._grid("simple"), *self.notes, ""])

    def markdown(self) -> str:
        return "\n".join([f"### {self.title}", "", self._grid("github"), "", *(f"- {note}" for note in self.notes), ""])

    def _grid(self, form: str) -> str:
        cells = [{name: cell_text(cell) for name, cell in row.items()} for row in self.rows]
        return tabulate(cells, headers="keys", tablefmt=form, disable_numparse=True)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Table:
        plot = document["plot"] and Plot(**{**document["plot"], "columns": tuple(document["plot"]["columns"])})
        return cls(document["title"], tuple(document["rows"]), tuple(document["notes"]), plot)


def cell_text(cell: Cell) -> str:
    if cell is None:
        return EMPTY
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def draw(table: Table, path: Path) -> None:
    """Draws the bars of a table's plot into an SVG that is the same for the same table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    assert table.plot is not None
    plot, rows = table.plot, table.rows
    columns = [name for name in plot.columns if any(row[name] is not None for row in rows)]
    labels = [", ".join(cell_text(row[name]) for name in plot.label.split(",")) for row in rows]
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fxpipe", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(max(6.0, 0.6 * len(rows) + 2), 3.2), layout="constrained")
        width = 0.8 / len(columns)
        for number, name in enumerate(columns):
            places = [place + width * (number + 0.5) - 0.4 for place in range(len(rows))]
            axes.bar(places, [row[name] or 0 for row in rows], width, label=name)  # type: ignore[misc]
        tilted = {"rotation": 30, "ha": "right"} if max(map(len, labels)) > 60 / len(labels) else {}
        axes.set_xticks(range(len(rows)), labels, **tilted)
        axes.set(ylabel=plot.axis)
        axes.set_title(table.title, fontsize=9)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
