"""Elements of a tensor that depend on no sample, after writes to parts of it.

    h = self.first(x)
    h[..., 1] = 0             # element 1 of each row is the same for all samples from here on
    h[..., ::2] += h[..., 1::2]
    return h - h.mean(0)      # in which the other elements of all samples have met

Each write of the graph is made to a small tensor of booleans as well, of which the views are taken that the graph
takes. So what is written to parts that overlap, or covers a tensor bit by bit, is known element by element. A write
through a tensor of indices, a function that is not known here, or a large tensor, ends that: nothing is known then.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxpipe._torch.functions import opname
from fxpipe.tracing.node_info import info, number_of
from fxpipe.tracing.tensors import storage_of
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify.effects import Effects

_SAMPLES = 4  # of which the regions are looked at
_MAX_ELEMENTS = 2**22
_VIEWS = frozenset(
    "__getitem__ getitem adjoint chunk detach expand expand_as flatten movedim narrow permute reshape select split "
    "squeeze swapaxes t tensor_split transpose unbind unflatten unsqueeze view view_as".split()
)


class ConstantRegions:
    """The elements of values that share memory which are constant, as far as the walk over a graph has come."""

    def __init__(self, traced: Traced, effects: Effects):
        self.traced, self.effects = traced, effects
        self._regions: dict[int, torch.Tensor | None] = {}  # alias class -> of its root; None: nothing is known
        self._roots: dict[int, fx.Node] = {}
        self._shapes: dict[fx.Node, tuple[int, ...] | None] = {}  # of roots, that are asked for at each write
        self._written_values: dict[fx.Node, fx.Node] = {}  # of a chain of writes: the one that they return
        for node in traced.graph.nodes:
            alias = effects.alias.get(node)
            if alias is not None:
                self._roots.setdefault(alias, node)

    def root_of(self, node: fx.Node) -> fx.Node:
        """The first value in the memory of this one."""
        alias = self.effects.alias[node]
        assert alias is not None
        return self._roots[alias]

    def has_writes(self, node: fx.Node) -> bool:
        """Returns whether its memory has been written to."""
        return self.effects.alias.get(node) in self._regions

    def region(self, node: fx.Node) -> Any:
        """The constant elements of a value of which the memory has been written to; None where they are not known."""
        alias = self.effects.alias[node]
        root = None if alias is None else self._regions.get(alias)
        return None if root is None else self._seen_through(node, root)

    def written(self, node: fx.Node, other: fx.Node) -> Any:
        """The elements of `other` that a node writes to; None where they are not known."""
        alias = self.effects.alias[other]
        root = None if alias is None else self._empty(alias)
        target = None if root is None else self._target(node, root)
        if root is None or target is None:
            return None
        target.fill_(True)
        return self._seen_through(other, root)

    def write(self, node: fx.Node, root: fx.Node, is_live: bool | None, root_is_live: bool | None) -> None:
        """Notes a write of a node to the memory of `root`, the first value there.

        Args:
            is_live: do the elements that it writes depend on samples, all or none of them? None: those that did before.
            root_is_live: the same of `root` before it was written to; None: some of it, or that is not known.
        """
        alias = self.effects.alias[root]
        assert alias is not None
        if alias not in self._regions:
            region = self._empty(alias)
            if region is not None and root_is_live is not None:
                self._regions[alias] = region.logical_or_(torch.tensor(not root_is_live, device="cpu"))
            else:
                self._regions[alias] = None
        region = self._regions[alias]
        target = None if region is None else self._target(node, region)
        if target is None:
            self._regions[alias] = None
        elif is_live is not None:
            target.fill_(not is_live)

    def forget(self, aliases: Iterable[int]) -> None:
        """Memory of which nothing is known from here on."""
        self._regions |= dict.fromkeys(aliases)

    def writes_itself(self, node: fx.Node) -> bool:
        """Returns whether `h[...] = value` puts a value where it is already, as Python does behind `h[...] += 1`."""
        if node.target is not operator.setitem:
            return False
        base, _, value = node.args
        if not isinstance(value, fx.Node) or not isinstance(base, fx.Node):
            return False
        alias = self.effects.alias[base]
        if alias is None or self.effects.alias[value] != alias or (root := self._empty(alias)) is None:
            return False
        target, source = self._target(node, root), self._seen_through(value, root)
        return target is not None and source is not None and bool(target.is_set_to(source))

    # -- tensors of booleans that stand for the values of one alias class ----------------------------------------------

    def _empty(self, alias: int) -> torch.Tensor | None:
        root = self._roots[alias]
        if root not in self._shapes:
            self._shapes[root] = self._shape(root)
        shape = self._shapes[root]
        return None if shape is None else torch.zeros(shape, dtype=torch.bool, device="cpu")

    def _shape(self, root: fx.Node) -> tuple[int, ...] | None:
        shapes = info(root).shapes
        sizes = [self._number(size) for size in shapes[0].shape] if len(shapes) == 1 else [None]
        known = tuple(size for size in sizes if size is not None)
        return known if len(known) == len(sizes) and math.prod(known) <= _MAX_ELEMENTS else None

    def _number(self, size: Any) -> int | None:
        number = size.subs(self.traced.batch, _SAMPLES)
        return int(number) if number.is_Integer else None

    def _target(self, node: fx.Node, root: torch.Tensor) -> torch.Tensor | None:
        """The part of `root` that a node writes to."""
        base = node.args[0] if node.args else None
        if not isinstance(base, fx.Node) or (value := self._seen_through(base, root)) is None:
            return None
        part: torch.Tensor | None = value
        if node.target is operator.setitem:
            part = self._view(node, operator.getitem, (value, node.args[1]))
        return part

    def _seen_through(self, node: fx.Node, root: torch.Tensor) -> Any:
        """The part of `root` that a value of the same memory is."""
        node = self._written_value(node)
        if self._roots.get(self.effects.alias[node]) is node:  # type: ignore[arg-type]
            return root
        source = self.effects.same.get(node, node.args[0] if node.args else None)
        if not isinstance(source, fx.Node) or self.effects.alias[source] != self.effects.alias[node]:
            return None
        value = self._seen_through(source, root)
        if value is None or node in self.effects.same:
            return value
        name = opname(node.target)
        if name not in _VIEWS:
            return None
        function = getattr(torch.Tensor, name) if node.op == "call_method" else node.target
        return self._view(node, function, (value, *node.args[1:]))

    def _written_value(self, node: fx.Node) -> fx.Node:
        """Returns the value that a chain of writes has returned; thousands of them may follow each other."""
        chain = []
        while node in self.effects.same and node not in self._written_values:
            chain.append(node)
            node = self.effects.same[node]
        value = self._written_values.get(node, node)
        self._written_values |= dict.fromkeys(chain, value)
        return value

    def _view(self, node: fx.Node, function: Any, args: tuple[Any, ...]) -> Any:
        """Takes the view that a node takes; None where it makes a copy, or is given tensors."""
        try:
            whole = args[0][0] if isinstance(args[0], (tuple, list)) else args[0]
            arguments, options = fx.map_arg((args, dict(node.kwargs)), self._argument)
            result = function(*arguments, **options)
        except Exception:  # not of so few samples
            return None
        parts = result if isinstance(result, (tuple, list)) else [result]
        is_view = all(isinstance(part, torch.Tensor) and storage_of(part) == storage_of(whole) for part in parts)
        return result if is_view else None

    def _argument(self, node: fx.Node) -> int:
        number = self._number(number_of(node))
        if number is None:
            raise ValueError
        return number
