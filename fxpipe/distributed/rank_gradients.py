"""The gradients of one step on one rank, from the stages to `.grad`.

    sums of stages ──▶ sums over replicas ──▶ sums over the stages of all ranks (tied weights) ──▶ divided ──▶ `.grad`

The second step is omitted with one replica, and within `no_sync()`; the next call that sums over replicas then first
sums the gradients in `.grad`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fxpipe._torch.autograd import leaves_below
from fxpipe.distributed.device_transfers import WAITED_FOR
from fxpipe.distributed.held_tensors import RankProgram
from fxpipe.distributed.rank_step import RankStep
from fxpipe.distributed.replicas import GradientReduction, Replicas, StageParameter, StepReport
from fxpipe.rewriting.program import Program
from fxpipe.runtime.bound_program import ModelTensors
from fxpipe.runtime.commit import GradientList, gradient_rollback
from fxpipe.runtime.engine import Engine, divided
from fxpipe.runtime.step import Step

Reports = Sequence[Sequence[StepReport]]  # by replica and rank


class RankGradients:
    """The gradients of one step on this rank."""

    def __init__(self, program: RankProgram, tensors: ModelTensors, programs: Sequence[Program], replicas: Replicas):
        self._group, self._replicas = replicas.group, replicas
        held, rank = program.held, replicas.group.rank
        own = [(name, j) for j, at, names in reversed(held.stages) if at == rank for name in names]
        changed = {name for one in programs for name in one.changes}
        names = dict.fromkeys((*program.transfers.stages_of, *(name for name, _ in own)))
        tensors_here = {name: tensors.get(name) for name in names if rank in held.holders(name) and name not in changed}
        # By name, the tensors that this rank holds and trains.
        self.trained = {name: tensor for name, tensor in tensors_here.items() if tensor.requires_grad}
        # By stage, the parameters in the reduction: the same in each step, independent of its graph.
        self.parameters = replicas.reducible({(n, j): self.trained[n] for n, j in own if n in self.trained})
        self._apart: dict[StageParameter, torch.Tensor] = {}  # sparse gradients of parameters in the reduction
        self._earlier: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and sums over replicas of `.grad`

    # -- sums over replicas ------------------------------------------------------------------------------------------

    def open_sum(self) -> GradientReduction | None:
        """Begins to sum gradients over replicas while the row runs; returns None if they are not summed."""
        return self._replicas.open_sum() if self._replicas.sums_gradients else None

    def give_rest(self, step: RankStep, report: StepReport) -> None:
        """Gives the reduction the remaining gradients of the row, and reports the gradients that it does not sum."""
        if not self._replicas.sums_gradients:
            return
        rest = {(name, j): totals.sums.pop(name) for j, totals in enumerate(step.totals) for name in [*totals.sums]}
        report.gradients = self._replicas.reduction.give_rest(rest)
        report.loss_parameters = len(parameters_of_loss(step))
        for name, j in report.gradients.late:
            step.totals[j].sums[name] = rest.pop((name, j))
        self._apart = rest

    def finish_sum(self, step: RankStep, reports: Reports) -> None:
        """Replaces the gradients of stages by their sums over replicas, except late ones."""
        if not self._replicas.sums_gradients:
            return
        of_rank = [of_replica[self._group.rank].gradients for of_replica in reports]
        for (name, j), total in self._replicas.finish_sum(self._apart, of_rank).items():
            step.totals[j].sums[name] = total
        self._wait_for_devices()

    def _wait_for_devices(self) -> None:
        if self._group.any_device_sums:  # if a device hangs for some ranks, none commits the step
            self._group.everybody(None, WAITED_FOR)

    def _sum_earlier(self, step: RankStep) -> None:
        """Sums the gradients in `.grad`, of calls within `no_sync()`, over replicas."""
        keys = {name: (name, j) for name, j in self.parameters}
        leaves = {keys.get(name, (name, 0)): parameter for name, parameter in self.trained.items()}
        leaves |= {("", k): leaf for k, (leaf, *_) in enumerate(parameters_of_loss(step))}
        replicas = self._replicas
        earlier = {key: leaf.grad / replicas.count for key, leaf in leaves.items() if leaf.grad is not None}
        reports = self._group.replicas.all_gather(replicas.open_sum().give_rest(earlier), WAITED_FOR)
        self._earlier = [(leaves[key], value) for key, value in replicas.finish_sum(earlier, reports).items()]
        self._wait_for_devices()

    def _sum_late(self, step: RankStep, reports: Reports) -> dict[str, torch.Tensor]:
        """Returns, by name, sums over replicas of late gradients; also replaces gradients of loss_fn's parameters."""
        everybody = [report for of_replica in reports for report in of_replica]
        if not any(report.gradients.late or report.loss_parameters for report in everybody):
            return {}
        late = {key for report in reports[self._group.replica] for key in report.gradients.late}
        sums: dict[Any, torch.Tensor] = {}
        for name, j in sorted(late, key=lambda key: key[1]):
            gradient = step.totals[j].sums.pop(name, None)
            if gradient is not None and name in self.trained:
                sums[name] = sums[name] + gradient if name in sums else gradient
        own = parameters_of_loss(step)
        sums = self._replicas.sum_apart(sums | {k: gradient for k, (_, gradient, _) in enumerate(own)})
        for k, (leaf, _, count) in enumerate(own):
            step.loss.own[id(leaf)] = (leaf, sums.pop(k), count)  # type: ignore[union-attr]
        return sums

    # -- the end -----------------------------------------------------------------------------------------------------

    def commit(self, engine: Engine, step: RankStep, reports: Reports, divisor: Any) -> None:
        """Adds the gradients of the step to `.grad`. If gradients have hooks, which may fail, all ranks wait."""
        replicas = self._replicas
        if replicas.sums_gradients and replicas.has_unsynced:
            self._sum_earlier(step)
        any_hooks = any(report.has_hooks for of_replica in reports for report in of_replica)
        late = self._sum_late(step, reports) if replicas.sums_gradients else {}
        # The next sum over replicas divides `.grad` by their count.
        scale = replicas.count if replicas.count > 1 and not replicas.is_synced else 1
        is_scaled = reports[0][0].scale is not None  # by a gradient scaler; equal on all ranks (`check_scales`)
        extra = [] if step.loss is None else [leaf for leaf, *_ in step.loss.own.values()]
        leaves = [*self.trained.values(), *(one.tensor for one in step.trained), *extra]
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

        (root,) = engine.commit(step, lambda _: None, [torch.zeros((), device="cpu")], extra, self.trained, finish)
        with gradient_rollback(leaves_below(root), is_certain=any_hooks):
            _write_gradients(self._earlier)
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


def parameters_of_loss(step: Step) -> list[tuple[nn.Parameter, torch.Tensor, int]]:
    """Returns the parameters that loss_fn uses, with the sums and counts of their gradients."""
    own = [] if step.loss is None else step.loss.own.values()
    return [(leaf, gradient, count) for leaf, gradient, count in own if isinstance(leaf, nn.Parameter)]


@torch.no_grad()
def _write_gradients(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for parameter, gradient in pairs:
        if parameter.grad is None or parameter.grad.is_sparse or gradient.is_sparse:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)
