"""The general paths of libraries: those they take for compilers, without looking at values.

Many libraries look into a mask and take a faster path where it hides nothing, but not while a compiler is at work. In
this block both questions are answered yes, in this thread only: with `is_compiling` alone some of them call
higher-order operators.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import torch

_QUESTIONS = ("is_compiling", "is_exporting")


@contextlib.contextmanager
def general_paths() -> Iterator[None]:
    here, before = threading.get_ident(), {name: getattr(torch.compiler, name) for name in _QUESTIONS}

    def answer(original: Callable[[], bool]) -> bool:
        return threading.get_ident() == here or original()

    try:
        for name, original in before.items():
            setattr(torch.compiler, name, functools.partial(answer, original))
        yield
    finally:
        for name, original in before.items():
            setattr(torch.compiler, name, original)
