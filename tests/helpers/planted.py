"""A fault planted in a function: its source with lines that are others."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def with_fault(function: Callable[..., Any], *lines: str) -> Callable[..., Any]:
    """Returns the function with faults: pairs of a text that must be in its source once, and what is there instead."""
    source = textwrap.dedent(inspect.getsource(function))
    for line, fault in zip(lines[::2], lines[1::2], strict=True):
        assert source.count(line) == 1, f"{line!r} is {source.count(line)} times in {function.__qualname__}"
        source = source.replace(line, fault)
    code = compile(source, f"<fault in {function.__qualname__}>", "exec")
    names: dict[str, Any] = {}
    exec(code, inspect.unwrap(function).__globals__, names)
    replaced: Callable[..., Any] = names[function.__name__]
    return replaced
