"""`save_graph`: the picture of a plan's stages as a file, SVG or a page that pans and zooms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fxpipe.drawing.svg import svg_of
from fxpipe.files import check_path, write_whole
from fxpipe.inspect.lanes.layout import lanes
from fxpipe.inspect.lanes.viewer import viewer_page

if TYPE_CHECKING:
    from fxpipe.plans import Plan
FORMATS = ("svg", "html")
WHAT = "a graph"


def save_graph(plan: Plan, path: str | Path, *, title: str = "") -> None:
    """Writes the picture of a plan: its stages as lanes of modules, what goes from one to the next, portals as arcs.

        save_graph(plan, "graph.svg")

    Args:
        path: ends in `.svg` or `.html`; the page can be dragged, and zoomed with the wheel, two fingers or keys.
        title: stands above it, such as the model's name.

    Raises:
        ArgumentError: the path has another suffix, or (a `FileError`) cannot be written.
    """
    form = check_graph_path(path)
    picture = svg_of(lanes(plan, title))
    content = viewer_page(picture, title or "Graph of a pipeline") if form == "html" else picture
    write_whole(path, content.encode(), WHAT)


def check_graph_path(path: str | Path) -> str:
    """The format of a graph's file, before there is a plan: raises as `save_graph` would; writes nothing."""
    return check_path(path, FORMATS, WHAT)
