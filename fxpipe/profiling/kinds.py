"""Nodes of one kind: one function, on arguments of which the same can be told but for values. They cost the same."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxpipe.tracing.checking.effects import Effects
from fxpipe.tracing.sizing.alike import same_function

Like = tuple[str, int]  # stands for a value: equal for all of which the same can be told


class Kinds:
    """The kinds of the nodes of one run."""

    def __init__(self, effects: Effects):
        self._effects = effects
        self._written = set().union(*effects.writes)
        self._numbers: dict[str, Like] = {}
        self._likes: dict[fx.Node, Like] = {}

    def of(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Hashable:
        """The kind of a node that is about to run."""
        args = fx.map_arg((node.args, node.kwargs), lambda n: self.like(n, values))
        return node.op, same_function(node.target), repr(args), node.meta["state"]

    def like(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Like:
        """What can be told of a value; in memory that is written to it may change (`unsqueeze_`, a gradient)."""
        if node not in self._likes or self._effects.alias[node] in self._written:
            described = repr(pytree.tree_map_only(torch.Tensor, _described, values[node]))
            self._likes[node] = self._numbers.setdefault(described, ("like", len(self._numbers)))
        return self._likes[node]


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    sizes = tensor.stride() if tensor.layout == torch.strided else tensor.layout
    return tensor.dtype, tuple(tensor.shape), sizes, tensor.device, tensor.requires_grad
