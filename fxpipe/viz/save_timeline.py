"""Timelines as files: pictures for a talk, a page to zoom in, a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path

from fxpipe.errors import ArgumentTypeError
from fxpipe.simulation.timeline import HasTimeline
from fxpipe.utils.files import check_output_path, write_atomically
from fxpipe.viz.gantt import draw_gantt

TIMELINE_FORMATS = ("svg", "html", "json")
TIMELINE_FILE = "a timeline"


def save_timeline(source: HasTimeline, path: str | Path, *, title: str = "") -> None:
    """Draws what each device does when and, of a simulation, what memory it takes.

    >>> save_timeline(pipe.last_step, "step.svg")  # doctest: +SKIP

    Args:
        source: a `Simulation`, or `pipe.last_step`.
        path: its suffix is the format: `.svg`, `.html` (one page to zoom in, which loads nothing from elsewhere),
            `.json` (for https://ui.perfetto.dev and chrome://tracing).
        title: stands above the picture; the schedule and its size, if not given.

    Raises:
        ArgumentError: another suffix.
        FileError: a place that cannot be written to.
        ArgumentTypeError: a source, or a path, that is neither.
    """
    form = check_timeline_path(path)
    if not isinstance(source, HasTimeline):
        raise ArgumentTypeError(
            f"a timeline is that of a Simulation or a StepRecord (pipe.last_step), not of {type(source).__name__}"
        )
    step = source.as_step()
    if form == "json":
        from fxpipe.viz.perfetto import perfetto_text

        write_atomically(path, perfetto_text(source).encode(), TIMELINE_FILE)
        return
    drawn = draw_gantt(step, title=title)
    if form == "svg":
        from fxpipe.viz.svg import svg_of

        content = svg_of(drawn.scene).encode()
    else:
        from fxpipe.viz.timeline_html import timeline_page

        content = timeline_page(step, drawn, title or drawn.scene.title).encode()
    write_atomically(path, content, TIMELINE_FILE)


def check_timeline_path(path: str | Path) -> str:
    """The format of a timeline's file, before there is a timeline: raises as `save_timeline` would; writes nothing."""
    return check_output_path(path, TIMELINE_FORMATS, TIMELINE_FILE)
