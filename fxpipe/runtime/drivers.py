"""Who drives the rows of a step: workers, workers that dawdle, or one thread that picks at random.

All do the same: for each action in a row, wait until it is ready, perform it. Guarantees:

- Every row comes to its end: an exception in one opens all fences, and the others stop before their next action.
- `drive` returns when all rows have ended, not before; then the exception, if any, is raised in the caller.
- A worker holds nothing of a step once its row has ended.

Assumed: rows of a validated schedule, so that some action is always ready.
"""

from __future__ import annotations

import atexit
import os
import queue
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from fxpipe.errors import InternalError
from fxpipe.runtime.step import Step
from fxpipe.scheduling.actions import Rows


class Driver(Protocol):
    """Runs the rows of a step to their end, or raises what made it fail."""

    def drive(self, step: Step, rows: Rows) -> None: ...

    def close(self) -> None: ...


def _raise_failure(step: Step) -> None:
    failure, step.failure = step.failure, None
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # else the exception holds this frame and this frame the exception


# -- workers ---------------------------------------------------------------------------------------------------------


def _work(jobs: queue.SimpleQueue[Any], device: torch.device, threads: int) -> None:
    """A worker: its arguments are all it holds, so that a pipe that is dropped is not kept alive by its threads."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while (job := jobs.get()) is not None:
        step, row, before, done = job
        del job  # nothing of a step may live on while the worker waits for the next one
        try:
            for action in row:
                step.wait(action)
                if step.failure is not None:
                    break
                before()
                step.perform(action)
        except BaseException as error:
            step.fail(error)
        finally:
            del step, row
            done.put(None)
            del done


_all_workers: weakref.WeakSet[Workers] = weakref.WeakSet()


class Workers:
    """One thread for each device entry. Threads start with the first step, and anew in a forked process."""

    def __init__(self, devices: Sequence[torch.device], jitter: int | None = None):
        """`jitter`: a seed; workers then wait a random time before each action, to shake out what hangs on timing."""
        self._devices = tuple(devices)
        self._jitter = random.Random(jitter) if jitter is not None else None
        self._queues: list[queue.SimpleQueue[Any]] = []
        self._threads: list[threading.Thread] = []
        self._process: int | None = None
        _all_workers.add(self)

    def drive(self, step: Step, rows: Rows) -> None:
        if self._process != os.getpid():
            self._start()
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        for jobs, row in zip(self._queues, rows, strict=True):
            jobs.put((step, row, self._before(), done))
        for _ in rows:
            self._wait_for(done, step)
        _raise_failure(step)

    def _wait_for(self, done: queue.SimpleQueue[None], step: Step) -> None:
        """Waits for one row; an interrupt makes the step fail, and the rows are still waited for."""
        while True:
            try:
                done.get()
                return
            except KeyboardInterrupt as interrupt:
                step.fail(interrupt)

    def _before(self) -> Callable[[], None]:
        if self._jitter is None:
            return _nothing
        own = random.Random(self._jitter.random())
        return lambda: time.sleep(own.random() * 2e-3)

    def _start(self) -> None:
        share = max(1, torch.get_num_threads() // len(self._devices))
        own = torch.get_num_threads()
        self._queues = [queue.SimpleQueue() for _ in self._devices]
        self._threads = [
            threading.Thread(target=_work, args=(jobs, device, share), name=f"fxpipe-{j}-{device}", daemon=True)
            for j, (jobs, device) in enumerate(zip(self._queues, self._devices, strict=True))
        ]
        for thread in self._threads:
            thread.start()
        # A new thread starts with the number that any thread has set last: set it back for those of others.
        torch.set_num_threads(own)
        self._process = os.getpid()
        weakref.finalize(self, _stop, list(self._queues))

    def close(self) -> None:
        """Ends the threads and waits for them. A later step starts new ones."""
        if self._process == os.getpid():
            _stop(self._queues)
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join()
        self._queues, self._threads, self._process = [], [], None


def _nothing() -> None:
    pass


def _stop(queues: Sequence[queue.SimpleQueue[Any]]) -> None:
    for jobs in queues:
        jobs.put(None)


@atexit.register
def _close_all() -> None:
    """A daemon thread that is inside torch when the interpreter ends aborts the process."""
    for workers in list(_all_workers):
        workers.close()


# -- one thread ------------------------------------------------------------------------------------------------------


class Interleaved:
    """Runs all rows in the calling thread, an action at a time, picked at random among those that are ready."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def drive(self, step: Step, rows: Rows) -> None:
        waiting = [deque(row) for row in rows if row]
        while waiting and step.failure is None:
            ready = [row for row in waiting if step.is_ready(row[0])]
            if not ready:
                raise InternalError(f"no action is ready: {[str(row[0]) for row in waiting]}")
            step.perform(self._random.choice(ready).popleft())
            waiting = [row for row in waiting if row]
        _raise_failure(step)

    def close(self) -> None:
        pass
