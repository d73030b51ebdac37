"""A stage in one step: its code on views of the model's tensors, and the autograd graphs that it makes.

F runs the stage on detached values, so that each micro-batch has a graph of its own; B calls autograd for that graph,
and sums the gradients of parameters in the order of the row.

The model itself is not touched before the step has ended well: parameters are read through detached views, a buffer
that forward changes is copied for each F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxpipe.rewriting.program import Stage
from fxpipe.runtime.assembly import Tensors
from fxpipe.runtime.commit import add_gradient
from fxpipe.runtime.compiled import Code
from fxpipe.runtime.exchange import Value, on, requires_grad
from fxpipe.runtime.wiring import Link
from fxpipe.thread_state import ThreadState, applied


@dataclass(slots=True)
class Pending:
    """What B needs of the graph that F or R has made."""

    leaves: list[tuple[Link, torch.Tensor]] = field(default_factory=list)  # received values that require grad
    roots: list[tuple[str, GradientEdge]] = field(default_factory=list)  # where gradients enter, by value


@dataclass(frozen=True, slots=True)
class Ran:
    """What a stage has made of one micro-batch."""

    sent: list[Any]
    buffers: dict[str, torch.Tensor]  # as they are after it
    pending: Pending


class OpenStage:
    """A stage with the tensors of the model that it uses, on its device."""

    def __init__(
        self,
        stage: Stage,
        code: Code,
        links: Sequence[Link],
        device: torch.device,
        tensors: Tensors,
        state: ThreadState,
    ):
        """`code`: what runs of it. `state`: of the caller."""
        self.stage, self.code, self.links, self.state = stage, code, links, state
        self.views: dict[str, torch.Tensor] = {}  # of parameters
        self.constants: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}  # that change, as the last F left them
        self.sums: dict[str, torch.Tensor] = {}  # of gradients, by parameter
        self._counts: dict[str, int] = {}  # of gradients in a sum
        for name in stage.attributes:
            tensor = tensors.get(name)
            moved = on(tensor.detach(), device)
            if name in stage.changes or name in stage.assigns:
                self.buffers[name] = moved.clone()  # the drop-in commits before R asks what F saw
            elif tensor.is_floating_point() or tensor.is_complex():
                self.views[name] = moved.requires_grad_(tensor.requires_grad and state.grad)
            else:
                self.constants[name] = moved

    def run(self, received: Sequence[Value], buffers: dict[str, torch.Tensor], grad: bool) -> Ran:
        """The stage's code on received values and copies of `buffers`."""
        stage, pending = self.stage, Pending()
        copies = {name: tensor.clone() for name, tensor in buffers.items()}
        views, constants = self.views, self.constants
        attributes = [views[a] if a in views else copies[a] if a in copies else constants[a] for a in stage.attributes]
        with applied(self.state), torch.set_grad_enabled(grad):
            uses = [
                _enter(link, value, pending) if isinstance(value.value, torch.Tensor) else value.value
                for link, value in zip(self.links, received, strict=True)
            ]
            made = self.code(*attributes, *uses)
        sent, assigned = list(made[: len(stage.sends)]), made[len(stage.sends) :]
        after = copies | {name: value.detach() for name, value in zip(stage.assigns, assigned, strict=True)}
        if grad:
            pending.roots += [
                (name, get_gradient_edge(x)) for name, x in zip(stage.sends, sent, strict=True) if requires_grad(x)
            ]
        return Ran(sent, after, pending)

    def go_back(self, pending: Pending, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Sums the gradients of parameters.

        Args:
            gradients: of `pending.roots`.

        Returns:
            Those of `pending.leaves`.
        """
        roots = [(edge, g) for (_, edge), g in zip(pending.roots, gradients, strict=True) if g is not None]
        views = [(name, view) for name, view in self.views.items() if view.requires_grad]
        if not roots or not (views or pending.leaves):
            return [None] * len(pending.leaves)
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
                count = self._counts.get(name, 0)
                self.sums[name] = add_gradient(self.sums.get(name), gradient, count)
                self._counts[name] = count + 1
        return list(found[len(views) :])


def _enter(link: Link, value: Value, pending: Pending) -> torch.Tensor:
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
