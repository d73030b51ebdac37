"""Timelines outside the terminal: pictures, traces for Perfetto, and views in a notebook."""

from __future__ import annotations

from pathlib import Path

from fxpipe.errors import ArgumentTypeError
from fxpipe.inspect.device_table import device_table
from fxpipe.inspect.gantt import draw_gantt
from fxpipe.inspect.html import notebook_picture, notebook_view
from fxpipe.inspect.svg import svg_of
from fxpipe.simulation.timeline import MEMORY_PARTS, HasTimeline, StepTimeline
from fxpipe.utils.files import check_output_path, write_atomically
from fxpipe.utils.units import count_text, human_seconds, percent

TIMELINE_FORMATS = ("svg", "json")
TIMELINE_FILE = "a timeline"


def save_timeline(source: HasTimeline, path: str | Path, *, title: str = "") -> None:
    """Writes a timeline of what each device does and, for a simulation, of its memory.

    >>> save_timeline(pipe.last_step, "step.svg")  # doctest: +SKIP

    Args:
        source: a `Simulation`, or `pipe.last_step`.
        path: the suffix is the format: `.svg`, or `.json` for https://ui.perfetto.dev and chrome://tracing.
        title: heading of the picture. Default: the schedule and its size.

    Raises:
        ArgumentError: the path has another suffix.
        FileError: the file cannot be written.
        ArgumentTypeError: the source, or the path, has another type.
    """
    form = check_output_path(path, TIMELINE_FORMATS, TIMELINE_FILE)
    if not isinstance(source, HasTimeline):
        raise ArgumentTypeError(
            f"a timeline is that of a Simulation or a StepRecord (pipe.last_step), not of {type(source).__name__}"
        )
    if form == "json":
        from fxpipe.inspect.perfetto import perfetto_text

        content = perfetto_text(source)
    else:
        content = svg_of(draw_gantt(source.as_step(), title=title))
    write_atomically(path, content.encode(), TIMELINE_FILE)


def step_html(step: StepTimeline) -> str:
    """Formats a step for a notebook: the timeline, and the time and (of a simulation) memory of each device."""
    title = f"{step.schedule}: step {human_seconds(step.seconds)}, bubble {percent(step.mean_bubble)}"
    facts = (
        f"{'simulated' if step.is_simulated else 'measured'}: {count_text(step.stages, 'stage')}, "
        f"{count_text(step.micro_batches, 'micro-batch', 'es')}"
    )
    table = device_table(step.devices, step.busy, step.bubble, step.memory, step.limits, *MEMORY_PARTS)
    return notebook_view(title, facts, notebook_picture(svg_of(draw_gantt(step))), table.for_notebook())
