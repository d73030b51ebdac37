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
from fxpipe.runtime.executors import ActionPerformer, ThreadedExecutor, raise_failure
from fxpipe.runtime.step import Step
from fxpipe.runtime.stream import Stream
from fxpipe.runtime.wiring import Fences
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


def _wait(step: ActionPerformer, action: Action) -> None:
    step.wait(action)
    if isinstance(step, Stream):
        one, action = step._at(action)
        one.wait_before_loss(action)
    elif isinstance(step, Step):
        step.wait_before_loss(action)


class InterleavedExecutor:
    """Runs all rows in the calling thread, an action at a time, picked at random among those that are ready."""

    is_closed = False

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def run(self, step: ActionPerformer, rows: Rows) -> None:
        self.start(step, rows)
        self.finish(step)

    def start(self, step: ActionPerformer, rows: Rows) -> None:
        with step.in_row():
            self._run(step, rows)

    def wait(self, event: threading.Event) -> None: ...

    def finish(self, step: ActionPerformer) -> None:
        raise_failure(step)

    def _run(self, step: ActionPerformer, rows: Rows) -> None:
        waiting = [deque(row) for row in rows if row]
        while waiting and step.failure is None:
            ready = [row for row in waiting if ends_without_waiting(_wait, step, row[0])]
            if not ready:
                step.fail(InternalError(f"no action is ready: {[str(row[0]) for row in waiting]}"))
                break
            step.perform(self._random.choice(ready).popleft())
            waiting = [row for row in waiting if row]

    def close(self) -> None:
        pass


class JitteredExecutor(ThreadedExecutor):
    """Workers that wait a random time before each action."""

    def __init__(self, devices: Sequence[torch.device], seed: int):
        super().__init__(devices)
        self._random = random.Random(seed)

    def _put(self, step: ActionPerformer, rows: Rows) -> None:
        if "wait" not in vars(step):
            wait = step.wait

            def wait_longer(action: Action) -> None:
                wait(action)
                time.sleep(self._random.random() * 2e-3)

            step.wait = wait_longer  # type: ignore[method-assign]
        super()._put(step, rows)
