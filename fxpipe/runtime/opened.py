"""A stage in one step: its code on views of the model's tensors, and the autograd graphs that it makes.

F runs the stage on detached values, so that each micro-batch has a graph of its own; B calls autograd for that graph,
and sums the gradients of parameters in the order of the row. Where backward is split, W does so for the weights that B
leaves to it.

The model itself is not touched before the step has ended well: parameters are read through detached views, a buffer
that forward changes is copied for each F.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from fxpipe.autograd import edge_of, gradients_of, has_edge
from fxpipe.errors import StateError
from fxpipe.rewriting.deferring import Found
from fxpipe.rewriting.program import Stage
from fxpipe.rewriting.tape import Tape
from fxpipe.runtime.assembly import Tensors
from fxpipe.runtime.commit import add_gradient
from fxpipe.runtime.compiled import Code
from fxpipe.runtime.entering import enter
from fxpipe.runtime.exchange import Value
from fxpipe.runtime.resting import InForward
from fxpipe.runtime.tracking import check_calls, tracked
from fxpipe.runtime.weighing import weighed
from fxpipe.runtime.wiring import Link
from fxpipe.thread_state import ThreadState


@dataclass(slots=True)
class Pending:
    """What B needs of the graph that F or R has made."""

    links: list[Link]  # received values that require grad
    leaves: list[GradientEdge]  # where their gradients come out
    names: list[str]  # values whose gradients go in
    roots: list[GradientEdge]  # where they do
    tape: Tape | None  # where backward is split

    def begin(self, name: str, edge: GradientEdge) -> None:
        """Notes where the gradient of a value goes in."""
        self.names.append(name)
        self.roots.append(edge)


class Ran(NamedTuple):
    """What a stage has made of one micro-batch."""

    sent: Sequence[Any]
    buffers: dict[str, torch.Tensor]  # as they are after it
    statistics: list[Found]  # of deferred batch norm
    pending: Pending


class OpenStage:
    """A stage with the tensors of the model that it uses, on its device."""

    def __init__(
        self,
        stage: Stage,
        code: Code,
        links: Sequence[Link],
        bring: Callable[[torch.Tensor], torch.Tensor],
        tensors: Tensors,
        state: ThreadState,
    ):
        """`code`: what runs of it; `bring`: to the stage's device; `state`: of the caller."""
        self.stage, self.code, self.links, self.grad = stage, code, links, state.grad
        self._in_forward = InForward(state)
        self.views: dict[str, torch.Tensor] = {}  # of parameters
        self.constants: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}  # that change, as the last F left them
        self._counters: dict[str, torch.Tensor] = {}  # of mini-batches, as every F leaves them
        self._statistics: dict[int, list[Found]] = {}  # of deferred batch norm, by micro-batch
        self.sums: dict[str, torch.Tensor] = {}  # of gradients, by parameter
        self._counts: dict[str, int] = {}  # of gradients in a sum
        self._bare: dict[str, torch.Tensor] = {}  # parameters as tapes have them
        for name in stage.attributes:
            tensor = tensors.get(name)
            if tensor.is_meta:
                raise StateError(
                    f"{name!r} is on the meta device, where it has no values: something has moved it there since "
                    "planning; give the model its values back (to_empty, load_state_dict), or make another pipe"
                )
            moved = bring(tensor.detach())
            if name in stage.changes or name in stage.assigns:
                self.buffers[name] = moved.clone()  # the drop-in commits before R asks what F saw
            elif tensor.is_floating_point() or tensor.is_complex():
                self.views[name] = moved.requires_grad_(tensor.requires_grad and state.grad)
            else:
                self.constants[name] = moved
        # What is the same for every micro-batch.
        self._fixed = [self.views.get(name, self.constants.get(name)) for name in stage.attributes]
        summed = {n: view for n, view in self.views.items() if view.requires_grad and n not in stage.weighed}
        self._names, self._summed = [*summed], [*summed.values()]  # whose gradients B sums

    def run(self, received: Sequence[Value], buffers: dict[str, torch.Tensor], is_kept: bool = True) -> Ran:
        """The stage's code on received values and copies of `buffers`. `is_kept`: B will go back through this run."""
        stage, attributes = self.stage, self._fixed
        if buffers:
            buffers = {name: x if name in stage.tracks else x.clone() for name, x in buffers.items()}
            attributes = [buffers.get(name, fixed) for name, fixed in zip(stage.attributes, attributes, strict=True)]
        tape = Tape(bare=self._bare) if stage.weighed and self.grad and is_kept else None
        first = (tape,) if stage.weighed else ()
        uses, links, leaves = enter(self.links, received)
        made = self._in_forward(self.code, *first, *attributes, *uses)
        sent, more = made[: len(stage.sends)], made[len(stage.sends) :]
        statistics: list[Found] = []
        if more:
            assigns = len(stage.assigns)
            buffers = buffers | {n: value.detach() for n, value in zip(stage.assigns, more[:assigns], strict=True)}
            statistics = [found for node in more[assigns:] for found in node]
        pending = Pending(links, leaves, [], [], tape)
        for link, edge in zip(links, leaves, strict=True):
            if link.later is not None:  # a later user's gradient enters there, too
                pending.begin(link.value.name, edge)
        for name, x in zip(stage.sends, sent, strict=True):
            # Without gradients there is no backward, and a leaf that forward makes has no edge.
            if self.grad and isinstance(x, torch.Tensor) and has_edge(x):
                pending.begin(name, edge_of(x))
        return Ran(sent, buffers, statistics, pending)

    def leave(self, i: int, ran: Ran) -> None:
        """What F leaves for that of the next micro-batch, and for the end of the step."""
        if not ran.buffers:
            return  # then it has no statistics either, which are of buffers
        for name, value in ran.buffers.items():
            (self._counters if name in self.stage.counters else self.buffers)[name] = value
        self._statistics[i] = ran.statistics
        first = next(iter(self._statistics.values()))
        if first or ran.statistics:
            check_calls(first, ran.statistics)

    def final_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that change, after all micro-batches."""
        return tracked(self.buffers | self._counters, [self._statistics[i] for i in sorted(self._statistics)])

    def go_back(self, pending: Pending, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Sums the gradients of parameters, but for those that W computes, and puts on the tape what W needs.

        Args:
            gradients: of `pending.roots`.

        Returns:
            Those of `pending.leaves`.
        """
        roots, arrived = [], []
        for root, gradient in zip(pending.roots, gradients, strict=True):
            if gradient is not None:
                roots.append(root)
                arrived.append(gradient)
        wanted = [*self._summed, *pending.leaves]
        of_weights = len(wanted)
        if pending.tape is not None:
            wanted += pending.tape.edges
        if not roots or not wanted:
            return [None] * len(pending.leaves)
        found = gradients_of(wanted, roots, arrived)
        self._add(zip(self._names, found, strict=False))
        if pending.tape is not None:
            pending.tape.arrived(found[of_weights:])
        return found[len(self._summed) : of_weights]

    def weigh(self, tape: Tape) -> None:
        """Sums the gradients of the parameters that B has left."""
        with torch.no_grad():
            self._add(weighed(tape))

    def _add(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        for name, gradient in gradients:
            if gradient is not None:
                count = self._counts.get(name, 0)
                self.sums[name] = add_gradient(self.sums.get(name), gradient, count)
                self._counts[name] = count + 1
            del gradient  # before the next one is made
