"""`--kwargs depth=4 name=small rate=0.1 flag=true`: keyword arguments as a command line has them.

A value is JSON (`true`, `null`, `[64, 128]`, `{"a": 1}`) or a literal of Python's (`True`, `None`, `(3, 3)`); what is
neither is text, which therefore needs no quotes.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from fxpipe.errors import ArgumentError
from fxpipe.inspect.words import close_to


def parse_keyword(text: str) -> tuple[str, Any]:
    """`depth=4` -> ("depth", 4); `name=small` -> ("name", "small")."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        place = "; TARGET goes before --kwargs" if ":" in text else ""  # it was taken for one more
        raise ArgumentError(f"{text!r}: expected name=value, as in depth=4{place}")
    return name, _value(value)


def check_keywords(function: Callable[..., Any], called: str, kwargs: Mapping[str, Any]) -> None:
    """Raises `ArgumentError`, with the function's parameters, unless it can be called with just these."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C, without one: the call will tell
        return
    parameters = signature.parameters.values()
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    shown = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
    has = f"; it has ({shown})" if shown else "; it has none"
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in kwargs:
            if name not in known:
                raise ArgumentError(f"--kwargs: {called} has no parameter {name!r}{close_to(name, known)}{has}")
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [name for name in required if name not in kwargs]
    if missing:
        given = " ".join(f"{name}=..." for name in missing)
        raise ArgumentError(f"{called} needs {' and '.join(map(repr, missing))}; give --kwargs {given}{has}")


def _value(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return text
