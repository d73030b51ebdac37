"""Executors of the rows of a step: worker threads, or the caller's thread.

For each action in a row they wait until it is ready and perform it. Guarantees:

- Every row comes to its end: an exception in one opens all fences, and the others stop before their next action.
- `run` returns when all rows have ended; then the exception, if any, is raised in the caller. An interrupt of the
  caller (Ctrl-C) makes the step fail like any other; only a second one does not wait for the rows.
- A worker holds nothing of a step once its row has ended, and none outlives the interpreter.

In a stream `start` queues more rows after the queued ones without waiting for workers; `finish` waits, as `run` does.
Rows are those of a validated schedule, so that some action is always ready.
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
    """Runs the rows of a step to their end, or raises what made it fail."""

    def run(self, step: ActionPerformer, rows: Rows) -> None: ...

    def start(self, step: ActionPerformer, rows: Rows) -> None:
        """Queues rows, or more of them, of which none waits for what is not queued yet."""

    def wait(self, event: threading.Event) -> None:
        """Returns when what was started has set the event, as it does when it fails, too."""

    def finish(self, step: ActionPerformer) -> None:
        """Returns when all that was started has ended, or raises what made it fail."""

    @property
    def is_closed(self) -> bool: ...

    def close(self) -> None: ...


PIPE_CLOSED = "the pipe is closed; make a new one with fxpipe.pipeline(model, ...)"
CLOSED_INSIDE_STEP = "close() was called inside a step of the same pipe (by loss_fn, say); call it after the step"
CLOSED_WHILE_RUNNING = "the pipe was closed while this step ran"

# Before the interpreter ends: a daemon thread that is inside torch then aborts the process.
open_executors: weakref.WeakSet[Executor] = weakref.WeakSet()


def close_all_executors() -> None:
    for executor in list(open_executors):
        executor.close()


def run_row(step: ActionPerformer, row: Sequence[Action]) -> None:
    """Performs the actions of a row, up to a failure."""
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
            del failure  # else the exception holds this frame and this frame the exception


# -- workers ---------------------------------------------------------------------------------------------------------

POLL_SECONDS = 1.0  # seconds between two looks at whether the workers are still alive


def _worker_main(
    jobs: queue.SimpleQueue[Any],
    device: torch.device,
    threads: int,
    ready: queue.SimpleQueue[Any],
    ended: list[BaseException],
) -> None:
    """A worker: its arguments are all it holds, so that a pipe that is dropped is not kept alive by its threads.

    A job is (context, step, row), or a queue to answer to, or None for the end. What
    else ends the thread, it leaves in `ended`.
    """
    try:
        torch.set_num_threads(threads)
        # Asking settles it: else the thread takes the process's number at its first operation (torch 2.13).
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
            del job  # nothing of a step may live on while the worker waits for the next one
    except BaseException as error:
        ended.append(error)


class ThreadedExecutor:
    """One thread for each device entry, which runs one row. Threads start with the first step, and anew in a fork."""

    def __init__(self, devices: Sequence[torch.device]):
        self._devices = tuple(devices)
        self._queues: list[queue.SimpleQueue[Any]] = []
        self._threads: list[threading.Thread] = []
        self._ended: list[BaseException] = []  # what has ended threads before their time
        self._process: int | None = None
        self._step: ActionPerformer | None = None  # that the workers are at
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
        if self._step is not None:  # left behind by a second interrupt
            self._step.fail(StateError("the step was interrupted"))
        warn_of_unseen_workers()
        self._step = step

    def _put(self, step: ActionPerformer, rows: Rows) -> None:
        if self._closed:
            raise StateError(CLOSED_WHILE_RUNNING)
        for jobs, row in zip(self._queues, rows, strict=True):
            # Context variables are the caller's; what a stage sets stays in its row.
            jobs.put((contextvars.copy_context(), step, row))

    @contextlib.contextmanager
    def _failing_with(
        self, step: ActionPerformer, queues: Sequence[queue.SimpleQueue[Any]], threads: Sequence[threading.Thread]
    ) -> Iterator[None]:
        """A block in which an interrupt of the caller, wherever it strikes, ends the step."""
        try:
            yield
        except BaseException as error:
            step.fail(error)
            self._wait_until_idle(queues, threads)
            self._step = step.failure = None
            raise  # also where a stage has failed before: a Ctrl-C must not get lost

    def _wait_until_idle(self, queues: Sequence[queue.SimpleQueue[Any]], threads: Sequence[threading.Thread]) -> None:
        """Returns when the workers have done all that is in their queues."""
        idle: queue.SimpleQueue[None] = queue.SimpleQueue()
        for jobs in queues:
            jobs.put(idle)
        for _ in queues:
            while not _has_answer(idle):
                self._check_alive(threads)

    def _check_alive(self, threads: Sequence[threading.Thread]) -> None:
        """Raises where workers will not come to an end."""
        if self._closed:
            raise StateError(CLOSED_WHILE_RUNNING)
        if not all(thread.is_alive() for thread in threads):
            names = " and ".join(thread.name for thread in threads if not thread.is_alive())
            cause = self._ended[0] if self._ended else None
            why = f"{type(cause).__name__}: {cause}" if cause else "it was told to end, by no code of fxpipe"
            raise InternalError(f"worker thread {names} has ended in the middle of a step ({why})") from cause

    def _start(self) -> None:
        """Starts new threads, each with its share of the cores; the caller's number of threads stays as it is."""
        own = torch.get_num_threads()
        share = max(1, own // len(self._devices))
        ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        _stop_workers(self._queues)  # of workers that are left, where one has died
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
            # A new thread starts with the number that any thread has set last: set it back for those of others.
            torch.set_num_threads(own)
        weakref.finalize(self, _stop_workers, queues)
        self._queues, self._threads, self._ended, self._process = queues, threads, ended, os.getpid()
        self._step = None

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Ends the threads, for good, and waits for them. A step that another thread runs meanwhile fails."""
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
    """Waits for an answer, but not for ever."""
    try:
        answers.get(timeout=POLL_SECONDS)
    except queue.Empty:
        return False
    return True


def _stop_workers(queues: Sequence[queue.SimpleQueue[Any]]) -> None:
    for jobs in queues:
        jobs.put(None)


# -- A pipe with one worker needs no thread: its row runs in the thread that calls, if that is all on the CPU --------
#
# So it costs what the model costs, whatever the allocator makes of a second thread: glibc gives each thread an arena of
# its own, and the same step is a tenth faster or slower in one than in another. Nothing is handed over, Ctrl-C strikes
# where the model is, and a debugger stops there.


def executor_for(devices: Sequence[torch.device]) -> Executor:
    """Returns the executor of a pipe on these devices."""
    return InlineExecutor() if len(devices) == 1 and devices[0].type == "cpu" else ThreadedExecutor(devices)


class InlineExecutor:
    """Runs the only row there is in the calling thread."""

    def __init__(self) -> None:
        self._running: tuple[int, ActionPerformer] | None = None  # the thread, and the step it is at
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
            # As with workers: context variables are the caller's; what a stage sets stays in its row.
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
        """Closes the executor for good. A step that another thread runs fails, and has ended soon."""
        running = self._running
        if running is not None and running[0] == threading.get_ident():
            raise StateError(CLOSED_INSIDE_STEP)
        self._closed = True
        if running is not None:
            running[1].fail(StateError(CLOSED_WHILE_RUNNING))
