"""The mixin by which a `HasTimeline` draws itself: into a file, and in a notebook."""

from __future__ import annotations

from pathlib import Path

from fxpipe.simulation.timeline import HasTimeline


class TimelineMixin:
    """A base of what is `HasTimeline`."""

    __slots__ = ()

    def save_timeline(self: HasTimeline, path: str | Path, *, title: str = "") -> None:
        """Draws what each device does when: `.svg`, or `.json` for Perfetto.

        Raises:
            ArgumentError: another suffix.
            FileError: a place that cannot be written to.
        """
        from fxpipe.inspect.save_timeline import save_timeline

        save_timeline(self, path, title=title)

    def _repr_html_(self: HasTimeline) -> str:
        from fxpipe.inspect.save_timeline import step_html

        return step_html(self.as_step())
