"""One mini-batch on its way through the stages: what each action does.

F  runs a stage, and keeps its autograd graph for B.
R  runs it again on what F was given, for a micro-batch whose graph was not kept.
B  goes back through that graph, in the worker; gradients of values go on to other stages, those of parameters are
   summed.

What stages hand each other is in `exchange`; what a stage does with it in `opened`. Whatever an action makes lives
until its last reader has taken it:

- `saved`       from F to R
- `pending`     from F or R to B
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fxpipe.errors import InternalError
from fxpipe.rewriting.functions import mixed, running
from fxpipe.rewriting.program import Stage
from fxpipe.runtime.assembly import Assembly, Tensors
from fxpipe.runtime.exchange import Exchange, Value
from fxpipe.runtime.failures import note
from fxpipe.runtime.fences import Fences
from fxpipe.runtime.loss_stage import LossStage
from fxpipe.runtime.losses import Losses
from fxpipe.runtime.microbatches import scatter
from fxpipe.runtime.opened import OpenStage, Pending, Ran
from fxpipe.scheduling.actions import Action, Kind


@dataclass(slots=True)
class Given:
    """What F was given, kept for R."""

    received: list[Value]
    buffers: dict[str, torch.Tensor]


class Step:
    """One mini-batch. `perform(action)` is all that whoever drives a row has to call, once `is_ready(action)`."""

    def __init__(
        self,
        assembly: Assembly,
        tensors: Tensors,
        leaves: Sequence[Any],
        weights: Sequence[float],
        seed: int,
        recomputed: frozenset[Action],
        losses: Losses | None = None,
        keep_outputs: bool = False,
    ):
        self.assembly, self.tensors = assembly, tensors
        self.weights, self.seed, self.recomputed = weights, seed, recomputed
        self.grad = assembly.state.grad
        wiring = assembly.wiring
        self.exchange = Exchange(assembly, scatter(leaves, assembly.in_dims, len(weights)))
        self.loss = None if losses is None else LossStage(assembly, self.exchange, losses, keep_outputs)
        self.opened = [
            OpenStage(stage, assembly.codes[j], wiring.links[j], assembly.devices[j], tensors, assembly.state)
            for j, stage in enumerate(self.stages)
        ]
        self.saved: dict[tuple[int, int], Given] = {}
        self.pending: dict[tuple[int, int], Pending] = {}
        # A worker's own stream is the default one; what the caller has queued on another must come first.
        self._streams = [torch.cuda.current_stream(d) if d.type == "cuda" else None for d in assembly.devices]
        self.failure: BaseException | None = None
        self.times: dict[Action, tuple[float, float]] = {}
        self._failing = threading.Lock()
        self._fences = Fences(wiring.before if losses is None else wiring.before_with_loss, len(weights))

    @property
    def stages(self) -> Sequence[Stage]:
        return self.assembly.program.stages

    @property
    def micro_batches(self) -> int:
        return len(self.weights)

    # -- for whoever drives a row --------------------------------------------------------------------------------------

    def is_ready(self, action: Action) -> bool:
        return self.failure is not None or self._fences.are_open(action)

    def wait(self, action: Action) -> None:
        """Returns when the action may start, or when the step has failed."""
        self._fences.wait(action)

    def fail(self, error: BaseException) -> None:
        """The first failure counts. All fences open, so that every row comes to its end."""
        with self._failing:
            if self.failure is None:
                self.failure = error
        self._fences.open_all()

    def perform(self, action: Action) -> None:
        """Does what the action says. An exception makes the step fail."""
        start = time.perf_counter()
        try:
            with torch.cuda.stream(self._streams[action.stage]):  # None: does nothing
                _DO[action.kind](self, action.stage, action.micro_batch)
        except BaseException as error:
            device = str(self.assembly.devices[action.stage])
            error.add_note(note(error, action, self.stages[action.stage], len(self.stages), device))
            self.fail(error)
            return
        self.times[action] = (start, time.perf_counter())
        self._fences.pass_on(action)

    # -- actions -----------------------------------------------------------------------------------------------------

    def forward(self, j: int, i: int) -> None:
        opened = self.opened[j]
        received = [self.exchange.take(j, link, i) for link in opened.links]
        buffers = dict(opened.buffers)
        if Action(Kind.RECOMPUTE, j, i) in self.recomputed:
            # Not under no_grad, where torch takes other kernels (LSTM): R must come to the same bits.
            with saved_tensors_hooks(_forget, _forgotten):
                ran = self._run(j, i, received, buffers)
            self.saved[j, i] = Given(received, buffers)
        else:
            ran = self._run(j, i, received, buffers)
            if self.grad:
                self.pending[j, i] = ran.pending
        opened.buffers.update(ran.buffers)
        self._send(j, i, ran.sent)
        if j == len(self.stages) - 1 and self.loss is not None:
            del received, ran  # what nobody saved need not live while the loss runs
            self.loss.run(i)

    def recompute(self, j: int, i: int) -> None:
        given = self.saved.pop((j, i))
        self.pending[j, i] = self._run(j, i, given.received, given.buffers).pending

    def _run(self, j: int, i: int, received: list[Value], buffers: dict[str, torch.Tensor]) -> Ran:
        running.seed, running.recomputes = mixed(self.seed, i), bool(self.recomputed)
        return self.opened[j].run(received, buffers, self.grad)

    def _send(self, j: int, i: int, sent: Sequence[Any]) -> None:
        for name, value in zip(self.stages[j].sends, sent, strict=True):
            self.exchange.send(j, name, i, value)

    def backward(self, j: int, i: int) -> None:
        pending = self.pending.pop((j, i))
        arrived = [self.exchange.take_gradient(j, name, i) for name, _ in pending.roots]
        found = self.opened[j].go_back(pending, arrived)
        for (link, _), gradient in zip(pending.leaves, found, strict=True):
            self.exchange.send_gradient(link, i, gradient)

    # -- the end of the step -----------------------------------------------------------------------------------------

    def is_changed(self, name: str) -> bool:
        """Does forward change this tensor of the model?"""
        return any(name in opened.buffers for opened in self.opened)

    @torch.no_grad()
    def commit_buffers(self) -> None:
        """Writes the buffers that forward has changed into the model."""
        for opened in self.opened:
            for name, value in opened.buffers.items():
                if name in opened.stage.assigns:
                    self.tensors.set(name, value)
                else:
                    self.tensors.get(name).copy_(value)

    def parameter_gradient(self, name: str) -> torch.Tensor | None:
        """Of all micro-batches, summed over stages in order; where the parameter is."""
        found = [opened.sums.pop(name) for opened in self.opened if name in opened.sums]
        if not found:
            return None
        home = self.tensors.get(name).device
        total = found[0].to(home)
        for gradient in found[1:]:
            total = total + gradient.to(home)
        return total


def _forget(tensor: torch.Tensor) -> None:
    """What a forward that will be recomputed would save for backward."""


def _forgotten(nothing: None) -> torch.Tensor:
    raise InternalError("backward of a forward that was to be recomputed")


_DO: dict[Kind, Callable[[Step, int, int], None]] = {
    Kind.FORWARD: Step.forward,
    Kind.RECOMPUTE: Step.recompute,
    Kind.BACKWARD: Step.backward,
}
