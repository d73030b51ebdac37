"""Threads that plan: what one of them does at a time, and how they come to their end.

To trace, to profile and to compile a stage, a model runs under dispatch modes of torch, which set flags of the process
and restore them at their end. If two threads left them in another order than they entered, the flags would stay set,
and torch.compile would silently do nothing. So one thread at a time: `DISPATCH_MODE_LOCK`.

And a thread that is inside torch when the interpreter ends aborts the process. So threads that plan are registered, and
end before that, at the next `cancellation_point()`, which planning passes at each node.
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

# -- Repairs in a forked child, which has only the thread that forked, and locks as the others held them -------------


def call_in_forked_child(function: Callable[[], object]) -> None:
    """Makes every forked child call `function` before anything else; does nothing where no forks exist (Windows)."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


EXIT_WAIT_SECONDS = 5.0  # seconds that the interpreter waits for threads that plan
_POLL_SECONDS = 0.01
# Seconds for them to come to a cancellation point. Then they are broken off between two lines of Python, whatever these
# are: also where C++ has called Python and takes no exception, as torch does in places, which aborts the process.
_PATIENCE_SECONDS = 2.0

_exiting_thread: threading.Thread | None = None  # that which ends the interpreter
_cancelled = set[threading.Thread]()
_planning_threads: Counter[threading.Thread] = Counter()


@contextmanager
def planning_block() -> Iterator[None]:
    """A block that traces, measures and cuts models; it may be inside of another one."""
    _begin_planning()
    try:
        yield
    finally:
        _end_planning()


def is_planning() -> bool:
    """Returns whether fxpipe runs this code to trace, compare or measure the model, not in a step.

        def count(module, args, output):
            if not fxpipe.is_planning():
                counts[module] += len(output)  # a forward hook: each sample of a step once

    Planning runs the model on your inputs, on parts of them and on other numbers of samples, so hooks and modules see
    more than the steps have.
    """
    return threading.current_thread() in _planning_threads and not _steps.depth


class _Steps(threading.local):
    """The steps that this thread runs under the lock of planning: the first run of compiled code."""

    depth = 0


_steps = _Steps()


@contextmanager
def step_block() -> Iterator[None]:
    """A block that runs a step, also where it takes the lock of planning."""
    _steps.depth += 1
    try:
        yield
    finally:
        _steps.depth -= 1


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
    """Ends a thread that plans where another one ends the interpreter: by a SystemExit, which says no word."""
    if _is_another_exiting() and threading.current_thread() in _planning_threads:
        _cancel()


def _is_another_exiting() -> bool:
    return _exiting_thread is not None and _exiting_thread is not threading.current_thread()


def _cancel() -> None:
    _cancelled.add(threading.current_thread())
    raise SystemExit


def stop_planning_threads() -> None:
    """Ends what other threads plan, and waits until they have ended, as far as that is soon."""
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
                _raise_in(thread)
            broken_off = planning
        time.sleep(_POLL_SECONDS)


def _raise_in(thread: threading.Thread) -> None:
    raise_in: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
    raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))


class ForkSafeLock:
    """A lock that its thread may take again, and that a forked child finds free where another thread had it."""

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

    def __enter__(self) -> None:
        self.acquire()

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
