"""The actions of one mini-batch.

F  runs a stage, and keeps its autograd graph for B.
R  runs the stage again with the inputs of F, for a micro-batch whose graph was not kept.
B  runs the backward of that graph, sends the gradients of values to other stages and sums the gradients of parameters.
W  computes the gradients of weights that B leaves, for micro-batches whose backward the schedule splits.

`exchange` holds the values between stages, `stage_instance` runs a stage. The results of an action live until
their last reader: `saved` from F to R, `pending` from F or R to B, `tapes` from B to W.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fxpipe._torch.saved_tensor_hooks import NoSavedTensors
from fxpipe.rewriting.program import WeightGradientTape, stage_context
from fxpipe.runtime.bound_program import BoundProgram, ModelTensors
from fxpipe.runtime.commit import add_gradient
from fxpipe.runtime.exchange import BoundaryValue, Exchange
from fxpipe.runtime.loss_checks import LossWeightingCheck
from fxpipe.runtime.loss_stage import LossStage, MiniBatchLossStage
from fxpipe.runtime.losses import MicroBatchLosses
from fxpipe.runtime.stage_instance import BackwardHandle, StageInstance, StageResult, StageTotals
from fxpipe.runtime.step_inputs import StepInputs, check_programs_fit
from fxpipe.runtime.transport import Transport
from fxpipe.runtime.wiring import fences_of
from fxpipe.scheduling.actions import Action, ActionKind
from fxpipe.scheduling.replicas import replica_of
from fxpipe.utils.accelerator import mix_seed
from fxpipe.utils.python_objects import NotKept


class RecomputeInputs(NamedTuple):
    """The inputs of F, saved for R."""

    received: list[BoundaryValue]
    buffers: dict[str, torch.Tensor]
    versions: list[int]  # versions of model tensors and received values, after F


class MiniBatch:
    """The stages, values and gradients of one mini-batch: what each action computes. A `Run` says when."""

    samples: int | None = None  # None if unknown
    report: Any = None  # over processes: what the rank of the last stage reports of the loss to the others

    def __init__(
        self,
        inputs: StepInputs,
        model: nn.Module,
        seed: int,
        recomputed: frozenset[Action],
        losses: MicroBatchLosses | None = None,
        keep_outputs: bool = False,
        split: frozenset[tuple[int, int]] = frozenset(),  # (stage, micro-batch) pairs with W
        look_at_elements: bool = False,
        known_tensors: ModelTensors | None = None,  # resolved tensors of the only program
        first_micro_batch: int = 0,  # its number, a seed of random numbers
        exchange: Callable[[StepInputs, Transport, bool, bool], Exchange] | None = None,  # creates it over processes
        stages: Collection[int] | None = None,  # in this process; None: all
        opens_stages: bool = True,  # False: the caller does, before the first F of each
    ):
        # Keep no reference to the inputs: their parts are freed with the stages that use them.
        self.bounds, self.trained, self.weights = inputs.bounds, inputs.trained, inputs.weights
        self.seed, self.recomputed, self.split = seed, recomputed, split
        self.first_micro_batch = first_micro_batch
        self.stages_here = range(len(inputs.bounds[0].devices)) if stages is None else stages
        first = inputs.bounds[0]
        every_device = [device for of_stage in first.stage_devices for device in of_stage]
        self.transport = Transport(every_device, inputs.values)
        self.devices, self.stage_devices = first.devices, first.stage_devices
        self.state, self.grad = first.state, first.state.grad
        self.exchange: Any = (exchange or Exchange)(inputs, self.transport, self.grad, losses is not None)
        self.loss_weighting = LossWeightingCheck.of(first, look_at_elements)
        self.loss: LossStage | None = None
        if losses is not None:
            stage_of_loss = MiniBatchLossStage if losses.takes_all else LossStage
            weighting = self.loss_weighting
            self.loss = stage_of_loss(inputs.bounds, self.exchange, losses, weighting, keep_outputs, inputs.weights)
        self.replica_totals = [tuple(StageTotals(inputs.is_handed_over) for _ in own) for own in self.stage_devices]
        self.totals = [own[0] for own in self.replica_totals]
        self._split_stages = {j for j, _ in split}
        self.open_programs = [
            (bound, known_tensors or ModelTensors(model, bound.constants)) for bound in inputs.programs
        ]
        if len(self.open_programs) > 1:
            check_programs_fit(inputs.programs, [tensors for _, tensors in self.open_programs])
        for bound, tensors in self.open_programs:
            for name in bound.overwritten:
                tensors.set(name, NotKept(name))
        if losses is not None and losses.reads:
            tensors, programs = self.open_programs[0][1], [bound.program for bound in inputs.programs]
            changed = dict.fromkeys(name for program in programs for name in (*program.changes, *program.left))
            read = [n for n in changed if n.rpartition(".")[2] in losses.reads and tensors.has(n)]
            losses.function = tensors.hiding(read, losses.function) if read else losses.function
        self.stages: list[dict[int, StageInstance]] = [{} for _ in self.bounds]  # by micro-batch, then by stage
        if opens_stages:
            self._open_stages()
        self.saved: dict[tuple[int, int], RecomputeInputs] = {}
        self.pending: dict[tuple[int, int], BackwardHandle] = {}
        self.tapes: dict[tuple[int, int], WeightGradientTape] = {}
        # Stages with replicas whose forward changes buffers: each micro-batch reads the buffers of the previous one.
        self.in_order = frozenset(
            j
            for j, own in enumerate(self.stage_devices)
            if len(own) > 1 and any(one.program.stages[j].changes_in_order for one in inputs.programs)
        )
        self.ordered = self.in_order  # stages whose F wait for the previous F; in a stream, of any mini-batch
        self.fences = fences_of([bound.wiring for bound in inputs.programs])
        # Replicas of the last stage compute losses in order, too: loss_fn may draw random numbers, or count.
        self.has_losses_in_order = losses is not None and len(self.stage_devices[-1]) > 1
        self.takes_all = losses is not None and losses.takes_all
        self.ended = threading.Event()  # all its actions have ended, or the run has failed

    def _open_stages(self) -> None:
        """Opens the stages of this process, each once for the micro-batches that run it."""
        opened: dict[tuple[int, int, int], StageInstance] = {}
        tensors = {id(bound): own for bound, own in self.open_programs}
        for i, bound in enumerate(self.bounds):
            for j in self.stages_here:
                turn = i % len(self.stage_devices[j])
                key = id(bound), j, turn
                if key not in opened:
                    opened[key] = self._open_stage(bound, j, turn, tensors[id(bound)])
                self.stages[i][j] = opened[key]

    def _open_stage(self, bound: BoundProgram, j: int, turn: int, tensors: ModelTensors) -> StageInstance:
        device, stage = bound.replicas_of(j)[turn]
        return StageInstance(
            stage,
            stage.callable(j in self._split_stages),
            bound.wiring.links[j],
            partial(self.transport.bring, target=device),
            tensors,
            self.state,
            self.replica_totals[j][turn],
        )

    def open_stage(self, j: int, i: int, versions: Mapping[int, torch.Tensor]) -> None:
        """Opens a stage of the only program for the replica of micro-batch i. `versions`: of weights, by identity."""
        ((bound, tensors),) = self.open_programs
        count = len(self.replica_totals[j])
        turn = replica_of(i, count)
        opened = self._open_stage(bound, j, turn, replace(tensors, versions=versions))
        for own in self.stages[turn::count]:
            own[j] = opened

    def close_stage(self, j: int) -> None:
        """Drops a stage, with its version of the weights."""
        for own in self.stages:
            del own[j]

    @property
    def micro_batches(self) -> int:
        return len(self.weights)

    def forward(self, j: int, i: int) -> None:
        opened = self.stages[i][j]
        received = [self.exchange.take(j, link, i) for link in opened.links]
        buffers = dict(opened.totals.buffers)
        if i and j in self.in_order:  # as another replica left them after the previous micro-batch
            count = len(self.replica_totals[j])
            before = self.replica_totals[j][replica_of(i - 1, count)]
            device = self.stage_devices[j][replica_of(i, count)]
            buffers = {name: self.transport.bring(buffer, device) for name, buffer in before.buffers.items()}
        if (ActionKind.RECOMPUTE, j, i) in self.recomputed:
            # Grad mode stays on: under no_grad torch uses other kernels (LSTM), and R must compute the same bits.
            with NoSavedTensors():
                ran = self._run(j, i, received, buffers, is_kept=False)
            self.saved[j, i] = RecomputeInputs(received, buffers, opened.versions(received))
        else:
            ran = self._run(j, i, received, buffers)
            if self.grad:
                self.pending[j, i] = ran.pending
        opened.totals.finish_forward(opened.stage, i, ran)
        self._send(j, i, ran.sent)

    def recompute(self, j: int, i: int) -> None:
        inputs = self.saved.pop((j, i))
        self.stages[i][j].check_unchanged(inputs.received, inputs.versions)
        stage_context.is_recomputing = True
        try:
            self.pending[j, i] = self._run(j, i, inputs.received, inputs.buffers).pending
        finally:
            stage_context.is_recomputing = False

    def _run(
        self, j: int, i: int, received: list[BoundaryValue], buffers: dict[str, torch.Tensor], is_kept: bool = True
    ) -> StageResult:
        if self.bounds[i].program.is_random:
            stage_context.seed = mix_seed(self.seed, self.first_micro_batch + i)
        return self.stages[i][j].run(received, buffers, is_kept)

    def _send(self, j: int, i: int, sent: Sequence[Any]) -> None:
        for name, value in zip(self.stages[i][j].stage.sends, sent, strict=True):
            self.exchange.send(j, name, i, value)

    def backward(self, j: int, i: int) -> None:
        pending = self.pending.pop((j, i))
        arrived = [self.exchange.take_gradient(j, name, i) for name in pending.names]
        if self.loss_weighting.reduced:
            self.loss_weighting.note_roots(j, i, pending, arrived)
        gradients = self.stages[i][j].backward(pending, arrived)
        for link, gradient in zip(pending.links, gradients, strict=True):
            self.exchange.send_gradient(link, i, gradient)
        if pending.tape is not None and (j, i) in self.split:
            self.tapes[j, i] = pending.tape
        elif pending.tape is not None:  # another micro-batch of the stage has W
            self.stages[i][j].weight_gradients(pending.tape)

    def weight_gradients(self, j: int, i: int) -> None:
        tape = self.tapes.pop((j, i), None)
        if tape is not None:  # else B computed all gradients
            self.stages[i][j].weight_gradients(tape)

    @property
    def divisor(self) -> Any:
        """The divisor of all gradients, for a weighted loss; None if there is none."""
        if self.report is not None:
            return self.report.divisor
        return None if self.loss is None else self.loss.losses.divisor

    def trained_parameters(self) -> dict[str, torch.Tensor]:
        """Returns, by name, the tensors of the model that stages in this process use and that get gradients."""
        changed = {name for totals in self.totals for name in totals.buffers}
        named = {
            name: tensors.get(name)
            for bound, tensors in self.open_programs
            for j in self.stages_here
            for name in bound.program.stages[j].attributes
        }
        return {name: tensor for name, tensor in named.items() if tensor.requires_grad and name not in changed}

    def take_state(self, results: list[list[Any]]) -> list[list[Any]]:
        """Takes state that changes once for the mini-batch from results, for `commit_buffers`; returns the others."""
        update = self.bounds[0].update
        if update is None:
            return results
        (values,), every = results, [one for of_stage in self.replica_totals for one in of_stage]
        for name in reversed(update.names):
            value = values.pop()
            for totals in (one for one in every if name in one.buffers):
                totals.buffers[name] = value
                totals.assigned |= update.assigned
        return [values]

    @torch.no_grad()
    def commit_buffers(self) -> None:
        for j in range(len(self.totals)):
            self.commit_buffers_of(j)
        self.transport.settle()  # the copies between replicas have ended

    @torch.no_grad()
    def commit_buffers_of(self, j: int) -> None:
        replicas = self.replica_totals[j]
        totals = replicas[replica_of(self.micro_batches - 1, len(replicas))]  # the replica of the last micro-batch
        others = [one for one in replicas if one is not totals]
        for name, value in totals.final_buffers(others, partial(self.transport.bring, target=self.devices[j])).items():
            tensors = next(own for bound, own in self.open_programs if bound.program.stages[j].uses(name))
            if name in totals.assigned:
                tensors.set(name, value)
            else:
                tensors.get(name).copy_(value)

    def parameter_gradient(self, name: str, home: torch.device) -> torch.Tensor | None:
        """Returns the sum of a parameter's gradients on its device, in order of micro-batches, replicas, stages."""
        every = (totals for of_stage in self.replica_totals for totals in of_stage)
        sums = [totals.sums.pop(name) for totals in every if name in totals.sums]
        if not sums:
            return None
        total, *more = [self.transport.bring(gradient, home) for gradient in sums]
        for gradient in more:
            total = add_gradient(total, gradient)
        return total
