"""Nodes of autograd as forward sees them (`tensor.grad_fn`): whoever puts a hook on one is noticed.

A function mode sees that forward reads `grad_fn`, not what it does with it; and the nodes of the recording are not
those of a stage, so that a hook on them would never be called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HOOKING = frozenset({"register_hook", "register_prehook"})
WHAT, REMEDY = "puts a hook on a node of autograd", "do so outside forward"


class SeenNode:
    """Stands for a node of autograd, and is like it; calls `noticed` before a hook is put on it, or on one before."""

    __slots__ = ("_node", "_noticed")

    def __init__(self, node: Any, noticed: Callable[[], object]):
        self._node, self._noticed = node, noticed

    def __getattr__(self, name: str) -> Any:
        if name in HOOKING:
            self._noticed()
        found = getattr(self._node, name)
        if name == "next_functions":
            return tuple((None if node is None else SeenNode(node, self._noticed), place) for node, place in found)
        return found

    @property  # type: ignore[misc]  # so that isinstance says what it says of the node
    def __class__(self) -> Any:
        return type(self._node)

    def __repr__(self) -> str:
        return repr(self._node)

    def __eq__(self, other: object) -> bool:
        return bool(self._node == (other._node if isinstance(other, SeenNode) else other))

    def __hash__(self) -> int:
        return hash(self._node)


def is_node_of(func: Any, name: str) -> bool:
    """Is this the call by which a tensor is asked for its node?"""
    return name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") == "grad_fn"
