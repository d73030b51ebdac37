"""A run: the actions of parallel rows, of one mini-batch (a step) or of more and more mini-batches (a stream).

    executor ──▶ link.wait ──▶ end.before, MiniBatch (F, R, B, W), end.after | end.update (U) ──▶ link.passed

A run differs from another in three objects: the *order* says which mini-batch a micro-batch is of, and what its actions
wait for besides values; the *link* carries what other rows wait for, by `Fences` in one process and by packets between
ranks (`distributed.packets.PacketLink`); the *end* runs around actions and does U. None refers to the run, or the
tensors of a step would live until the garbage collector runs. Micro-batches are numbered through all mini-batches.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import profiler

from fxpipe._torch.thread_state import ThreadState, set_thread_state
from fxpipe._torch.tools import is_profiler_on
from fxpipe.rewriting.program import stage_context
from fxpipe.runtime.caller_context import CallerContext
from fxpipe.runtime.mini_batch import MiniBatch
from fxpipe.runtime.step_record import StepLog, mark_time
from fxpipe.runtime.transport import Transport
from fxpipe.scheduling.actions import Action, ActionKind
from fxpipe.scheduling.replicas import replica_of
from fxpipe.scheduling.streams import StreamSchedule
from fxpipe.utils import accelerator

# Actions that the host queues on a device ahead of it. What is sent between stages has its memory until the device has
# run what reads it: a host that runs far ahead would hold the values of many micro-batches, beyond the plan.
HOST_AHEAD = 4


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The order of one mini-batch. A stream has a `StreamSchedule` instead."""

    before_updates: Mapping[int, Sequence[Action]] = field(default_factory=dict)  # by stage, what its U waits for

    def place(self, micro_batch: int) -> tuple[int, int]:
        """Returns the mini-batch of a micro-batch, and the number of the micro-batch in it."""
        return 0, micro_batch

    def awaited(self, action: Action, in_order: Collection[int]) -> Sequence[Action]:
        """Returns the actions of other rows that an action waits for, besides the makers of its values."""
        # `in_order`: stages in which F of a micro-batch reads the buffers that F of the previous one leaves.
        kind, j, i = action
        if kind is ActionKind.UPDATE:
            return self.before_updates.get(j, ())
        return (Action(kind, j, i - 1),) if i and kind is ActionKind.FORWARD and j in in_order else ()


# Most fences are open when a worker reaches them. So passed actions are recorded in a set, and only a worker that has
# to wait creates an event. No opening is missed: the passing worker records the action first and then looks for an
# event, the waiting worker adds an event first and then looks at the record.


class Fences:
    """A fence for each action that others wait for; once open it stays open. Over processes: `PacketLink`."""

    def __init__(self) -> None:
        self._passed: set[Action] = set()
        self._events: dict[Action, threading.Event] = {}
        self._ended = 0  # micro-batches, from the first, whose actions have all ended
        self._all_open = False

    def wait(self, run: Run, action: Action) -> None:
        """Returns when what an action needs is here, or when the run has failed."""
        for needed in run.needs(action):
            self.wait_behind(needed)

    def wait_behind(self, action: Action) -> None:
        if not self._is_open(action):
            event = self._events.setdefault(action, threading.Event())
            if not self._is_open(action):
                event.wait()

    def _is_open(self, action: Action) -> bool:
        return action in self._passed or action.micro_batch < self._ended or self._all_open

    def passed(self, run: Run, action: Action) -> None:
        """Notes that an action has ended, for those that wait for it."""
        self._passed.add(action)
        event = self._events.get(action)
        if event is not None:
            event.set()

    def open_all(self) -> None:
        self._all_open = True
        for event in list(self._events.values()):
            event.set()

    def forget(self, stages: int, micro_batches: range) -> None:
        """Forgets the first micro-batches, whose actions have all ended."""
        self._ended = micro_batches.stop  # first: a worker that finds nothing recorded looks at it
        for action in itertools.starmap(Action, itertools.product(ActionKind, range(stages), micro_batches)):
            self._passed.discard(action)
            self._events.pop(action, None)


class End:
    """Runs around the actions of mini-batch t, here of a step. Micro-batches have their numbers in the mini-batch."""

    def __init__(self, updates: Mapping[int, Callable[[], None]] | None = None):
        """`updates`: by stage, what U calls."""
        self.updates = updates or {}

    def before(self, run: Run, t: int, action: Action) -> None:
        """Called before each action but U."""

    def after(self, run: Run, t: int, action: Action) -> None:
        """Called after each action but U, outside of the caller's modes, before those that wait for it can go on."""

    def update(self, run: Run, t: int, stage: int) -> None:
        """Performs U."""
        with run.transport.at_all(run.devices[stage]):
            self.updates[stage]()

    def updated(self, run: Run, t: int, stage: int) -> None:
        """Called after U, when those that wait for it can go on."""


class Run:
    """Performs the actions of parallel rows; a failure in one row ends all.

    Each action runs on its stage's device and streams, in the caller's context, timed, with a note if it fails. In a
    profiler it is a range, `fxpipe F stage 1 micro-batch 3`.
    """

    def __init__(
        self,
        stage_devices: Sequence[Sequence[torch.device]],
        transport: Transport,
        context: CallerContext,
        state: ThreadState,
        order: StepOrder | StreamSchedule | None = None,
        link: Fences | None = None,
        end: End | None = None,
    ):
        """`stage_devices`: by stage, of its replicas."""
        self.devices = tuple(own[0] for own in stage_devices)
        self.transport, self.state = transport, state
        self.caller_context = context  # the caller's; replaced for a drop-in's backward
        self.order = order or StepOrder()
        self.link = link or Fences()
        self.end = end
        self.mini_batches: dict[int, MiniBatch] = {}  # by number, while they run
        self.failure: BaseException | None = None
        self.log = StepLog()
        self.has_replicas = any(len(own) > 1 for own in stage_devices)
        # Device and stream by stage and replica, cached for all actions.
        self._places = [[(device, transport.compute_stream(device)) for device in own] for own in stage_devices]
        self._queued = {stream: deque[Any]() for own in self._places for _, stream in own}  # ends of the last actions
        self._last_stage = len(self.devices) - 1
        self._failing = threading.Lock()

    def add(self, t: int, mini_batch: MiniBatch) -> None:
        self.mini_batches[t] = mini_batch
        if self.failure is not None:  # others may have been opened just before
            self._open_all()

    def remove(self, t: int, micro_batches: range) -> None:
        """Drops the oldest mini-batch, whose actions have all ended. `micro_batches`: its numbers in the run."""
        del self.mini_batches[t]
        self.link.forget(len(self.devices), micro_batches)

    @contextmanager
    def in_row(self) -> Iterator[None]:
        """A block in which a thread performs a row or a part of one."""
        # Nearly all actions need the same state, and setting it takes ten microseconds. So a row sets it once: the
        # caller's grad mode, no autocast, which backward must not have, and no multithreading in autograd. Forward and
        # loss then set nothing unless the caller has autocast on (`CallerStateRunner`).
        stage_context.recomputes = any(one.recomputed for one in list(self.mini_batches.values()))
        with set_thread_state(self.state.without_autocast()), torch.autograd.set_multithreading_enabled(False):
            yield

    def needs(self, action: Action) -> list[Action]:
        """Returns the actions of other rows that must end before an action."""
        kind, j, i = action
        t, k = self.order.place(i)
        one = self.mini_batches.get(t)
        if one is None or kind is ActionKind.UPDATE:
            return [*self.order.awaited(action, ())]
        needed = [Action(*fence, i) for fence in one.fences.get((kind, j), ())]
        needed += self.order.awaited(action, one.ordered)
        if kind is ActionKind.BACKWARD and one.takes_all:  # after the only loss, of all micro-batches
            needed.append(Action(ActionKind.FORWARD, self._last_stage, i - k + one.micro_batches - 1))
        if self.caller_context.takes_turns:  # a thread that has the turn must not wait within the action
            needed += self._before_loss(one, action)
        return needed

    def _before_loss(self, one: MiniBatch, action: Action) -> Sequence[Action]:
        """Returns what the loss after an F waits for: with replicas of the last stage, the previous loss."""
        kind, j, i = action
        is_ordered = one.has_losses_in_order and kind is ActionKind.FORWARD and j == self._last_stage
        return (Action(kind, j, i - 1),) if is_ordered and i else ()

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
        self._open_all()

    def _open_all(self) -> None:
        self.link.open_all()
        for one in list(self.mini_batches.values()):
            one.ended.set()

    def raise_failure(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # else exception and frame would form a reference cycle

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
            if self.end is not None and action.kind is not ActionKind.UPDATE:
                t, k = self.order.place(action.micro_batch)
                self.end.after(self, t, action._replace(micro_batch=k))
            if stream is not None:
                self._stay_near_device(action, stream)
        except BaseException as error:
            with contextlib.suppress(Exception):  # a failing note must not hide the failure
                error.add_note(self._note_of_failure(action, error))
            self.fail(error)
            return
        self.link.passed(self, action)
        if action.kind is ActionKind.UPDATE and self.end is not None:
            self.end.updated(self, self.order.place(action.micro_batch)[0], action.stage)

    def _timed(self, action: Action, stream: Any) -> None:
        kind, j, i = action
        start, on_core = mark_time(stream), time.thread_time()
        t, k = self.order.place(i)
        if kind is ActionKind.UPDATE:
            assert self.end is not None
            self.end.update(self, t, j)
        else:
            if self.end is not None:
                self.end.before(self, t, Action(kind, j, k))
            self._compute(self.mini_batches[t], action, k, stream)
        self.log.times[action] = (start, mark_time(stream))
        if stream is None:
            self.log.on_core[action] = time.thread_time() - on_core

    def _stay_near_device(self, action: Action, stream: Any) -> None:
        queued = self._queued[stream]  # workers on one device share it
        queued.append(self.log.times[action][1])
        if len(queued) > HOST_AHEAD:
            accelerator.wait_on_host(queued.popleft())

    def _compute(self, one: MiniBatch, action: Action, k: int, stream: Any) -> None:
        """Performs an action of micro-batch k of a mini-batch. `stream`: of its device."""
        kind, j, i = action
        if kind is ActionKind.FORWARD:
            one.forward(j, k)
            if one.loss is not None and j == self._last_stage:
                for before in self._before_loss(one, action):
                    self.link.wait_behind(before)
                start = mark_time(stream)
                one.loss.run(k)
                self.log.losses[i] = (start, mark_time(stream))
        elif kind is ActionKind.BACKWARD:
            one.backward(j, k)
        elif kind is ActionKind.WEIGHT:
            one.weight_gradients(j, k)
        else:
            one.recompute(j, k)

    def _note_of_failure(self, action: Action, error: BaseException) -> str:
        """Returns the note for an exception: stage, micro-batch, action; and the node, if the stage's code raised."""
        kind, j, i = action
        t, k = self.order.place(i)
        device = self._place(action)[0]
        text = f"fxpipe: stage {j} of {len(self.devices)} on {device}, micro-batch {k}, {kind.words}"
        one = None if kind is ActionKind.UPDATE else self.mini_batches.get(t)
        opened = None if one is None else one.stages[k].get(j)
        if opened is not None:
            node = opened.function.failing_node(error)
            location = opened.stage.locations.get(node)
            if location is not None:
                module = f", module {location.module}" if location.module else ""
                text += f", node {node}{module} ({location.source})"
            if kind is ActionKind.RECOMPUTE:
                text += "; the forward of this micro-batch went well before, so it does not do the same twice"
        return text if isinstance(self.order, StepOrder) else f"{text}; of mini-batch {t} of the stream"
