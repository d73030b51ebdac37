"""Executors that try other orders of actions: a step has the same bits in whatever order the fences allow."""

import random
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch

from fxpipe.errors import InternalError
from fxpipe.runtime.action_performer import ActionPerformer
from fxpipe.runtime.executors import ThreadedExecutor, raise_failure
from fxpipe.scheduling.actions import Action, Rows


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
            ready = [row for row in waiting if step.is_ready(row[0])]
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
