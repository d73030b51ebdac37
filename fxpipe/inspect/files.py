"""Files that the command is to write, looked at before the long work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fxpipe.errors import ArgumentError
from fxpipe.files import check_path

SUFFIXES = {
    "timeline": ("png", "pdf", "svg", "html", "json"),
    "graph": ("svg", "html"),
    "report": ("html",),
    "save": ("json",),
}
WHAT = {"timeline": "a timeline", "graph": "a graph", "report": "a report", "save": "a plan"}


@dataclass(frozen=True, slots=True)
class Output:
    """One file."""

    option: str  # one of SUFFIXES
    path: Path

    def __str__(self) -> str:
        return f"--{self.option} {self.path}"


def check_outputs(outputs: Sequence[Output]) -> None:
    """Nothing is written.

    Raises:
        ArgumentError: for the first that could not be: its suffix, its place, what it takes to draw it.
    """
    taken: dict[Path, Output] = {}
    for output in outputs:
        other = taken.setdefault(output.path.resolve(), output)
        if other is not output:
            raise ArgumentError(f"{output}: --{other.option} is to be written there; give another path")
        form = check_path(output.path, SUFFIXES[output.option], f"--{output.option}: {WHAT[output.option]}")
        if form in ("png", "pdf"):
            from fxpipe.drawing.raster import require_matplotlib

            require_matplotlib(form)
