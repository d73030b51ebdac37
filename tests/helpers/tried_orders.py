"""Executors that try other orders of actions: a step has the same bits in whatever order the fences allow."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from fxpipe.errors import InternalError
from fxpipe.runtime.executors import ThreadedExecutor
from fxpipe.runtime.run import Fences, Run
from fxpipe.scheduling.actions import Action, Rows


class _WouldWait(BaseException):
    pass


def _refuse_to_wait(fences: Fences, key: Any) -> None:
    if key not in fences._passed and not fences._all_open:
        raise _WouldWait


def ends_without_waiting(function: Callable[..., None], *args: Any) -> bool:
    with mock.patch.object(Fences, "wait_behind", _refuse_to_wait):
        try:
            function(*args)
        except _WouldWait:
            return False
    return True


def _wait(run: Run, action: Action) -> None:
    run.link.wait(run, action)
    one = run.mini_batches.get(run.order.place(action.micro_batch)[0])
    for needed in () if one is None else run._before_loss(one, action):
        run.link.wait_behind(needed)


class InterleavedExecutor:
    """Runs all rows in the calling thread, an action at a time, picked at random among those that are ready."""

    is_closed = False

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def run(self, run: Run, rows: Rows) -> None:
        self.start(run, rows)
        self.finish(run)

    def start(self, run: Run, rows: Rows) -> None:
        with run.in_row():
            self._run(run, rows)

    def wait(self, event: threading.Event) -> None: ...

    def finish(self, run: Run) -> None:
        run.raise_failure()

    def _run(self, run: Run, rows: Rows) -> None:
        waiting = [deque(row) for row in rows if row]
        while waiting and run.failure is None:
            ready = [row for row in waiting if ends_without_waiting(_wait, run, row[0])]
            if not ready:
                run.fail(InternalError(f"no action is ready: {[str(row[0]) for row in waiting]}"))
                break
            run.perform(self._random.choice(ready).popleft())
            waiting = [row for row in waiting if row]

    def close(self) -> None:
        pass


class JitteredExecutor(ThreadedExecutor):
    """Workers that wait a random time before each action."""

    def __init__(self, devices: Sequence[torch.device], seed: int):
        super().__init__(devices)
        self._random = random.Random(seed)

    def _put(self, run: Run, rows: Rows) -> None:
        if "perform" not in vars(run):
            perform = run.perform

            def perform_later(action: Action) -> None:
                time.sleep(self._random.random() * 2e-3)
                perform(action)

            run.perform = perform_later  # type: ignore[method-assign]
        super()._put(run, rows)
