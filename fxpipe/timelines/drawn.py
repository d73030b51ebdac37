"""How a `Timed` draws itself: into a file, and in a notebook."""

from __future__ import annotations

from pathlib import Path

from fxpipe.timelines.steps import Timed


class Drawn:
    """A base of what is `Timed`."""

    __slots__ = ()

    def save_timeline(self: Timed, path: str | Path, *, title: str = "") -> None:
        """Draws what each device does when: `.png`, `.pdf`, `.svg`, `.html` to zoom in, or `.json` for Perfetto.

        Raises:
            ArgumentError: another suffix; png or pdf, and there is no matplotlib.
            FileError: a place that cannot be written to.
        """
        from fxpipe.timelines.pictures import save_timeline

        save_timeline(self, path, title=title)

    def _repr_html_(self: Timed) -> str:
        from fxpipe.timelines.html import step_html

        return step_html(self.as_step())
