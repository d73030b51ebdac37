"""A registry of the tensors that forward holds: which node has made each.

A tensor is known by its identity as long as somebody holds it, and not longer: a recording needs no more memory than
forward does. What lies in one storage is said by numbers that no other storage gets, though the first may be gone.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Mapping

import torch
from torch import fx, nn

from fxpipe._torch.storages import StorageNumbers
from fxpipe.tracing.model_state import container_tensors, slots_of
from fxpipe.tracing.node_info import info, update_info
from fxpipe.tracing.record.grad_fn import custom_backward_name


class TensorRegistry:
    """The tensors that are there."""

    def __init__(self) -> None:
        self.storages = StorageNumbers()
        self._nodes: dict[int, tuple[fx.Node, weakref.ref[torch.Tensor]]] = {}  # by id of the tensor
        self._own_nodes: dict[int, str | None] = {}  # by the same: which backward of its own came with a recorded call

    def add(self, tensor: torch.Tensor, node: fx.Node) -> None:
        nodes, key = self._nodes, id(tensor)
        nodes[key] = node, weakref.ref(tensor, lambda _: nodes.pop(key, None))  # its id may be another's then
        self.expect_backward(tensor)
        update_info(node, storages=info(node).storages | {self.storages.name(tensor)})

    def node(self, tensor: torch.Tensor) -> fx.Node | None:
        return self._nodes[id(tensor)][0] if id(tensor) in self._nodes else None

    def expect_backward(self, tensor: torch.Tensor, name: str | None = None) -> None:
        """Notes that recorded calls have made a tensor what it is now, or is going to be by the function `name`."""
        with contextlib.suppress(RuntimeError):  # a view whose node does not hold any more
            self._own_nodes[id(tensor)] = name or custom_backward_name(tensor)

    def unexpected_backward(self, tensor: torch.Tensor) -> str | None:
        """The name of the backward that a tensor that is there has got from a call that was not recorded."""
        if not torch.is_grad_enabled():
            return None
        name = custom_backward_name(tensor)
        return name if name != self._own_nodes.get(id(tensor)) else None

    def clear(self) -> None:
        """Holds no tensor any more."""
        self._nodes.clear()
        self._own_nodes.clear()
        self.storages = StorageNumbers()


# Under which names a graph reads the tensors that it has not made: the model's, found by identity, and constants.


class TensorNames:
    """The names of such tensors. A tensor keeps its name while it lives: those that only this knows are held."""

    def __init__(self, model: nn.Module, held: Mapping[str, torch.Tensor]):
        """`held`: further ones, by name."""
        slots = slots_of(model)
        self._own: dict[int, str] = {}
        # A tensor of several names goes by that of the parameter, under which optimizers and `state_dict` know it.
        for slot, tensor in sorted(slots.items(), key=lambda item: item[0].kind != "parameter"):
            self._own.setdefault(id(tensor), slot.name)
        self._others: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in (*container_tensors(model).items(), *held.items()):
            self._others.setdefault(id(tensor), (name, tensor))
        taken = {slot.name for slot in slots}.union(name for name, _ in self._others.values())
        self._free = (name for n in itertools.count() if (name := f"constant_{n}") not in taken)

    def own(self, tensor: torch.Tensor) -> str | None:
        """The name of a tensor that a module holds by itself: a parameter, a buffer, an attribute."""
        return self._own.get(id(tensor))

    def other(self, tensor: torch.Tensor) -> str | None:
        """The name of one in a container of a module, of one that was given, or of a constant."""
        name, _ = self._others.get(id(tensor), (None, tensor))
        return name

    def add(self, tensor: torch.Tensor) -> str:
        """Makes a tensor a constant, and returns its name."""
        name = next(self._free)
        self._others[id(tensor)] = (name, tensor)
        return name
