"""Complete steps of a pipe over several processes, on one rank.

A step runs as in one process (`runtime.engine`) up to its end. Before anything is committed, all ranks gather the loss,
which the rank of the last stage has, and whether the step succeeded. So it is committed on all ranks or on none.

    sums of stages ──▶ sums over replicas ──▶ sums over the stages of all ranks (tied weights) ──▶ divided ──▶ `.grad`

The second step is omitted with one replica, and within `no_sync()`; the next call that sums over replicas then first
sums the gradients in `.grad`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fxpipe._torch.autograd import has_gradient_hooks, leaves_below
from fxpipe.distributed.device_transfers import WAITED_FOR
from fxpipe.distributed.held_tensors import RankProgram, TensorExchange, TensorTransfers, share_buffers
from fxpipe.distributed.packets import Layout, Mailbox, PacketLink
from fxpipe.distributed.rank_exchange import RankExchange, RankStepEnd
from fxpipe.distributed.rank_group import RankGroup
from fxpipe.distributed.replicas import (
    GradientReduction,
    ReplicaPart,
    Replicas,
    ReplicaStart,
    StageParameter,
    StepReport,
    check_scales,
    digest,
    drop_gradients_of_loss,
    loss_of_replica,
    parameters_of_loss,
)
from fxpipe.errors import LossError
from fxpipe.rewriting.program import Program
from fxpipe.rewriting.relay_routes import RelayRoutes
from fxpipe.runtime.bound_program import ModelTensors, different_programs
from fxpipe.runtime.commit import GradientList, add_gradient, gradient_rollback
from fxpipe.runtime.engine import Engine, divided, gathered_results
from fxpipe.runtime.executors import InlineExecutor
from fxpipe.runtime.loss_checks import LossVerdict
from fxpipe.runtime.loss_stage import LossStage
from fxpipe.runtime.losses import LossCall, MicroBatchLosses
from fxpipe.runtime.mini_batch import MiniBatch
from fxpipe.runtime.run import Run
from fxpipe.runtime.step_inputs import GivenInputs, StepInputs
from fxpipe.runtime.step_record import StepRecord
from fxpipe.scheduling import Schedule
from fxpipe.utils.pytree import map_tensor_leaves

MAX_MICRO_BATCHES = 4096  # whose layouts of packets are remembered: with dynamic sizes each may have others


def open_mailbox(
    group: RankGroup, layouts: dict[Any, Layout], routes: RelayRoutes, tensors: TensorTransfers | None = None
) -> Mailbox:
    """Creates the mailbox of a step or a stream; all ranks call it together. `tensors`: of the model, that move."""
    if group.transfers is not None:
        ranks = [routes.rank(cut) for cut in range(len(routes.placement))]
        pairs = [pair for a, b in pairwise(ranks) if a != b for pair in ((a, b), (b, a))]
        if tensors is not None:
            pairs += (*tensors.borrowed, *tensors.gradients, *tensors.changed)
        group.transfers.connect(pairs)
    return Mailbox(group.connection, group.device, layouts, group.transfers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInputs(GivenInputs):
    """The inputs of a step, the same on all ranks, except for leaves and targets, which are where they are needed."""

    bounds: tuple[RankProgram, ...] = ()
    leaves: Sequence[Any] = ()
    samples: tuple[int, ...] = ()
    union: RankProgram = field(default=None)  # type: ignore[assignment]  # of all micro-batches; None in a message
    sizes: tuple[Any, ...] = ()  # sizes of the leaves, on all ranks
    seed: int = 0
    known: Mapping[int, Any] = field(default_factory=dict)  # pieces of the mini-batch, by index

    @property
    def programs(self) -> list[Program]:
        """The programs that run, without duplicates."""
        return [bound.program for bound in different_programs(self.bounds)]

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        return {name: tensor for one in self.bounds for name, tensor in one.constants.items()}


class RankEngine(Engine):
    """Runs this rank's part of the steps of one model."""

    def __init__(self, model: nn.Module, group: RankGroup):
        super().__init__(model, InlineExecutor(), (group.device,))
        self.group = group
        self._layouts: dict[Any, Layout] = {}
        self._generation, self._micro_batches = -1, 0  # of `_layouts`
        self.replicas = Replicas(group)

    def _end(self) -> None:
        """Also closes the connections: a thread of gloo that frees a tensor after the interpreter's end aborts."""
        super()._end()
        self.group.close()

    @property
    def last_step(self) -> StepRecord | None:
        record, group = super().last_step, self.group
        return None if record is None else replace(record, transport=group.transport, reduction=group.reduction)

    def _device_of_row(self, row: int) -> torch.device | None:
        return self.group.device if row == self.group.rank else None

    def _open(self, inputs: RankInputs) -> tuple[Mailbox, TensorExchange]:
        """Creates the mailbox of a step, and borrows tensors. All ranks call it together."""
        program, tensors = inputs.union, ModelTensors(self.model, inputs.constants)
        if self._generation != self.group.generation or self._micro_batches >= MAX_MICRO_BATCHES:
            self._layouts.clear()  # in the same step on all ranks
            self._generation, self._micro_batches = self.group.generation, 0
        self._micro_batches += len(inputs.samples)
        mailbox = open_mailbox(self.group, self._layouts, program.routes, program.transfers)
        exchange = TensorExchange(mailbox, self.group.rank, tensors, program)
        exchange.borrow()
        return mailbox, exchange

    def _run_row(
        self,
        inputs: RankInputs,
        schedule: Schedule,
        mailbox: Mailbox,
        seed: int,
        reduction: GradientReduction | None = None,
        **more: Any,
    ) -> Run:
        """Runs the row. `reduction`: gets gradients as soon as they are complete, if one program runs."""
        rank, program = self.group.rank, inputs.union
        name = program.number, inputs.sizes, schedule.micro_batches
        link = PacketLink(self.group, mailbox, program.routes.placement, name)
        one = self._mini_batch(inputs, schedule, seed, **self.part_of_step(inputs), **more)
        row = schedule.rows[rank]
        end = None if reduction is None or len(inputs.programs) > 1 else RankStepEnd(reduction, row)
        run = self._run_of(one, link=link, end=end)
        link.queue(schedule.rows, rank)
        self._run_rows(run, schedule, (row,))
        one.exchange.check_empty()
        if self.group.transfers is not None:
            self.group.transfers.settle()  # a missing message fails this step before the ranks commit it
        return run

    def part_of_step(self, inputs: RankInputs) -> dict[str, Any]:
        """Returns the arguments of a step with the stages of this rank only."""
        routes, rank = [one.routes for one in inputs.bounds], self.group.rank
        here = [j for j, at in enumerate(routes[0].placement) if at == rank]
        return {"exchange": functools.partial(RankExchange, routes=routes, rank=rank), "stages": here}

    def own_inputs(self, inputs: GivenInputs) -> StepInputs:
        assert isinstance(inputs, RankInputs)
        if inputs.bounds[0].routes.is_here(0, self.group.rank):
            return StepInputs.of(inputs)
        parts = tuple((None,) * len(bound.program.inputs) for bound in inputs.bounds)
        return StepInputs(inputs.bounds, parts, tuple(inputs.shares), (), (), inputs.is_handed_over)

    def call_ranks(self, inputs: RankInputs, schedule: Schedule, *, to_all: bool) -> Any:
        """Runs all forwards; returns the output on the rank of the last stage or on all ranks, else None."""
        program, (mailbox, exchange) = inputs.union, self._open(inputs)
        (one,) = self._run_row(inputs, schedule, mailbox, inputs.seed).mini_batches.values()
        last, count = program.last, len(program.program.outputs)
        outputs = gathered_results(one)[0] if self.group.rank == last else []
        more = one.take_state(self._from_last(inputs, [outputs[count:]]))
        output = program.output(outputs[:count]) if self.group.rank == last else None
        if to_all:
            output = self._on_all(output, last)
        self.group.connection.all_gather(None, "the end of the step")
        one.commit_buffers()
        exchange.spread_changes()
        with torch.no_grad():
            self.write_back(inputs, more)
        one.transport.settle()
        mailbox.settle()
        return output

    def train_ranks(
        self, inputs: RankInputs, schedule: Schedule, call: LossCall, to_all: bool
    ) -> tuple[torch.Tensor, Any]:
        """Runs a step and adds its gradients to `.grad` on this rank; returns the loss, and outputs or None."""
        last, m, is_whole = inputs.union.last, schedule.micro_batches, inputs.takes_all(call.reduction)
        is_last = self.group.rank == last
        # Micro-batches from the caller are not compared with a mini-batch.
        kind = self.loss_histories.of(inputs, call) if is_last and not inputs.is_handed_over and not is_whole else None
        mailbox, exchange = self._open(inputs)
        gradients = RankGradients(self, inputs)
        part = self.begin(inputs, gradients, call.reduction, is_last)
        inputs, part = self.with_head(inputs, part)
        looks_at_elements = not inputs.is_handed_over and not is_whole and part.micro_batches > 1
        is_verified, is_again = kind is not None and kind.is_due and m > 1, False

        while True:
            losses = self.losses_of_part(inputs, part, call, is_verified) if is_last else None
            reduction = self.replicas.reduction.begin() if self.replicas.sums_gradients else None
            run = self._run_row(
                inputs, schedule, mailbox, part.seed, reduction,
                losses=losses,
                keep_outputs=is_last and (is_verified or call.return_outputs),
                look_at_elements=(kind is None or kind.look_at_elements) and looks_at_elements,
                first_micro_batch=part.first,
            )  # fmt: skip
            (one,) = run.mini_batches.values()
            leaves = (*gradients.trained.values(), *(each.tensor for each in one.trained))
            has_hooks, outputs = any(map(has_gradient_hooks, leaves)), list[Any]()
            report = StepReport(has_hooks, self._loss_scale(call.scaler))
            if one.loss is not None:
                self.refuse_strange_leaves(one.loss)
                if is_whole and part.replica:
                    drop_gradients_of_loss(one)
                report.loss = loss_of_replica(one.loss.losses)
            if one.loss is not None and kind is not None:
                # The micro-batches of all replicas add up to the loss, which is not verified here.
                is_compared = is_verified and not (self.replicas.count > 1 and one.loss.bound.is_weighed)
                report.evidence, outputs = one.loss.evidence(kind, is_compared, call.return_outputs, run.log)
                losses = one.loss.losses
                report.evidence.shares = [losses.share(i) * losses.scale for i in range(one.micro_batches)]
                self._note_step(run, schedule)
            if one.loss is None or self.replicas.count > 1:
                report.evidence.weights_of_elements = dict(one.loss_weighting.gradients)
            gradients.give_rest(one, report)
            reports: list[list[StepReport]] = self.group.everybody(report, "the end of the step")
            gradients.finish_sum(one, reports)
            verdict = LossVerdict([[each.evidence for each in row] for row in reports], last, part.firsts)
            if is_again or not verdict.is_unsure:
                break
            is_verified, is_again = is_last and m > 1, True  # nothing has changed yet: repeat with verification
            mailbox.settle()
        verdict.check(kind, m, self.group.replica)
        check_scales(reports)
        of_last = [of_replica for row in reports if (of_replica := row[last].loss) is not None]
        loss, divisor = self.replicas.loss_of_union(of_last, part, "batch" if is_whole else call.reduction)

        exchange.sum_gradients(one)
        more = one.take_state(self._from_last(inputs, [] if one.loss is None else one.loss.other_results()))
        output = None
        if one.loss is not None and call.return_outputs:
            output = one.loss.output(None if inputs.is_handed_over else outputs)
        if call.return_outputs and to_all:
            output = self._on_all(output, last)
        mailbox.settle()
        gradients.commit(one, reports, divisor)
        if self.group.replica == 0:
            one.commit_buffers()
            exchange.spread_changes()
        if self.replicas.count > 1 and part.changes_buffers:
            share_buffers(self.group, exchange.tensors, self.changed_here(inputs))
        with torch.no_grad():
            self.write_back(inputs, more)
        return loss.to(self.group.device), output

    def begin(
        self, inputs: RankInputs, gradients: RankGradients, reduction: str, is_last: bool, in_stream: bool = False
    ) -> ReplicaPart:
        """Exchanges messages with the other replicas about a step, or the first mini-batch of a graph in a stream."""
        replicas, update = self.replicas, inputs.union.update
        if replicas.count > 1 and update is not None:
            what = f"forward changes {update.names[0]!r} once for all samples of a step"
            raise LossError(f"{what}, and replicas of the pipe do not gather them: train with one replica")
        start = self.start_of(inputs, reduction, gradients.parameters, in_stream)
        start = start if is_last and not inputs.takes_all(reduction) else replace(start, known=None)
        part = replicas.begin(start, () if inputs.is_handed_over else inputs.bound.combinations, in_stream)
        assert part is not None
        if replicas.count > 1 and start.is_synced:
            replicas.prepare_sum(gradients.parameters)
        if part.may_differ:
            replicas.check_weights(gradients.trained)
        return part

    def start_of(
        self, inputs: RankInputs, reduction: str, parameters: Mapping[StageParameter, torch.Tensor], in_stream: bool
    ) -> ReplicaStart:
        """Returns this rank's message to the other replicas about a mini-batch. `parameters`: in the reduction."""
        seed = inputs.seed if any(program.is_random for program in inputs.programs) else None
        is_synced, changes_buffers = self.replicas.is_synced or in_stream, bool(self.changed_here(inputs))
        is_joint, has_head = inputs.is_joint(reduction), inputs.bound.head is not None
        joint = "" if inputs.is_handed_over else str((has_head, inputs.bound.out_dims if is_joint else None))
        own = digest(parameters), changes_buffers, inputs.known, self.replicas.may_differ, joint
        return ReplicaStart(inputs.batch, len(inputs.samples), seed, is_synced, reduction, *own)

    def with_head(self, inputs: RankInputs, part: ReplicaPart) -> tuple[RankInputs, ReplicaPart]:
        """Adds values that samples of all replicas share to the inputs, and known pieces, which may depend on them."""
        bound, leader = inputs.bounds[0], inputs.bounds[0].routes.placement[0]
        if bound.head is None or self.replicas.count == 1 or inputs.is_handed_over:
            return inputs, part
        leaves, known = self.head_of(bound, inputs.leaves, part) if self.group.rank == leader else (inputs.leaves, None)
        return replace(inputs, leaves=leaves), replace(part, known=self._on_all(known, leader))

    def head_of(self, bound: RankProgram, leaves: Sequence[Any], part: ReplicaPart) -> tuple[Sequence[Any], Any]:
        """Returns the inputs with values that samples of all replicas share, and known pieces. For leaders."""
        if bound.head is None or self.replicas.count == 1:
            return leaves, part.known
        ways = [(dim, f"the input {place}") for place, dim in enumerate(bound.in_dims)]
        (union,) = self.replicas.union_of(part, leaves, ways)
        known = bound.known_pieces and bound.known_pieces(union, part.batch)
        known = map_tensor_leaves(lambda t: t.detach().cpu(), known)
        return [*leaves, *bound.head(union, part.batch).values()], known

    def _loss_scale(self, scaler: torch.amp.GradScaler | None) -> float | None:
        if scaler is None:
            return None
        scaler.scale(torch.zeros((), device=self.group.device))  # the first call initializes a scaler
        return float(scaler.get_scale())

    def changed_here(self, inputs: RankInputs) -> list[str]:
        changed = dict.fromkeys(name for program in inputs.programs for name in program.changes)
        return [name for name in changed if self.group.rank in inputs.union.held.holders(name)]

    def losses_of_part(
        self, inputs: RankInputs, part: ReplicaPart, call: LossCall, is_verified: bool
    ) -> MicroBatchLosses:
        known = map_tensor_leaves(lambda t: t.to(self.group.device), dict(part.known or {}))
        losses = self.losses_of(inputs, call, is_verified, known)
        losses.portion, losses.unit = part.portions[part.replica], self.replicas.unit(part)
        losses.gather = functools.partial(self.replicas.gather, part, inputs) if self.replicas.count > 1 else None
        return losses

    def refuse_strange_leaves(self, stage: LossStage) -> None:
        """Refuses a loss that reads parameters of the model: other ranks may hold them."""
        names = {id(p): name for name, p in self.model.named_parameters()} if self.group.size > 1 else {}
        if name := next((names[key] for key in stage.own if key in names), None):
            raise LossError(
                f"loss_fn reads the parameter {name!r} of the model, which another rank may hold; let forward return "
                "what the loss needs of it, a penalty say"
            )

    def _from_last(self, inputs: RankInputs, values: Sequence[Any]) -> Any:
        is_needed = any(program.written_inputs or program.left for program in inputs.programs)
        is_needed |= inputs.union.update is not None
        return self._on_all(list(values), inputs.union.last) if is_needed else []

    def _on_all(self, value: Any, source: int) -> Any:
        at_home = map_tensor_leaves(lambda t: t.detach().cpu(), value)
        result = self.group.connection.broadcast(at_home, source, "the outputs")
        return value if self.group.rank == source else map_tensor_leaves(lambda t: t.to(self.group.device), result)


Reports = Sequence[Sequence[StepReport]]  # by replica and rank


class RankGradients:
    def __init__(self, engine: RankEngine, inputs: RankInputs):
        self._engine, self._group, self._replicas = engine, engine.group, engine.replicas
        held, rank, tensors = inputs.union.held, engine.group.rank, ModelTensors(engine.model, inputs.constants)
        own = [(name, j) for j, at, names in reversed(held.stages) if at == rank for name in names]
        changed = {name for program in inputs.programs for name in program.changes}
        names = dict.fromkeys((*inputs.union.transfers.stages_of, *(name for name, _ in own)))
        tensors_here = {name: tensors.get(name) for name in names if rank in held.holders(name) and name not in changed}
        # By name, the tensors that this rank holds and trains.
        self.trained = {name: tensor for name, tensor in tensors_here.items() if tensor.requires_grad}
        # By stage, the parameters in the reduction: the same in each step, independent of its graph.
        self.parameters = engine.replicas.reducible({(n, j): self.trained[n] for n, j in own if n in self.trained})
        self._apart: dict[StageParameter, torch.Tensor] = {}  # sparse gradients of parameters in the reduction
        self._earlier: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and sums over replicas of `.grad`

    def give_rest(self, one: MiniBatch, report: StepReport) -> None:
        """Gives the reduction the remaining gradients of the row, and reports the gradients that it does not sum."""
        if not self._replicas.sums_gradients:
            return
        rest = {(name, j): totals.sums.pop(name) for j, totals in enumerate(one.totals) for name in [*totals.sums]}
        report.gradients = self._replicas.reduction.give_rest(rest)
        report.loss_parameters = len(parameters_of_loss(one))
        for name, j in report.gradients.late:
            one.totals[j].sums[name] = rest.pop((name, j))
        self._apart = rest

    def finish_sum(self, one: MiniBatch, reports: Reports) -> None:
        """Replaces the gradients of stages by their sums over replicas, except late ones."""
        if not self._replicas.sums_gradients:
            return
        of_rank = [of_replica[self._group.rank].gradients for of_replica in reports]
        for (name, j), total in self._replicas.finish_sum(self._apart, of_rank).items():
            one.totals[j].sums[name] = total
        self._wait_for_devices()

    def _wait_for_devices(self) -> None:
        if self._group.any_device_sums:  # if a device hangs for some ranks, none commits the step
            self._group.everybody(None, WAITED_FOR)

    def _sum_earlier(self, one: MiniBatch) -> None:
        """Sums the gradients in `.grad`, of calls within `no_sync()`, over replicas."""
        keys = {name: (name, j) for name, j in self.parameters}
        leaves = {keys.get(name, (name, 0)): parameter for name, parameter in self.trained.items()}
        leaves |= {("", k): leaf for k, (leaf, *_) in enumerate(parameters_of_loss(one))}
        replicas = self._replicas
        earlier = {key: leaf.grad / replicas.count for key, leaf in leaves.items() if leaf.grad is not None}
        reports = self._group.replicas.all_gather(replicas.reduction.begin().give_rest(earlier), WAITED_FOR)
        self._earlier = [(leaves[key], value) for key, value in replicas.finish_sum(earlier, reports).items()]
        self._wait_for_devices()

    def _sum_late(self, one: MiniBatch, reports: Reports) -> dict[str, torch.Tensor]:
        """Returns, by name, sums over replicas of late gradients; also replaces gradients of loss_fn's parameters."""
        everybody = [report for of_replica in reports for report in of_replica]
        if not any(report.gradients.late or report.loss_parameters for report in everybody):
            return {}
        late = {key for report in reports[self._group.replica] for key in report.gradients.late}
        sums: dict[Any, torch.Tensor] = {}
        for name, j in sorted(late, key=lambda key: key[1]):
            gradient = one.totals[j].sums.pop(name, None)
            if gradient is not None and name in self.trained:
                sums[name] = add_gradient(sums.get(name), gradient)
        return self._replicas.sum_of_loss(one, sums)

    def commit(self, one: MiniBatch, reports: Reports, divisor: Any) -> None:
        """Adds the gradients of the step to `.grad`. If gradients have hooks, which may fail, all ranks wait."""
        replicas = self._replicas
        if replicas.sums_gradients and replicas.has_unsynced:
            self._sum_earlier(one)
        any_hooks = any(report.has_hooks for of_replica in reports for report in of_replica)
        late = self._sum_late(one, reports) if replicas.sums_gradients else {}
        # The next sum over replicas divides `.grad` by their count.
        scale = replicas.count if replicas.count > 1 and not replicas.is_synced else 1
        is_scaled = reports[0][0].scale is not None  # by a gradient scaler; equal on all ranks (`check_scales`)
        extra = [] if one.loss is None else [leaf for leaf, *_ in one.loss.own.values()]
        leaves = [*self.trained.values(), *(each.tensor for each in one.trained), *extra]
        names = {id(leaf): name for name, leaf in self.trained.items()}
        shared = {*names, *(id(leaf) for leaf in extra if isinstance(leaf, nn.Parameter))}

        def finish(sums: GradientList) -> GradientList:
            for k, (leaf, gradient) in enumerate(zip(leaves, sums, strict=True)):
                more = late.pop(names.get(id(leaf), ""), None)
                gradient = more if gradient is None else gradient if more is None else gradient + more
                if gradient is not None:
                    gradient = divided(gradient, divisor)
                    sums[k] = gradient * scale if scale != 1 and id(leaf) in shared else gradient
            if is_scaled:
                self._spread_infinity([gradient for gradient in sums if gradient is not None])
            return sums

        (root,) = self._engine.commit(one, lambda _: None, [torch.zeros((), device="cpu")], extra, self.trained, finish)
        with gradient_rollback(leaves_below(root), is_certain=any_hooks):
            with torch.no_grad():
                for parameter, gradient in self._earlier:
                    if parameter.grad is None or parameter.grad.is_sparse or gradient.is_sparse:
                        parameter.grad = gradient
                    else:
                        parameter.grad.copy_(gradient)
            if leaves:
                root.backward()
            elif is_scaled:
                self._spread_infinity([])
            if any_hooks:
                self._group.everybody(None, "the hooks on gradients")
        replicas.has_unsynced = replicas.count > 1 and not replicas.is_synced

    def _spread_infinity(self, gradients: Sequence[torch.Tensor]) -> None:
        """Makes gradients on all ranks infinite if any rank has infinite ones, so that all scalers skip the update."""
        values = (one.coalesce().values() if one.is_sparse else one for one in gradients)
        finite = [torch.isfinite(one).all() for one in values]
        is_finite = bool(torch.stack([flag.cpu() for flag in finite]).all()) if finite else True
        if all(self._group.connection.all_gather(is_finite, "the gradients of the other ranks to be finite")):
            return
        for gradient in gradients:
            if gradient.is_sparse:
                gradient.mul_(math.inf)
            elif gradient.numel():
                gradient[(0,) * gradient.dim()] = math.inf
