"""Bars on stderr for what takes long, where someone is looking.

A pass that may take long says how far it is, and knows nothing of who looks:

    with progress("shapes", len(nodes)) as step:
        for node in nodes:
            ...
            step()

A bar appears once its step has taken longer than a second, and is gone when it ends, well or not. Nothing is shown
where stderr is no terminal (a file, a pipe, a notebook, closed, None), nor in a block of `show_progress(False)`: what
the argument `progress` of the entry points comes to. One bar within another stands below it. Each part is also a
cancellation point (`utils.locks`).

Not every pass can say how far it is. Around all of them `show_phases` shows the phase that `phase` named last, and the
seconds, which a thread keeps counting during a pass that takes long.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from fxpipe.utils.locks import cancellation_point

BAR_DELAY = 1.0  # seconds before a bar appears: most steps are over by then

_WITH_TOTAL = "{desc}: {percentage:3.0f}%|{bar}| {n:.5g}/{total:.5g} {unit} [{elapsed}{postfix}]"
_WITHOUT_TOTAL = "{desc}: {n:.5g} {unit} [{elapsed}{postfix}]"
_PHASES = "{desc}: [{elapsed}{postfix}]"

_shown: ContextVar[bool] = ContextVar("fxpipe_progress", default=True)


class ProgressStep(Protocol):
    """Tells that so much more has been done; `note` stands behind the bar."""

    def __call__(self, done: float = 1, note: str = "") -> object: ...


@contextlib.contextmanager
def show_progress(wanted: bool) -> Iterator[None]:
    """A block in which bars are shown where someone is looking, unless they are not wanted here or further out."""
    before = _shown.set(_shown.get() and wanted)
    try:
        yield
    finally:
        _shown.reset(before)


@contextlib.contextmanager
def progress(what: str, total: float | None, unit: str = "nodes") -> Iterator[ProgressStep]:
    """Gives a function to call after each part of `total`, or of what nobody knows how much there will be (None)."""
    if not (_shown.get() and _is_terminal()):
        yield ignore_progress
        return
    from tqdm import tqdm  # here: it takes 50 ms to import

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no thread that looks after bars

    form = _PHASES if not unit else _WITHOUT_TOTAL if total is None else _WITH_TOTAL
    # miniters: a slow part after many quick ones is shown too.
    with Bar(
        total=total, desc=what, unit=unit, delay=BAR_DELAY, leave=False, miniters=1, dynamic_ncols=True, bar_format=form
    ) as bar:

        def step(done: float = 1, note: str = "") -> None:
            if note:
                bar.set_postfix_str(note, refresh=False)
            bar.update(done)
            cancellation_point()

        ended = threading.Event()
        clock = threading.Thread(target=_keep_counting, args=(bar, ended), daemon=True)
        clock.start()
        try:
            yield step
        finally:
            ended.set()
            clock.join()


def _keep_counting(bar: Any, ended: threading.Event) -> None:
    """Shows the seconds of a bar while nothing else does."""
    while not ended.wait(max(BAR_DELAY, 0.05)):
        bar.refresh()


@contextlib.contextmanager
def show_phases(what: str) -> Iterator[None]:
    """A block of passes. Each pass names itself by `phase`."""
    with progress(what, None, unit="") as step:
        before = _step.set(step)
        try:
            yield
        finally:
            _step.reset(before)


def phase(name: str) -> None:
    """Names what is done from here on. It is a cancellation point, too."""
    _step.get()(0, name)


def _is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except (ValueError, AttributeError):  # closed; something that only writes
        return False


def ignore_progress(done: float = 1, note: str = "") -> None:
    """The step of what nobody looks at."""
    cancellation_point()


_step: ContextVar[ProgressStep] = ContextVar("fxpipe_phase", default=ignore_progress)
