"""A mixin that draws a `HasTimeline` into a file and in a notebook."""

from __future__ import annotations

from pathlib import Path

from fxpipe.simulation.timeline import HasTimeline


class TimelineMixin:
    """A base class for a `HasTimeline`."""

    __slots__ = ()

    def save_timeline(self: HasTimeline, path: str | Path, *, title: str = "") -> None:
        """Draws the actions of each device over time: `.svg`, or `.json` for Perfetto.

        Raises:
            ArgumentError: the path has another suffix.
            FileError: the file cannot be written.
        """
        from fxpipe.inspect.gantt import save_timeline

        save_timeline(self, path, title=title)

    def _repr_html_(self: HasTimeline) -> str:
        from fxpipe.inspect.gantt import step_html

        return step_html(self.as_step())
