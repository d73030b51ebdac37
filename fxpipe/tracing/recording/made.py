"""Which node has made a tensor that forward holds.

A tensor is known by its identity as long as somebody holds it, and not longer: a recording needs no more memory than
forward does. What lies in one storage is said by numbers that no other storage gets, though the first may be gone.
"""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import fx

from fxpipe.storages import Storages
from fxpipe.tracing.recording.autograd_nodes import own_node


class Made:
    """The tensors that are there."""

    def __init__(self) -> None:
        self.storages = Storages()
        self._nodes: dict[int, tuple[fx.Node, weakref.ref[torch.Tensor]]] = {}  # by id of the tensor
        self._own_nodes: dict[int, str | None] = {}  # by the same: which backward of its own came with a recorded call

    def add(self, tensor: torch.Tensor, node: fx.Node) -> None:
        nodes, key = self._nodes, id(tensor)
        nodes[key] = node, weakref.ref(tensor, lambda _: nodes.pop(key, None))  # its id may be another's then
        self.explain(tensor)
        node.meta["storages"] = node.meta.get("storages", frozenset()) | {self.storages.name(tensor)}

    def node(self, tensor: torch.Tensor) -> fx.Node | None:
        return self._nodes[id(tensor)][0] if id(tensor) in self._nodes else None

    def explain(self, tensor: torch.Tensor, name: str | None = None) -> None:
        """What a tensor is now, or is going to be by the function `name`, is what recorded calls have made of it."""
        with contextlib.suppress(RuntimeError):  # a view whose node does not hold any more
            self._own_nodes[id(tensor)] = name or own_node(tensor)

    def unexplained(self, tensor: torch.Tensor) -> str | None:
        """The name of the backward that a tensor that is there has got from a call that was not recorded."""
        if not torch.is_grad_enabled():
            return None
        name = own_node(tensor)
        return name if name != self._own_nodes.get(id(tensor)) else None

    def clear(self) -> None:
        """Holds no tensor any more."""
        self._nodes.clear()
        self._own_nodes.clear()
        self.storages = Storages()
