"""Threads that plan: what one of them does at a time, and how they come to their end.

To trace, to profile and to compile a stage, a model runs under dispatch modes of torch. Who enters one sets flags of
the process, and on leaving sets them back to what they were; of two threads that leave in another order than they
entered, one sets back what the other had set. The flags would then stay for good, and by them torch.compile stands
aside, without a word. So these have turns: `one_at_a_time`.

And a thread that is inside torch when the interpreter ends aborts the process. So threads that plan are known, and
broken off before.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fxpipe.forks import in_child

LAST_PLAN = 5.0  # seconds that the interpreter waits for threads that plan
_REPEAT = 0.05  # seconds until they are told again: code of others may swallow what should have ended it

_planning: Counter[threading.Thread] = Counter()


@contextmanager
def planning() -> Iterator[None]:
    """A block that traces, measures and cuts models; it may be inside of another one."""
    _begin()
    try:
        yield
    finally:
        _end()


def _begin() -> None:
    _planning[threading.current_thread()] += 1


def _end() -> None:
    thread = threading.current_thread()
    _planning[thread] -= 1
    if not _planning[thread]:
        del _planning[thread]


def end_planning() -> None:
    """Breaks off what other threads plan, and waits until they have ended, as far as that is soon.

    They get a SystemExit, which ends a thread without a word, and which comes between two lines of Python only.
    """
    deadline = time.monotonic() + LAST_PLAN
    told = set()
    while others := {*_planning} - {threading.current_thread()}:
        for thread in others:
            stop: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
            stop(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        told |= others
        if time.monotonic() > deadline:
            return
        time.sleep(_REPEAT)
    for thread in told:
        thread.join(_REPEAT)


class Turn:
    """A lock that its thread may take again, and that a forked child finds free where another thread had it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0
        in_child(self._free)

    def acquire(self) -> None:
        _begin()
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._lock.release()
        _end()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _free(self) -> None:
        if self._owner != threading.get_ident():
            self._lock, self._owner, self._depth = threading.RLock(), None, 0


one_at_a_time = Turn()


@in_child
def _forget_others() -> None:
    for thread in {*_planning} - {threading.current_thread()}:
        del _planning[thread]
