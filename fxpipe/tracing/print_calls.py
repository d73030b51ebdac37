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
from collections.abc import Collection, Iterator
from typing import Any

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
def mute_repeated_prints(is_first_run: bool = True) -> Iterator[Collection[str]]:
    """A block in which `print` works until the model has run once; yields the lines that print in that run."""
    global _print
    here = threading.get_ident()
    if here in _lost:
        yield _lost[here]
        return
    with _lock:
        if builtins.print is not _print_once:
            _print, builtins.print = builtins.print, _print_once
        _lost[here] = {}
        _in_first_run.update({here} if is_first_run else ())
    try:
        yield _lost[here]
    finally:
        with _lock:
            end_first_run()
            del _lost[here]
            if not _lost and builtins.print is _print_once:
                builtins.print = _print


def end_first_run() -> None:
    """Ends the first run of the model: later runs do not print."""
    _in_first_run.discard(threading.get_ident())
