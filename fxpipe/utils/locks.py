"""Threads that plan: what one of them does at a time, and how they come to their end.

To trace, to profile and to compile a stage, a model runs under dispatch modes of torch. Who enters one sets flags of
the process, and on leaving sets them back to what they were; of two threads that leave in another order than they
entered, one sets back what the other had set. The flags would then stay for good, and by them torch.compile stands
aside, without a word. So these have turns: `DISPATCH_MODE_LOCK`.

And a thread that is inside torch when the interpreter ends aborts the process. So threads that plan are known, and
broken off before.
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
_REPEAT_SECONDS = 0.05  # seconds until they are told again: code of others may swallow what should have ended it

_planning_threads: Counter[threading.Thread] = Counter()


@contextmanager
def planning_block() -> Iterator[None]:
    """A block that traces, measures and cuts models; it may be inside of another one."""
    _begin_planning()
    try:
        yield
    finally:
        _end_planning()


def _begin_planning() -> None:
    _planning_threads[threading.current_thread()] += 1


def _end_planning() -> None:
    thread = threading.current_thread()
    _planning_threads[thread] -= 1
    if not _planning_threads[thread]:
        del _planning_threads[thread]


def stop_planning_threads() -> None:
    """Breaks off what other threads plan, and waits until they have ended, as far as that is soon.

    They get a SystemExit, which ends a thread without a word, and which comes between two lines of Python only.
    """
    deadline = time.monotonic() + EXIT_WAIT_SECONDS
    told = set()
    while others := {*_planning_threads} - {threading.current_thread()}:
        for thread in others:
            stop: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
            stop(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        told |= others
        if time.monotonic() > deadline:
            return
        time.sleep(_REPEAT_SECONDS)
    for thread in told:
        thread.join(_REPEAT_SECONDS)


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
    for thread in {*_planning_threads} - {threading.current_thread()}:
        del _planning_threads[thread]
