"""The executors of the rows of a `Run`: worker threads, or the caller's thread.

An executor waits for what an action needs and performs it, row by row, within `run.in_row()`. An exception in one
row opens all fences, and the other rows stop before their next action. `run` returns, or raises, when all rows have
ended, also after an interrupt of the caller (Ctrl-C); only a second one does not wait. A worker whose row has ended
holds nothing of the step. No worker outlives the interpreter.

In a stream `start` queues further rows without waiting for workers; `finish` waits, as `run` does. Rows must be of a
validated schedule, so that some action is always ready.
"""

from __future__ import annotations

import contextvars
import os
import queue
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from fxpipe._torch.tools import ALL_THREADS_CONFIG, sees_this_thread_only
from fxpipe.errors import InternalError, StateError
from fxpipe.runtime.run import Run
from fxpipe.scheduling.actions import Action, Rows
from fxpipe.utils import accelerator

PIPE_CLOSED = "the pipe is closed; make a new one with fxpipe.pipeline(model, ...)"
CLOSED_INSIDE_STEP = "close() was called inside a step of the same pipe (by loss_fn, say); call it after the step"
CLOSED_WHILE_RUNNING = "the pipe was closed while this step ran"

# Before the interpreter ends: a daemon thread inside torch would abort the process.
open_executors: weakref.WeakSet[Executor] = weakref.WeakSet()


def close_all_executors() -> None:
    for executor in list(open_executors):
        executor.close()


def run_row(run: Run, row: Sequence[Action]) -> None:
    try:
        with run.in_row():
            for action in row:
                run.link.wait(run, action)
                if run.failure is not None:
                    break
                run.perform(action)
    except BaseException as error:
        run.fail(error)


POLL_SECONDS = 1.0  # seconds between two checks that the workers are alive


def _worker_main(
    jobs: queue.SimpleQueue[Any],
    device: torch.device,
    threads: int,
    ready: queue.SimpleQueue[Any],
    ended: list[BaseException],
) -> None:
    """Runs a worker. It holds only its arguments, so that threads do not keep a dropped pipe alive."""
    # A job is (context, run, row), a queue to answer to, or None for the end. `ended`: exceptions that ended threads.
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
        self._run: Run | None = None
        self.is_closed = False
        open_executors.add(self)

    def run(self, run: Run, rows: Rows) -> None:
        """Runs the rows of a step to their end, or raises the step's exception."""
        self._begin(run)
        self.finish(run, rows)

    def start(self, run: Run, rows: Rows) -> None:
        """Queues rows, none of which may wait for an action that is not queued yet."""
        if self._run is not run:
            self._begin(run)
        self._put(run, rows)

    def wait(self, event: threading.Event) -> None:
        """Returns when a queued row has set the event, which a failure sets, too."""
        threads = self._threads
        while not event.wait(POLL_SECONDS):
            self._check_alive(threads)

    def finish(self, run: Run, rows: Rows = ()) -> None:
        """Returns when all queued rows, and these, have ended, or raises the step's exception."""
        if self._run is run:
            queues, threads = self._queues, self._threads
            try:
                if rows:
                    self._put(run, rows)
                self._wait_until_idle(queues, threads)
            except BaseException as error:  # an interrupt of the caller, at any point, ends the step
                run.fail(error)
                self._wait_until_idle(queues, threads)
                self._run = run.failure = None
                raise  # also where a stage has failed before: a Ctrl-C must not get lost
            self._run = None
        run.raise_failure()

    def _begin(self, run: Run) -> None:
        if self.is_closed:
            raise StateError(PIPE_CLOSED)
        if self._process != os.getpid() or not all(thread.is_alive() for thread in self._threads):
            self._start()
        if self._run is not None:  # after a second interrupt
            self._run.fail(StateError("the step was interrupted"))
        if sees_this_thread_only():  # threads cannot be added later (torch 2.13)
            warnings.warn(
                "the profiler sees only the thread that started it, and none of the pipe's workers; let it see all: "
                f"torch.profiler.profile(..., experimental_config={ALL_THREADS_CONFIG})",
                stacklevel=2,
            )
        self._run = run

    def _put(self, run: Run, rows: Rows) -> None:
        if self.is_closed:
            raise StateError(CLOSED_WHILE_RUNNING)
        for jobs, row in zip(self._queues, rows, strict=True):
            # Each row has a copy of the caller's context variables.
            jobs.put((contextvars.copy_context(), run, row))

    def _wait_until_idle(self, queues: Sequence[queue.SimpleQueue[Any]], threads: Sequence[threading.Thread]) -> None:
        idle: queue.SimpleQueue[None] = queue.SimpleQueue()  # an interrupt leaves no lock held
        for jobs in queues:
            jobs.put(idle)
        answers = 0
        while answers < len(queues):
            try:
                idle.get(timeout=POLL_SECONDS)
                answers += 1
            except queue.Empty:
                self._check_alive(threads)

    def _check_alive(self, threads: Sequence[threading.Thread]) -> None:
        """Raises if the executor is closed or a worker has died."""
        if self.is_closed:
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
            for error in [ready.get() for _ in threads]:
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
        self._run = None

    def close(self) -> None:
        """Stops the threads permanently, and waits for them. A step that another thread runs fails."""
        if threading.current_thread() in self._threads:
            raise StateError(CLOSED_INSIDE_STEP)
        self.is_closed = True
        if self._process == os.getpid():
            if self._run is not None:
                self._run.fail(StateError(CLOSED_WHILE_RUNNING))
            _stop_workers(self._queues)
            for thread in self._threads:
                thread.join()
        self._queues, self._threads, self._process = [], [], None


def _stop_workers(queues: Sequence[queue.SimpleQueue[Any]]) -> None:
    for jobs in queues:
        jobs.put(None)


class InlineExecutor:
    """Runs the only row in the calling thread, for a pipe with one worker on the CPU."""

    # So Ctrl-C and debuggers stop within the model, and it costs what the model costs: in another thread, with its own
    # memory arena of glibc, the same step may be 10 % faster or slower.

    def __init__(self) -> None:
        self._running: tuple[int, Run] | None = None
        self.is_closed = False
        open_executors.add(self)

    def run(self, run: Run, rows: Rows) -> None:
        self.start(run, rows)
        self.finish(run)

    def start(self, run: Run, rows: Rows) -> None:
        if self.is_closed:
            raise StateError(PIPE_CLOSED)
        (row,) = rows
        self._running = threading.get_ident(), run
        try:
            # As with workers, the row has a copy of the caller's context variables.
            contextvars.copy_context().run(run_row, run, row)
        finally:
            self._running = None

    def wait(self, event: threading.Event) -> None: ...

    def finish(self, run: Run) -> None:
        run.raise_failure()

    def close(self) -> None:
        """Closes the executor permanently. A step that another thread runs fails soon."""
        running = self._running
        if running is not None and running[0] == threading.get_ident():
            raise StateError(CLOSED_INSIDE_STEP)
        self.is_closed = True
        if running is not None:
            running[1].fail(StateError(CLOSED_WHILE_RUNNING))


Executor: TypeAlias = ThreadedExecutor | InlineExecutor


def executor_for(devices: Sequence[torch.device]) -> Executor:
    return InlineExecutor() if len(devices) == 1 and devices[0].type == "cpu" else ThreadedExecutor(devices)
