"""What a node calls, ready to be timed: nothing but the function itself runs between two looks at the clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpipe.profiling.samples import Value
from fxpipe.tracing.devices import on_device
from fxpipe.tracing.traced import WORKING, Traced


@dataclass(frozen=True, slots=True)
class Call:
    """What a working node calls, and the nodes and constants that it is given."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_method: bool

    def bound(self, values: Mapping[fx.Node, Value]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The function and its arguments, ready to be called."""
        args, kwargs = fx.map_arg((self.args, self.kwargs), values.__getitem__)
        if self.is_method:
            return getattr(args[0], self.target), args[1:], kwargs
        return self.target, args, kwargs


def calls_on(traced: Traced, device: torch.device | None) -> dict[fx.Node, Call]:
    """The calls of all working nodes, with the devices among their arguments as in a stage on `device`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    found = {}
    for node in traced.graph.nodes:
        if node.op == "output":
            continue
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op in WORKING:
            if device is not None:
                on_device(copy, device)
            originals = {copies[n]: n for n in node.all_input_nodes}
            args, kwargs = fx.map_arg((copy.args, copy.kwargs), originals.__getitem__)
            found[node] = Call(copy.target, args, kwargs, copy.op == "call_method")
    return found
