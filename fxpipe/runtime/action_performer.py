"""Performs actions: each on its stage's device and streams, in the caller's context, timed, with a note if it fails.

An executor calls `wait(action)` and `perform(action)` within `in_row()`. Subclasses implement the actions: a
mini-batch (`step`), and the update of the weights after one (`stage_updates`). In a profiler each action is a range,
`fxpipe F stage 1 micro-batch 3`.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch.autograd import profiler

from fxpipe._torch.profiler import ALL_THREADS_CONFIG, is_profiler_on, sees_this_thread_only
from fxpipe.runtime.caller_context import CallerContext
from fxpipe.runtime.step_record import StepLog, mark_time
from fxpipe.runtime.transport import Transport
from fxpipe.scheduling.actions import Action, ActionKind
from fxpipe.scheduling.replicas import replica_of


def action_note(action: Action, stages: int, device: str) -> str:
    """Returns the note for an exception: stage, micro-batch and action."""
    return (
        f"fxpipe: stage {action.stage} of {stages} on {device}, micro-batch {action.micro_batch}, {action.kind.words}"
    )


def warn_of_unseen_workers() -> None:
    """Warns if a profiler records only this thread, since threads cannot be added later (torch 2.13)."""
    if sees_this_thread_only():
        warnings.warn(
            "the profiler sees only the thread that started it, and none of the pipe's workers; let it see all: "
            f"torch.profiler.profile(..., experimental_config={ALL_THREADS_CONFIG})",
            stacklevel=2,
        )


class ActionPerformer(ABC):
    """Performs the actions of parallel rows; a failure in one row ends all."""

    # By kind of action: a method of the subclass, with arguments (stage, micro-batch).
    action_methods: ClassVar[Mapping[ActionKind, Callable[[Any, int, int], None]]] = {}

    def __init__(
        self,
        devices: Sequence[torch.device],
        transport: Transport,
        context: CallerContext,
        stage_devices: Sequence[Sequence[torch.device]] = (),
    ):
        """`devices`: by stage. `stage_devices`: by stage, of its replicas; empty: each stage has one."""
        self.devices, self.transport = tuple(devices), transport
        self.stage_devices = tuple(map(tuple, stage_devices)) or tuple((device,) for device in devices)
        self.every_device = [device for own in self.stage_devices for device in own]
        self.has_replicas = any(len(own) > 1 for own in self.stage_devices)
        # Device and stream by stage and replica, cached for all actions.
        self._places = [[(device, transport.compute_stream(device)) for device in own] for own in self.stage_devices]
        self.caller_context = context  # the caller's; replaced for a drop-in's backward
        self.failure: BaseException | None = None
        self.log = StepLog()
        self._failing = threading.Lock()

    @abstractmethod
    def in_row(self) -> AbstractContextManager[None]:
        """A block in which a thread performs a row or a part of one."""

    @abstractmethod
    def wait(self, action: Action) -> None:
        """Returns when the action may start, or when the step has failed."""

    @abstractmethod
    def pass_on(self, action: Action) -> None:
        """Opens the fences of an action that has ended."""

    @abstractmethod
    def open_all(self) -> None:
        """Opens all fences, so that waiting workers see the failure."""

    def note_of_failure(self, action: Action, error: BaseException) -> str:
        return action_note(action, len(self.devices), str(self.device_of(action)))

    def device_of(self, action: Action) -> torch.device:
        return self._place(action)[0]

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
            if stream is None and self.caller_context.is_empty and not is_profiler_on():
                self._timed(action, stream)
            else:
                is_seen = is_profiler_on()
                with (
                    self.caller_context.for_action(action.kind, device),
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
        self.action_methods[kind](self, j, i)
        self.log.times[action] = (start, mark_time(stream))
        if stream is None:
            self.log.on_core[action] = time.thread_time() - on_core
