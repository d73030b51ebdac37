"""The loss of each micro-batch and the gradients of the outputs: a stage of its own, behind the last."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxpipe.autograd import gradients_of, hooks_asleep, leaves_under
from fxpipe.rewriting.program import Constant
from fxpipe.runtime.assembly import Assembly
from fxpipe.runtime.commit import add_gradient
from fxpipe.runtime.elements import Elements
from fxpipe.runtime.exchange import Exchange
from fxpipe.runtime.loss_draws import generators_held, generators_put_back
from fxpipe.runtime.losses import Losses
from fxpipe.runtime.resting import InForward
from fxpipe.runtime.verifying import Output, verify
from fxpipe.thread_state import applied

Gather = Callable[[Sequence[Any], int | str | None], Any]


@dataclass(slots=True)
class LossStage:
    """Runs on the worker of the last stage, right after its F."""

    assembly: Assembly
    exchange: Exchange
    losses: Losses
    elements: Elements
    keep_outputs: bool
    outputs: dict[int, list[Any]] = field(default_factory=dict)  # by micro-batch, where they are kept
    gradients: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)  # of outputs, where they are verified
    values_written: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # by micro-batch, to inputs
    own: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = field(default_factory=dict)
    # Of what else the loss hangs on, by id: the tensor, the sum of its gradients, and how many these are.
    in_forward: InForward = field(init=False)
    tree: Callable[[Sequence[Any]], Any] = field(init=False)  # the model's output from what is received

    def __post_init__(self) -> None:
        self.in_forward, self.tree = InForward(self.assembly.state), output_tree(self.assembly)

    def run(self, i: int) -> None:
        links, user = self.assembly.wiring.links[-1], len(self.assembly.devices)
        outputs: list[Any] = []
        trained: list[int] = []  # places of outputs that want a gradient
        for link in links:
            received = self.exchange.take(user, link, i)
            output = received.value
            if received.requires_grad:
                output = output.detach().requires_grad_()
                trained.append(len(outputs))
            outputs.append(output)
        if self.keep_outputs:
            self.outputs[i] = [x.detach() if isinstance(x, torch.Tensor) else x for x in outputs]
        if self.assembly.program.written:
            values = {link.value: output for link, output in zip(links, outputs, strict=True)}
            self.values_written[i] = [values[value].detach() for value in self.assembly.program.written.values()]
        with generators_held(self.assembly.devices[-1]):
            loss, begin = self.in_forward(self.losses, self.tree(outputs), i)
        found: Sequence[torch.Tensor | None] = [None] * len(trained)
        if loss.requires_grad:  # else it is a number, a micro-batch of padding say, and adds nothing
            found = self._go_back(loss, begin, [outputs[place] for place in trained], i)
            for place, gradient in zip(trained, found, strict=True):
                self.exchange.send_gradient(links[place], i, gradient)
        if self.losses.whole_target is not None:
            gradients: list[torch.Tensor | None] = [None] * len(outputs)
            for place, gradient in zip(trained, found, strict=True):
                gradients[place] = torch.zeros_like(outputs[place]) if gradient is None else gradient
            self.gradients[i] = gradients

    def _go_back(
        self, loss: torch.Tensor, begin: torch.Tensor, outputs: Sequence[torch.Tensor], i: int
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of a micro-batch's outputs; those of what else the loss hangs on are summed."""
        received = {id(x) for x in outputs}
        own = [x for x in leaves_under(loss) if id(x) not in received]
        reductions = self.elements.under(loss.grad_fn, loss.output_nr)
        wanted = [*outputs, *[r.edge for r in reductions], *own]
        if own:
            with hooks_asleep(own):
                # What was made of them before this step belongs to all micro-batches: keep the graph.
                found = gradients_of(wanted, [loss], [begin], keep_graph=True)
            self._sum(own, found[-len(own) :])
        else:
            found = gradients_of(wanted, [loss], [begin])
        if reductions:
            self.elements.note("loss", i, reductions, found[len(outputs) : len(outputs) + len(reductions)])
        return found[: len(outputs)]

    def _sum(self, own: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        for leaf, gradient in zip(own, gradients, strict=True):
            if gradient is not None:
                _, total, count = self.own.get(id(leaf), (leaf, None, 0))
                self.own[id(leaf)] = (leaf, add_gradient(total, gradient, count), count + 1)

    def gathered(self, gather: Gather) -> list[Any]:
        """The outputs of the mini-batch, which were kept: one for each link."""
        rows = [self.outputs.pop(i) for i in sorted(self.outputs)]
        return [gather(list(parts), how) for parts, how in zip(zip(*rows, strict=True), self._hows(), strict=True)]

    def written(self, gather: Gather) -> list[torch.Tensor]:
        """What forward has left in the inputs that it writes to, of the mini-batch."""
        rows = [self.values_written.pop(i) for i in sorted(self.values_written)]
        dims = [self.assembly.in_dims[place] for place in self.assembly.program.written]
        return [gather(list(parts), dim) for parts, dim in zip(zip(*rows, strict=True), dims, strict=False)]

    def verify(self, outputs: Sequence[Any]) -> bool:
        """Is the loss of all outputs at once what the losses of micro-batches add up to? `outputs`: gathered.

        Returns:
            Whether that could be seen.

        Raises:
            LossError: it is not.
        """
        rows = [self.gradients.pop(i) for i in sorted(self.gradients)]
        columns = zip(*rows, strict=True)
        with applied(self.assembly.state), generators_put_back(self.assembly.devices[-1]):
            return verify(
                self.losses,
                [Output(x, how, g) for x, how, g in zip(outputs, self._hows(), columns, strict=True)],
                self.tree,
            )

    def _hows(self) -> list[int | str | None]:
        """How the outputs go together: one for each link."""
        how = dict(reversed(self.assembly.results))  # an output may be an input that was written to
        return [how[link.value] for link in self.assembly.wiring.links[-1]]


def output_tree(assembly: Assembly) -> Callable[[Sequence[Any]], Any]:
    """Makes the model's output of what the outputs' links receive."""
    place = {link.value: k for k, link in enumerate(assembly.wiring.links[-1])}
    places = [o if isinstance(o, Constant) else place[o] for o in assembly.program.outputs]
    if assembly.out_spec.is_leaf() and places == [0]:
        return operator.itemgetter(0)

    def tree(values: Sequence[Any]) -> Any:
        leaves = [p.value if isinstance(p, Constant) else values[p] for p in places]
        return pytree.tree_unflatten(leaves, assembly.out_spec)

    return tree
