"""A pipe with one worker needs no thread: its row runs in the thread that calls, if that is all on the CPU.

So it costs what the model costs, whatever the allocator makes of a second thread: glibc gives each thread an arena of
its own, and the same step is a tenth faster or slower in one than in another. Nothing is handed over, Ctrl-C strikes
where the model is, and a debugger stops there.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Sequence

import torch

from fxpipe.errors import StateError
from fxpipe.runtime.drivers import (
    CLOSED,
    INSIDE,
    WHILE_RUNNING,
    Driver,
    Workers,
    closed_at_exit,
    raise_failure,
    run_row,
)
from fxpipe.runtime.step import Step
from fxpipe.scheduling.actions import Rows


def driver_for(devices: Sequence[torch.device]) -> Driver:
    """Who drives the rows of a pipe with these workers."""
    return Alone() if len(devices) == 1 and devices[0].type == "cpu" else Workers(devices)


class Alone:
    """Runs the only row there is in the calling thread."""

    def __init__(self) -> None:
        self._running: tuple[int, Step] | None = None  # the thread, and the step it is at
        self._closed = False
        closed_at_exit.add(self)

    def drive(self, step: Step, rows: Rows) -> None:
        if self._closed:
            raise StateError(CLOSED)
        (row,) = rows
        self._running = threading.get_ident(), step
        try:
            # As with workers: context variables are the caller's; what a stage sets stays in its row.
            contextvars.copy_context().run(run_row, step, row)
        finally:
            self._running = None
        raise_failure(step)

    def close(self) -> None:
        """For good. A step that another thread runs fails, and has ended soon."""
        running = self._running
        if running is not None and running[0] == threading.get_ident():
            raise StateError(INSIDE)
        self._closed = True
        if running is not None:
            running[1].fail(StateError(WHILE_RUNNING))
