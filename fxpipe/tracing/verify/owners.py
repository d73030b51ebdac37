"""Finds samples of different micro-batches that meet in a graph: runs one node at a time with other arguments.

Each element of a value has an *owner*: the micro-batch whose samples it depends on. A node runs on its arguments, then
with other elements of each micro-batch in turn: what changes with two of them depends on both.

    h [4, 3]   owners 0 0 1 1    relu(h)   0 0 1 1    h[0]   0    h.min()   0 and 1: they meet

Integers and bools of the inputs (ids, lengths, masks) change only for functions of them alone: counts and offsets may
be of all samples, if no float depends on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.thread_state import set_thread_state
from fxpipe.tracing.model_state import preserve_state
from fxpipe.tracing.node_info import dependencies_of, info, state_of
from fxpipe.tracing.traced import CALL_OPS, Traced, attribute_tensor
from fxpipe.tracing.verify.compared_sizes import opened, run_deterministic_node
from fxpipe.utils.batch_split import rows_per_sample
from fxpipe.utils.pytree import flatten

_NOBODY = -1
_SEVERAL = -2  # an integer of several micro-batches: a count, the largest length
_UNCHANGED = -3  # no element has this owner
_CHANGES = ((1.0, 0.3), (-1e4, 1e2), (1e4, 1e2))  # factors of a float and of the noise that is added to it


def samples_meet(traced: Traced, leaves: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Returns whether outputs with rows use a value of several micro-batches, such as a minimum, or may do so."""
    results = zip(traced.handed_out, traced.handed_out_dims, strict=True)
    rows = [result for result, how in results if isinstance(how, int)]
    used = set[fx.Node]().union(*map(dependencies_of, rows))
    for node in reversed(traced.graph.nodes):  # nodes that write to the memory of used values, too
        written = info(node).written_storages
        if written and any(not written.isdisjoint(info(other).storages) for other in used):
            used.update(dependencies_of(node))
    nodes = [node for node in traced.graph.nodes if node in used]
    last = {source: node for node in nodes for source in (node, *node.all_input_nodes)}
    with preserve_state(traced.model):
        run = _OwnerRun(traced, leaves, sizes)
        try:
            for node in nodes:
                if node.op in CALL_OPS and run.meets_at(node):
                    return True
                for source in [source for source in run.values if last.get(source) is node]:
                    del run.values[source]
            return any(
                bool((one == _SEVERAL).any()) for n in rows if isinstance(n, fx.Node) for one in run.owners.get(n, ())
            )
        except Exception:  # a function may fail with other arguments
            return True


class _OwnerRun:
    """The values of nodes, and the owners of the elements of their tensors."""

    def __init__(self, traced: Traced, leaves: Sequence[Any], sizes: Sequence[int]):
        self.parts = range(len(sizes))
        self.grad = any(info(node).opaque is not None for node in traced.nodes)
        attributes = {n: attribute_tensor(traced, n) for n in traced.graph.nodes if n.op == "get_attr"}
        self.values: dict[fx.Node, Any] = {
            n: opened(x.detach()) if isinstance(x, nn.Parameter) else x.detach() for n, x in attributes.items()
        }
        self.owners: dict[fx.Node, list[torch.Tensor]] = {}
        self.of_integers: set[fx.Node] = set()  # values made of integers and bools of the inputs alone
        for place, node in traced.placeholders.items():
            value, dim = leaves[place].detach(), traced.in_dims[place]
            self.values[node] = value
            if dim is not None:
                rows = torch.tensor([size * rows_per_sample(dim) for size in sizes])
                by_row = torch.arange(len(sizes)).repeat_interleave(rows).to(value.device)
                self.owners[node] = [by_row.view([-1 if d == dim else 1 for d in range(value.dim())]).expand_as(value)]
                if not value.is_floating_point():
                    self.of_integers.add(node)

    def meets_at(self, node: fx.Node) -> bool:
        """Runs a node. Returns whether an element of its result depends on several micro-batches, or may do so."""
        written, sources = info(node).written_storages, node.all_input_nodes
        sharing = [n for n in self.values if written and not written.isdisjoint(info(n).storages)]
        if self.owners.keys().isdisjoint((*sources, *sharing)) and all(n.op in CALL_OPS for n in sharing):
            with set_thread_state(state_of(node)), torch.set_grad_enabled(self.grad and state_of(node).grad):
                self.values[node] = run_deterministic_node(node, self.values.__getitem__)  # writes to views, too
            return False
        if not {*sharing} <= {*sources}:
            return True
        owned = [n for n in sources if n in self.owners and n not in self.of_integers]
        are_integers = not owned
        owned = owned or [n for n in sources if n in self.owners]
        base = self._run(node, sharing, {})
        try:
            by_part = [self._changed(node, sharing, owned, base, part) for part in self.parts] if owned else []
        except Exception:
            if not are_integers:
                raise
            # Another mask selects another number of elements, which cannot be compared.
            held = {part for n in owned for owner in self.owners[n] for part in owner.unique().tolist()}
            has_part = [part in held and not sharing for part in self.parts]
            if sum(has_part) > 1 and any(x.numel() == 0 for x in _tensors(base)):
                return True
            by_part = [[torch.full_like(x, one, dtype=torch.bool) for x in _tensors(base)] for one in has_part]
        changes = [torch.stack(of_tensor).long() for of_tensor in zip(*by_part, strict=True)]
        owners = [torch.where(one.sum(0) == 1, one.argmax(0), _NOBODY) for one in changes]
        several = [one.sum(0) > 1 for one in changes]
        shared = [n for n in sources if any(bool((one == _SEVERAL).any()) for one in self.owners.get(n, ()))]
        for together in [shared, *([n] for n in shared)] if shared else []:
            more = self._changed(node, sharing, together, base, _SEVERAL)
            several = [one | other for one, other in zip(several, more, strict=True)] if several else more
        for x, one in zip(_tensors(base), several, strict=False):
            if (not are_integers or x.is_floating_point()) and bool(one.any()):
                return True
        marked = iter([torch.where(one, _SEVERAL, owner) for one, owner in zip(several, owners, strict=False)])
        for n, value in zip((node, *sharing), base, strict=True):
            own = [owner for _, owner in zip(_tensors(value), marked, strict=False)]
            self.values[n] = value
            self.owners.pop(n, None)
            if any(bool((owner != _NOBODY).any()) for owner in own):
                self.owners[n] = own
                if are_integers and not any(x.is_floating_point() for x in _tensors(value)):
                    self.of_integers.add(n)
        return False

    def _run(self, node: fx.Node, sharing: Sequence[fx.Node], changed: Mapping[fx.Node, Any]) -> list[Any]:
        """Returns the result of a node, and the values of arguments that share the memory to which it writes."""
        values = {n: changed.get(n, self.values[n]) for n in node.all_input_nodes}
        values |= {n: pytree.tree_map_only(torch.Tensor, torch.clone, values[n]) for n in sharing}
        with set_thread_state(state_of(node)), torch.set_grad_enabled(self.grad and state_of(node).grad):
            return [run_deterministic_node(node, values.__getitem__), *(values[n] for n in sharing)]

    def _changed(
        self, node: fx.Node, sharing: Sequence[fx.Node], owned: Sequence[fx.Node], base: Any, part: int
    ) -> list[torch.Tensor]:
        """Returns which elements of the result change with the elements of a micro-batch."""
        differs = [torch.zeros_like(x, dtype=torch.bool) for x in _tensors(base)]
        values = [x for n in owned for x in _tensors(self.values[n])]
        # If all are true, `any()` shows only among false ones that it depends on one.
        others = (None, False, True) if any(x.dtype == torch.bool for x in values) else (None,)
        # After an index out of range, an accelerator could not be used.
        is_on_cpu = all(x.device.type == "cpu" for x in values)
        seeds = 3 if all(x.is_floating_point() for x in values) else 5 if is_on_cpu else 2
        for background, seed in itertools.product(others, range(seeds)):
            try:
                before = base if background is None else self._with(node, sharing, owned, _UNCHANGED, background, seed)
                after = self._with(node, sharing, owned, part, background, seed)
            except Exception:
                if background is None and seed < 2:
                    raise
                continue  # a larger integer may be out of range
            pairs = zip(_tensors(before), _tensors(after), strict=True)
            differs = [d | ~torch.isclose(x, y, 1e-4, equal_nan=True) for d, (x, y) in zip(differs, pairs, strict=True)]
        return differs

    def _with(
        self,
        node: fx.Node,
        sharing: Sequence[fx.Node],
        owned: Sequence[fx.Node],
        part: int,
        background: bool | None,
        seed: int,
    ) -> list[Any]:
        """Runs a node with other elements of a micro-batch, and with all bools of samples equal to `background`."""
        changed = {}
        for n in owned:
            leaves, spec = flatten(self.values[n])
            tensors = zip(_tensors(leaves), self.owners[n], strict=True)
            new = iter([_other(_filled(x, owner, background), owner == part, seed) for x, owner in tensors])
            leaves = [next(new) if isinstance(x, torch.Tensor) else x for x in leaves]
            changed[n] = pytree.tree_unflatten(leaves, spec)
        return self._run(node, sharing, changed)


def _filled(value: torch.Tensor, owner: torch.Tensor, background: bool | None) -> torch.Tensor:
    if background is None or value.dtype != torch.bool:
        return value
    return value.masked_fill(owner != _NOBODY, background)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _other(value: torch.Tensor, mask: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns a tensor that has other values where `mask` is true."""
    if value.dtype == torch.bool:
        return value ^ mask
    if not value.is_floating_point():
        others = (value.flatten().roll(1).view(value.shape), value * 0, value + 3, value + 1009, value - 1009)
        return torch.where(mask, others[seed], value)
    factor, of_noise = _CHANGES[seed]
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).to(value)
    largest = value.nan_to_num(0, 0, 0).abs().max() if value.numel() else 1
    return torch.where(mask, value * factor + noise * of_noise * (largest + 0.1), value)
