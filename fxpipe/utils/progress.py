"""Progress bars on stderr, in terminals and notebooks.

A pass that may take long reports its progress:

    with progress("shapes", len(nodes)) as step:
        for node in nodes:
            ...
            step()

Around all passes `show_phases` shows one bar: the last pass that `phase` or `progress` named, its progress, and the
elapsed seconds. A bar appears after two seconds. If stderr is a log, `show_phases` writes one line after two seconds.
Each step is also a cancellation point (`utils.locks`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

from fxpipe.utils.locks import cancellation_point

BAR_DELAY = 2.0  # seconds before a bar appears: most steps have ended by then

_WITH_TOTAL = "{desc}: {percentage:3.0f}%|{bar}| {n:.5g}/{total:.5g} {unit} [{elapsed}{postfix}]"
_WITHOUT_TOTAL = "{desc}: {n:.5g} {unit} [{elapsed}{postfix}]"
_PHASES = "{desc}: [{elapsed}{postfix}]"

_shown: ContextVar[bool] = ContextVar("fxpipe_progress", default=True)


class ProgressStep(Protocol):
    """Reports progress of `done` more parts; `note` is shown after the bar."""

    def __call__(self, done: float = 1, note: str = "") -> object: ...


@contextlib.contextmanager
def show_progress(wanted: bool) -> Iterator[None]:
    """A block in which bars are shown if `wanted` here and in all outer blocks."""
    before = _shown.set(_shown.get() and wanted)
    try:
        yield
    finally:
        _shown.reset(before)


@contextlib.contextmanager
def progress(what: str, total: float | None, unit: str = "nodes") -> Iterator[ProgressStep]:
    """Yields a function to call after each part of `total` (None: unknown)."""
    if _step.get() is not ignore_progress:
        yield _step_of_phase(_step.get(), what, total, unit)
        return
    if not (_shown.get() and (is_terminal() or _is_notebook())):
        yield ignore_progress
        return
    with warnings.catch_warnings():  # a notebook without widgets shows text
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm  # here: it takes 50 ms to import

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no monitor thread

    form = _PHASES if not unit else _WITHOUT_TOTAL if total is None else _WITH_TOTAL
    # miniters=1: also shows a slow part after many fast parts.
    with Bar(
        total=total, desc=what, unit=unit, delay=BAR_DELAY, leave=False, miniters=1, mininterval=min(0.1, BAR_DELAY),
        dynamic_ncols=True, bar_format=form,
    ) as bar:  # fmt: skip

        def step(done: float = 1, note: str = "") -> None:
            if note:
                bar.set_postfix_str(note, refresh=False)
            bar.update(done)
            cancellation_point()

        ended = threading.Event()

        def keep_counting() -> None:
            """Refreshes the seconds between steps."""
            pause = max(BAR_DELAY, 0.05)
            while not ended.wait(pause):
                bar.refresh()
                pause = min(pause, 1.0)

        clock = threading.Thread(target=keep_counting, daemon=True)
        clock.start()
        try:
            yield step
        finally:
            ended.set()
            clock.join()


def _step_of_phase(show: ProgressStep, what: str, total: float | None, unit: str) -> ProgressStep:
    """Returns the step of a pass that is shown by the enclosing bar."""
    sum_done = 0.0

    def step(done: float = 1, note: str = "") -> None:
        nonlocal sum_done
        sum_done += done
        share = f" {min(sum_done / total, 1):.0%}" if total else f" {sum_done:.5g} {unit}" if unit else ""
        show(1, ", ".join(filter(None, (f"{what}{share}", note))))

    return step


def _step_of_log(what: str) -> ProgressStep:
    """Returns a step that writes one line if the phases take longer than `BAR_DELAY`."""
    begun, is_written = time.monotonic(), False

    def step(done: float = 1, note: str = "") -> None:
        nonlocal is_written
        cancellation_point()
        if not is_written and note and time.monotonic() - begun > BAR_DELAY:
            is_written = True
            with contextlib.suppress(Exception):  # stderr is closed, None, or refuses
                sys.stderr.write(f"fxpipe: {what} takes more than {BAR_DELAY:.0f} s; now {note}\n")

    return step


@contextlib.contextmanager
def show_phases(what: str) -> Iterator[None]:
    """A block of passes, each named by `phase` or `progress`, shown in one bar."""
    is_log = _step.get() is ignore_progress and _shown.get() and not (is_terminal() or _is_notebook())
    with contextlib.nullcontext(_step_of_log(what)) if is_log else progress(what, None, unit="") as step:
        before = _step.set(step)
        try:
            yield
        finally:
            _step.reset(before)


def phase(name: str) -> None:
    """Names the pass that begins here. Also a cancellation point."""
    _step.get()(1, name)


def is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except (ValueError, AttributeError):  # closed, or write-only
        return False


def _is_notebook() -> bool:
    return type(sys.stderr).__module__.startswith("ipykernel")


def ignore_progress(done: float = 1, note: str = "") -> None:
    """The step of a pass that is not shown."""
    cancellation_point()


_step: ContextVar[ProgressStep] = ContextVar("fxpipe_phase", default=ignore_progress)
