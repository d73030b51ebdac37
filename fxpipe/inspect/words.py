"""Words of messages: what was meant, what came, what was raised."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def close_to(name: str, names: Iterable[str]) -> str:
    """`; did you mean make or made?`: names like this one, or nothing."""
    found = difflib.get_close_matches(name, list(names), n=3)
    return f"; did you mean {' or '.join(found)}?" if found else ""


LONG = 500  # letters: some errors list all that there is


def describe(error: BaseException) -> str:
    """`KeyError: 'width'`: an exception in one line."""
    text = " ".join(str(error).split())
    if len(text) > LONG:
        text = f"{text[:LONG]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def an(value: object) -> str:
    """`an int`, `a list`: what came instead."""
    kind = type(value).__name__
    if value is None:
        return kind
    return f"an {kind}" if kind[0].lower() in "aeiou" else f"a {kind}"
