"""The loss of each micro-batch and the gradients of the outputs: a stage of its own, behind the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxpipe.autograd import leaves_under
from fxpipe.rewriting.program import Constant
from fxpipe.runtime.assembly import Assembly
from fxpipe.runtime.exchange import Exchange
from fxpipe.runtime.losses import Losses
from fxpipe.thread_state import applied


@dataclass(slots=True)
class LossStage:
    """Runs on the worker of the last stage, right after its F."""

    assembly: Assembly
    exchange: Exchange
    losses: Losses
    keep_outputs: bool
    outputs: dict[int, list[Any]] = field(default_factory=dict)  # by micro-batch, where they are kept
    gradients: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # of what else it hangs on

    def run(self, i: int) -> None:
        links = self.assembly.wiring.links[-1]
        values = [self.exchange.take(len(self.assembly.devices), link, i) for link in links]
        leaves = [v.value.detach().requires_grad_() if v.requires_grad else v.value for v in values]
        if self.keep_outputs:
            self.outputs[i] = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
        with applied(self.assembly.state):
            loss = self.losses(output_tree(self.assembly, leaves), i)
        wanted = [(link, x) for link, x, v in zip(links, leaves, values, strict=True) if v.requires_grad]
        received = {id(x) for _, x in wanted}
        own = [x for x in leaves_under(loss) if id(x) not in received]
        found = torch.autograd.grad(loss, [*(x for _, x in wanted), *own], allow_unused=True)
        for (link, _), gradient in zip(wanted, found, strict=False):
            self.exchange.send_gradient(link, i, gradient)
        for leaf, gradient in zip(own, found[len(wanted) :], strict=True):
            if gradient is not None:
                have = self.gradients.get(id(leaf))
                self.gradients[id(leaf)] = (leaf, gradient if have is None else have[1] + gradient)

    def verify(self, target: tuple[Any, ...], gather: Callable[[Sequence[Any], int | str | None], Any]) -> None:
        """Is the loss of all outputs, which were kept, what the losses of micro-batches add up to?"""
        program, links = self.assembly.program, self.assembly.wiring.links[-1]
        how = {
            o: d for o, d in zip(program.outputs, self.assembly.out_dims, strict=True) if not isinstance(o, Constant)
        }
        parts = zip(*(self.outputs.pop(i) for i in sorted(self.outputs)), strict=True)
        outputs = [gather(list(p), how[link.value]) for p, link in zip(parts, links, strict=True)]
        self.losses.verify(output_tree(self.assembly, outputs), target)


def output_tree(assembly: Assembly, values: Sequence[Any]) -> Any:
    """The model's output, with `values` for what the outputs' links receive."""
    by_name = {link.value: x for link, x in zip(assembly.wiring.links[-1], values, strict=True)}
    leaves = [o.value if isinstance(o, Constant) else by_name[o] for o in assembly.program.outputs]
    return pytree.tree_unflatten(leaves, assembly.out_spec)
