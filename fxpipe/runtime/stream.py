"""A stream of mini-batches through the stages, without a flush: what `train_stream` runs.

Each mini-batch is a `Step`, with its inputs, its exchange, its loss and the sums of its gradients. But its stages open
when its forward comes to them, with the *version* of the weights that the stream's order (`scheduling.streams`) gives
it, and close with its update U, which is an action of the rows. So a worker only waits for its neighbours.

*Versions.* The newest version of a weight is in the model's parameter, which an optimizer updates in place. If a
mini-batch in flight still needs the version there, the parameter first gets a copy, and the older version stays in the
views that forward ran on, and is freed with the last of them. Views are of `.data`, which counts versions separately:
`detach()` would share the parameter's count, and autograd would refuse the backward. The count that an update leaves
shows if something else has written to a parameter. Gradients are hidden meanwhile (`stream_gradients`).

*Buffers* are written into the model when a stage has ended the forward of a mini-batch, so the next one finds them.

*Replicas* of a stage have a row each. A mini-batch sees them in the order of its turns: first the replica of its first
micro-batch. Each opens the stage when the first of its micro-batches comes, with a copy of the version if its device
is another one. A round of mini-batches is updated with the mean of their gradients, on the device of the parameters. If
forward changes buffers, the forward of each micro-batch waits for the one before.

Actions follow the order of the rows, and between replicas that of `StreamSchedule.awaited`, so the result does not
depend on which worker is faster.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fxpipe._torch.autograd import version_of
from fxpipe._torch.tensor_data import replace_data
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import StateError
from fxpipe.rewriting.program import stage_context
from fxpipe.runtime.action_performer import ActionPerformer
from fxpipe.runtime.bound_program import BoundProgram, ModelTensors
from fxpipe.runtime.caller_context import CallerContext, thread_defaults
from fxpipe.runtime.engine import Engine, StepNotes, losses_of
from fxpipe.runtime.exchange import TransferNote
from fxpipe.runtime.loss_verification import LossHistory
from fxpipe.runtime.stage_instance import StageInstance
from fxpipe.runtime.stage_updates import OverlappedUpdates, StagewiseOptimizer
from fxpipe.runtime.step import OpenProgram, Step
from fxpipe.runtime.step_inputs import GivenInputs, StepInputs
from fxpipe.runtime.step_record import StepLog
from fxpipe.runtime.stream_gradients import HiddenGradients
from fxpipe.runtime.transport import Transport, on_all_streams
from fxpipe.scheduling.actions import Action, ActionKind, Rows, Schedule
from fxpipe.scheduling.replicas import replica_of, rows_of_replicas
from fxpipe.scheduling.streams import StreamSchedule
from fxpipe.utils import accelerator
from fxpipe.utils.random_generators import mix_seed

RECORDED_MINI_BATCHES = 32  # of a stream: the last ones, of which `last_step` tells
_HERE = nullcontext()


class StageWeights:
    """The versions of the weights of one stage that mini-batches in flight need; used by the stage's workers alone.

    One of them updates. Others may ask for versions meanwhile, but for the one that is being made.
    """

    def __init__(self, named: Mapping[str, torch.Tensor]):
        self._named = dict(named)
        self.newest = 0
        self._views = {0: self._new_views()}  # by version: by identity of the parameter
        self._counts: list[int] | None = self._write_counts()  # None: they are being updated
        self._changing = threading.Lock()
        self.gradients = HiddenGradients(self._named.values())
        self.gradients.hide()
        self.most_held = 1

    def _new_views(self) -> dict[int, torch.Tensor]:
        return {id(p): p.data.requires_grad_(p.requires_grad) for p in self._named.values()}

    def _write_counts(self) -> list[int]:
        return [version_of(p) for p in self._named.values()]

    def keep_first_version(self, transport: Transport) -> None:
        """Keeps the memory that the parameters have until the stages are done with it, once updates have taken other.

        It may be of another stream than that of the stages, on which later versions are made.
        """
        for parameter in self._named.values():
            stream = transport.compute_stream(parameter.device)
            if stream is not None:
                accelerator.keep_for_stream(parameter.data, stream)

    def at(self, version: int) -> Mapping[int, torch.Tensor]:
        """Returns the weights of a version, by the identity of their parameters."""
        with self._changing:
            self._check_unchanged()
            return self._views[version]

    def _check_unchanged(self) -> None:
        """Raises `StateError` where somebody else has written to the weights."""
        if self._counts is None:
            return
        for (name, p), count in zip(self._named.items(), self._counts, strict=True):
            if version_of(p) != count:
                raise StateError(
                    f"the parameter {name!r} was written to in the middle of a stream (load_state_dict, an update by "
                    "hand, another optimizer), while mini-batches in flight have older values of it: let the stream "
                    "end, or close it, before"
                )

    def begin_update(self, oldest: int) -> None:
        """Leaves the parameters for an optimizer to write to. `oldest`: the oldest version that is needed after it."""
        with self._changing:
            self._check_unchanged()
            self._counts = None
            self._views = {version: views for version, views in self._views.items() if version >= oldest}
        self.gradients.show()
        if self.newest in self._views:
            for parameter in self._named.values():
                replace_data(parameter, parameter.detach().clone())
        if self._named:
            self.most_held = max(self.most_held, len(self._views) + 1)

    def end_update(self) -> None:
        with self._changing:
            self.newest += 1
            self._views[self.newest] = self._new_views()
            self._counts = self._write_counts()
        self.gradients.hide()


@dataclass(frozen=True, slots=True)
class VersionedTensors(ModelTensors):
    """The model's tensors, with a version of some parameters in their places."""

    versions: Mapping[int, torch.Tensor] = field(default_factory=dict)  # by identity of the parameter

    def get(self, name: str) -> torch.Tensor:
        tensor = ModelTensors.get(self, name)
        return self.versions.get(id(tensor), tensor)


class StreamStep(Step):
    """A mini-batch of a stream."""

    def _open(self, bound: BoundProgram, tensors: ModelTensors, split_stages: set[int]) -> OpenProgram:
        return OpenProgram(bound, tensors, {})

    before_loss: Callable[[Action], None] | None = None  # waits for the losses of mini-batches before, too

    def wait_before_loss(self, action: Action) -> None:
        if self.before_loss is not None:
            self.before_loss(action)

    def _stages_by_micro_batch(self) -> list[dict[int, StageInstance]]:
        return [{} for _ in range(self.micro_batches)]

    def open_stage(self, j: int, i: int, versions: Mapping[int, torch.Tensor]) -> None:
        """Opens a stage where micro-batch i is, when the first forward there comes to it."""
        (program,) = self.open_programs
        model, count = program.tensors, len(self.replica_totals[j])
        tensors = VersionedTensors(model.model, model.constants, model.modules, model.places, versions)
        turn = replica_of(i, count)
        opened = self._open_replica(program.bound, j, turn, tensors, is_split=False)
        program.stages.setdefault(j, opened)
        for own in self._stages[turn::count]:
            own[j] = opened

    def close_stage(self, j: int) -> None:
        """Lets go of a stage that has been updated, and of its version of the weights."""
        del self.open_programs[0].stages[j]
        for own in self._stages:
            del own[j]

    def has_open(self, action: Action) -> bool:
        return action.stage in self._stages[action.micro_batch]


@dataclass(slots=True)
class MiniBatch:
    """A mini-batch in flight."""

    step: StreamStep
    bound: BoundProgram  # its program
    updates: OverlappedUpdates
    history: LossHistory
    is_verified: bool
    left: set[int]  # stages that are still to be updated
    ended: threading.Event = field(default_factory=threading.Event)  # all of them are, or the stream has failed

    @property
    def micro_batches(self) -> int:
        return self.step.micro_batches


class StreamRun(ActionPerformer):
    """Performs the actions of the mini-batches that are in flight."""

    def __init__(
        self,
        order: StreamSchedule,
        weights: Sequence[StageWeights],
        stage_devices: Sequence[Sequence[torch.device]],
        context: CallerContext,
        recomputes: bool,
        update: Callable[[Sequence[Step], int, OverlappedUpdates], None],
    ):
        """
        Args:
            weights: by stage.
            stage_devices: by stage those of its replicas; with the first one's are the parameters.
            update: gives a stage the mean of the gradients of some steps and updates it.
        """
        self.every_device = [device for own in stage_devices for device in own]
        super().__init__([own[0] for own in stage_devices], Transport(self.every_device), context, stage_devices)
        self.order, self.weights, self.in_flight = order, weights, dict[int, MiniBatch]()
        self.in_order: Collection[int] = ()  # stages with replicas whose forward changes buffers, of the program
        for of_stage in weights:
            of_stage.keep_first_version(self.transport)
        self.applied = [0] * len(self.devices)  # mini-batches whose gradients are in the weights, by stage
        self.state = ThreadState.now()  # of the caller; another one comes with another program, behind a drain
        self._recomputes, self._update = recomputes, update

    def _at(self, action: Action) -> tuple[MiniBatch, Action]:
        """Returns the mini-batch of an action, and the action as that has it."""
        kind, j, i = action
        t, k = self.order.place(i)
        return self.in_flight[t], Action(kind, j, k)

    # -- for executors -----------------------------------------------------------------------------------------------

    def in_row(self) -> AbstractContextManager[None]:
        stage_context.recomputes = self._recomputes
        return thread_defaults(self.state)

    def is_ready(self, action: Action) -> bool:
        one, own = self._at(action)
        if self.failure is not None:
            return True
        others = (*self.order.awaited(action, self.in_order), *self._before_loss(action))
        return one.step.is_ready(own) and all(step.has_passed(other) for step, other in self._in_steps(others))

    def wait(self, action: Action) -> None:
        one, own = self._at(action)
        one.step.wait(own)
        for step, other in self._in_steps(self.order.awaited(action, self.in_order)):
            step.wait_behind(other)

    def _in_steps(self, actions: Iterable[Action]) -> Iterator[tuple[StreamStep, Action]]:
        """Yields actions that others wait for, each as its mini-batch has it."""
        for action in actions:
            t, k = self.order.place(action.micro_batch)
            one = self.in_flight.get(t)
            if one is not None:  # else it has ended
                yield one.step, action._replace(micro_batch=k)

    def _before_loss(self, action: Action) -> tuple[Action, ...]:
        """The F whose loss comes before that of this one, where replicas of the last stage take losses in order."""
        kind, j, i = action
        is_in_order = self.order.replicas[-1] > 1 and kind is ActionKind.FORWARD and j == self.order.stages - 1
        return (Action(kind, j, i - 1),) if is_in_order and i else ()

    def _wait_before_loss(self, first: int, action: Action) -> None:
        """Returns when the loss behind an F of a mini-batch may be taken, which begins with this micro-batch."""
        for step, other in self._in_steps(self._before_loss(_shifted(action, first))):
            step.wait_behind(other)

    def pass_on(self, action: Action) -> None:
        t, k = self.order.place(action.micro_batch)
        one = self.in_flight.get(t)
        if one is None:
            return
        one.step.pass_on(Action(action.kind, action.stage, k))
        if action.kind is ActionKind.UPDATE:
            for each in self._round(action.stage, t):
                each.left.discard(action.stage)
                if not each.left:
                    each.ended.set()

    def _round(self, j: int, t: int) -> list[MiniBatch]:
        """The mini-batches by which a stage is updated together with this one."""
        return [self.in_flight[each] for each in self.order.round_of(j, t)]

    def open_all(self) -> None:
        for one in list(self.in_flight.values()):
            one.step.open_all()
            one.ended.set()

    def add(self, t: int, one: MiniBatch) -> None:
        """Takes in a mini-batch that is about to be admitted."""
        one.step.before_loss = functools.partial(self._wait_before_loss, self.order.micro_batches)
        self.in_flight[t] = one
        if self.failure is not None:  # it may have opened the others just before
            self.open_all()

    def note_of_failure(self, action: Action, error: BaseException) -> str:
        one, own = self._at(action)
        t, _ = self.order.place(action.micro_batch)
        is_in_stage = own.kind is not ActionKind.UPDATE and one.step.has_open(own)
        note = one.step.note_of_failure(own, error) if is_in_stage else super().note_of_failure(own, error)
        return f"{note}; of mini-batch {t} of the stream"

    # -- actions -----------------------------------------------------------------------------------------------------

    def forward(self, j: int, i: int) -> None:
        t, k = self.order.place(i)
        one = self.in_flight[t]
        if k < self.order.replicas[j]:
            one.step.open_stage(j, k, self.weights[j].at(self.order.version(j, t)))
        one.step.forward(j, k)
        if k == one.micro_batches - 1:
            with on_all_streams(self.transport, self.every_device, self.devices[j]) if self.has_replicas else _HERE:
                one.step.commit_buffers_of(j)

    def recompute(self, j: int, i: int) -> None:
        t, k = self.order.place(i)
        self.in_flight[t].step.recompute(j, k)

    def backward(self, j: int, i: int) -> None:
        t, k = self.order.place(i)
        self.in_flight[t].step.backward(j, k)

    def update(self, j: int, i: int) -> None:
        t, _ = self.order.place(i)
        together, weights = self._round(j, t), self.weights[j]
        for one in together:
            one.step.close_stage(j)
        *others, last = together
        with on_all_streams(self.transport, self.every_device, self.devices[j]):
            weights.begin_update(self.order.version(j, t + 1))
            for one in others:
                one.updates.begun.append(j)
            self._update([one.step for one in together], j, last.updates)
            weights.end_update()
        self.applied[j] = t + 1

    action_methods = {  # noqa: RUF012
        ActionKind.FORWARD: forward,
        ActionKind.RECOMPUTE: recompute,
        ActionKind.BACKWARD: backward,
        ActionKind.UPDATE: update,
    }


@dataclass(frozen=True, slots=True)
class StreamLoss:
    """The loss of a stream, the same for all mini-batches."""

    function: Callable[..., Any]
    reduction: str


class Stream:
    """The mini-batches of one call of `train_stream`, from their admission to their loss."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        context: CallerContext,
        order: StreamSchedule,
        stage_devices: Sequence[Sequence[torch.device]],
        optimizer: StagewiseOptimizer,
        parameters: Mapping[int, Sequence[torch.Tensor]],
        loss: StreamLoss,
        seed: int,
    ):
        """
        Args:
            name: of the schedule.
            context: of the caller.
            stage_devices: by stage those of its replicas.
            parameters: that the optimizer holds, by stage.
            seed: of the numbers that the stages draw.
        """
        self.name, self.engine, self.optimizer, self.loss, self.seed = name, engine, optimizer, loss, seed
        self._order, self._parameters, self._context = order, parameters, context
        self.stages: Sequence[int] = range(order.stages)  # that run here
        named = {id(p): name for name, p in engine.model.named_parameters(remove_duplicate=False)}
        every = range(order.stages)
        weights = [StageWeights({named.get(id(p), "?"): p for p in parameters.get(j, ())}) for j in every]
        self._run = self._make_run(weights, stage_devices, any(map(order.recomputes_in, every)))
        self._tensors: tuple[BoundProgram, ModelTensors] | None = None  # of the program that runs, looked up once
        self._collected = 0  # mini-batches whose loss was taken
        self._recent: deque[_Recorded] = deque(maxlen=RECORDED_MINI_BATCHES)

    def _make_run(
        self, weights: Sequence[StageWeights], stage_devices: Sequence[Sequence[torch.device]], recomputes: bool
    ) -> StreamRun:
        return StreamRun(self._order, weights, stage_devices, self._context, recomputes, self.engine.update_stage)

    @property
    def in_flight(self) -> int:
        """The number of mini-batches admitted whose loss has not been taken."""
        return self._order.admitted - self._collected

    @property
    def has_failed(self) -> bool:
        return self._run.failure is not None

    @property
    def applied(self) -> list[int]:
        """The number of mini-batches that each stage that runs here is updated with."""
        return [self._run.applied[j] for j in self.stages]

    @property
    def versions_held(self) -> tuple[int, ...]:
        """The most versions of its weights that each stage has held that runs here."""
        return tuple(self._run.weights[j].most_held for j in self.stages)

    def seed_of(self, mini_batch: int) -> int:
        return mix_seed(self.seed, mini_batch)

    # -- in, and out ---------------------------------------------------------------------------------------------------

    def admit(self, given: GivenInputs) -> None:
        """Queues a mini-batch after those in flight."""
        t, bound, count = self._order.admitted, given.bound, len(given.samples)
        sizes = given.batch, count
        history = self.engine.loss_histories.of(
            self.loss.function, self.loss.reduction, tuple(given.targets), bound, sizes
        )
        is_verified = history.is_due and count > 1
        self._run.state = bound.state
        self._run.in_order = self._stages_in_order(bound)
        own = replace(given, bounds=(bound.with_turns_from(self._order.micro_batches),) * count)
        with on_all_streams(self._run.transport, self._run.every_device, bound.devices[-1]):
            losses = losses_of(own, self.loss.function, self.loss.reduction, is_verified=is_verified)
            step = StreamStep(
                StepInputs.of(own),
                self.engine.model,
                self.seed_of(t),
                self._order.recomputed(count),
                self._context,
                losses=losses,
                keep_outputs=is_verified,
                look_at_elements=history.look_at_elements and count > 1,
                known_tensors=self._tensors_of(bound),
            )
        self._run.add(t, MiniBatch(step, bound, self._updates_now(), history, is_verified, {*self.stages}))
        step.log.begun.append(time.perf_counter())
        self._queue(self._order.admit(count))

    def _stages_in_order(self, bound: BoundProgram) -> frozenset[int]:
        """The stages with replicas of which forward leaves buffers to that of the next micro-batch."""
        stages = zip(bound.program.stages, self._order.replicas, strict=True)
        return frozenset(
            j for j, (stage, count) in enumerate(stages) if count > 1 and (stage.changed_buffers or stage.assigns)
        )

    def _updates_now(self) -> OverlappedUpdates:
        """The updates of a mini-batch that is admitted now, with the options that the optimizer has now."""
        return OverlappedUpdates(self.optimizer, self._parameters, options=self.optimizer.options_now())

    def _queue(self, rows: Rows) -> None:
        self.engine.executor.start(self._run, rows)

    def _tensors_of(self, bound: BoundProgram) -> ModelTensors:
        if self._tensors is None or self._tensors[0] is not bound:
            self._tensors = bound, ModelTensors(self.engine.model, bound.constants)
        return self._tensors[1]

    def drain(self) -> None:
        """Queues what is left of the mini-batches in flight, so that all of them end."""
        self._queue(self._order.drain())

    def wait(self) -> None:
        """Returns when all mini-batches have ended that were admitted, after a drain."""
        for one in self._run.in_flight.values():
            self.engine.executor.wait(one.ended)
        self._raise_failure()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """A block behind a drain, in which the model is as between two steps: a graph may be recorded."""
        every = [weights.gradients for weights in self._run.weights]
        for gradients in every:
            gradients.show()
        try:
            yield
        finally:
            for gradients in every:
                gradients.hide()

    def collect(self) -> torch.Tensor:
        """Waits for the oldest mini-batch in flight to end on all stages; returns its loss.

        Raises:
            LossError: its micro-batches do not add up to it.
            Exception: what a stage has raised.
        """
        t = self._collected
        one = self._run.in_flight[t]
        self.engine.executor.wait(one.ended)
        self._raise_failure()
        loss = self._checked_loss(one)
        if one.step.loss is not None:
            one.step.loss.add_up_replicas()
        self.engine.add_gradients(one.step, one.updates)
        self.optimizer.count_step()
        self._collected += 1
        del self._run.in_flight[t]
        self._record(t, one)
        return loss

    @staticmethod
    def _loss_stage(one: MiniBatch) -> Any:
        assert one.step.loss is not None
        return one.step.loss

    def _checked_loss(self, one: MiniBatch) -> torch.Tensor:
        wrong = one.step.loss_weighting.difference(self._loss_stage(one).losses.share)
        loss, _, one.is_verified = self.engine.judged_loss(one.step, one.history, wrong, one.is_verified)
        return loss

    # -- ends ----------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Lets all mini-batches in flight end; their losses are not needed any more."""
        self.drain()
        while self.in_flight:
            self.collect()
        self.engine.executor.finish(self._run)
        self._close()

    def abort(self, error: BaseException) -> None:
        """Drops the mini-batches in flight, after an exception, to which it adds what has been applied by then."""
        self.drop(error)
        self.note_applied(error)

    def drop(self, error: BaseException) -> None:
        """Drops the mini-batches in flight, after an exception."""
        self._run.fail(error)
        try:
            self.engine.executor.finish(self._run)
        except BaseException as other:
            if other is not error and not isinstance(other, Exception):
                raise  # another interrupt
        finally:
            for one in self._run.in_flight.values():
                one.step.transport.settle()
            self._run.in_flight.clear()
            self._close()

    def note_applied(self, error: BaseException) -> None:
        """Adds to an exception what has been applied by then."""
        applied = self.applied
        if any(applied):
            words = ", ".join(f"stage {j} those of {count}" for j, count in zip(self.stages, applied, strict=True))
            error.add_note(
                f"fxpipe: the stream was dropped; of the updates of its mini-batches, in order, {words} had been made"
            )

    def _close(self) -> None:
        for weights in self._run.weights:
            weights.gradients.show()
        if self._recent:
            self.engine.take_notes(_notes_of(self.name, self._order.replicas, [*self._recent]))

    def _raise_failure(self) -> None:
        failure = self._run.failure
        if failure is not None:
            raise failure

    # -- the record of the last mini-batches ---------------------------------------------------------------------------

    def _record(self, t: int, one: MiniBatch) -> None:
        """Keeps the notes of a mini-batch, not the step itself, which holds tensors."""
        log, step, first = self._run.log, one.step, self._order.first_micro_batch(t)
        times, on_core = {}, {}
        for kind in ActionKind:
            for j in range(self._order.stages):
                for k in range(one.micro_batches):
                    own, there = Action(kind, j, k), Action(kind, j, first + k)
                    if there in log.times:
                        times[own] = log.times.pop(there)
                        if there in log.on_core:
                            on_core[own] = log.on_core.pop(there)
        log = StepLog([*step.log.begun], times, on_core, dict(step.log.losses))
        self._recent.append(_Recorded(one.bound, first, one.micro_batches, log, [*step.exchange.moved]))


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The notes of a mini-batch."""

    bound: BoundProgram
    first: int  # of its micro-batches, in the stream
    micro_batches: int
    log: StepLog
    moved: Sequence[TransferNote]


def _notes_of(name: str, replicas: Sequence[int], recorded: Sequence[_Recorded]) -> StepNotes:
    """The notes of several mini-batches as those of one step, with their micro-batches counted through.

    They are counted from 0 on, or from so far on that each is with the replicas of its turn.
    """
    first = recorded[0].first % math.lcm(*replicas)
    bounds, moved, log = [recorded[0].bound] * first, list[TransferNote](), StepLog()
    for one in recorded:
        log.times.update({_shifted(action, first): marks for action, marks in one.log.times.items()})
        log.on_core.update({_shifted(action, first): seconds for action, seconds in one.log.on_core.items()})
        log.losses.update({first + k: mark for k, mark in one.log.losses.items()})
        moved += [(value, source, user, first + i, size) for value, source, user, i, size in one.moved]
        bounds += [one.bound] * one.micro_batches
        first += one.micro_batches
    starts = [start for start, _ in log.times.values()]
    on_host = [start for start in starts if isinstance(start, float)]
    log.begun.append(min(on_host) if on_host else recorded[0].log.begun[0])
    stages = range(len(replicas))
    rows = rows_of_replicas(tuple(tuple(a for a in log.times if a.stage == j) for j in stages), replicas)
    counts = tuple(replicas) if max(replicas) > 1 else ()
    return StepNotes(Schedule(name, len(stages), first, rows, replicas=counts), bounds, log, moved)


def _shifted(action: Action, first: int) -> Action:
    return action._replace(micro_batch=first + action.micro_batch)
