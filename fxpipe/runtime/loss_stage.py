"""The loss of each micro-batch and the gradients of the outputs: a stage after the last one.

Random numbers in loss_fn (noise, dropout, sampled negatives) are drawn from torch's generators, as in a plain loop over
micro-batches. A stage whose kernels accept no other generator borrows one and restores it, so the locks of the
generators are held while loss_fn runs: first of the CPU's. The loss of the whole mini-batch draws other numbers and
cannot be compared; computing a loss twice shows whether it draws.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpipe._torch.autograd import gradients_of, leaves_below, suspend_hooks
from fxpipe._torch.thread_state import set_thread_state
from fxpipe.errors import LossError, UnequalOutputsError
from fxpipe.runtime import loss_checks
from fxpipe.runtime.bound_program import BoundProgram
from fxpipe.runtime.caller_context import CallerStateRunner
from fxpipe.runtime.commit import add_gradient
from fxpipe.runtime.exchange import Exchange
from fxpipe.runtime.losses import MicroBatchLosses
from fxpipe.runtime.step_inputs import combine, gather, tensor_requires_grad
from fxpipe.runtime.step_record import StepLog
from fxpipe.scheduling.replicas import replica_of
from fxpipe.utils import accelerator
from fxpipe.utils.accelerator import generator_lock
from fxpipe.utils.pytree import map_tensor_leaves

_CPU = torch.device("cpu")
_own_lock = threading.RLock()  # held during the backward into leaves of loss functions


@dataclass(slots=True)
class LossStage:
    """Runs on the worker of the last stage, right after its F."""

    bounds: Sequence[BoundProgram]  # by micro-batch
    exchange: Exchange
    losses: MicroBatchLosses
    loss_weighting: loss_checks.LossWeightingCheck
    keep_outputs: bool
    shares: Sequence[float]  # by micro-batch: share of the samples
    outputs: dict[int, list[Any]] = field(default_factory=dict)  # by micro-batch, if they are kept
    gradients: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)  # for outputs, if they are verified
    others: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # by micro-batch: results that are not outputs
    # By identity, for leaves that loss_fn uses: tensor, sum and number of gradients.
    own: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = field(default_factory=dict)
    devices: Sequence[torch.device] = field(init=False)  # by micro-batch: of its loss
    run_as_caller: CallerStateRunner = field(init=False)

    def __post_init__(self) -> None:
        self.run_as_caller = CallerStateRunner(self.bound.state)
        replicas = self.bound.stage_devices[-1]
        self.devices = [replicas[replica_of(i, len(replicas))] for i in range(len(self.bounds))]
        # The function refers to no step: the losses would keep it until the garbage collector ran.
        bring, home = self.exchange.transport.bring, self.bound.devices[-1]
        self.losses.bring = lambda x, device: bring(x, device or home) if isinstance(x, torch.Tensor) else x

    @property
    def bound(self) -> BoundProgram:
        """The program of the mini-batch, or of the first micro-batch."""
        return self.bounds[0]

    def _received(self, i: int) -> tuple[list[Any], list[int]]:
        """Takes outputs of a micro-batch as leaves of the loss's graph, kept as needed; says which require grad."""
        bound = self.bounds[i]
        links, user = bound.wiring.links[-1], len(bound.devices)
        outputs: list[Any] = []
        trained: list[int] = []
        for place, link in enumerate(links):
            received = self.exchange.take(user, link, i)
            output = self.losses.bring(received.value, None) if self.losses.takes_all else received.value
            if received.requires_grad:
                output = output.detach().requires_grad_()
                trained.append(place)
            outputs.append(output)
        if self.keep_outputs and not self.losses.takes_all:
            self.outputs[i] = [x.detach() if isinstance(x, torch.Tensor) else x for x in outputs]
        if bound.program.written_inputs or bound.program.left or bound.update is not None:
            values = {link.value: output for link, output in zip(links, outputs, strict=True)}
            others = (values[value] for value, *_ in bound.other_results)
            self.others[i] = [x.detach() if isinstance(x, torch.Tensor) else x for x in others]
        return outputs, trained

    def run(self, i: int) -> None:
        links = self.bounds[i].wiring.links[-1]
        outputs, trained = self._received(i)
        with generator_lock(_CPU), generator_lock(self.devices[i]):  # one loss at a time
            loss, begin = self.run_as_caller(self._loss, outputs, i)
        value, is_mean = self.losses.values[i], self.losses.returns_weights or self.losses.reduction == "mean"
        if value is not None and is_mean and self.loss_weighting.is_on:
            self.loss_weighting.values[i] = value
        gradients: Sequence[torch.Tensor | None] = [None] * len(trained)
        if loss.requires_grad:  # else it is a constant, for example of a micro-batch of padding
            gradients = self._go_back(loss, begin, [outputs[place] for place in trained], i)
            for place, gradient in zip(trained, gradients, strict=True):
                self.exchange.send_gradient(links[place], i, gradient)
        if self.losses.whole_target is not None:
            kept = self.gradients[i] = [None] * len(outputs)
            for place, gradient in zip(trained, gradients, strict=True):
                kept[place] = torch.zeros_like(outputs[place]) if gradient is None else gradient

    def _loss(self, outputs: Sequence[Any], i: int) -> tuple[torch.Tensor, torch.Tensor]:
        losses, bound = self.losses, self.bounds[i]
        if losses.is_handed_over or not bound.is_weighed:
            return losses(bound.output_of(outputs), i)
        return losses(self._share(outputs, i), i, lambda: bound.output_of(outputs))

    def _share(self, outputs: Sequence[Any], i: int) -> Any:
        """Returns the output of a micro-batch such that losses of all of them add up to the loss of the mini-batch."""
        # With `reduction="mean"` their mean does: a sum over samples counts once for each part of the batch.
        losses, bound = self.losses, self.bounds[i]
        weight, reduction = losses.shares[i] * losses.portion, losses.reduction
        known = map_tensor_leaves(lambda t: losses.bring(t, self.devices[i]), dict(losses.known))
        handed_out, combined = bound.handed_out(outputs), dict[int, Any]()
        for one in bound.combinations:
            if one.is_affine:
                value = one.share(handed_out, known, weight)
                value = value * weight if reduction == "sum" and weight != 1 else value
            else:
                value = one.of(handed_out)
                if weight != 1 and tensor_requires_grad(value):
                    raise LossError(
                        f"{one.where} needs all samples together, and required no gradient when the pipe was planned, "
                        "as parameters were frozen: make the pipe after you set requires_grad"
                    )
            combined[one.output] = value
        if reduction == "mean" and weight != 1:
            for place, how in enumerate(bound.out_dims[: bound.out_spec.num_leaves]):
                value = handed_out[place]
                if how == "sum" and isinstance(value, torch.Tensor) and value.is_floating_point():
                    handed_out[place] = value / weight
        return bound.output(handed_out, combined)

    def _go_back(
        self, loss: torch.Tensor, begin: torch.Tensor, outputs: Sequence[torch.Tensor], i: int
    ) -> Sequence[torch.Tensor | None]:
        """Computes the gradients of a micro-batch's outputs, and sums the gradients of other leaves."""
        received = {id(x) for x in outputs}
        own = [x for x in leaves_below(loss) if id(x) not in received]
        reductions = loss_checks.reductions_under(loss.grad_fn, loss.output_nr) if self.loss_weighting.is_on else []
        wanted = [*outputs, *[r.edge for r in reductions], *own]
        if own:
            # One replica at a time, in any mini-batch of a stream: all share the hooks and the graph above these
            # leaves. The graph is retained for the other micro-batches.
            with _own_lock, suspend_hooks(own):
                gradients = gradients_of(wanted, [loss], [begin], keep_graph=True)
            for leaf, gradient in zip(own, gradients[-len(own) :], strict=True):
                if gradient is not None:
                    _, total, count = self.own.get(id(leaf), (leaf, None, 0))
                    self.own[id(leaf)] = (leaf, add_gradient(total, gradient, count), count + 1)
        else:
            gradients = gradients_of(wanted, [loss], [begin])
        if reductions:
            self.loss_weighting.note("loss", i, reductions, gradients[len(outputs) : len(outputs) + len(reductions)])
        return gradients[: len(outputs)]

    def _at_home(self, values: list[Any]) -> list[Any]:
        """Moves values of a micro-batch to the device of the last stage's parameters."""
        return [self.losses.bring(value, None) for value in values]

    def evidence(
        self, history: loss_checks.LossHistory, is_verified: bool, is_asked: bool, log: StepLog
    ) -> tuple[loss_checks.LossEvidence, list[Any]]:
        """Returns a step's evidence (`is_verified`: from all outputs) and, if `is_asked`, its gathered outputs."""
        wrong, outputs = self.loss_weighting.difference(self.losses.share), list[Any]()
        is_verified = is_verified and self.keep_outputs
        try:
            if self.keep_outputs:
                rows = [self._at_home(self.outputs.pop(i)) for i in sorted(self.outputs)]
                outputs = self._gathered(rows, self._ways())
        except UnequalOutputsError:
            if is_asked:
                raise
            is_verified = False
        if is_verified:
            start, home = time.perf_counter(), self.bound.devices[-1]
            rows = [self._at_home(self.gradients.pop(i)) for i in sorted(self.gradients)]
            columns = zip(outputs, self._ways(), zip(*rows, strict=True), strict=True)
            generators = [] if home == _CPU else [accelerator.default_generator(home)]
            # In a stream other mini-batches may be computing losses.
            with (
                set_thread_state(self.bound.state),
                generator_lock(_CPU),
                generator_lock(home),
                accelerator.restore_generators(generators),
            ):
                gathered = [loss_checks.GatheredOutput(x, how, gradients) for x, (how, _), gradients in columns]
                history.can_verify = loss_checks.verify_loss(self.losses, gathered, self.bound.output_of)
            log.verifications.append(time.perf_counter() - start)
        can_verify, share = history.can_verify, self.losses.share
        wrong_means = self.loss_weighting.difference(share, means_only=can_verify is False) if wrong else None
        return loss_checks.LossEvidence(wrong, wrong_means, can_verify, is_verified), outputs

    def output(self, outputs: Sequence[Any] | None) -> Any:
        """Returns the output of the mini-batch, from its gathered `outputs`; None: of the caller's micro-batches."""
        if outputs is not None:
            return self.bound.output_of(outputs)
        return [bound.output_of(self._at_home(self.outputs.pop(i))) for i, bound in enumerate(self.bounds)]

    def other_results(self) -> list[list[torch.Tensor]]:
        """Returns what forward leaves in inputs and state: of the mini-batch, or of each of the caller's."""
        rows = [self._at_home(self.others.pop(i, [])) for i in range(len(self.bounds))]
        if self.losses.is_handed_over:
            return rows
        results = self._gathered(rows, [(how, what) for _, how, what in self.bound.other_results])
        if (update := self.bound.update) is not None:
            count = len(results) - len(update.combination.pieces)
            results[count:] = update.of(results[count:])
        return [results]

    def _gathered(self, rows: Sequence[Sequence[Any]], ways: Sequence[tuple[int | str | None, str]]) -> list[Any]:
        columns = zip(zip(*rows, strict=True), ways, strict=True)
        return [gather(parts, how, self.shares, what) for parts, (how, what) in columns]

    def _ways(self) -> list[tuple[int | str | None, str]]:
        """Returns how each link's output is gathered, and its name."""
        # Use the first of duplicates: an output may also be an input that forward writes to.
        ways = {value: (how, what) for value, how, what in reversed(self.bound.results)}
        return [ways[link.value] for link in self.bound.wiring.links[-1]]


@dataclass(slots=True)
class MiniBatchLossStage(LossStage):
    """Computes one loss of all outputs, on the worker that runs the last F: a joint tail, or `reduction="batch"`."""

    received: dict[int, tuple[list[Any], list[int]]] = field(default_factory=dict)  # by micro-batch, until the last
    kept: Any = None  # the output, if it is kept

    def run(self, i: int) -> None:
        self.received[i] = self._received(i)
        if len(self.received) < len(self.bounds):
            return
        rows = [self.received.pop(k) for k in range(len(self.bounds))]
        with generator_lock(_CPU), generator_lock(self.bound.devices[-1]):
            loss, begin = self.run_as_caller(self._loss_of_all, [outputs for outputs, _ in rows])
        if not loss.requires_grad:
            return
        places = [(k, place) for k, (_, trained) in enumerate(rows) for place in trained]
        gradients = self._go_back(loss, begin, [rows[k][0][place] for k, place in places], i)
        for (k, place), gradient in zip(places, gradients, strict=True):
            self.exchange.send_gradient(self.bounds[k].wiring.links[-1][place], k, gradient)

    def _loss_of_all(self, rows: Sequence[Sequence[Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        ways, losses, bound = self._ways(), self.losses, self.bound
        columns = zip(zip(*rows, strict=True), ways, strict=True)
        own, target = [combine(parts, how, self.shares, what) for parts, (how, what) in columns], losses.targets[0]
        union = losses.gather or (lambda *_: contextlib.nullcontext((own, target)))
        with union(own, ways, target) as (values, target_of_union):
            handed_out, computed, losses.targets = bound.handed_out(values), dict[str, Any](), [target_of_union]
            combined = {one.output: one.of(handed_out, computed) for one in bound.combinations}
            if self.keep_outputs:
                self.kept = map_tensor_leaves(torch.Tensor.detach, bound.output(bound.handed_out(own), combined))
            return losses(bound.output(handed_out, combined), 0)

    def output(self, outputs: Sequence[Any] | None) -> Any:
        return self.kept  # another run of the tail could draw other random numbers
