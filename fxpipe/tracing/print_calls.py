"""Shows the output of `print` in forward once.

A model runs several times during planning; steps run the graph instead. So only the first run prints, and the pipe
warns. Only `print` to stdout is muted, in the planning thread.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fxpipe.tracing.record.opaque_call import active


@dataclass(slots=True)
class _PrintState:
    """The prints of forward in one thread since planning began."""

    is_first_run: bool = True
    lost: dict[str, None] = field(default_factory=dict)  # source lines of prints that steps will not run


_lock = threading.Lock()
_by_thread: dict[int, _PrintState] = {}
_print = builtins.print


def _print_once(*values: Any, file: Any = None, **settings: Any) -> None:
    prints = _by_thread.get(threading.get_ident())
    if prints is None or file not in (None, sys.stdout):
        _print(*values, file=file, **settings)
        return
    recorder = active.recorder
    if recorder is not None and not recorder.paused and prints.is_first_run:
        prints.lost[recorder.source] = None
    _print(*values, file=file if prints.is_first_run else io.StringIO(), **settings)


@contextlib.contextmanager
def mute_repeated_prints(is_first_run: bool = True) -> Iterator[None]:
    """A block in which `print` works until the model has run once."""
    global _print
    here = threading.get_ident()
    if here in _by_thread:
        yield
        return
    prints = _PrintState(is_first_run)
    with _lock:
        if builtins.print is not _print_once:
            _print, builtins.print = builtins.print, _print_once
        _by_thread[here] = prints
    try:
        yield
    finally:
        with _lock:
            del _by_thread[here]
            if not _by_thread and builtins.print is _print_once:
                builtins.print = _print


def lost_prints() -> tuple[str, ...]:
    """Returns the source lines of prints of forward in this block, which steps will not run."""
    prints = _by_thread.get(threading.get_ident())
    return () if prints is None else (*prints.lost,)


def text_of_prints(model: nn.Module, lines: Sequence[str]) -> str:
    """Returns the warning of prints that steps do not run."""
    places = ", ".join(lines[:3]) + (", ..." if len(lines) > 3 else "")
    return (
        f"forward of {type(model).__name__} prints at {places}: this is shown once while the model is planned, and not "
        "in a step, which runs the graph of what forward computes; to print in each step, put a forward hook on a "
        "module inside (register_forward_hook), or keep the module that prints whole (leaf_modules=)"
    )


def end_first_run() -> None:
    """Ends the first run of the model: later runs do not print."""
    prints = _by_thread.get(threading.get_ident())
    if prints is not None:
        prints.is_first_run = False
