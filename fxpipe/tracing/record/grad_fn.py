"""Autograd nodes: as forward sees them (`tensor.grad_fn`), and custom ones.

A stage has other nodes than the recording, and a hook on a recorded node would never run. A proxy detects such hooks.

A custom node, from an `autograd.Function` in Python or C++, is in the graph only if a recorded function created it. A
custom node that appears on a tensor later comes from an unrecorded function, whose inside was recorded instead.
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
    """A proxy of an autograd node; calls `noticed` before a hook is put on it or on a node that it leads to."""

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

    @property  # type: ignore[misc]  # for isinstance checks
    def __class__(self) -> Any:
        return type(self._node)

    def __repr__(self) -> str:
        return repr(self._node)

    def __eq__(self, other: object) -> bool:
        return bool(self._node == (other._node if isinstance(other, GradFnProxy) else other))

    def __hash__(self) -> int:
        return hash(self._node)


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
