"""Threads that plan: the lock for dispatch modes, and their cancellation when the interpreter exits.

Tracing, profiling and compiling run a model under dispatch modes of torch, which set process-wide flags and restore
them at their end. If two threads left modes in another order than they entered, the flags would stay set, and
torch.compile would silently do nothing. So only one thread at a time uses modes: `DISPATCH_MODE_LOCK`.

A thread that is inside torch when the interpreter ends aborts the process. So threads that plan are registered, and
end before that at the next `cancellation_point()`, which planning passes at each node.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# -- Forked children: only the thread that forked exists there, and locks stay held by other threads -----------------


def call_in_forked_child(function: Callable[[], object]) -> None:
    """Makes every forked child call `function` first; does nothing on platforms without fork (Windows)."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


EXIT_WAIT_SECONDS = 5.0  # seconds that the interpreter waits for threads that plan
_POLL_SECONDS = 0.01
# Seconds for them to reach a cancellation point. Then an exception is raised in them, between any two lines of Python.
# This aborts the process if C++ has called Python and does not handle exceptions, as in parts of torch.
_PATIENCE_SECONDS = 2.0

_exiting_thread: threading.Thread | None = None  # ends the interpreter
_cancelled = set[threading.Thread]()
_planning_threads: Counter[threading.Thread] = Counter()


@contextmanager
def planning_block() -> Iterator[None]:
    """A block that traces, measures and cuts models. Blocks may be nested."""
    _begin_planning()
    try:
        yield
    finally:
        _end_planning()


def is_planning() -> bool:
    """Returns True if fxpipe runs this code to trace, compare or measure the model, not in a step.

        def count(module, args, output):
            if not fxpipe.is_planning():
                counts[module] += len(output)  # a forward hook: each sample of a step once

    Planning runs the model on your inputs, on parts of them and on other numbers of samples, so hooks and modules see
    more calls than the steps make.
    """
    return threading.current_thread() in _planning_threads and not step_block.depth


class _StepBlock(threading.local):
    """A block in which this thread runs a step, even if it takes the planning lock, as compiled code does at first."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1


step_block = _StepBlock()


def _begin_planning() -> None:
    if _is_another_exiting():
        _cancel()
    _planning_threads[threading.current_thread()] += 1


def _end_planning() -> None:
    thread = threading.current_thread()
    _planning_threads[thread] -= 1
    if not _planning_threads[thread]:
        del _planning_threads[thread]


def cancellation_point() -> None:
    """Raises SystemExit, which is silent, in a thread that plans if another thread ends the interpreter."""
    if _is_another_exiting() and threading.current_thread() in _planning_threads:
        _cancel()


def _is_another_exiting() -> bool:
    return _exiting_thread is not None and _exiting_thread is not threading.current_thread()


def _cancel() -> None:
    _cancelled.add(threading.current_thread())
    raise SystemExit


def stop_planning_threads() -> None:
    """Cancels planning in other threads, and waits for their end for at most `EXIT_WAIT_SECONDS`."""
    global _exiting_thread
    _exiting_thread = threading.current_thread()
    begun = time.monotonic()
    broken_off = set[threading.Thread]()
    while (seconds := time.monotonic() - begun) < EXIT_WAIT_SECONDS:
        planning = {*_planning_threads} - {_exiting_thread}
        if not planning and not any(thread.is_alive() for thread in _cancelled):
            return
        if seconds > _PATIENCE_SECONDS:
            for thread in planning - broken_off:
                raise_in: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
                raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
            broken_off = planning
        time.sleep(_POLL_SECONDS)


class ForkSafeLock:
    """A reentrant lock that is free in a forked child if another thread held it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0
        call_in_forked_child(self._free)

    def acquire(self) -> None:
        _begin_planning()
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._lock.release()
        _end_planning()

    __enter__ = acquire

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _free(self) -> None:
        if self._owner != threading.get_ident():
            self._lock, self._owner, self._depth = threading.RLock(), None, 0


DISPATCH_MODE_LOCK = ForkSafeLock()


@call_in_forked_child
def _forget_other_threads() -> None:
    global _exiting_thread
    _exiting_thread = None
    _cancelled.clear()
    for thread in {*_planning_threads} - {threading.current_thread()}:
        del _planning_threads[thread]
