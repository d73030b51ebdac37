"""Executors of the rows of a step: worker threads, or the caller's thread. They guarantee:

- Every row ends: an exception in one opens all fences, and the other rows stop before their next action.
- `run` returns when all rows have ended; then it raises the exception, if any. An interrupt of the caller (Ctrl-C)
  fails the step like any other; only a second interrupt does not wait for the rows.
- After a row has ended, its worker holds nothing of the step. No worker outlives the interpreter.

In a stream `start` queues further rows without waiting for workers; `finish` waits, as `run` does. Rows must be of a
validated schedule, so that some action is always ready.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from fxpipe.errors import InternalError, StateError
from fxpipe.runtime.action_performer import ActionPerformer, warn_of_unseen_workers
from fxpipe.scheduling.actions import Action, Rows
from fxpipe.utils import accelerator


class Executor(Protocol):
    """Runs the rows of a step to their end, or raises the step's exception."""

    def run(self, step: ActionPerformer, rows: Rows) -> None: ...

    def start(self, step: ActionPerformer, rows: Rows) -> None:
        """Queues rows, none of which may wait for an action that is not queued yet."""

    def wait(self, event: threading.Event) -> None:
        """Returns when a queued row has set the event, which a failure sets, too."""

    def finish(self, step: ActionPerformer) -> None:
        """Returns when all queued rows have ended, or raises the step's exception."""

    @property
    def is_closed(self) -> bool: ...

    def close(self) -> None: ...


PIPE_CLOSED = "the pipe is closed; make a new one with fxpipe.pipeline(model, ...)"
CLOSED_INSIDE_STEP = "close() was called inside a step of the same pipe (by loss_fn, say); call it after the step"
CLOSED_WHILE_RUNNING = "the pipe was closed while this step ran"

# Before the interpreter ends: a daemon thread inside torch would abort the process.
open_executors: weakref.WeakSet[Executor] = weakref.WeakSet()


def close_all_executors() -> None:
    for executor in list(open_executors):
        executor.close()


def run_row(step: ActionPerformer, row: Sequence[Action]) -> None:
    try:
        with step.in_row():
            for action in row:
                step.wait(action)
                if step.failure is not None:
                    break
                step.perform(action)
    except BaseException as error:
        step.fail(error)


def raise_failure(step: ActionPerformer) -> None:
    failure, step.failure = step.failure, None
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # else exception and frame would form a reference cycle


# -- workers ---------------------------------------------------------------------------------------------------------

POLL_SECONDS = 1.0  # seconds between two checks that the workers are alive


def _worker_main(
    jobs: queue.SimpleQueue[Any],
    device: torch.device,
    threads: int,
    ready: queue.SimpleQueue[Any],
    ended: list[BaseException],
) -> None:
    """Runs a worker. It holds only its arguments, so that threads do not keep a dropped pipe alive.

    A job is (context, step, row), a queue to answer to, or None for the end. `ended`: exceptions that ended threads.
    """
    try:
        torch.set_num_threads(threads)
        # Reading the number fixes it: else the thread uses the process's number at its first operation (torch 2.13).
        torch.get_num_threads()
        if device.type != "cpu":
            accelerator.set_current_device(device)
    except BaseException as error:
        ready.put(error)
        return
    ready.put(None)
    del ready
    try:
        while (job := jobs.get()) is not None:
            if isinstance(job, tuple):
                job[0].run(run_row, *job[1:])
            else:
                job.put(None)
            del job  # hold nothing of a step while waiting
    except BaseException as error:
        ended.append(error)


class ThreadedExecutor:
    """One thread for each device entry, which runs one row. Threads start with the first step, and again in a fork."""

    def __init__(self, devices: Sequence[torch.device]):
        self._devices = tuple(devices)
        self._queues: list[queue.SimpleQueue[Any]] = []
        self._threads: list[threading.Thread] = []
        self._ended: list[BaseException] = []  # exceptions that ended threads
        self._process: int | None = None
        self._step: ActionPerformer | None = None
        self._closed = False
        open_executors.add(self)

    def run(self, step: ActionPerformer, rows: Rows) -> None:
        self._begin(step)
        queues, threads = self._queues, self._threads
        with self._failing_with(step, queues, threads):
            self._put(step, rows)
            self._wait_until_idle(queues, threads)
        self._step = None
        raise_failure(step)

    def start(self, step: ActionPerformer, rows: Rows) -> None:
        if self._step is not step:
            self._begin(step)
        self._put(step, rows)

    def wait(self, event: threading.Event) -> None:
        threads = self._threads
        while not event.wait(POLL_SECONDS):
            self._check_alive(threads)

    def finish(self, step: ActionPerformer) -> None:
        if self._step is step:
            queues, threads = self._queues, self._threads
            with self._failing_with(step, queues, threads):
                self._wait_until_idle(queues, threads)
            self._step = None
        raise_failure(step)

    def _begin(self, step: ActionPerformer) -> None:
        if self._closed:
            raise StateError(PIPE_CLOSED)
        if self._process != os.getpid() or not all(thread.is_alive() for thread in self._threads):
            self._start()
        if self._step is not None:  # after a second interrupt
            self._step.fail(StateError("the step was interrupted"))
        warn_of_unseen_workers()
        self._step = step

    def _put(self, step: ActionPerformer, rows: Rows) -> None:
        if self._closed:
            raise StateError(CLOSED_WHILE_RUNNING)
        for jobs, row in zip(self._queues, rows, strict=True):
            # Each row has a copy of the caller's context variables.
            jobs.put((contextvars.copy_context(), step, row))

    @contextlib.contextmanager
    def _failing_with(
        self, step: ActionPerformer, queues: Sequence[queue.SimpleQueue[Any]], threads: Sequence[threading.Thread]
    ) -> Iterator[None]:
        """A block in which an interrupt of the caller, at any point, ends the step."""
        try:
            yield
        except BaseException as error:
            step.fail(error)
            self._wait_until_idle(queues, threads)
            self._step = step.failure = None
            raise  # also where a stage has failed before: a Ctrl-C must not get lost

    def _wait_until_idle(self, queues: Sequence[queue.SimpleQueue[Any]], threads: Sequence[threading.Thread]) -> None:
        idle: queue.SimpleQueue[None] = queue.SimpleQueue()
        for jobs in queues:
            jobs.put(idle)
        for _ in queues:
            while not _has_answer(idle):
                self._check_alive(threads)

    def _check_alive(self, threads: Sequence[threading.Thread]) -> None:
        """Raises if the executor is closed or a worker has died."""
        if self._closed:
            raise StateError(CLOSED_WHILE_RUNNING)
        if not all(thread.is_alive() for thread in threads):
            names = " and ".join(thread.name for thread in threads if not thread.is_alive())
            cause = self._ended[0] if self._ended else None
            why = f"{type(cause).__name__}: {cause}" if cause else "it was told to end, by no code of fxpipe"
            raise InternalError(f"worker thread {names} has ended in the middle of a step ({why})") from cause

    def _start(self) -> None:
        """Starts new threads, each with its share of the cores; the caller's number of threads does not change."""
        own = torch.get_num_threads()
        share = max(1, own // len(self._devices))
        ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        _stop_workers(self._queues)  # remaining workers, if one has died
        queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in self._devices]
        ended: list[BaseException] = []
        threads = [
            threading.Thread(
                target=_worker_main, args=(jobs, device, share, ready, ended), name=f"fxpipe-{j}-{device}", daemon=True
            )
            for j, (jobs, device) in enumerate(zip(queues, self._devices, strict=True))
        ]
        try:
            for thread in threads:
                thread.start()
            errors = [ready.get() for _ in threads]
            for error in errors:
                if error is not None:
                    raise error
        except BaseException:
            _stop_workers(queues)
            raise
        finally:
            # New threads start with the last number that any thread has set: restore it for other threads.
            torch.set_num_threads(own)
        weakref.finalize(self, _stop_workers, queues)
        self._queues, self._threads, self._ended, self._process = queues, threads, ended, os.getpid()
        self._step = None

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Stops the threads permanently, and waits for them. A step that another thread runs fails."""
        if threading.current_thread() in self._threads:
            raise StateError(CLOSED_INSIDE_STEP)
        self._closed = True
        if self._process == os.getpid():
            if self._step is not None:
                self._step.fail(StateError(CLOSED_WHILE_RUNNING))
            _stop_workers(self._queues)
            for thread in self._threads:
                thread.join()
        self._queues, self._threads, self._process = [], [], None


def _has_answer(answers: queue.SimpleQueue[None]) -> bool:
    try:
        answers.get(timeout=POLL_SECONDS)
    except queue.Empty:
        return False
    return True


def _stop_workers(queues: Sequence[queue.SimpleQueue[Any]]) -> None:
    for jobs in queues:
        jobs.put(None)


# -- A pipe with one worker on the CPU needs no thread: its row runs in the calling thread ---------------------------
#
# So it costs what the model costs: glibc gives each thread a memory arena, and the same step may be 10 % faster or
# slower in another arena. Ctrl-C and debuggers stop within the model.


def executor_for(devices: Sequence[torch.device]) -> Executor:
    return InlineExecutor() if len(devices) == 1 and devices[0].type == "cpu" else ThreadedExecutor(devices)


class InlineExecutor:
    """Runs the only row in the calling thread."""

    def __init__(self) -> None:
        self._running: tuple[int, ActionPerformer] | None = None
        self._closed = False
        open_executors.add(self)

    def run(self, step: ActionPerformer, rows: Rows) -> None:
        self.start(step, rows)
        self.finish(step)

    def start(self, step: ActionPerformer, rows: Rows) -> None:
        if self._closed:
            raise StateError(PIPE_CLOSED)
        (row,) = rows
        self._running = threading.get_ident(), step
        try:
            # As with workers, the row has a copy of the caller's context variables.
            contextvars.copy_context().run(run_row, step, row)
        finally:
            self._running = None

    def wait(self, event: threading.Event) -> None: ...

    def finish(self, step: ActionPerformer) -> None:
        raise_failure(step)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Closes the executor permanently. A step that another thread runs fails soon."""
        running = self._running
        if running is not None and running[0] == threading.get_ident():
            raise StateError(CLOSED_INSIDE_STEP)
        self._closed = True
        if running is not None:
            running[1].fail(StateError(CLOSED_WHILE_RUNNING))
