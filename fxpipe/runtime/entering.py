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

# Makes a node whose outputs are its inputs. To torch it is the guard behind derivatives that exist once only, so it
# raises if backward should go past it. (An autograd.Function does the same in three times the time.)
_Node: Any = torch._C._functions.DelayedError
_MESSAGE = b"fxpipe: backward went past the beginning of a stage; please report this"

# Something that requires grad, or there would be no node: it has no memory.
_token = torch.empty(0, device="cpu", requires_grad=True)  # whatever the default device is when this is imported


def enter(received: Sequence[Value]) -> tuple[list[Any], list[GradientEdge | None]]:
    """What the stage uses, and the edge by which its gradient is asked for; None where there is none."""
    uses: list[Any] = []
    edges: list[GradientEdge | None] = [None] * len(received)
    through: list[int] = []
    for place, entering in enumerate(received):
        value = entering.value
        if not isinstance(value, torch.Tensor):
            uses.append(value)
        elif not (entering.requires_grad and torch.is_grad_enabled()):
            uses.append(value.detach())
        elif type(value) is torch.Tensor:
            uses.append(value)
            through.append(place)
        else:  # a leaf after all: it is of a class of its own, which the node would take from it
            leaf = value.detach().requires_grad_()
            uses.append(leaf)
            edges[place] = get_gradient_edge(leaf)
    if through:
        made = _Node(_MESSAGE, len(through) + 1)(*[uses[place] for place in through], _token)
        node = made[0].grad_fn
        for k, place in enumerate(through):
            uses[place], edges[place] = made[k], GradientEdge(node, k)
    return uses, edges
