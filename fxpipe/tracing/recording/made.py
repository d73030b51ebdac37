"""Which node has made a tensor that forward holds.

A tensor is known by its identity as long as somebody holds it, and not longer: a recording needs no more memory than
forward does. What lies in one storage is said by numbers that no other storage gets, though the first may be gone.
"""

from __future__ import annotations

import weakref

import torch
from torch import fx

from fxpipe.storages import Storages


class Made:
    """The tensors that are there."""

    def __init__(self) -> None:
        self.storages = Storages()
        self._nodes: dict[int, tuple[fx.Node, weakref.ref[torch.Tensor]]] = {}  # by id of the tensor

    def add(self, tensor: torch.Tensor, node: fx.Node) -> None:
        nodes, key = self._nodes, id(tensor)
        nodes[key] = node, weakref.ref(tensor, lambda _: nodes.pop(key, None))  # its id may be another's then
        node.meta["storages"] = node.meta.get("storages", frozenset()) | {self.storages.name(tensor)}

    def node(self, tensor: torch.Tensor) -> fx.Node | None:
        return self._nodes[id(tensor)][0] if id(tensor) in self._nodes else None

    def clear(self) -> None:
        """Holds no tensor any more."""
        self._nodes.clear()
        self.storages = Storages()
