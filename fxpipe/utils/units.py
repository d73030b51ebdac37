"""Readable text for numbers of bytes, seconds and things, and checks of numbers that users pass."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from fxpipe.errors import ArgumentError, ArgumentTypeError


def size_at_least(number: float) -> str:
    """Formats bytes as a memory limit, rounded up: `40.2KiB`."""
    size, units = number / 1024, ["TiB", "GiB", "MiB", "KiB"]
    while size >= 1000 and len(units) > 1:
        size /= 1024
        units.pop()
    return f"{math.ceil(10 * size) / 10:.1f}{units[-1]}"


def human_bytes(number: float) -> str:
    """Formats bytes: `1536` -> `1.5 KiB`."""
    if number < 1024:
        return f"{number:.4g} B"
    size, units = number / 1024, ["TiB", "GiB", "MiB", "KiB"]
    while size >= 999.95 and len(units) > 1:  # prints as 1000.0 or more: use the next unit
        size /= 1024
        units.pop()
    return f"{size:.1f} {units[-1]}"


def human_seconds(seconds: float) -> str:
    """Formats seconds: `0.0123` -> `12.3 ms`, `360` -> `6:00 min`, `7209` -> `2:00:09 h`; in ms below ten seconds."""
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{rest:02} h" if minutes >= 120 else f"{minutes}:{rest:02} min"
    if seconds >= 10:
        return f"{seconds:.1f} s"
    milliseconds = seconds * 1e3
    digits = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2 if milliseconds >= 1 else 3
    return f"{milliseconds:.{digits}f} ms"


def percent(share: float) -> str:
    """Formats a share: `0.3333` -> `33.3 %`."""
    return f"{share:.1%}".replace("%", " %")


def count_text(number: int, noun: str, plural: str = "s") -> str:
    """Formats a count: `1, "stage"` -> `1 stage`; `2, "batch", "es"` -> `2 batches`."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def three_digits(number: float) -> str:
    """Formats with three digits, or as a whole number from 100: `0.012345` -> `0.0123`, `1118.2` -> `1,118`."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def whole_number(value: Any) -> int | None:
    """Converts any integer (also of numpy) to int; returns None for other values, and for bool.

    >>> whole_number(3), whole_number(3.0), whole_number(True)
    (3, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Returns `; did you mean ...?` with the most similar of `names`; empty if none is similar."""
    matches = difflib.get_close_matches(str(name).lower(), list(names), n=3)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def with_article(value: object) -> str:
    """Returns the type of a value with its article: `an int`, `a list`, or `None`."""
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"an {kind}" if kind[0].lower() in "aeiou" else f"a {kind}"


def names_text(names: Sequence[str], most: int = 6) -> str:
    """Formats names as a list, at most the first `most`.

    >>> names_text(["a", "b"]), names_text(["a", "b", "c"], most=2)
    ("'a', 'b'", "'a', 'b' and 1 more")
    """
    shown = ", ".join(map(repr, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def parse_count(argument: str, value: Any, expected: str = "a whole number") -> int:
    """Checks an argument that is a count.

    >>> parse_count("chunks", 4)
    4

    Raises `ArgumentTypeError` if it is not a whole number (`expected` describes what is), `ArgumentError` if it is less
    than 1.
    """
    count = whole_number(value)
    if count is not None and count >= 1:
        return count
    kind = ArgumentTypeError if count is None else ArgumentError
    raise kind(f"{argument}={value!r}: expected {expected}, at least 1")


def parse_number(argument: str, value: Any, what: str) -> float:
    """Checks an argument that is a finite number, 0 or more."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ArgumentTypeError(f"{argument}={value!r} is {with_article(value)}; expected {what}, 0 or more")
    if not math.isfinite(value) or value < 0:
        raise ArgumentError(f"{argument}={value!r}: expected {what}, 0 or more and finite")
    return float(value)
