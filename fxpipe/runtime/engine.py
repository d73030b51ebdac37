"""Runs complete steps: the drop-in, whose backward the caller starts, and `forward_backward`.

Both end in the same order: after all rows have succeeded, buffers are written into the model and gradients go through
`commit`. If a row fails, nothing changes.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.autograd import leaves_below
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import ArgumentError, LossError, StateError
from fxpipe.rewriting.program import ConstantOutput, ReceivedValue
from fxpipe.runtime.bound_program import ModelTensors
from fxpipe.runtime.caller_context import CallerContext
from fxpipe.runtime.commit import GradientList, add_gradient, attach_commit, gradient_rollback
from fxpipe.runtime.exchange import BoundaryValue
from fxpipe.runtime.executors import Executor, close_all_executors
from fxpipe.runtime.loss_checks import LossHistories, LossVerdict
from fxpipe.runtime.loss_stage import LossStage
from fxpipe.runtime.losses import MODEL_LOSS_REMEDIES, LossCall, MicroBatchLosses
from fxpipe.runtime.mini_batch import MiniBatch
from fxpipe.runtime.run import End, Fences, Run, StepOrder
from fxpipe.runtime.stage_updates import OverlappedUpdates, actions_before_updates, update_rows
from fxpipe.runtime.step_inputs import GivenInputs, StepInputs, gather, scatter, scatter_gradient, target_dims
from fxpipe.runtime.step_record import StepNotes, StepRecord, step_record_of
from fxpipe.runtime.transport import Transport, leaves_on_device
from fxpipe.scheduling.actions import ActionKind, Rows, Schedule
from fxpipe.scheduling.row_transforms import backward_part, forward_part, with_updates
from fxpipe.scheduling.validation import check_order
from fxpipe.utils import accelerator
from fxpipe.utils.accelerator import draw_seed
from fxpipe.utils.batch_split import rows_of_inputs
from fxpipe.utils.locks import call_in_forked_child, stop_planning_threads
from fxpipe.utils.pytree import flatten, map_tensor_leaves, refuse_uncuttable

ORDER_OF_BUFFERS = "forward changes buffers there, of which each micro-batch is to find what the one before has left"
ORDER_OF_LOSSES = "loss_fn, which may draw random numbers or count, is called for one micro-batch after the other"
LAST_STEP_SECONDS = 1.0  # seconds that the interpreter waits at exit for a step without workers
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Runs steps of one model on one set of workers."""

    def __init__(self, model: nn.Module, executor: Executor, devices: Sequence[torch.device] = ()):
        self.model, self.executor, self.devices = model, executor, devices
        self._last_notes: StepNotes | None = None
        self._last_step: StepRecord | None = None  # computed from the notes on request
        self._caller_context = CallerContext()  # the caller's, during a step
        self.loss_histories = LossHistories()
        self._busy = threading.Lock()
        self._runner: int | None = None
        self._transport: Transport | None = None
        self.is_streaming = False  # a stream is open, whose stages have their own weights and gradients
        self._kept_failure: weakref.finalize[Any, Any] | None = None
        self.starts = 0  # number of steps begun, including refused ones
        _engines.add(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A block in which no other step can run: workers that served two would wait for each other."""
        with self.occupied() as context, context.suspended():
            yield

    @contextmanager
    def occupied(self, is_streaming: bool = False) -> Iterator[CallerContext]:
        """A block like `running`, around code of the caller: its modes and hooks stay active."""
        acquired = False
        self.starts += 1
        self.raise_kept_failure()
        try:
            acquired = self._busy.acquire(blocking=False)
            if not acquired and self.is_streaming:
                raise StateError(
                    "the pipe is in the middle of a stream (train_stream), whose mini-batches are in its stages: let "
                    "it end, or close it (stream.close(), `with pipe.train_stream(...) as stream:`), then call the "
                    "pipe (before a backward take the loss of the outputs again)"
                )
            if not acquired:
                raise StateError(
                    "the pipe is already running a step, in another thread or around this call (a hook, loss_fn); "
                    "call it when that has ended (before a backward take the loss of the outputs again)"
                )
            accelerator.refuse_capture(self.devices)
            self._runner = threading.get_ident()
            self._caller_context = CallerContext.now()
            self.is_streaming = is_streaming
            yield self._caller_context
        except BaseException:
            if acquired and self._transport is not None:
                self._transport.settle()  # frees what a failed step has sent, after the copies
            raise
        finally:
            if acquired:
                self._transport, self.is_streaming = None, False
                self._runner, self._caller_context = None, CallerContext()
                self._busy.release()

    def keep_failure(self, error: BaseException) -> None:
        """Keeps an exception for the next call; it is printed if there is none."""
        error.add_note("fxpipe: raised in the end of a stream whose loop was left before, and kept for the next call")
        self._kept_failure = weakref.finalize(self, sys.excepthook, type(error), error, error.__traceback__)

    def raise_kept_failure(self) -> None:
        if self._kept_failure is not None and (kept := self._kept_failure.detach()) is not None:
            raise kept[2][1]

    def _end(self) -> None:
        """Prevents further steps, and waits up to `LAST_STEP_SECONDS` for a step in another thread."""
        if self._runner != threading.get_ident():
            self._busy.acquire(timeout=LAST_STEP_SECONDS)

    def _forget_others(self) -> None:
        """Resets a forked child, where the step of another thread does not continue."""
        if self._runner != threading.get_ident():
            self._busy, self._runner, self._caller_context = threading.Lock(), None, CallerContext()

    def own_inputs(self, given_inputs: GivenInputs) -> StepInputs:
        return StepInputs.of(given_inputs)

    def _mini_batch(
        self, given_inputs: GivenInputs, schedule: Schedule, seed: int | None = None, **more: Any
    ) -> MiniBatch:
        """Opens the mini-batch of a step. `more`: further arguments of `MiniBatch`."""
        inputs = self.own_inputs(given_inputs)
        # A model without random nodes leaves the generator unchanged, as it does without a pipe.
        if seed is None:
            is_random = any(bound.program.is_random for bound in inputs.programs)
            seed = draw_seed() if is_random else 0
        recomputed = frozenset(a for row in schedule.rows for a in row if a.kind is ActionKind.RECOMPUTE)
        one = MiniBatch(inputs, self.model, seed, recomputed, split=schedule.split_backwards, **more)
        one.samples = given_inputs.batch
        if one.in_order:
            check_order(schedule, one.in_order, ORDER_OF_BUFFERS)
        if one.has_losses_in_order:
            check_order(schedule, frozenset((schedule.stages - 1,)), ORDER_OF_LOSSES)
        return one

    def _run_of(
        self, one: MiniBatch, order: StepOrder | None = None, link: Fences | None = None, end: End | None = None
    ) -> Run:
        run = Run(one.stage_devices, one.transport, self._caller_context, one.state, order, link, end)
        run.add(0, one)
        return run

    def _run_rows(self, run: Run, schedule: Schedule, rows: Rows) -> None:
        """Runs rows of the schedule, all or a part, and keeps notes for the record."""
        run.log.begun.append(time.perf_counter())
        self._transport = run.transport
        self.executor.run(run, rows)
        self._note_step(run, schedule)

    def _note_step(self, run: Run, schedule: Schedule) -> None:
        # Keep no reference to the mini-batch, which holds tensors.
        one = run.mini_batches[0]
        samples = None if any(bound.is_whole for bound in one.bounds) else one.samples
        self.take_notes(StepNotes(schedule, one.bounds, run.log.now(), [*one.exchange.moved], samples))

    def take_notes(self, notes: StepNotes) -> None:
        self._last_notes, self._last_step = notes, None

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the last step, computed on the first access; None before the first step."""
        notes = self._last_notes
        if self._last_step is None and notes is not None:
            record = step_record_of(notes)
            devices = []
            for row, one in enumerate(record.devices):
                device = self._device_of_row(row)
                if device is not None and accelerator.counts_memory(device):
                    one = replace(one, peak_memory=accelerator.peak_allocated_bytes(device))
                devices.append(one)
            self._last_step = replace(record, devices=tuple(devices))
        return self._last_step

    def _device_of_row(self, row: int) -> torch.device | None:
        """Returns the device of a row, if it is in this process."""
        return self.devices[row] if row < len(self.devices) else None

    def update(
        self,
        updates: Mapping[int, Callable[[], None]],
        devices: Sequence[torch.device],
        placement: Sequence[int],
        replicas: Sequence[int],
    ) -> None:
        """Runs the updates of stages, what their U calls, in their workers. `replicas`: by worker; empty: one each."""
        notes, context = self._last_notes, self._caller_context
        run = Run([(d,) for d in devices], Transport(devices), context, ThreadState.now(), end=End(updates))
        run.log.begun.append(time.perf_counter())
        last = 0 if notes is None else notes.schedule.micro_batches - 1
        self.executor.run(run, update_rows(updates, placement, last, replicas))
        if notes is not None:
            notes.log.updates.append(run.log)
            self._last_step = None

    def call(self, given_inputs: GivenInputs, schedule: Schedule) -> Any:
        """Runs all forwards of a mini-batch and returns the output, whose backward runs all backwards, once."""
        bound, leaves, m = given_inputs.bound, given_inputs.leaves, schedule.micro_batches
        kind = self.loss_histories.of_kind(bound.out_dims, (), bound)
        one = self._mini_batch(given_inputs, schedule, look_at_elements=kind.look_at_elements and m > 1)
        run = self._run_of(one)
        self._run_rows(run, schedule, forward_part(schedule))
        outputs, parts = gathered_results(one)
        one.take_state([outputs[len(bound.results) :]])
        one.commit_buffers()
        one.transport.settle()
        differentiable = [
            (place, o, how, what)
            for place, (o, how, what) in enumerate(bound.results)
            if not isinstance(o, ConstantOutput) and any(p.requires_grad for p in parts[o])
        ]
        if differentiable:
            shapes = [[p.value.shape for p in parts[o]] for _, o, *_ in differentiable]  # values may be freed

            def backward(gradients: Sequence[torch.Tensor | None]) -> None:
                for (_, o, how, _), gradient, part_shapes in zip(differentiable, gradients, shapes, strict=True):
                    if gradient is not None:
                        one.exchange.enter_gradients(o, scatter_gradient(gradient, part_shapes, how, one.weights))
                run.caller_context = self._caller_context.for_backward(run.caller_context)
                self._run_rows(run, schedule, backward_part(schedule))
                if wrong := one.loss_weighting.difference(lambda i: one.weights[i], means_only=True):
                    raise LossError(f"{wrong} {MODEL_LOSS_REMEDIES}")
                kind.count_pass()

            parts_of_graph = [outputs[place] for place, *_ in differentiable]
            attached = self.commit(one, backward, parts_of_graph, running=self.running)
            for (place, *_, what), output in zip(differentiable, attached, strict=True):
                outputs[place] = output
                if place in bound.used_outputs:  # the gradient of the model's own use is added in the stages
                    refuse: Any = functools.partial(_refuse_hook, what)
                    output.register_hook = output.retain_grad = refuse  # type: ignore[method-assign]
        count = len(bound.program.outputs)
        self.write_back(given_inputs, [outputs[count : len(bound.results)]])
        for place, source in bound.returned_inputs.items():
            if leaves[source].device == outputs[place].device:
                outputs[place] = leaves[source]
        return bound.output(outputs[:count])

    def commit(
        self,
        one: MiniBatch,
        backward: Callable[[Sequence[torch.Tensor | None]], None],
        outputs: Sequence[torch.Tensor],
        extra: Sequence[torch.Tensor] = (),  # leaves of the loss
        named: Mapping[str, torch.Tensor] | None = None,  # the parameters that get gradients; None: all trained ones
        end: Callable[[GradientList], GradientList] | None = None,  # makes gradients of the sums; None: divides them
        running: Callable[[], AbstractContextManager[None]] = nullcontext,  # a block around `backward`
    ) -> tuple[torch.Tensor, ...]:
        """Attaches `outputs` to the caller's graph: their backward runs `backward` and returns the gradient sums."""
        named = one.trained_parameters() if named is None else named

        def finish(gradients: Sequence[torch.Tensor | None]) -> GradientList:
            with one.transport.on_step_streams():
                backward(gradients)
                sums: GradientList = [one.parameter_gradient(name, tensor.device) for name, tensor in named.items()]
                sums += [one.exchange.input_gradients(each) for each in one.trained]
                if one.loss is not None:
                    sums += [one.loss.own.pop(id(leaf))[1] for leaf in extra]
                divisor = one.divisor
                return end(sums) if end is not None else [g if g is None else divided(g, divisor) for g in sums]

        inputs = [*named.values(), *(each.tensor for each in one.trained), *extra]
        return attach_commit(finish, outputs, inputs, running)

    def forward_backward(
        self, given_inputs: GivenInputs, schedule: Schedule, call: LossCall, updates: OverlappedUpdates | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Runs a step and adds its gradients to the model's parameters; returns the loss, and the outputs or None."""
        # With `updates` the stages update their weights within the step, unless the step verifies the loss.
        m, takes_all = schedule.micro_batches, given_inputs.takes_all(call.reduction)
        devices = dict.fromkeys(given_inputs.bound.stage_devices[-1])
        if call.scaler is not None and len(devices) > 1 and not takes_all:
            raise ArgumentError(
                f"grad_scaler with replicas of the last stage on {', '.join(map(str, devices))}: it has its scale on "
                "one device; train in bfloat16, or plan with one replica of the last stage"
            )
        history = None  # there is one loss, or the caller's micro-batches have no mini-batch to compare with
        if not given_inputs.is_handed_over and not takes_all:
            history = self.loss_histories.of(given_inputs, call)

        def run_step(is_verified: bool, seed: int | None = None) -> tuple[Run, MiniBatch, LossStage]:
            one = self._mini_batch(
                given_inputs,
                schedule,
                seed,
                losses=self.losses_of(given_inputs, call, is_verified),
                keep_outputs=is_verified or call.return_outputs,
                look_at_elements=history is not None and history.look_at_elements and m > 1,
            )
            run = self._run_with_updates(one, schedule, None if is_verified else updates)
            assert one.loss is not None
            return run, one, one.loss

        run, one, stage = run_step(is_verified := history is not None and history.is_due and m > 1)
        loss, outputs = stage.losses.total(), None
        if history is not None:
            evidence, outputs = stage.evidence(history, is_verified, call.return_outputs, run.log)
            is_repeatable = updates is None or not updates.begun
            if is_repeatable and LossVerdict([[evidence]]).is_unsure:  # run again and verify
                run, one, stage = run_step(True, one.seed)
                loss = stage.losses.total()
                evidence, outputs = stage.evidence(history, True, call.return_outputs, run.log)
            LossVerdict([[evidence]]).check(history, m)
            if evidence.is_verified:
                self._note_step(run, schedule)
        results = one.take_state(stage.other_results())
        output = stage.output(outputs) if call.return_outputs else None
        self.add_gradients(one, updates)
        one.commit_buffers()
        with torch.no_grad():
            self.write_back(given_inputs, results)
        return loss, output

    def write_back(self, given_inputs: GivenInputs, results: Sequence[Sequence[torch.Tensor]]) -> None:
        """Writes the last values of inputs that forward writes to, and of attributes that it sets, as a loop does."""
        every = given_inputs.leaves if given_inputs.is_handed_over else [given_inputs.leaves]
        for bound, leaves, values in zip(given_inputs.bounds, every, results, strict=False):
            tensors, places = ModelTensors(self.model, bound.constants), bound.program.written_inputs
            for place, value in zip(places, values[: len(places)], strict=True):
                if isinstance(leaves[place], torch.Tensor):  # else another process has the inputs
                    leaves[place].copy_(value)
            for name, value in zip(bound.program.left, values[len(places) :], strict=True):
                tensors.set(name, value)

    def losses_of(
        self,
        given_inputs: GivenInputs,
        call: LossCall,
        is_verified: bool = False,
        known: Mapping[int, Any] | None = None,
    ) -> MicroBatchLosses:
        """Returns the losses of a step. `known`: pieces of the mini-batch, if this process does not have its leaves."""
        bound, target, shares, reduction = given_inputs.bound, given_inputs.targets, given_inputs.shares, call.reduction
        devices, home, whole = bound.stage_devices[-1], bound.devices[-1], None
        takes_all = given_inputs.takes_all(reduction)
        if given_inputs.is_handed_over:
            targets = targets_on_devices(target, devices)
        elif takes_all:
            targets, shares, reduction = targets_on_devices([target], [home]), [1.0], "sum"
        else:
            if is_verified:  # copied before the step, since loss_fn may write to the target
                whole = map_tensor_leaves(lambda t: t.detach().to(home, copy=True), target)
            rows = rows_of_inputs(bound.in_dims)
            targets = scatter_target(target, given_inputs.batch, len(shares), devices, rows)
            if known is None and bound.known_pieces is not None:
                known = bound.known_pieces(given_inputs.leaves, given_inputs.batch)
        losses = MicroBatchLosses(call.function, reduction, shares, targets, call.scaler, whole, known=known or {})
        losses.is_handed_over, losses.takes_all = given_inputs.is_handed_over, takes_all
        losses.reads = self.loss_histories.names_read(call.function)  # a step hides what forward changes there
        return losses

    def add_gradients(self, one: MiniBatch, updates: OverlappedUpdates | None = None) -> None:
        """Adds the gradients of a successful mini-batch to the gradients of the model's parameters."""
        _refuse_parameters_in_loss(one.loss, updates)
        extra = [] if one.loss is None else [leaf for leaf, *_ in one.loss.own.values()]
        updated = updates.identities if updates is not None and updates.begun else ()
        named = {name: t for name, t in one.trained_parameters().items() if id(t) not in updated}
        (root,) = self.commit(one, lambda _: None, [torch.zeros((), device="cpu")], extra, named)
        if not root.requires_grad:  # all parameters are updated, and their gradients freed
            with one.transport.on_step_streams():
                return
        with gradient_rollback(leaves_below(root)):
            root.backward()

    def _run_with_updates(self, one: MiniBatch, schedule: Schedule, updates: OverlappedUpdates | None) -> Run:
        if updates is None:
            run = self._run_of(one)
            self._run_rows(run, schedule, schedule.rows)
            return run
        users: dict[int, set[int]] = {}
        for bound, tensors in one.open_programs:
            for j, stage in enumerate(bound.program.stages):
                for name in stage.attributes:
                    users.setdefault(id(tensors.get(name)), set()).add(j)
        order = StepOrder(actions_before_updates(schedule, updates.parameters, users))
        end = End({j: functools.partial(update_stage, [one], j, updates) for j in range(schedule.stages)})
        run, schedule = self._run_of(one, order, end=end), with_updates(schedule)
        self._run_rows(run, schedule, schedule.rows)
        return run


def update_stage(mini_batches: Sequence[MiniBatch], j: int, updates: OverlappedUpdates) -> None:
    """Updates a stage in its worker with the mean gradients of mini-batches of one program: in a stream, of a round."""
    for one in mini_batches:
        _refuse_parameters_in_loss(one.loss, updates)
    own = {id(parameter) for parameter in updates.parameters.get(j, ())}
    named = {name: tensor for name, tensor in mini_batches[0].trained_parameters().items() if id(tensor) in own}
    trained: list[torch.Tensor] = []

    def finish(_: object) -> GradientList:
        divisors = [one.divisor for one in mini_batches]
        means: GradientList = [_mean_gradient(name, t.device, mini_batches, divisors) for name, t in named.items()]
        trained.extend(t for t, gradient in zip(named.values(), means, strict=True) if gradient is not None)
        return means

    if named:
        (root,) = attach_commit(finish, [torch.zeros((), device="cpu")], [*named.values()])
        with gradient_rollback([*named.values()]):
            root.backward()
    updates.step(j, trained)


def gathered_results(one: MiniBatch) -> tuple[list[Any], dict[ReceivedValue, list[BoundaryValue]]]:
    """Returns the gathered results of a mini-batch without a loss, and new state; and the parts of results by value."""
    bound, every = one.bounds[0], range(one.micro_batches)
    n = len(bound.devices)
    parts = {link.value: [one.exchange.take(n, link, i) for i in every] for link in bound.wiring.links[-1]}
    outputs = [
        o.value if isinstance(o, ConstantOutput) else gather([p.value for p in parts[o]], how, one.weights, what)
        for o, how, what in bound.results
    ]
    update = bound.update
    return [*outputs, *(update.of_all(outputs) if update is not None else ())], parts


def _refuse_hook(output: str, *_: Any) -> None:
    raise StateError(
        f"the model itself uses {output} further, and a hook on it (register_hook, retain_grad) would see the gradient "
        "of the loss alone; put a hook on the module that makes it (register_forward_hook: output.register_hook(...))"
    )


def _mean_gradient(
    name: str, home: torch.device, mini_batches: Sequence[MiniBatch], divisors: Sequence[Any]
) -> torch.Tensor | None:
    """Returns the mean over mini-batches of a parameter's gradient, on its device: summed in order, divided once."""
    total, count = None, 0
    for one, divisor in zip(mini_batches, divisors, strict=True):
        gradient = one.parameter_gradient(name, home)
        if gradient is not None:
            total = add_gradient(total, divided(gradient, divisor), count)
            count += 1
    return total if total is None or len(mini_batches) == 1 else total / len(mini_batches)


def _refuse_parameters_in_loss(stage: LossStage | None, updates: OverlappedUpdates | None) -> None:
    """Raises `LossError` if the loss reads weights that are updated before their gradients from the loss exist."""
    if stage is not None and updates is not None and not updates.identities.isdisjoint(stage.own):
        raise LossError(
            "loss_fn reads parameters of the model themselves, which an optimizer with overlap=True updates while the "
            "loss may still be taken; let forward return what the loss needs of them (a penalty, say), or leave "
            "overlap=True out"
        )


def divided(gradient: torch.Tensor, divisor: Any) -> torch.Tensor:
    if divisor is None:
        return gradient
    return gradient / (divisor.to(gradient.device) if isinstance(divisor, torch.Tensor) else divisor)


def scatter_target(
    target: tuple[Any, ...], batch: int, count: int, devices: Sequence[torch.device], rows: Collection[int] = (1,)
) -> list[tuple[Any, ...]]:
    """Returns the target of each micro-batch, on the device of its loss: `()` or `(target,)`."""
    # `devices`: of the replicas of the last stage. `rows`: possible numbers of rows of a sample in the target.
    leaves, spec = flatten(target)
    for leaf in leaves:
        refuse_uncuttable("target", leaf)
    dims = target_dims(leaves, batch, rows) if count > 1 else [None] * len(leaves)
    if len({*devices}) == 1:
        leaves = leaves_on_device(leaves, devices[0])
    return targets_on_devices([pytree.tree_unflatten(part, spec) for part in scatter(leaves, dims, count)], devices)


def targets_on_devices(targets: Sequence[tuple[Any, ...]], devices: Sequence[torch.device]) -> list[tuple[Any, ...]]:
    """Moves the target of each micro-batch to the device of the replica that computes its loss."""
    moved, turns = [*targets], len(devices) if len({*devices}) > 1 else 1
    for turn in range(turns):
        leaves, spec = flatten(moved[turn::turns])
        if leaves:
            moved[turn::turns] = pytree.tree_unflatten(leaves_on_device(leaves, devices[turn]), spec)
    return moved


@atexit.register
def _stop_at_exit() -> None:
    """Stops all engines: a thread inside torch aborts the process when the interpreter ends."""
    close_all_executors()
    stop_planning_threads()  # before the engines: a first step plans
    for engine in list(_engines):
        engine._end()


@call_in_forked_child
def _reset_in_child() -> None:
    for engine in list(_engines):
        engine._forget_others()
