"""Values that stand for others: where only the time of nodes counts, those of one kind need not all run.

A node whose samples are taken would run for its value alone, for nodes behind it. If another node of its kind has run
in the same round, its value will do: it has the same shapes, strides and dtypes. Not so values that

- are written to, or share memory with what is;
- are no floating point numbers: an index out of one table may lie beyond another;
- have a size that hangs on values: it may be another one;
- a hook sees.

A value is kept as long as a node is still to come that may be of its kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxpipe.tracing.checking.effects import Effects
from fxpipe.tracing.sizing.alike import same_function
from fxpipe.tracing.traced import Traced


class Alike:
    """The values of one round."""

    def __init__(self, traced: Traced, effects: Effects):
        self.were_taken = False
        self._rough: dict[fx.Node, Hashable] = {}  # of nodes whose value may be another's: equal for those of one kind
        self._last: dict[Hashable, fx.Node] = {}
        self._kept: dict[Hashable, dict[Hashable, Any]] = defaultdict(dict)  # rough kind -> kind -> value
        written = set().union(*effects.writes)
        for node, changed in zip(effects.nodes, effects.writes, strict=True):
            if not changed and effects.alias[node] not in written and _is_plain(traced, node):
                self._rough[node] = rough = (node.op, same_function(node.target), node.meta["shapes"])
                self._last[rough] = node

    def keep(self, node: fx.Node, kind: Hashable, value: Any) -> None:
        """To be called when a node has run."""
        if node not in self._rough:
            return
        rough = self._rough[node]
        if self._last[rough] is node:
            self._kept.pop(rough, None)
        elif all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
            self._kept[rough].setdefault(kind, value)

    def take(self, node: fx.Node, kind: Hashable) -> Any:
        """A value of this kind; None where there is none."""
        if node not in self._rough:
            return None
        rough = self._rough[node]
        value = self._kept[rough].get(kind)
        if self._last[rough] is node:
            self._kept.pop(rough, None)
        self.were_taken |= value is not None
        return value

    def forbid(self) -> None:
        """No value stands for another from now on."""
        self._rough.clear()
        self.were_taken = False

    def clear(self) -> None:
        self._kept.clear()


def _is_plain(traced: Traced, node: fx.Node) -> bool:
    shapes = node.meta.get("shapes", ())
    return (
        bool(shapes)
        and "hook" not in node.meta
        and all(
            (shape.dtype.is_floating_point or shape.dtype.is_complex)
            and all(size.free_symbols <= {traced.batch} for size in shape.shape)
            for shape in shapes
        )
    )
