"""`int(size)`, `float(size)` and `len(tensor)`, followed: these give plain numbers, whatever a size would rather be.

Where one is called in a recording, the function that does so is noted, and the model recorded again; meanwhile such
functions call what is here instead (`builtin_calls`), which does the same to all but sizes. Where a function cannot be
found, or the call is made elsewhere (`map(int, sizes)`), the number stays a plain one, and that it was read is known.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from fxpipe.tracing.record.recorded_sizes import RECORDED, RecordedSize, followed_float
from fxpipe.utils.builtin_calls import exchange_calls, functions_of, uses_builtins


def _int(*args: Any, **kwargs: Any) -> Any:
    is_size = len(args) == 1 and not kwargs and isinstance(args[0], RECORDED)
    return math.trunc(_noted(args[0])) if is_size else int(*args, **kwargs)


def _float(*args: Any) -> Any:
    if len(args) != 1 or not isinstance(args[0], RECORDED):
        return float(*args)
    size = _noted(args[0])
    return followed_float(size) if isinstance(size, RecordedSize) else size


def _len(value: Any) -> int:
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.dim() > 0:
        size: int = _noted(value.shape[0])
        return size
    return len(value)


def _noted(size: Any) -> Any:
    if isinstance(size, RECORDED):
        size.recorder.has_followed_casts = True
    return size


FOLLOWED_CASTS: dict[str, Callable[..., Any]] = {"int": _int, "float": _float, "len": _len}


class CastingFunctions:
    """The functions that were seen to make plain numbers of sizes, and their code that makes sizes of sizes."""

    def __init__(self) -> None:
        self._functions: dict[CodeType, list[weakref.ref[FunctionType]]] = {}
        self._followed: dict[CodeType, CodeType] = {}

    def add(self, codes: set[CodeType]) -> bool:
        """Adds the functions with these codes. Returns whether any of them is one that was not followed."""
        new = {code for code in codes if not any(ref() for ref in self._functions.get(code, ()))}
        for function in functions_of(new):
            followed = exchange_calls(function.__code__, FOLLOWED_CASTS)
            if followed is not function.__code__ and uses_builtins(function, FOLLOWED_CASTS):
                self._followed[function.__code__] = followed
                self._functions.setdefault(function.__code__, []).append(weakref.ref(function))
        return not new.isdisjoint(self._functions)

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """A block in which they make sizes of sizes."""
        exchanged: list[tuple[FunctionType, CodeType]] = []
        for code, references in self._functions.items():
            for function in (reference() for reference in references):
                if function is not None and function.__code__ is code:
                    exchanged.append((function, code))
                    function.__code__ = self._followed[code]
        try:
            yield
        finally:
            for function, code in exchanged:
                function.__code__ = code


CASTING_FUNCTIONS = CastingFunctions()  # for those who hold the lock of recordings
