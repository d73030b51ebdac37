"""Received values as a stage uses them: where the autograd graph of a micro-batch begins.

The gradient of a received value is asked for by its edge, not by a leaf. A leaf would be kept by its graph, with its
memory, until B has gone through it, also where nothing in the stage has saved the value: what a linear layer in the
stage before has made and the first residual sum in this one has added, say. So values enter through one node that
keeps nothing. Gradients of later users enter there, too: a sum is made in the node's input, as a leaf's is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxpipe.runtime.exchange import Value
from fxpipe.runtime.wiring import Link

# Makes a node whose outputs are its inputs. To torch it is the guard behind derivatives that exist once only, so it
# raises if backward should go past it. (An autograd.Function does the same in three times the time.)
_Node: Any = torch._C._functions.DelayedError
_MESSAGE = b"fxpipe: backward went past the beginning of a stage; please report this"

# Something that requires grad, or there would be no node: it has no memory.
_token = torch.empty(0, device="cpu", requires_grad=True)  # whatever the default device is when this is imported


def enter(links: Sequence[Link], received: Sequence[Value]) -> tuple[list[Any], list[Link], list[GradientEdge]]:
    """What the stage uses; the links of what wants a gradient, and the edges by which that is asked for."""
    uses: list[Any] = []
    wanted: list[Link] = []
    edges: list[GradientEdge] = []
    places: list[int] = []
    through: list[torch.Tensor] = []
    is_recorded = torch.is_grad_enabled()
    for link, entering in zip(links, received, strict=True):
        value = entering.value
        if isinstance(value, torch.Tensor):
            if not (entering.requires_grad and is_recorded):
                value = value.detach()
            elif type(value) is torch.Tensor:
                places.append(len(uses))
                through.append(value)
            else:  # a leaf after all: it is of a class of its own, which the node would take from it
                value = value.detach().requires_grad_()
                wanted.append(link)
                edges.append(get_gradient_edge(value))
        uses.append(value)
    if through:
        made = _Node(_MESSAGE, len(through) + 1)(*through, _token)
        node = made[0].grad_fn
        for k, place in enumerate(places):
            uses[place] = made[k]
            wanted.append(links[place])
            edges.append(GradientEdge(node, k))
    return uses, wanted, edges
