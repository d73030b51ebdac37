"""Nodes of autograd: as forward sees them (`tensor.grad_fn`), and those that are not torch's own.

A function mode sees that forward reads `grad_fn`, not what it does with it; and the nodes of the recording are not
those of a stage, so that a hook on them would never be called. Whoever puts one on is noticed.

A node with a backward of its own, of an `autograd.Function` in Python or C++, is of the graph only where the recorded
function has made it: what is found on a tensor later came from a function that was not seen, whose inside was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from fxpipe._torch.autograd import forward_class_of
from fxpipe._torch.function_modes import without_torch_function

HOOK_METHODS = frozenset({"register_hook", "register_prehook"})
NODE_HOOK_PROBLEM, NODE_HOOK_REMEDY = "puts a hook on a node of autograd", "do so outside forward"


class GradFnProxy:
    """Stands for a node of autograd, and is like it; calls `noticed` before a hook is put on it, or on one before."""

    __slots__ = ("_node", "_noticed")

    def __init__(self, node: Any, noticed: Callable[[], object]):
        self._node, self._noticed = node, noticed

    # No model of the zoo: a forward that looks at `grad_fn` needs it (behaviour/test_autograd_nodes.py).
    def __getattr__(self, name: str) -> Any:
        if name in HOOK_METHODS:
            self._noticed()
        value = getattr(self._node, name)
        if name == "next_functions":
            return tuple((None if node is None else GradFnProxy(node, self._noticed), place) for node, place in value)
        return value

    @property  # type: ignore[misc]  # so that isinstance says what it says of the node
    def __class__(self) -> Any:
        return type(self._node)

    def __repr__(self) -> str:
        return repr(self._node)

    def __eq__(self, other: object) -> bool:
        return bool(self._node == (other._node if isinstance(other, GradFnProxy) else other))

    def __hash__(self) -> int:
        return hash(self._node)


def is_grad_fn_access(func: Any, name: str) -> bool:
    """Returns whether this is the call by which a tensor is asked for its node."""
    return name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") == "grad_fn"


def custom_backward_name(tensor: torch.Tensor) -> str | None:
    """The name of the node that made a tensor, if it is one with a backward of its own."""
    with without_torch_function():
        node: Any = tensor.grad_fn if tensor.requires_grad else None
    if isinstance(node, BackwardCFunction):
        return str(forward_class_of(node).__name__)
    if type(node).__name__ == "CppFunction":  # what Python makes of all nodes that are not torch's own
        return str(node.name())
    return None
