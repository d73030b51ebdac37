"""The gradients of one step on one rank, from the stages to `.grad`.

    sums of stages ──▶ sums over replicas ──▶ sums over the stages of all ranks (tied weights) ──▶ divided ──▶ `.grad`

The second step is omitted with one replica, and within `no_sync()`; the next call that sums over replicas then first
sums the gradients in `.grad`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxpipe._torch.autograd import has_gradient_hooks, leaves_below
from fxpipe.distributed.gradient_reduction import WAITED_FOR, GradientReduction, StageParameter
from fxpipe.distributed.held_tensors import RankProgram, gradient_of
from fxpipe.distributed.rank_group import RankGroup
from fxpipe.distributed.rank_step import RankStep
from fxpipe.distributed.replicas import GradientReport, Replicas, StepReport
from fxpipe.rewriting.program import Program
from fxpipe.runtime.bound_program import ModelTensors
from fxpipe.runtime.commit import GradientList, attach_commit, gradient_rollback
from fxpipe.runtime.engine import divided
from fxpipe.runtime.step import Step

Reports = Sequence[Sequence[StepReport]]  # by replica and rank


class RankGradients:
    """The gradients of one step on this rank."""

    def __init__(
        self,
        program: RankProgram,
        tensors: ModelTensors,
        programs: Sequence[Program],
        group: RankGroup,
        replicas: Replicas,
    ):
        self._held, self._transfers, self._tensors, self._programs = program.held, program.transfers, tensors, programs
        self._group, self._replicas = group, replicas
        self.trained = self._trained()
        own = program.held.used_by_stages(group.rank)
        # By stage, the parameters in the reduction: the same in each step, independent of its graph.
        self.parameters = replicas.reducible({(n, j): self.trained[n] for n, j in own if n in self.trained})
        self._reduction: GradientReduction | None = None
        self._sums: dict[StageParameter, torch.Tensor] = {}
        self._late: set[StageParameter] = set()  # gradients summed after the step
        self._mixed: set[StageParameter] = set()  # gradients that are sparse on some replicas and dense on others
        self._earlier: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and sums over replicas of `.grad`

    def _trained(self) -> dict[str, torch.Tensor]:
        """Returns, by name, the tensors that this rank holds and trains."""
        rank, held, tensors = self._group.rank, self._held, self._tensors
        names = dict.fromkeys((*self._transfers.stages_of, *(name for name, _ in held.used_by_stages(rank))))
        changed = {name for program in self._programs for name in program.changes}
        own = {name: tensors.get(name) for name in names if rank in held.holders(name) and name not in changed}
        return {name: tensor for name, tensor in own.items() if tensor.requires_grad}

    def have_hooks(self, step: RankStep) -> bool:
        leaves = [*self.trained.values(), *(one.tensor for one in step.trained)]
        return any(map(has_gradient_hooks, leaves))

    # -- sums over replicas ------------------------------------------------------------------------------------------

    def open_sum(self) -> GradientReduction | None:
        """Begins to sum gradients over replicas while the row runs; returns None if they are not summed."""
        self._reduction = self._replicas.open_sum() if self._replicas.sums_gradients else None
        return self._reduction

    def give_rest(self, step: RankStep, report: StepReport) -> None:
        """Gives the reduction the remaining gradients of the row, and reports the gradients that it does not sum."""
        if self._reduction is None:
            return
        reduction = self._reduction
        left = {(name, j): g for j, totals in enumerate(step.totals) for name, g in totals.sums.items()}
        report.gradients = GradientReport.of(left, self.parameters, reduction.completed)
        report.loss_parameters = len(parameters_of_loss(step))
        summed = [key for key, gradient in left.items() if reduction.has(key) and not gradient.is_sparse]
        reduction.give_rest({(name, j): step.totals[j].sums.pop(name) for name, j in summed})

    def finish_sum(self) -> None:
        if self._reduction is not None:
            self._sums = self._reduction.finish()
            self._wait_for_devices()

    def _wait_for_devices(self) -> None:
        if self._group.any_device_sums:  # if a device hangs for some ranks, none commits the step
            self._group.everybody(None, WAITED_FOR)

    def sum_over_replicas(self, step: RankStep, reports: Reports) -> None:
        """Replaces gradients with their sums over replicas."""
        if self._reduction is None:
            return
        by_rank = [[one.gradients for one in of_rank] for of_rank in zip(*reports, strict=True)]
        self._mixed = set[StageParameter]().union(*map(mixed_gradients, by_rank))
        of_rank = by_rank[self._group.rank]
        own = of_rank[self._group.replica].sparse & self._mixed
        sparse = {(name, j): step.totals[j].sums.pop(name) for name, j in own}
        if mixed_gradients(of_rank):
            sparse = self._replicas.sum_late(sparse)
        for (name, j), value in self._sums.items():
            if not all((name, j) in one.missing for one in of_rank):
                step.totals[j].sums[name] = value + sparse[name, j] if (name, j) in sparse else value
        self._replicas.note_unreducible(key for one in of_rank for key in one.sparse)
        self._sums = {}
        if self._replicas.has_unsynced:
            self._sum_earlier(step)

    def _sum_earlier(self, step: RankStep) -> None:
        """Sums the gradients in `.grad`, of calls within `no_sync()`, over replicas."""
        keys = {name: (name, j) for name, j in self.parameters}
        leaves = {keys.get(name, (name, 0)): parameter for name, parameter in self.trained.items()}
        leaves |= {("", k): leaf for k, (leaf, *_) in enumerate(parameters_of_loss(step))}
        count = self._replicas.count
        earlier = {key: leaf.grad / count for key, leaf in leaves.items() if leaf.grad is not None}
        report = GradientReport.of(earlier, self.parameters)
        sums = self._replicas.sum_complete(earlier, self._group.replicas.all_gather(report, WAITED_FOR))
        self._earlier = [(leaves[key], value) for key, value in sums.items()]
        self._wait_for_devices()

    def sum_late(
        self, step: RankStep, reports: Reports, others: Mapping[StageParameter, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns, by name, sums over replicas of late gradients; also replaces gradients of loss_fn's parameters."""
        everybody = [report for of_replica in reports for report in of_replica]
        if not any(report.gradients.late or report.loss_parameters for report in everybody):
            return {}
        late = {key for report in reports[self._group.replica] for key in report.gradients.late} - self._mixed
        self._late = late
        gradients: dict[Any, torch.Tensor | None] = {}
        for name in self.trained:
            stages = [j for j in self._transfers.stages_of.get(name, ()) if (name, j) in late]
            gradients[name] = gradient_of(name, stages, step, others)
        own = parameters_of_loss(step)
        gradients |= {k: gradient for k, (_, gradient, _) in enumerate(own)}
        sums = self._replicas.sum_late({key: value for key, value in gradients.items() if value is not None})
        for k, (leaf, _, count) in enumerate(own):
            step.loss.own[id(leaf)] = (leaf, sums[k], count)  # type: ignore[union-attr]
        return {key: value for key, value in sums.items() if isinstance(key, str)}

    # -- the end -----------------------------------------------------------------------------------------------------

    def commit(
        self, step: RankStep, reports: Reports, others: Mapping[StageParameter, torch.Tensor], divisor: Any
    ) -> None:
        """Adds the gradients of the step to `.grad`. If gradients have hooks, which may fail, all ranks wait."""
        replicas = self._replicas
        any_hooks = any(report.has_hooks for of_replica in reports for report in of_replica)
        late = self.sum_late(step, reports, others) if replicas.sums_gradients else {}
        # The next sum over replicas divides `.grad` by their count.
        scale = replicas.count if replicas.count > 1 and not replicas.is_synced else 1
        is_scaled = reports[0][0].scale is not None  # by a gradient scaler; equal on all ranks (`check_scales`)
        extra = [] if step.loss is None else [leaf for leaf, *_ in step.loss.own.values()]

        def finished(gradient: torch.Tensor | None, is_shared: bool) -> torch.Tensor | None:
            if gradient is None:
                return None
            if divisor is not None:
                gradient = divided(gradient, divisor)
            return gradient * scale if is_shared and scale != 1 else gradient

        def finish(_: object) -> GradientList:
            sums: GradientList = []
            for name in self.trained:
                stages = [j for j in self._transfers.stages_of.get(name, ()) if (name, j) not in self._late]
                gradient = gradient_of(name, stages, step, others)
                sums.append(finished(_sum(gradient, late.pop(name, None)), is_shared=True))
            sums += [finished(step.exchange.input_gradients(one), is_shared=False) for one in step.trained]
            if step.loss is not None:
                own = [(leaf, step.loss.own.pop(id(leaf))[1]) for leaf in extra]
                sums += [finished(gradient, isinstance(leaf, nn.Parameter)) for leaf, gradient in own]
            if is_scaled:
                self._spread_infinity([gradient for gradient in sums if gradient is not None])
            return sums

        leaves = [*self.trained.values(), *(one.tensor for one in step.trained), *extra]
        if leaves:
            (root,) = attach_commit(step.transport.on_step_streams(finish), [torch.zeros((), device="cpu")], leaves)
            with gradient_rollback(leaves_below(root), is_certain=any_hooks):
                _write_gradients(self._earlier)
                root.backward()
                if any_hooks:
                    self._wait_for_hooks()
        else:
            if is_scaled:
                self._spread_infinity([])
            if any_hooks:
                self._wait_for_hooks()
        replicas.has_unsynced = replicas.count > 1 and not replicas.is_synced

    def _spread_infinity(self, gradients: Sequence[torch.Tensor]) -> None:
        """Makes gradients on all ranks infinite if any rank has infinite ones, so that all scalers skip the update."""
        finite = [torch.isfinite(_values(gradient)).all() for gradient in gradients]
        is_finite = bool(torch.stack([flag.cpu() for flag in finite]).all()) if finite else True
        if all(self._group.connection.all_gather(is_finite, "the gradients of the other ranks to be finite")):
            return
        for gradient in gradients:
            if gradient.is_sparse:
                gradient.mul_(math.inf)
            elif gradient.numel():
                gradient[(0,) * gradient.dim()] = math.inf

    def _wait_for_hooks(self) -> None:
        self._group.everybody(None, "the hooks on gradients")


def mixed_gradients(reports: Sequence[GradientReport]) -> set[StageParameter]:
    """Returns the gradients of a rank that are sparse on some replicas and dense on others."""
    sparse = {key for one in reports for key in one.sparse}
    return {key for key in sparse if not all(key in one.missing for one in reports)}


def parameters_of_loss(step: Step) -> list[tuple[nn.Parameter, torch.Tensor, int]]:
    """Returns the parameters that loss_fn uses, with the sums and counts of their gradients."""
    own = [] if step.loss is None else step.loss.own.values()
    return [(leaf, gradient, count) for leaf, gradient, count in own if isinstance(leaf, nn.Parameter)]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a gradient: the stored elements if it is sparse."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    return second if first is None else first if second is None else first + second


@torch.no_grad()
def _write_gradients(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for parameter, gradient in pairs:
        if parameter.grad is None or parameter.grad.is_sparse or gradient.is_sparse:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)
