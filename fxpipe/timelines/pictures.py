"""Timelines as files: pictures for a talk, a page to zoom in, a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path

from fxpipe.errors import ArgumentTypeError
from fxpipe.files import check_path, write_whole
from fxpipe.timelines.gantt import gantt
from fxpipe.timelines.steps import Timed

FORMATS = ("png", "pdf", "svg", "html", "json")
WHAT = "a timeline"


def save_timeline(source: Timed, path: str | Path, *, title: str = "") -> None:
    """Draws what each device does when and, of a simulation, what memory it takes.

    >>> save_timeline(pipe.last_step, "step.svg")  # doctest: +SKIP

    Args:
        source: a `Simulation`, or `pipe.last_step`.
        path: its suffix is the format: `.png` and `.pdf` (these need matplotlib), `.svg`, `.html` (one page to zoom in,
            which loads nothing from elsewhere), `.json` (for https://ui.perfetto.dev and chrome://tracing).
        title: stands above the picture; the schedule and its size, if not given.

    Raises:
        ArgumentError: another suffix; no matplotlib where it is needed.
        FileError: a place that cannot be written to.
        ArgumentTypeError: a source, or a path, that is neither.
    """
    form = check_picture_path(path)
    if not isinstance(source, Timed):
        raise ArgumentTypeError(
            f"a timeline is that of a Simulation or a StepRecord (pipe.last_step), not of {type(source).__name__}"
        )
    step = source.as_step()
    if form == "json":
        from fxpipe.timelines.traces import trace_text

        write_whole(path, trace_text(source).encode(), WHAT)
        return
    drawn = gantt(step, title=title)
    if form == "svg":
        from fxpipe.drawing.svg import svg_of

        content = svg_of(drawn.scene).encode()
    elif form == "html":
        from fxpipe.timelines.pages import timeline_page

        content = timeline_page(step, drawn, title or drawn.scene.title).encode()
    else:
        from fxpipe.drawing.raster import raster_of

        content = raster_of(drawn.scene, form)
    write_whole(path, content, WHAT)


def check_picture_path(path: str | Path) -> str:
    """The format of a timeline's file, before there is a timeline: raises as `save_timeline` would; writes nothing."""
    form = check_path(path, FORMATS, WHAT)
    if form in ("png", "pdf"):
        from fxpipe.drawing.raster import require_matplotlib

        require_matplotlib(form)
    return form
