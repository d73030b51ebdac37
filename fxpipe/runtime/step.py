"""One mini-batch on its way through the stages: what each action does.

F  runs a stage on detached values, so that each (stage, micro-batch) has an autograd graph of its own.
R  runs it again on what F was given, for a micro-batch whose graph was not kept.
B  calls autograd for that graph, in the worker; gradients of values go on to other stages, those of parameters are
summed.

The tables below are filled by one worker and emptied by another, each entry behind a fence. Whatever an action makes
lives until its last reader has taken it:

- `values`      one entry for each reader: forward, from the maker to the user
- `gradients`   backward, from a user to the next earlier one or to the maker
- `saved`       from F to R
- `pending`     from F or R to B

The model itself is not touched before the step has ended well: parameters are read through detached views, a buffer
that forward changes is copied for each F.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree

from fxpipe.autograd import leaves_under
from fxpipe.errors import InternalError
from fxpipe.rewriting.functions import mixed, running
from fxpipe.rewriting.program import INPUT, Constant
from fxpipe.runtime.assembly import Assembly, Tensors
from fxpipe.runtime.commit import add_gradient
from fxpipe.runtime.failures import note
from fxpipe.runtime.losses import Losses
from fxpipe.runtime.microbatches import scatter
from fxpipe.runtime.wiring import Link
from fxpipe.scheduling.actions import Action, Kind
from fxpipe.thread_state import applied


@dataclass(slots=True)
class Value:
    """What one stage hands to another."""

    value: Any  # a tensor is detached
    requires_grad: bool


@dataclass(slots=True)
class Pending:
    """What B needs of the graph that F or R has made."""

    leaves: list[tuple[Link, torch.Tensor]] = field(default_factory=list)  # received values that require grad
    roots: list[tuple[str, GradientEdge]] = field(default_factory=list)  # where gradients enter


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
        self.assembly, self.tensors, self.losses = assembly, tensors, losses
        self.weights, self.seed, self.recomputed = weights, seed, recomputed
        self.keep_outputs = keep_outputs
        self.grad = assembly.state.grad
        self.inputs = scatter(leaves, assembly.in_dims, len(weights))
        self.places = {name: place for place, name in enumerate(assembly.program.inputs) if name is not None}
        self.values: dict[tuple[int, int, str, int], Value] = {}
        self.gradients: dict[tuple[int, str, int], torch.Tensor] = {}
        self.saved: dict[tuple[int, int], Given] = {}
        self.pending: dict[tuple[int, int], Pending] = {}
        self.outputs: dict[int, list[Any]] = {}
        self.sums: list[dict[str, torch.Tensor]] = [{} for _ in self.stages]
        self.counts: list[dict[str, int]] = [{} for _ in self.stages]
        self.loss_gradients: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of what else the loss hangs on
        self.views, self.constants, self.state = self._open_model()
        # A worker's own stream is the default one; what the caller has queued on another must come first.
        self._streams = [torch.cuda.current_stream(d) if d.type == "cuda" else None for d in assembly.devices]
        self.failure: BaseException | None = None
        self.times: dict[Action, tuple[float, float]] = {}
        self._failing = threading.Lock()
        wiring = assembly.wiring
        self._before = wiring.before if losses is None else wiring.before_with_loss
        self._fences = {fence: [threading.Event() for _ in weights] for fence in self._before}

    @property
    def stages(self) -> Sequence[Any]:
        return self.assembly.program.stages

    @property
    def micro_batches(self) -> int:
        return len(self.weights)

    def _open_model(
        self,
    ) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        """Views of parameters and constant buffers for each stage; the buffers that change."""
        views: list[dict[str, torch.Tensor]] = []
        constants: list[dict[str, torch.Tensor]] = []
        state: dict[str, torch.Tensor] = {}
        for stage, device in zip(self.stages, self.assembly.devices, strict=True):
            views.append({})
            constants.append({})
            for name in stage.attributes:
                tensor = self.tensors.get(name)
                moved = _on(tensor.detach(), device)
                if name in stage.changes or name in stage.assigns:
                    state[name] = moved.clone()  # the drop-in commits before R asks what F saw
                elif tensor.is_floating_point() or tensor.is_complex():
                    views[-1][name] = moved.requires_grad_(tensor.requires_grad and self.grad)
                else:
                    constants[-1][name] = moved
        return views, constants, state

    # -- fences ------------------------------------------------------------------------------------------------------

    def _fences_before(self, action: Action) -> list[threading.Event]:
        fences = self._before.get((action.kind, action.stage), ())
        return [self._fences[fence][action.micro_batch] for fence in fences]

    def is_ready(self, action: Action) -> bool:
        return self.failure is not None or all(fence.is_set() for fence in self._fences_before(action))

    def wait(self, action: Action) -> None:
        """Returns when the action may start, or when the step has failed."""
        for fence in self._fences_before(action):
            fence.wait()

    def fail(self, error: BaseException) -> None:
        """The first failure counts. All fences open, so that every row comes to its end."""
        with self._failing:
            if self.failure is None:
                self.failure = error
        for fences in self._fences.values():
            for fence in fences:
                fence.set()

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
        fences = self._fences.get((action.kind, action.stage))
        if fences is not None:
            fences[action.micro_batch].set()

    # -- forward -----------------------------------------------------------------------------------------------------

    def take(self, user: int, link: Link, i: int) -> Value:
        """What `user` receives, on its device; nobody else will ask for it."""
        source, name = link.value.source, link.value.name
        if source == INPUT:
            given = self.inputs[i][self.places[name]]
            value = Value(given.detach(), given.requires_grad and self.grad)
        else:
            value = self.values.pop((user, source, name, i))
        if isinstance(value.value, torch.Tensor):
            device = self.assembly.devices[min(user, len(self.stages) - 1)]
            value.value = _on(value.value, device)
        return value

    def forward(self, j: int, i: int) -> None:
        stage = self.stages[j]
        received = [self.take(j, link, i) for link in self.assembly.wiring.links[j]]
        buffers = {name: self.state[name] for name in stage.attributes if name in self.state}
        if Action(Kind.RECOMPUTE, j, i) in self.recomputed:
            # Not under no_grad, where torch takes other kernels (LSTM): R must come to the same bits.
            with saved_tensors_hooks(_forget, _forgotten):
                sent, after, _ = self._run(j, i, received, buffers, self.grad)
            self.saved[j, i] = Given(received, buffers)
        else:
            sent, after, pending = self._run(j, i, received, buffers, self.grad)
            if self.grad:
                self.pending[j, i] = pending
        self.state.update(after)
        for name, value in zip(stage.sends, sent, strict=True):
            bare = value.detach() if isinstance(value, torch.Tensor) else value
            for user in self.assembly.wiring.users[j, name]:
                self.values[user, j, name, i] = Value(bare, _requires_grad(value))
        if j == len(self.stages) - 1 and self.losses is not None:
            self._loss(i)

    def _run(
        self, j: int, i: int, received: list[Value], buffers: dict[str, torch.Tensor], grad: bool
    ) -> tuple[list[Any], dict[str, torch.Tensor], Pending]:
        """Runs the stage. Returns what it sends, the buffers after it, and what B needs."""
        stage, pending = self.stages[j], Pending()
        copies = {name: tensor.clone() for name, tensor in buffers.items()}
        views, constants = self.views[j], self.constants[j]
        attributes = [views[a] if a in views else copies[a] if a in copies else constants[a] for a in stage.attributes]
        running.seed, running.recomputes = mixed(self.seed, i), bool(self.recomputed)
        with applied(self.assembly.state), torch.set_grad_enabled(grad):
            uses = [
                self._enter(link, value, pending) if isinstance(value.value, torch.Tensor) else value.value
                for link, value in zip(self.assembly.wiring.links[j], received, strict=True)
            ]
            # Not `stage.run(...)`: fx's own call gives up the traceback of a failing builtin, and with it the node.
            made = stage.run.forward(*attributes, *uses)
        sent, assigned = list(made[: len(stage.sends)]), made[len(stage.sends) :]
        after = copies | {name: value.detach() for name, value in zip(stage.assigns, assigned, strict=True)}
        if grad:
            pending.roots += [
                (name, get_gradient_edge(x)) for name, x in zip(stage.sends, sent, strict=True) if _requires_grad(x)
            ]
        return sent, after, pending

    def _enter(self, link: Link, value: Value, pending: Pending) -> torch.Tensor:
        """A received tensor as the stage uses it: a leaf of the graph that is about to be made."""
        leaf: torch.Tensor = value.value.detach()
        if not (value.requires_grad and torch.is_grad_enabled()):
            return leaf
        pending.leaves.append((link, leaf.requires_grad_()))
        if link.later is None:
            return leaf
        use = leaf.view_as(leaf)  # a later user's gradient enters here
        pending.roots.append((link.value.name, get_gradient_edge(use)))
        return use

    def _loss(self, i: int) -> None:
        """The loss of a micro-batch and the gradients of the outputs: a stage of its own, behind the last."""
        assert self.losses is not None
        links = self.assembly.wiring.links[-1]
        values = [self.take(len(self.stages), link, i) for link in links]
        leaves = [v.value.detach().requires_grad_() if v.requires_grad else v.value for v in values]
        if self.keep_outputs:
            self.outputs[i] = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
        with applied(self.assembly.state):
            loss = self.losses(self.output_tree(leaves), i)
        wanted = [(link, x) for link, x, v in zip(links, leaves, values, strict=True) if v.requires_grad]
        received = {id(x) for _, x in wanted}
        own = [x for x in leaves_under(loss) if id(x) not in received]
        found = torch.autograd.grad(loss, [*(x for _, x in wanted), *own], allow_unused=True)
        for (link, _), gradient in zip(wanted, found, strict=False):
            self._send_gradient(link, i, gradient)
        for leaf, gradient in zip(own, found[len(wanted) :], strict=True):
            if gradient is not None:
                have = self.loss_gradients.get(id(leaf))
                self.loss_gradients[id(leaf)] = (leaf, gradient if have is None else have[1] + gradient)

    def output_tree(self, values: Sequence[Any]) -> Any:
        """The model's output, with `values` for what the outputs' links receive."""
        by_name = {link.value: x for link, x in zip(self.assembly.wiring.links[-1], values, strict=True)}
        leaves = [o.value if isinstance(o, Constant) else by_name[o] for o in self.assembly.program.outputs]
        return pytree.tree_unflatten(leaves, self.assembly.out_spec)

    # -- backward ----------------------------------------------------------------------------------------------------

    def recompute(self, j: int, i: int) -> None:
        given = self.saved.pop((j, i))
        self.pending[j, i] = self._run(j, i, given.received, given.buffers, True)[2]

    def backward(self, j: int, i: int) -> None:
        pending = self.pending.pop((j, i))
        arrived = [(edge, self.gradients.pop((j, name, i), None)) for name, edge in pending.roots]
        device = self.assembly.devices[j]
        roots = [(edge, _on(g, device)) for edge, g in arrived if g is not None]
        views = [(name, view) for name, view in self.views[j].items() if view.requires_grad]
        if not roots or not (views or pending.leaves):
            return
        # autograd.grad and not .backward(): AccumulateGrad would give each gradient the strides of its leaf, and the
        # next kernel other bits.
        with torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(
                [edge for edge, _ in roots],
                [*(view for _, view in views), *(leaf for _, leaf in pending.leaves)],
                [g for _, g in roots],
                allow_unused=True,
            )
        for (name, _), gradient in zip(views, found, strict=False):
            if gradient is not None:
                count = self.counts[j].get(name, 0)
                self.sums[j][name] = add_gradient(self.sums[j].get(name), gradient, count)
                self.counts[j][name] = count + 1
        for (link, _), gradient in zip(pending.leaves, found[len(views) :], strict=True):
            self._send_gradient(link, i, gradient)

    def enter_gradients(self, place: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """The drop-in: the gradients of an output, one for each micro-batch."""
        output = self.assembly.program.outputs[place]
        link = next(link for link in self.assembly.wiring.links[-1] if link.value == output)
        for i, gradient in enumerate(gradients):
            key = (link.earlier, link.value.name, i)
            if gradient is not None:  # a value may stand in the output twice
                self.gradients[key] = gradient if key not in self.gradients else self.gradients[key] + gradient

    def _send_gradient(self, link: Link, i: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        key = (link.earlier, link.value.name, i)
        if key in self.gradients:
            raise InternalError(f"two gradients for {link.value.name} at stage {link.earlier}, micro-batch {i}")
        self.gradients[key] = gradient

    # -- the end of the step -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def commit_buffers(self) -> None:
        """Writes the buffers that forward has changed into the model."""
        assigned = {name for stage in self.stages for name in stage.assigns}
        for name, value in self.state.items():
            if name in assigned:
                self.tensors.set(name, value)
            else:
                self.tensors.get(name).copy_(value)

    def parameter_gradient(self, name: str) -> torch.Tensor | None:
        """Of all micro-batches, summed over stages in order; where the parameter is."""
        found = [sums.pop(name) for sums in self.sums if name in sums]
        if not found:
            return None
        home = self.tensors.get(name).device
        total = found[0].to(home)
        for gradient in found[1:]:
            total = total + gradient.to(home)
        return total

    def input_gradients(self, place: int, like: torch.Tensor) -> torch.Tensor | None:
        """Of an input that requires grad."""
        name, dim = self.assembly.program.inputs[place], self.assembly.in_dims[place]
        assert name is not None
        found = [self.gradients.pop((INPUT, name, i), None) for i in range(self.micro_batches)]
        if all(g is None for g in found):
            return None
        if dim is None:
            total: Any = sum(g.to(like.device) for g in found if g is not None)
            return total  # type: ignore[no-any-return]
        parts = [part[place] for part in self.inputs]
        filled = [torch.zeros_like(p) if g is None else g.to(like.device) for g, p in zip(found, parts, strict=True)]
        return torch.cat(filled, dim)


def _forget(tensor: torch.Tensor) -> None:
    """What a forward that will be recomputed would save for backward."""


def _forgotten(nothing: None) -> torch.Tensor:
    raise InternalError("backward of a forward that was to be recomputed")


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy to a GPU need not be waited for, its stream does; one to the CPU would be read before it is there."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


_DO: dict[Kind, Callable[[Step, int, int], None]] = {
    Kind.FORWARD: Step.forward,
    Kind.RECOMPUTE: Step.recompute,
    Kind.BACKWARD: Step.backward,
}
