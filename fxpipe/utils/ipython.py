"""Results in IPython: the text of `print` instead of the repr with all fields."""

from __future__ import annotations

from typing import Any


def show_as_printed(shown: object, printer: Any, cycle: bool) -> None:
    """Shows a result as `print` does: the `_repr_pretty_` of classes that print as tables."""
    printer.text(str(shown))
