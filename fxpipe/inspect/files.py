"""Files that the command is to write, looked at before the long work: the kind, the place, what it takes to draw it."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from fxpipe.errors import ArgumentError

SUFFIXES = {
    "timeline": ("png", "pdf", "svg", "html", "json"),
    "graph": ("svg", "html"),
    "report": ("html",),
    "save": ("json",),
}
DRAWN_BY_MATPLOTLIB = ("png", "pdf")


@dataclass(frozen=True, slots=True)
class Output:
    """One file."""

    option: str  # one of SUFFIXES
    path: Path

    def __str__(self) -> str:
        return f"--{self.option} {self.path}"


def check_outputs(outputs: tuple[Output, ...]) -> None:
    """Raises `ArgumentError` for the first that could not be written. Nothing is written."""
    taken: dict[Path, Output] = {}
    for output in outputs:
        other = taken.setdefault(output.path.absolute(), output)
        if other is not output:
            raise ArgumentError(f"{output}: --{other.option} is to be written there")
        _check_suffix(output)
        _check_place(output)


def _check_suffix(output: Output) -> None:
    known = SUFFIXES[output.option]
    suffix = output.path.suffix.lower().removeprefix(".")
    if suffix not in known:
        accepted = ", ".join(f".{name}" for name in known)
        raise ArgumentError(f"{output}: unknown kind of file {output.path.suffix!r}; accepted are {accepted}")
    if suffix in DRAWN_BY_MATPLOTLIB and importlib.util.find_spec("matplotlib") is None:
        others = ", ".join(name for name in known if name not in DRAWN_BY_MATPLOTLIB)
        raise ArgumentError(f"{output}: {suffix} needs matplotlib: pip install fxpipe[plot]; {others} need nothing")


def _check_place(output: Output) -> None:
    path, folder = output.path, output.path.absolute().parent
    if path.is_dir():
        raise ArgumentError(f"{output}: is a directory")
    if not folder.is_dir():
        what = "is no directory" if folder.exists() else "does not exist"
        raise ArgumentError(f"{output}: cannot be written: {folder} {what}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ArgumentError(f"{output}: cannot be written: permission denied")
