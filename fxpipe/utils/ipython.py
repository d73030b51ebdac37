"""What IPython shows as text of a result: what `print` shows, instead of a line with all fields of all parts."""

from __future__ import annotations

from typing import Any


def show_as_printed(shown: object, printer: Any, cycle: bool) -> None:
    """Is `_repr_pretty_` of classes that print as a table."""
    printer.text(str(shown))
