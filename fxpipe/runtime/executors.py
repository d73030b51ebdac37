"""The executors of a step's rows (worker threads, or the caller's thread), and the class that performs its actions.

An executor calls `wait(action)` and `perform(action)` of an `ActionPerformer` within `in_row()`. An exception in one
row opens all fences, and the other rows stop before their next action. `run` returns, or raises, when all rows have
ended, also after an interrupt of the caller (Ctrl-C); only a second one does not wait. A worker whose row has ended
holds nothing of the step. No worker outlives the interpreter.

In a stream `start` queues further rows without waiting for workers; `finish` waits, as `run` does. Rows must be of a
validated schedule, so that some action is always ready.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.autograd import profiler

from fxpipe._torch.thread_state import ThreadState, set_thread_state
from fxpipe._torch.tools import ALL_THREADS_CONFIG, is_profiler_on, sees_this_thread_only
from fxpipe.errors import InternalError, StateError
from fxpipe.rewriting.program import stage_context
from fxpipe.runtime.caller_context import CallerContext
from fxpipe.runtime.step_record import StepLog, mark_time
from fxpipe.runtime.transport import Transport
from fxpipe.runtime.wiring import Fences
from fxpipe.scheduling.actions import Action, ActionKind, Rows
from fxpipe.scheduling.replicas import replica_of
from fxpipe.utils import accelerator


class ActionPerformer:
    """Performs the actions of parallel rows; a failure in one row ends all. By itself it can only update stages.

    Each action runs on its stage's device and streams, in the caller's context, timed, with a note if it fails. In a
    profiler it is a range, `fxpipe F stage 1 micro-batch 3`.
    """

    recomputes = False  # some actions are R

    def __init__(
        self,
        devices: Sequence[torch.device],
        transport: Transport,
        context: CallerContext,
        state: ThreadState,
        stage_devices: Sequence[Sequence[torch.device]] = (),
    ):
        """`devices`: by stage. `stage_devices`: by stage, of its replicas; empty: each stage has one."""
        self.devices, self.transport, self.state = tuple(devices), transport, state
        self.stage_devices = tuple(map(tuple, stage_devices)) or tuple((device,) for device in devices)
        self.has_replicas = any(len(own) > 1 for own in self.stage_devices)
        # Device and stream by stage and replica, cached for all actions.
        self._places = [[(device, transport.compute_stream(device)) for device in own] for own in self.stage_devices]
        self.caller_context = context  # the caller's; replaced for a drop-in's backward
        self.updates: Mapping[int, Callable[[], None]] = {}  # by stage, what U calls
        self.fences = Fences({})
        self.failure: BaseException | None = None
        self.log = StepLog()
        self._failing = threading.Lock()

    @contextmanager
    def in_row(self) -> Iterator[None]:
        """A block in which a thread performs a row or a part of one."""
        # Nearly all actions need the same state, and setting it takes ten microseconds. So a row sets it once: the
        # caller's grad mode, no autocast, which backward must not have, and no multithreading in autograd. Forward and
        # loss then set nothing unless the caller has autocast on (`CallerStateRunner`).
        stage_context.recomputes = self.recomputes
        with set_thread_state(self.state.without_autocast()), torch.autograd.set_multithreading_enabled(False):
            yield

    def wait(self, action: Action) -> None:
        """Returns when the action may start, or when the step has failed."""
        self.fences.wait(action)

    def pass_on(self, action: Action) -> None:
        """Opens the fences of an action that has ended."""
        self.fences.pass_on(action)

    def open_all(self) -> None:
        """Opens all fences, so that waiting workers see the failure."""
        self.fences.open_all()

    def note_of_failure(self, action: Action, error: BaseException) -> str:
        """Returns the note for an exception: stage, micro-batch and action."""
        stage, device = f"stage {action.stage} of {len(self.devices)}", self._place(action)[0]
        return f"fxpipe: {stage} on {device}, micro-batch {action.micro_batch}, {action.kind.words}"

    def _place(self, action: Action) -> tuple[torch.device, Any]:
        """Returns device and stream of an action. U runs on the device of the parameters, the first replica's."""
        own = self._places[action.stage]
        turn = 0 if action.kind is ActionKind.UPDATE else replica_of(action.micro_batch, len(own))
        return own[turn]

    def fail(self, error: BaseException) -> None:
        """Stores the first failure and opens all fences, so that every row ends."""
        with self._failing:
            if self.failure is None:
                self.failure = error
        self.open_all()

    def perform(self, action: Action) -> None:
        device, stream = self._place(action) if self.has_replicas else self._places[action.stage][0]
        try:
            is_seen = is_profiler_on()
            if stream is None and self.caller_context.is_empty and not is_seen:
                self._timed(action, stream)
            else:
                context = self.caller_context
                with (
                    contextlib.nullcontext() if context.is_empty else context.for_action(action.kind, device),
                    profiler.record_function(action.range_name) if is_seen else contextlib.nullcontext(),
                    self.transport.at(device),
                ):
                    self._timed(action, stream)
        except BaseException as error:
            with contextlib.suppress(Exception):  # a failing note must not hide the failure
                error.add_note(self.note_of_failure(action, error))
            self.fail(error)
            return
        self.pass_on(action)

    def _timed(self, action: Action, stream: Any) -> None:
        kind, j, i = action
        start, on_core = mark_time(stream), time.thread_time()
        performer: Any = self  # comparisons: a look-up of the method would be one more call in each action
        if kind is ActionKind.FORWARD:
            performer.forward(j, i)
        elif kind is ActionKind.BACKWARD:
            performer.backward(j, i)
        elif kind is ActionKind.WEIGHT:
            performer.weight_gradients(j, i)
        elif kind is ActionKind.RECOMPUTE:
            performer.recompute(j, i)
        else:
            performer.update(j, i)
        self.log.times[action] = (start, mark_time(stream))
        if stream is None:
            self.log.on_core[action] = time.thread_time() - on_core

    def update(self, j: int, i: int) -> None:
        with self.transport.at_all(self.devices[j]):
            self.updates[j]()


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


POLL_SECONDS = 1.0  # seconds between two checks that the workers are alive


def _worker_main(
    jobs: queue.SimpleQueue[Any],
    device: torch.device,
    threads: int,
    ready: queue.SimpleQueue[Any],
    ended: list[BaseException],
) -> None:
    """Runs a worker. It holds only its arguments, so that threads do not keep a dropped pipe alive."""
    # A job is (context, step, row), a queue to answer to, or None for the end. `ended`: exceptions that ended threads.
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
        self.is_closed = False
        open_executors.add(self)

    def run(self, step: ActionPerformer, rows: Rows) -> None:
        """Runs the rows of a step to their end, or raises the step's exception."""
        self._begin(step)
        self.finish(step, rows)

    def start(self, step: ActionPerformer, rows: Rows) -> None:
        """Queues rows, none of which may wait for an action that is not queued yet."""
        if self._step is not step:
            self._begin(step)
        self._put(step, rows)

    def wait(self, event: threading.Event) -> None:
        """Returns when a queued row has set the event, which a failure sets, too."""
        threads = self._threads
        while not event.wait(POLL_SECONDS):
            self._check_alive(threads)

    def finish(self, step: ActionPerformer, rows: Rows = ()) -> None:
        """Returns when all queued rows, and these, have ended, or raises the step's exception."""
        if self._step is step:
            queues, threads = self._queues, self._threads
            try:
                if rows:
                    self._put(step, rows)
                self._wait_until_idle(queues, threads)
            except BaseException as error:  # an interrupt of the caller, at any point, ends the step
                step.fail(error)
                self._wait_until_idle(queues, threads)
                self._step = step.failure = None
                raise  # also where a stage has failed before: a Ctrl-C must not get lost
            self._step = None
        raise_failure(step)

    def _begin(self, step: ActionPerformer) -> None:
        if self.is_closed:
            raise StateError(PIPE_CLOSED)
        if self._process != os.getpid() or not all(thread.is_alive() for thread in self._threads):
            self._start()
        if self._step is not None:  # after a second interrupt
            self._step.fail(StateError("the step was interrupted"))
        if sees_this_thread_only():  # threads cannot be added later (torch 2.13)
            warnings.warn(
                "the profiler sees only the thread that started it, and none of the pipe's workers; let it see all: "
                f"torch.profiler.profile(..., experimental_config={ALL_THREADS_CONFIG})",
                stacklevel=2,
            )
        self._step = step

    def _put(self, step: ActionPerformer, rows: Rows) -> None:
        if self.is_closed:
            raise StateError(CLOSED_WHILE_RUNNING)
        for jobs, row in zip(self._queues, rows, strict=True):
            # Each row has a copy of the caller's context variables.
            jobs.put((contextvars.copy_context(), step, row))

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
        self._step = None

    def close(self) -> None:
        """Stops the threads permanently, and waits for them. A step that another thread runs fails."""
        if threading.current_thread() in self._threads:
            raise StateError(CLOSED_INSIDE_STEP)
        self.is_closed = True
        if self._process == os.getpid():
            if self._step is not None:
                self._step.fail(StateError(CLOSED_WHILE_RUNNING))
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
        self._running: tuple[int, ActionPerformer] | None = None
        self.is_closed = False
        open_executors.add(self)

    def run(self, step: ActionPerformer, rows: Rows) -> None:
        self.start(step, rows)
        self.finish(step)

    def start(self, step: ActionPerformer, rows: Rows) -> None:
        if self.is_closed:
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
