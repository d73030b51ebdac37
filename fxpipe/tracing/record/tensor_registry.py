"""A registry of the tensors that forward holds, with the nodes that created them.

A tensor is identified by identity while it is alive; the registry holds no reference, so a recording needs no more
memory than forward. Storages have unique numbers, which are not reused after a storage is freed.

A custom node of autograd, from an `autograd.Function` in Python or C++, is in the graph only if a recorded function
created it. A custom node that appears on a tensor later comes from an unrecorded function, whose inside was recorded
instead. A stage has other nodes than the recording, and a hook on a recorded node would never run: so forward may look
at nodes (`tensor.grad_fn`) only in a module that is kept whole.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import BackwardCFunction

from fxpipe._torch.autograd import forward_class_of
from fxpipe._torch.modes import without_torch_function
from fxpipe._torch.tensor_data import StorageNumbers
from fxpipe.tracing.model_state import container_tensors, slots_of
from fxpipe.tracing.node_info import info, update_info

NODE_PROBLEM, NODE_REMEDY = "looks at a node of autograd (grad_fn)", "do so outside forward"


class TensorRegistry:
    def __init__(self) -> None:
        self.storages = StorageNumbers()
        self._nodes: dict[int, tuple[fx.Node, weakref.ref[torch.Tensor]]] = {}
        self._own_nodes: dict[int, str | None] = {}  # by id of the tensor: the custom backward of its recorded call

    def add(self, tensor: torch.Tensor, node: fx.Node) -> None:
        nodes, key = self._nodes, id(tensor)
        nodes[key] = node, weakref.ref(tensor, lambda _: nodes.pop(key, None))  # the id may be reused
        self.expect_backward(tensor)
        update_info(node, storages=info(node).storages | {self.storages.name(tensor)})

    def node(self, tensor: torch.Tensor) -> fx.Node | None:
        return self._nodes[id(tensor)][0] if id(tensor) in self._nodes else None

    def expect_backward(self, tensor: torch.Tensor, name: str | None = None) -> None:
        """Records that recorded calls created a tensor's current grad_fn, or that the function `name` will."""
        with contextlib.suppress(RuntimeError):  # a view whose node is no longer valid
            self._own_nodes[id(tensor)] = name or custom_backward_name(tensor)

    def unexpected_backward(self, tensor: torch.Tensor) -> str | None:
        """Returns the name of a custom backward that a tensor got from an unrecorded call; None if it has none."""
        if not torch.is_grad_enabled():
            return None
        name = custom_backward_name(tensor)
        return name if name != self._own_nodes.get(id(tensor)) else None


class TensorNames:
    """The names under which a graph reads tensors that it did not create: of the model, and constants, kept alive."""

    def __init__(self, model: nn.Module, held: Mapping[str, torch.Tensor]):
        slots = slots_of(model)
        self._own: dict[int, str] = {}
        # A shared tensor gets the name of the parameter, which optimizers and `state_dict` use.
        for slot, tensor in sorted(slots.items(), key=lambda item: item[0].kind != "parameter"):
            self._own.setdefault(id(tensor), slot.name)
        self._others: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in (*container_tensors(model).items(), *held.items()):
            self._others.setdefault(id(tensor), (name, tensor))
        taken = {slot.name for slot in slots}.union(name for name, _ in self._others.values())
        self._free = (name for n in itertools.count() if (name := f"constant_{n}") not in taken)

    def own(self, tensor: torch.Tensor) -> str | None:
        """Returns the name of a tensor that a module holds directly: a parameter, a buffer, an attribute."""
        return self._own.get(id(tensor))

    def other(self, tensor: torch.Tensor) -> str | None:
        """Returns the name of a tensor in a container of a module, of a held tensor, or of a constant."""
        name, _ = self._others.get(id(tensor), (None, tensor))
        return name

    def add(self, tensor: torch.Tensor) -> str:
        name = next(self._free)
        self._others[id(tensor)] = (name, tensor)
        return name


def is_grad_fn_access(func: Any, name: str) -> bool:
    return name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") == "grad_fn"


def custom_backward_name(tensor: torch.Tensor) -> str | None:
    """Returns the name of a tensor's node if it has a custom backward."""
    with without_torch_function():
        node: Any = tensor.grad_fn if tensor.requires_grad else None
    if isinstance(node, BackwardCFunction):
        return str(forward_class_of(node).__name__)
    if type(node).__name__ == "CppFunction":  # Python's type for custom C++ nodes
        return str(node.name())
    return None
