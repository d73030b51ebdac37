"""`save_graph`: the picture of a plan's stages as a file, SVG or a page that pans and zooms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fxpipe.inspect.lanes import lanes
from fxpipe.inspect.pictures import check_picture_path
from fxpipe.inspect.svg import svg_of
from fxpipe.inspect.viewer import page_of

if TYPE_CHECKING:
    from fxpipe.plans import Plan


def save_graph(plan: Plan, path: str | Path, *, title: str = "") -> None:
    """Writes the picture of a plan: its stages as lanes of modules, what goes from one to the next, portals as arcs.

        save_graph(plan, "graph.svg")

    Args:
        path: ends in `.svg` or `.html`; the page can be dragged, and zoomed with the wheel, two fingers or keys.
        title: stands above it, such as the model's name.

    Raises:
        ArgumentError: the path has another suffix, or cannot be written.
    """
    suffix = check_picture_path(path, ("svg", "html"))
    picture = svg_of(lanes(plan, title))
    Path(path).write_text(page_of(picture, title or "Graph of a pipeline") if suffix == "html" else picture, "utf-8")
