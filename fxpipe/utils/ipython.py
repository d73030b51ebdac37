"""The text that IPython shows of a result: as `print` shows it, instead of all fields of all parts."""

from __future__ import annotations

from typing import Any


def show_as_printed(shown: object, printer: Any, cycle: bool) -> None:
    """Shows a result in IPython, as `_repr_pretty_` of a class that prints as a table."""
    printer.text(str(shown))
