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
from typing import Any

from torch import nn

from fxpipe.tracing.record.opaque_call import active

_lock = threading.Lock()
_lost: dict[int, dict[str, None]] = {}  # by thread that plans: source lines of prints that steps will not run
_in_first_run = set[int]()  # threads in which the model has not run yet
_print = builtins.print


def _print_once(*values: Any, file: Any = None, **settings: Any) -> None:
    here = threading.get_ident()
    if here in _lost and file in (None, sys.stdout):
        recorder = active.recorder
        if here not in _in_first_run:
            file = io.StringIO()
        elif recorder is not None and not recorder.paused:
            _lost[here][recorder.source] = None
    _print(*values, file=file, **settings)


@contextlib.contextmanager
def mute_repeated_prints(is_first_run: bool = True) -> Iterator[None]:
    """A block in which `print` works until the model has run once."""
    global _print
    here = threading.get_ident()
    if here in _lost:
        yield
        return
    with _lock:
        if builtins.print is not _print_once:
            _print, builtins.print = builtins.print, _print_once
        _lost[here] = {}
        _in_first_run.update({here} if is_first_run else ())
    try:
        yield
    finally:
        with _lock:
            end_first_run()
            del _lost[here]
            if not _lost and builtins.print is _print_once:
                builtins.print = _print


def lost_prints() -> tuple[str, ...]:
    """Returns the source lines of prints of forward in this block, which steps will not run."""
    return tuple(_lost.get(threading.get_ident(), ()))


def end_first_run() -> None:
    """Ends the first run of the model: later runs do not print."""
    _in_first_run.discard(threading.get_ident())


def text_of_prints(model: nn.Module, lines: Sequence[str]) -> str:
    """Returns the warning of prints that steps do not run."""
    places = ", ".join(lines[:3]) + (", ..." if len(lines) > 3 else "")
    return (
        f"forward of {type(model).__name__} prints at {places}: this is shown once while the model is planned, and not "
        "in a step, which runs the graph of what forward computes; to print in each step, put a forward hook on a "
        "module inside (register_forward_hook), or keep the module that prints whole (leaf_modules=)"
    )
