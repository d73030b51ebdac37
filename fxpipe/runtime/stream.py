"""A stream of mini-batches through the stages, without a flush: the runtime of `train_stream`.

All mini-batches are of one `Run`. A stage opens for each with its first forward there, on the *version* of the weights
that the order of the stream (`scheduling.streams`) assigns, and closes with its update U, an action of the rows.

*Versions.* The newest version of a weight is in the model's parameter, which an optimizer updates in place. If a
mini-batch in flight still needs the version there, the parameter first gets a copy; the older version stays in the
views that forward ran on, and is freed with the last of them. Views are of `.data`, which has a separate version
counter: `detach()` would share the parameter's, and autograd would refuse the backward. *Buffers* are written into the
model when a stage has run all forwards of a mini-batch. *Replicas* of a stage have a row each, and open the stage on a
copy of the version; a round of mini-batches makes one update with the mean of the gradients, on the device of the
parameters. Replicas wait for each other (`StreamSchedule.awaited`), so no result depends on the speed of workers.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fxpipe._torch.autograd import version_of
from fxpipe._torch.tensor_data import replace_data
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import StateError
from fxpipe.runtime.bound_program import BoundProgram, ModelTensors
from fxpipe.runtime.caller_context import CallerContext
from fxpipe.runtime.engine import Engine, update_stage
from fxpipe.runtime.exchange import TransferNote
from fxpipe.runtime.loss_checks import LossHistory, LossVerdict
from fxpipe.runtime.losses import LossCall
from fxpipe.runtime.mini_batch import MiniBatch
from fxpipe.runtime.run import End, Fences, Run
from fxpipe.runtime.stage_updates import OverlappedUpdates, StagewiseOptimizer
from fxpipe.runtime.step_inputs import GivenInputs, tensor_requires_grad
from fxpipe.runtime.step_record import StepLog, StepNotes
from fxpipe.runtime.transport import Transport
from fxpipe.scheduling.actions import Action, ActionKind, Rows, Schedule
from fxpipe.scheduling.replicas import rows_of_replicas
from fxpipe.scheduling.streams import StreamSchedule
from fxpipe.utils import accelerator
from fxpipe.utils.accelerator import mix_seed

RECORDED_MINI_BATCHES = 32  # mini-batches of a stream in `last_step`: the last ones
NO_GRADIENTS = (
    "the gradient of a parameter is asked for in the middle of a stream (train_stream), in which each stage updates as "
    "soon as it has gradients, and there is no time at which those of all stages are there. What needs them all "
    "(clip_grad_norm_, clip_grad_value_, GradScaler, another optimizer, logging norms) needs forward_backward, and "
    "stands between it and optimizer.step(); or let the stream end, or close it"
)


class StreamGradient(torch.Tensor):
    """The `.grad` of a parameter while a stream is open. It has no memory of the parameter's size."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise StateError(NO_GRADIENTS)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "StreamGradient()"


class StageWeights:
    """The versions of a stage's weights that mini-batches in flight need, and its hidden gradients."""

    # One worker of the stage updates. Others may read versions at the same time, except the one being created.

    def __init__(self, named: Mapping[str, torch.Tensor]):
        self._named = dict(named)
        self.newest, self.most_held = -1, 1
        self._views: dict[int, dict[int, torch.Tensor]] = {}  # by version, then by identity of the parameter
        self._counts: list[int] | None = None  # version counters; None during an update
        self._changing = threading.Lock()
        self._hidden: list[tuple[torch.Tensor, StreamGradient]] = []  # reused, since creating them is slow
        self.end_update()

    def hide_gradients(self) -> None:
        """Sets `.grad` of parameters without a gradient to an unusable one."""
        # Stages update and drop gradients while others are at other mini-batches. Code between two losses that reads
        # `.grad` (`clip_grad_norm_`, another optimizer, a logger) would find None, and skip all parameters silently.
        # (Code that reads it while all stages update gets the error the next time.)
        if not self._hidden:
            for p in filter(tensor_requires_grad, self._named.values()):
                empty = torch.empty((), dtype=p.dtype, device=p.device)
                self._hidden.append((p, empty.expand(p.shape).as_subclass(StreamGradient)))
        for parameter, hidden in self._hidden:
            if parameter.grad is None:
                parameter.grad = hidden

    def show_gradients(self) -> None:
        for parameter, _ in self._hidden:
            if type(parameter.grad) is StreamGradient:
                parameter.grad = None

    def keep_first_version(self, transport: Transport) -> None:
        """Keeps the memory of the first version, perhaps of another stream, until the stages have read it."""
        for parameter in self._named.values():
            stream = transport.compute_stream(parameter.device)
            if stream is not None:
                accelerator.keep_for_stream(parameter.data, stream)

    def at(self, version: int) -> Mapping[int, torch.Tensor]:
        """Returns the weights of a version, by identity of the parameter."""
        with self._changing:
            self._check_unchanged()
            return self._views[version]

    def _check_unchanged(self) -> None:
        """Raises `StateError` if other code has written to the weights."""
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
        """Prepares the parameters for an optimizer. `oldest`: the oldest version that is needed after the update."""
        with self._changing:
            self._check_unchanged()
            self._counts = None
            self._views = {version: views for version, views in self._views.items() if version >= oldest}
        self.show_gradients()
        if self.newest in self._views:
            for parameter in self._named.values():
                replace_data(parameter, parameter.detach().clone())
        if self._named:
            self.most_held = max(self.most_held, len(self._views) + 1)

    def end_update(self) -> None:
        with self._changing:
            self.newest += 1
            self._views[self.newest] = {id(p): p.data.requires_grad_(p.requires_grad) for p in self._named.values()}
            self._counts = [version_of(p) for p in self._named.values()]
        self.hide_gradients()


@dataclass(slots=True)
class Admitted:
    """A mini-batch in flight."""

    mini_batch: MiniBatch
    bound: BoundProgram  # whose replicas are in the order of their turns in the stream
    history: LossHistory
    is_verified: bool
    updates: OverlappedUpdates
    left: set[int]  # stages not yet updated
    begun: float = field(default_factory=time.perf_counter)  # time of the host's clock
    part: Any = None  # over processes: of this replica of the pipe


class StreamEnd(End):
    """Opens a stage for a mini-batch with the version of its weights; writes its buffers; updates it by rounds."""

    def __init__(self, order: StreamSchedule, weights: Sequence[StageWeights]):
        super().__init__()
        self.order, self.weights = order, weights
        self.admitted: dict[int, Admitted] = {}  # by number
        self.applied = [0] * order.stages  # by stage: mini-batches in its weights

    def before(self, run: Run, t: int, action: Action) -> None:
        kind, j, k = action
        if kind is ActionKind.FORWARD and k < self.order.replicas[j]:
            run.mini_batches[t].open_stage(j, k, self.weights[j].at(self.order.version(j, t)))

    def after(self, run: Run, t: int, action: Action) -> None:
        kind, j, k = action
        one = run.mini_batches[t]
        if kind is ActionKind.FORWARD and k == one.micro_batches - 1:
            with run.transport.at_all(run.devices[j]):
                self.commit_buffers(one, j)

    def commit_buffers(self, one: MiniBatch, j: int) -> None:
        one.commit_buffers_of(j)

    def update(self, run: Run, t: int, stage: int) -> None:
        together, weights = self._round(stage, t), self.weights[stage]
        for each in together:
            each.mini_batch.close_stage(stage)
        *others, last = together
        with run.transport.at_all(run.devices[stage]):
            weights.begin_update(self.order.version(stage, t + 1))
            for each in others:
                each.updates.begun.append(stage)
            self.update_stage(together, stage, last.updates)
            weights.end_update()
        self.applied[stage] = t + 1

    def update_stage(self, together: Sequence[Admitted], j: int, updates: OverlappedUpdates) -> None:
        update_stage([each.mini_batch for each in together], j, updates)

    def updated(self, run: Run, t: int, stage: int) -> None:
        for each in self._round(stage, t):
            each.left.discard(stage)
            if not each.left:
                each.mini_batch.ended.set()

    def _round(self, j: int, t: int) -> list[Admitted]:
        """Returns the mini-batches that make one update of a stage together with mini-batch t."""
        return [self.admitted[each] for each in self.order.round_of(j, t)]

    def checked_loss(self, admitted: Admitted) -> torch.Tensor:
        """Returns the loss of a mini-batch that has ended. Raises `LossError` unless its micro-batches add up to it."""
        one, history = admitted.mini_batch, admitted.history
        assert one.loss is not None
        loss = one.loss.losses.total()
        evidence, _ = one.loss.evidence(history, admitted.is_verified, False, StepLog())
        LossVerdict([[evidence]]).check(history, one.micro_batches)
        admitted.is_verified = evidence.is_proved
        return loss


class Stream:
    """The mini-batches of one call of `train_stream`, from admission to loss."""

    part: Any = None  # part of this replica in the next mini-batch; see `Admitted`

    def __init__(
        self,
        engine: Engine,
        context: CallerContext,  # of the caller
        order: StreamSchedule,
        schedule: object,
        stage_devices: Sequence[Sequence[torch.device]],  # by stage, of its replicas
        optimizer: StagewiseOptimizer,
        parameters: Mapping[int, Sequence[torch.Tensor]],  # by stage, those in the optimizer
        loss: LossCall,
        seed: int,  # of the stages
        *,
        link: Fences | None = None,
    ):
        transport = Transport(device for own in stage_devices for device in own)
        self.name, self.engine, self.optimizer, self.loss, self.seed = str(schedule), engine, optimizer, loss, seed
        self._order, self._parameters = order, parameters
        self.stages: Sequence[int] = range(order.stages)  # stages in this process
        named = {id(p): name for name, p in engine.model.named_parameters(remove_duplicate=False)}
        every = range(order.stages)
        self.weights = [StageWeights({named.get(id(p), "?"): p for p in parameters.get(j, ())}) for j in every]
        for of_stage in self.weights:
            of_stage.keep_first_version(transport)
        self.end = self._make_end(order)
        # The caller's state changes only with the program, after a drain.
        self.run = Run(stage_devices, transport, context, ThreadState.now(), order, link, self.end)
        self._tensors: tuple[BoundProgram, ModelTensors] | None = None  # for the running program
        self._collected = 0  # mini-batches whose loss was returned
        # The last mini-batches: program, micro-batches in the stream, when it began, transfers.
        self._recent: deque[tuple[BoundProgram, range, float, list[TransferNote]]] = deque()

    def _make_end(self, order: StreamSchedule) -> StreamEnd:
        return StreamEnd(order, self.weights)

    @property
    def in_flight(self) -> int:
        """The number of admitted mini-batches whose loss was not returned yet."""
        return self._order.admitted - self._collected

    @property
    def applied(self) -> list[int]:
        """The number of mini-batches in the weights of each stage in this process."""
        return [self.end.applied[j] for j in self.stages]

    @property
    def versions_held(self) -> tuple[int, ...]:
        """The largest number of versions that each stage in this process has held."""
        return tuple(self.weights[j].most_held for j in self.stages)

    def admit(self, given_inputs: GivenInputs) -> None:
        """Queues a mini-batch."""
        t, bound, count = self._order.admitted, given_inputs.bound, len(given_inputs.samples)
        history = self._history_of(given_inputs)
        is_verified = history.is_due and count > 1 and not given_inputs.takes_all(self.loss.reduction)
        if self._tensors is None or self._tensors[0] is not bound:
            self._tensors = bound, ModelTensors(self.engine.model, bound.constants)
        self.run.state = bound.state
        own = replace(given_inputs, bounds=(bound.with_turns_from(self._order.micro_batches),) * count)
        with self.run.transport.at_all(bound.devices[-1]):
            one = self._open(
                own,
                history,
                is_verified,
                recomputed=self._order.recomputed(count),
                keep_outputs=is_verified,
                known_tensors=self._tensors[1],
                opens_stages=False,
            )
        # If forward changes buffers, replicas read the buffers that the last micro-batch left, in any mini-batch.
        stages = zip(bound.program.stages, self._order.replicas, strict=True)
        one.ordered = frozenset(j for j, (stage, replicas) in enumerate(stages) if replicas > 1 and stage.changes)
        updates = OverlappedUpdates(self.optimizer, self._parameters, options=self.optimizer.options_now())
        self.end.admitted[t] = Admitted(one, bound, history, is_verified, updates, {*self.stages}, part=self.part)
        self.run.add(t, one)
        self._queue(self._order.admit(count, given_inputs.is_joint(self.loss.reduction)))

    def _history_of(self, given_inputs: GivenInputs) -> LossHistory:
        return self.engine.loss_histories.of(given_inputs, self.loss)

    def _open(self, given_inputs: GivenInputs, history: LossHistory, is_verified: bool, **more: Any) -> MiniBatch:
        takes_all = given_inputs.takes_all(self.loss.reduction)
        looks = history.look_at_elements and len(given_inputs.samples) > 1 and not takes_all
        inputs, seed = self.engine.own_inputs(given_inputs), mix_seed(self.seed, self._order.admitted)
        losses = self.engine.losses_of(given_inputs, self.loss, is_verified)
        return MiniBatch(inputs, self.engine.model, seed, losses=losses, look_at_elements=looks, **more)

    def _queue(self, rows: Rows) -> None:
        self.engine.executor.start(self.run, rows)

    def drain(self) -> None:
        """Queues the remaining actions of the mini-batches in flight, so that all of them end."""
        self._queue(self._order.drain())

    def wait_for_all(self) -> None:
        """Waits for all admitted mini-batches, after a drain."""
        for one in self.run.mini_batches.values():
            self.engine.executor.wait(one.ended)
        self._raise_failure()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """A block after a drain, in which the model is as between two steps: a graph may be recorded."""
        for weights in self.weights:
            weights.show_gradients()
        try:
            yield
        finally:
            for weights in self.weights:
                weights.hide_gradients()

    def collect(self) -> torch.Tensor:
        """Waits until all stages are updated with the oldest mini-batch in flight; returns its loss."""
        t = self._collected
        admitted = self.end.admitted[t]
        one = admitted.mini_batch
        self.engine.executor.wait(one.ended)
        self._raise_failure()
        loss = self.end.checked_loss(admitted)
        self.engine.add_gradients(one, admitted.updates)
        self.optimizer.count_step()
        self._collected += 1
        self._record(t, admitted)
        del self.end.admitted[t]
        self.run.remove(t, self._order.micro_batches_of(t))
        return loss

    def close(self) -> None:
        """Waits for all mini-batches in flight, without returning their losses."""
        self.drain()
        while self.in_flight:
            self.collect()
        self.engine.executor.finish(self.run)
        self._close()

    def abort(self, error: BaseException) -> None:
        """Drops the mini-batches in flight after an exception, and adds the number of updates to it."""
        self.run.fail(error)
        try:
            self.engine.executor.finish(self.run)
        except BaseException as other:
            if other is not error and not isinstance(other, Exception):
                raise  # another interrupt
        finally:
            for one in self.run.mini_batches.values():
                one.transport.settle()
            self.run.mini_batches.clear()
            self.end.admitted.clear()
            self._close()
        self.note_applied(error)
        del error  # else it and this frame, in its traceback, would form a reference cycle

    def note_applied(self, error: BaseException) -> None:
        applied = self.applied
        if any(applied):
            words = ", ".join(f"stage {j} those of {count}" for j, count in zip(self.stages, applied, strict=True))
            error.add_note(
                f"fxpipe: the stream was dropped; of the updates of its mini-batches, in order, {words} had been made"
            )

    def _close(self) -> None:
        for weights in self.weights:
            weights.show_gradients()
        if self._recent:
            self.engine.take_notes(self._notes())

    def _raise_failure(self) -> None:
        if self.run.failure is not None:
            raise self.run.failure

    def _record(self, t: int, admitted: Admitted) -> None:
        """Keeps the notes of the last mini-batches, without their tensors."""
        log, numbers = self.run.log, self._order.micro_batches_of(t)
        exchange = admitted.mini_batch.exchange
        moved = [(name, source, user, numbers[k], size) for name, source, user, k, size in exchange.moved]
        self._recent.append((admitted.bound, numbers, admitted.begun, moved))
        if len(self._recent) > RECORDED_MINI_BATCHES:
            _, old, *_ = self._recent.popleft()
            for kind, j, i in itertools.product(ActionKind, range(self._order.stages), old):
                log.times.pop(Action(kind, j, i), None)
                log.on_core.pop(Action(kind, j, i), None)
                log.losses.pop(i, None)

    def _notes(self) -> StepNotes:
        """Returns the notes of the last mini-batches as the notes of one step, with consecutive micro-batches."""
        # Numbers start at the smallest one that keeps every micro-batch on its replica.
        bound, numbers, begun, _ = self._recent[0]
        every, replicas = self.run.log, self._order.replicas
        known = dict(every.times)  # after an interrupt, workers may still add to it
        own = range(numbers.start, self._recent[-1][1].stop)
        shift = numbers.start % math.lcm(*replicas) - numbers.start
        shifted = {a: a._replace(micro_batch=a.micro_batch + shift) for a in known if a.micro_batch in own}
        times = {new: known[a] for a, new in shifted.items()}
        on_core = {new: every.on_core[a] for a, new in shifted.items() if a in every.on_core}
        losses = {i + shift: marks for i, marks in dict(every.losses).items() if i in own}
        bounds, moved = [bound] * (numbers.start + shift), list[TransferNote]()
        for each, those, _, notes in self._recent:
            bounds += [each] * len(those)
            moved += [(name, source, user, i + shift, size) for name, source, user, i, size in notes]
        begun = min((start for start, _ in times.values() if isinstance(start, float)), default=begun)
        log = StepLog([begun], times, on_core, losses)
        stages = range(self._order.stages)
        rows = rows_of_replicas(tuple(tuple(a for a in times if a.stage == j) for j in stages), replicas)
        counts = tuple(replicas) if max(replicas) > 1 else ()
        return StepNotes(Schedule(self.name, len(stages), len(bounds), rows, replicas=counts), bounds, log, moved)
