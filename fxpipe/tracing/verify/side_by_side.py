"""Runs a graph node by node on a few samples (the whole) and on parts of them, side by side.

A value *joins* if its parts can be combined into the whole: rows along a dimension, a sum, a mean, or the same value in
all parts. This needs no list of functions. Tokens sorted by expert do not join, and join again when they are restored
(a *block*). A value can hide a dependence between samples, so there are three kinds of runs:

- *loud*: the last samples in reverse order, parameters that are zero or tiny replaced (opened), and noise on each value
  with rows: equal in whole and parts, but smaller in the last part, so that statistics of the parts differ;
- *plain*: the example unchanged;
- *equal*: loud, with the integers of the first sample for all: ids, experts, nearest codes.

Dropout is disabled and batch norm uses its running statistics. Other random functions must leave a sample unchanged
when other samples change. Parts get the whole's value of state that forward updates, as if they had run in order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.thread_state import set_thread_state
from fxpipe.tracing.guards import expect
from fxpipe.tracing.interpreter import NodeValues, run_nodes
from fxpipe.tracing.model_state import preserve_rng, preserve_state, seeded_python_rng
from fxpipe.tracing.node_info import call_on_device, dependencies_of, info, state_of
from fxpipe.tracing.shapes.batch_reductions import base_opname
from fxpipe.tracing.traced import CALL_OPS, Traced, attribute_tensor
from fxpipe.tracing.verify import compared_sizes
from fxpipe.tracing.verify.equivalence import is_close, take_samples
from fxpipe.utils.batch_split import rows_per_sample

EVIDENCE = 5  # times the tolerance: a larger change shows that a value depends on an argument
WEAK = 0.05  # share of the largest element: a smaller common part of samples may be lost in the next nodes

Opened = dict[fx.Node, torch.Tensor]  # replacements of parameters that are zero or tiny
Joins = frozenset[int | str]  # dimensions that hold rows, "sum", "mean", "same"; "parts" of a tuple
NO_JOIN: Joins = frozenset()
_UNSET = frozenset("empty new new_empty empty_like empty_strided new_empty_strided".split())
_LIKE_FIRST = _UNSET | frozenset(
    "zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full new_tensor".split()
)  # do not use the values of their first argument
_SEVERAL_DRAWS = frozenset("rrelu rrelu_ poisson binomial _standard_gamma _Dirichlet".split())  # draws vary with values
_MAPS: dict[Any, int] = {F.linear: 0, torch.addmm: 1}  # linear maps of rows, with the place of what they map
_LIKE_SECOND = frozenset("view_as expand_as reshape_as type_as to".split())  # use the values of their first argument


@dataclass
class Findings:
    joins: dict[fx.Node, Joins] = field(default_factory=dict)
    depends: set[fx.Node] = field(default_factory=set)
    blocks: set[fx.Node] = field(default_factory=set)  # values that join although an argument does not
    opened: set[fx.Node] = field(default_factory=set)  # blocks observed to depend on that argument
    selected: set[fx.Node] = field(default_factory=set)  # values whose size depends on values
    shown: set[fx.Node] = field(default_factory=set)  # selected values with rows in several parts
    sources: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # arguments and values written to the node
    parameters: Opened = field(default_factory=dict)
    reads_values: bool = False  # does Python read values of samples?
    may_fail: bool = False  # may a node fail on a part? It does not join then, and parts go on with the whole's value
    failed: set[fx.Node] = field(default_factory=set)  # with all that is computed from these

    def has_rows(self, node: fx.Node) -> bool:
        return any(isinstance(how, int) or how == "parts" for how in self.joins[node])

    def add(self, run: Findings) -> None:
        self.joins = {node: self.joins.get(node, joins) & joins for node, joins in run.joins.items()}
        self.depends |= run.depends
        self.blocks |= run.blocks
        self.opened |= run.opened
        self.selected |= run.selected
        self.shown |= run.shown
        self.failed |= run.failed
        self.reads_values |= run.reads_values
        self.sources = run.sources

    def hiding(self) -> set[fx.Node]:
        """Returns the values that join and may hide a dependence between samples."""
        reduced = {n for n in self.depends if self.joins[n] and not self.has_rows(n) and info(n).shapes}
        hiding = {n for n in self.blocks - self.opened if self.joins[n] or len(info(n).shapes) > 1}
        for node, sources in self.sources.items():  # `h + gate * h.mean(0)`, a loss with weights of the batch
            own = _value_sources(node)
            is_weighed = not reduced.isdisjoint(own) and any(map(self.has_rows, own))
            if self.joins[node] and (is_weighed or (self.has_rows(node) and not reduced.isdisjoint(sources))):
                hiding.add(node)
        return hiding

    def distrust(self) -> set[fx.Node]:
        """Clears the joins of values that may hide a dependence and of all their users; returns the former."""
        hiding = self.hiding()
        tainted, before = {*hiding}, 0
        while len(tainted) > before:  # repeats because of values that are written to later
            before = len(tainted)
            for node, sources in self.sources.items():
                if not tainted.isdisjoint(sources):
                    tainted.add(node)
        self.joins |= dict.fromkeys(tainted, NO_JOIN)
        return hiding

    def meeting(self, node: fx.Node) -> fx.Node:
        """Walks back from a value that does not join to the first node that mixes samples."""
        ends, seen, todo = list[fx.Node](), {node}, [node]
        while todo:
            node = todo.pop()
            sources = [n for n in self.sources[node] if n in self.depends]
            before = [n for n in sources if not self.joins[n]] or [n for n in sources if not self.has_rows(n)]
            if not before:
                ends.append(node)
            todo += {*before} - seen
            seen.update(before)
        order = [*self.joins]  # sources of a node include values written to it
        return min(ends or seen, key=lambda n: (len(self.sources[n]) > len(_value_sources(n)), order.index(n)))


def run_side_by_side(
    traced: Traced,
    leaves: Sequence[Any],
    parts: tuple[int, ...],
    mode: str,
    findings: Findings,
    results: Sequence[fx.Node],
) -> SideBySide:
    """Runs whole and parts; retries in the original order, then without noise, if the model rejects the values.

    `results`: values that parts must have; without noise, if it would make them NaN.
    """
    ways = [(True, True), (False, True), (False, False)]
    for is_reversed, is_noisy in ways[("loud", "equal", "plain").index(mode) :]:
        run = SideBySide(traced, parts, mode, is_noisy, findings)
        try:
            run.run(leaves, is_reversed, results)
            break
        except Exception:
            if not is_noisy:
                raise
    return run


class SideBySide(Findings):
    """A run on the whole and its parts. The values of a node are a list: of the whole, then of each part."""

    def __init__(self, traced: Traced, parts: Sequence[int], mode: str, is_noisy: bool, findings: Findings):
        super().__init__(parameters=findings.parameters, may_fail=findings.may_fail)
        self.traced, self.parts, self.mode, self.is_noisy = traced, parts, mode, is_noisy
        self.features = set[fx.Node]()  # floats computed from parameters or from float inputs
        self.written = frozenset[int]().union(*(info(n).written_storages for n in traced.graph.nodes))
        self.last_maps = {n for n in traced.nodes if _is_last_map(n, self.written)}
        self.values: NodeValues = {}
        self.eps: dict[fx.Node, float] = {}  # precision of values; reductions include their sources
        self.has_python = any(info(n).opaque is not None for n in traced.nodes)
        attributes = [n for n in traced.graph.nodes if n.op == "get_attr"]
        self.buffers = {n for n in attributes if not isinstance(attribute_tensor(traced, n), nn.Parameter)}
        self.state = frozenset[int]().union(*(info(n).storages for n in self.buffers))
        self.assigned = set[fx.Node]().union(*map(dependencies_of, traced.assigned.values()))
        self.updates: dict[fx.Node, frozenset[int]] = {}  # node -> buffers that it is written to, also indirectly
        for writer in traced.graph.nodes:
            if memory := info(writer).written_storages & self.state:
                for node in dependencies_of(writer):
                    self.updates[node] = self.updates.get(node, frozenset()) | memory
        self.adaptive = set[fx.Node]()  # opaque nodes whose Python reads something of all samples
        self.noise: dict[Hashable, torch.Tensor] = {}  # by number of elements, dtype and device
        self.of_buffers = {*self.buffers}  # values computed from buffers, and not from samples

    def run(self, leaves: Sequence[Any], is_reversed: bool, results: Sequence[fx.Node]) -> None:
        first = max(0, self.traced.batch_of(leaves) - sum(self.parts)) if is_reversed else 0
        samples = take_samples(self.traced, leaves, first, first + sum(self.parts))
        for place, dim in enumerate(self.traced.in_dims):
            rows, leaf = rows_per_sample(dim), samples[place]
            if dim is not None and is_reversed:
                samples[place] = torch.cat(leaf.split(rows, dim)[::-1], dim)
            elif dim is not None and self.mode == "equal" and _holds_integers(leaf):
                samples[place] = torch.cat([leaf.narrow(dim, 0, rows)] * (leaf.shape[dim] // rows), dim)
        self.samples = [samples, *self.traced.micro_batches(samples, self.parts)]
        needed = {*results}
        for node in reversed(self.traced.nodes):
            needed.update(node.all_input_nodes if node in needed or node not in self.traced.tail else ())
        self.only_tail = self.traced.tail - needed  # no micro-batch runs them
        self.last_maps |= self.only_tail
        with preserve_state(self.traced.model):
            torch.manual_seed(0)
            nodes = [*self.traced.graph.nodes]
            for node in run_nodes(nodes, self.values, self._input, self._attribute, self._work, results):
                self._look_at(node)
        if self.is_noisy and any(bool(t.isnan().any()) for node in results for t in _tensors(self.values[node][0])):
            raise ArithmeticError("noise leads out of what a function takes")  # NaN would be equal in all samples
        self.values.clear()

    # -- values of nodes -----------------------------------------------------------------------------------------------

    def _input(self, node: fx.Node) -> list[Any]:
        place = self.traced.place_of(node)
        if self.traced.in_dims[place] is not None:
            self.depends.add(node)
            if _is_float(self.samples[0][place]) and not _holds_integers(self.samples[0][place]):
                self.features.add(node)
        return [s[place].detach().clone() if isinstance(s[place], torch.Tensor) else s[place] for s in self.samples]

    def _attribute(self, node: fx.Node) -> list[torch.Tensor]:
        tensor = attribute_tensor(self.traced, node)
        is_parameter = node not in self.buffers
        if is_parameter and _is_float(tensor):
            self.features.add(node)
        parameter = tensor.detach()
        if is_parameter and self.mode != "plain":
            if node not in self.parameters:
                self.parameters[node] = compared_sizes.opened(parameter)
            parameter = self.parameters[node]
        held = [parameter if is_parameter else parameter.clone() for _ in self.samples]
        return [one.detach().requires_grad_(self.has_python and tensor.requires_grad) for one in held]

    def _work(self, node: fx.Node, values: NodeValues) -> list[Any]:
        if node.target is expect or node in self.last_maps:  # expectations are values of the example
            return [None] * len(self.samples)
        if node in self.traced.shared:
            return [_copied(self._call(node, 0)) for _ in self.samples]
        if self.failed.isdisjoint(node.all_input_nodes):
            try:
                return self._results(node)
            except Exception:
                if not self.may_fail:
                    raise
        if node not in self.traced.tail and not self.state.isdisjoint(info(node).written_storages):
            raise ArithmeticError("state is made of what parts of the batch do not compute")
        self.failed.add(node)
        return [_copied(self._call(node, 0)) for _ in self.samples]

    def _results(self, node: fx.Node) -> list[Any]:
        dim = self._dim_of_map(node)
        if dim is not None:
            whole = self._call(node, 0)
            return [whole, *whole.split([part.shape[dim] for part in self.values[_mapped(node)][1:]], dim)]
        if not info(node).is_random or node.target in compared_sizes.MADE_DETERMINISTIC:
            reads: list[list[Any]] = [[] for _ in self.samples]
            results = [self._call(node, k, reads=reads[k]) for k in range(len(self.samples))]
            if any(reads):
                self.reads_values |= not self.depends.isdisjoint(node.all_input_nodes)
                self.adaptive.update(() if _are_of_samples(*reads) else (node,))
            if info(node).is_random and self.is_noisy:  # else a value less the same value after dropout is always 0
                for tensor in _tensors(results):
                    tensor.data.mul_(1 + len(self.joins) % 8 / 16)
            return results
        results = []
        for k in reversed(range(len(self.samples))):
            with preserve_rng():
                results.append(self._call(node, k))
        if info(node).is_scalar_draw:
            return [_copied(results[-1]) for _ in results]
        if not self._leaves_alone(node):
            return results[::-1]
        torch.rand(())  # so that the next node draws other numbers
        return self._with_rows_of_whole(results[::-1])

    def _dim_of_map(self, node: fx.Node) -> int | None:
        """Returns the dimension of the rows if a node is a linear map of rows by parameters; parts need not run it."""
        if node.target not in _MAPS or self.has_python or not self.written.isdisjoint(info(node).storages):
            return None  # a write to the whole would change its rows
        mapped = _mapped(node)
        sources = [n for n in node.all_input_nodes if n is not mapped]
        if not isinstance(mapped, fx.Node) or any(n.op != "get_attr" or n in self.buffers for n in sources):
            return None
        values = [self.values[n][0] for n in node.all_input_nodes]
        dims = [how for how in self.joins[mapped] if isinstance(how, int)]
        is_plain = all(type(value) is torch.Tensor for value in values)  # others may scale by what all samples hold
        return dims[0] if is_plain and len(dims) == 1 and dims[0] < self.values[mapped][0].dim() - 1 else None

    def _call(
        self, node: fx.Node, k: int, changed: Callable[[fx.Node], Any] | None = None, reads: list[Any] | None = None
    ) -> Any:
        """Runs a node on the whole (k = 0) or on part k."""
        with set_thread_state(state_of(node)), torch.set_grad_enabled(self.has_python and state_of(node).grad):
            value_of = changed or (lambda source: self.values[source][k])
            return compared_sizes.run_deterministic_node(node, value_of, reads)

    def _made_of(self, node: fx.Node, changed: dict[fx.Node, Any], on_cpu: bool = False) -> list[torch.Tensor]:
        """Runs a node on the whole again with changed arguments; returns its tensors, or the target that it writes.

        `on_cpu`: the arguments may be indices out of range, after which a GPU cannot be used.
        """
        arguments = {n: _copied(self.values[n][0]) for n in node.all_input_nodes} | changed
        with preserve_rng():
            if on_cpu:
                arguments = {n: pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, arguments[n]) for n in arguments}
                called = call_on_device(node, torch.device("cpu"))
                function, args, kwargs = fx.map_arg(called, arguments.__getitem__)
                is_method = node.op == "call_method"
                value = getattr(args[0], function)(*args[1:], **kwargs) if is_method else function(*args, **kwargs)
            else:
                value = self._call(node, 0, arguments.__getitem__)
        target: Any = node.args[0] if value is None and node.args else None
        return [*_tensors(value if target is None else arguments[target])]

    def _leaves_alone(self, node: fx.Node, step: int = 0) -> bool:
        """Returns whether a sample of the whole stays the same, for the same draws, if other samples change.

        `step`: integers of these become larger or smaller than all.
        """
        sources = _value_sources(node)
        if base_opname(node) == "randperm" or not all(self.joins[n] for n in sources):
            return False
        moving = [n for n in sources if n in self.depends and base_opname(node) not in _SEVERAL_DRAWS]
        draws = 4 if info(node).is_random and info(node).opaque is not None else 1  # in some, samples keep their places
        for draw, part in itertools.product(range(draws), (0, len(self.parts) - 1)) if moving else ():
            moved = {n: self._moved_rows(n, part, step) for n in moving}
            try:
                with preserve_rng(), seeded_python_rng(draw) if draw else contextlib.nullcontext():
                    if draw:
                        torch.manual_seed(draw)
                    pairs = [
                        *zip(self._made_of(node, {}, step != 0), self._made_of(node, moved, step != 0), strict=True)
                    ]
            except Exception:
                if draw == 0:
                    raise
                continue  # Python may return another structure (layers skipped by chance)
            for place, (left, right) in enumerate(pairs):
                rows = (self._rows_of_parts(node, place, left, dim) for dim in range(left.dim()))
                if not any(of and _same_rows(left, right, dim, of, part) for dim, of in enumerate(rows)):
                    return False
        return True

    def _rows_of_parts(self, node: fx.Node, place: int, tensor: torch.Tensor, dim: int) -> list[int]:
        """Returns the number of rows of each part, in a tensor that a node makes of the whole; [] if there are none."""
        tensors = [[*_tensors(value)] for value in self.values.get(node, ())[1:]]
        parts = [own[place].shape for own in tensors if place < len(own) and dim < own[place].dim()]
        if len(parts) == len(self.parts) and sum(shape[dim] for shape in parts) == tensor.shape[dim]:
            return [shape[dim] for shape in parts]  # samples may have unequal numbers of selected rows
        rows, rest = divmod(tensor.shape[dim], sum(self.parts))
        return [] if rest else [rows * size for size in self.parts]

    def _moved_rows(self, node: fx.Node, part: int, step: int) -> Any:
        value, dims = _copied(self.values[node][0]), [d for d in self.joins[node] if isinstance(d, int)]
        if not dims or not (_is_float(value) or step):
            return value
        rows = value.split([v.shape[dims[0]] for v in self.values[node][1:]], dims[0])[part]
        if value.dtype == torch.bool:
            rows.logical_not_()
        elif not _is_float(value):
            rows.fill_((value.max() if step > 0 else value.min()) + step)
        else:
            moved = _moved(rows, 1 + part)
            if value.min() >= 0:  # rates or probabilities, which random functions may require
                moved = moved.abs() if value.max() > 1 else moved.clamp(0, 1)
            rows.copy_(moved)
        return value

    def _with_rows_of_whole(self, values: list[Any]) -> list[Any]:
        """Gives parts the rows of the whole; a value without rows gets the whole's value."""
        whole = [*_tensors(values[0])]
        for place, tensor in enumerate(whole):
            parts = [[*_tensors(value)][place] for value in values[1:]]
            dim = _dim_of_rows(tensor, parts)
            rows = tensor.split([p.shape[dim] for p in parts], dim) if dim is not None else [tensor] * len(parts)
            for part, new in zip(parts, rows, strict=True):
                if part.shape == new.shape:
                    part.data.copy_(new)
        return values

    # -- findings ------------------------------------------------------------------------------------------------------

    def _look_at(self, node: fx.Node) -> None:
        sources, values = _value_sources(node), self.values[node]
        is_shared = node in self.traced.shared  # parts get the value of the whole
        self.sources[node] = sources
        if base_opname(node) in _UNSET or self._is_update(node, sources):
            self._with_rows_of_whole(values)
        elif not is_shared and not self.depends.isdisjoint(sources):
            self.depends.add(node)
        if node not in self.depends and not self.of_buffers.isdisjoint(sources):
            self.of_buffers.add(node)
        if node.op in CALL_OPS and not self.features.isdisjoint(sources):
            self.features.add(node)
        if node.target is operator.getitem and node.args[0] in self.adaptive:
            self.adaptive.add(node)
        reduced = (self.eps[n] for n in sources if not any(isinstance(how, int) for how in self.joins[n]))
        self.eps[node] = max((_eps(values[0]), *reduced))
        self.joins[node] = self._joins_of(node) if node.op != "get_attr" else frozenset(("same",))
        written = info(node).written_storages
        if node in self.only_tail:
            self.joins[node] = NO_JOIN
            return
        if node in self.failed:
            self.failed.update(n for n in self.values if not written.isdisjoint(info(n).storages))
            self.joins |= dict.fromkeys(self.failed, NO_JOIN)
            self.depends.add(node)
            return
        if node in self.last_maps:
            self.joins[node] = self.joins[sources[0]]
        for other in self.values if written else ():
            if other is node or written.isdisjoint(info(other).storages):
                continue
            if node in self.depends and other not in self.buffers:
                self.depends.add(other)
                self.sources[other] = [*self.sources[other], *(n for n in self.sources[node] if n is not other)]
            self.joins[other] = self._joins_of(other)
        if node.op in CALL_OPS and not is_shared and info(node).number is None and info(node).read is None:
            self._look_for_block(node, sources)
            self._look_at_counts(node, sources)
            self._look_at_selection(node)
        if node.op != "get_attr":
            self._spread(node)

    def _joins_of(self, node: fx.Node) -> Joins:
        tensors = [[*_tensors(value)] for value in self.values[node]]
        if not tensors[0]:
            return frozenset(("same",))
        if any(len(t) != len(tensors[0]) for t in tensors):
            return NO_JOIN
        # A step that is chosen by the error of all samples changes each of them by little.
        tolerance = 100 * self.eps[node] if node in self.adaptive else max(2e-4, 4 * self.eps[node])
        leaves = zip(*tensors, strict=True)
        joins = [_joins_of_tensors(whole, parts, self.parts, tolerance) for whole, *parts in leaves]
        if isinstance(self.values[node][0], torch.Tensor):
            return joins[0]
        return frozenset(("parts",)) if all(joins) else NO_JOIN

    def _is_update(self, node: fx.Node, sources: list[fx.Node]) -> bool:
        """Returns whether a node computes new state from old state and samples; gives parts the state of the whole.

        False if the old state is overwritten: then the new state is what samples of this batch have in common.
        """
        memory = self.updates.get(node, frozenset())
        has_batch = any(size.free_symbols for shape in info(node).shapes for size in shape.shape)
        if not has_batch and not info(node).written_storages and (node in self.assigned or memory):
            old = [n for n in sources if n in self.of_buffers]
            states = (info(n).storages for one in old for n in dependencies_of(one))
            if old and (node in self.assigned or not all(map(memory.isdisjoint, states))):
                return True
            if node in self.assigned:
                return False
        effects, state = self.traced.effects, [n for n in sources if not self.state.isdisjoint(info(n).storages)]
        assert effects is not None
        # Fused fake quantization does not raise the version of the tensors that it writes.
        held = [n for n in state if effects.alias[n] in effects.written_classes[effects.place[node]]]
        if not any(self._changes_with(node, n) for n in held):  # some of several may be recomputed: a scale
            return False
        for other in held:
            self._with_rows_of_whole(self.values[other])
        return True

    def _look_for_block(self, node: fx.Node, sources: list[fx.Node]) -> None:
        """Records a value that joins although an argument does not, and whether it depends on that argument."""
        target = node.args[0] if self.values[node][0] is None and node.args else node  # `h[places] = rows`
        if not isinstance(target, fx.Node) or not self.joins.get(target):
            return
        is_of_samples = not self.depends.isdisjoint(sources)  # else of their indices, like `arange(b)`
        met = [n for n in sources if not self.joins[n] and n is not target and _may_move(self.values[n][0])]
        met = [n for n in met if n in self.depends or not (is_of_samples or self._ignores(node, n))]
        if met:
            self.blocks.add(target)
            floats = [n for n in met if _is_float(self.values[n][0])]
            tensors = [value for n in (target, *sources) if isinstance(value := self.values[n][0], torch.Tensor)]
            is_verdict = [t.dtype == torch.bool for t in tensors] == [True, *[False] * (len(tensors) - 1)]
            is_weak = any(self._differs_weakly(self.values[n]) for n in floats)
            if not (is_verdict or is_weak) and self._is_opened(node, sources, floats or met):
                self.opened.add(target)  # not for `count <= capacity`, nor if `h + 1e-3 * mean` is within tolerance

    def _ignores(self, node: fx.Node, indices: fx.Node) -> bool:
        """Returns whether a node makes the same of any indices of samples: `vmap` of a mask that is equal for all."""
        value = self.values[indices][0]
        with contextlib.suppress(Exception):  # numbers that are used as indices
            results = [self._made_of(node, {indices: other}) for other in (value, value + 1, -value, value * 2**20 + 3)]
            return value.dtype == torch.int64 and all(all(map(torch.equal, results[0], one)) for one in results)
        return False

    def _is_opened(self, node: fx.Node, sources: list[fx.Node], met: list[fx.Node]) -> bool:
        """Returns whether a block depends on what does not join. A mask of ones hides it: `mask[arange(b)]`."""
        if all(self._changes_with(node, n) for n in met):
            return True
        masks = [n for n in sources if n not in self.depends and n not in met and self.values[n][0].dim() > 1]
        before = {n: self.values[n] for n in (node, *masks)}
        try:
            for n in masks:
                noise = torch.randn(before[n][0].shape, generator=torch.Generator().manual_seed(0)) > 0
                self.values[n] = self._with_rows_of_whole([noise.to(before[n][0]), *_copied(before[n][1:])])
            self.values[node] = [self._call(node, k) for k in range(len(self.samples))]
            return bool(self._joins_of(node)) and all(self._changes_with(node, n) for n in met)
        except Exception:
            return False
        finally:
            self.values |= before

    def _differs_weakly(self, values: list[torch.Tensor]) -> bool:
        """Returns whether rows that do not join almost do, so that derived values may join within tolerance."""
        whole, *parts = values
        dim = _dim_of_rows(whole, parts)
        return dim is not None and is_close(whole, torch.cat(parts, dim), max(WEAK, EVIDENCE * _tolerance(whole)))

    def _look_at_counts(self, node: fx.Node, sources: list[fx.Node]) -> None:
        """Checks with changed arguments a function of values that get no noise: integers, floats that may be a mask."""
        counts = [n for n in sources if n in self.depends and n not in self.features]
        floats = [n for n in counts if _is_float(self.values[n][0])]
        has_integers = len(counts) > len(floats) and self.depends.intersection(sources) == {*counts}
        has_integers &= info(node).opaque is None and all(n.op != "get_attr" for n in node.all_input_nodes)
        has_integers &= all(self.joins[n] for n in sources)  # else `_look_for_block` decides
        # Elements of a tuple may have rows.
        has_rows = self.has_rows(node) or not isinstance(self.values[node][0], torch.Tensor)
        if self.mode != "loud" or not has_rows or info(node).is_random:
            return
        for step in ((0,) if floats else ()) + ((1, -1) if has_integers else ()):
            with contextlib.suppress(Exception):
                if not self._leaves_alone(node, step):
                    self.blocks.add(node)

    def _look_at_selection(self, node: fx.Node) -> None:
        """Records what depends on the number of selected rows, which a few samples do not show.

        So do rows that are cut (`x[mask][:8]`) and Python that may read the number (`if len(x[mask]) > 8`).
        """
        arguments = node.all_input_nodes if info(node).opaque is not None else []
        sizes = [size for one in (node, *arguments) for shape in info(one).shapes for size in shape.shape]
        of_values = [size for size in sizes if size.free_symbols - {self.traced.batch}]
        if of_values:  # rows in some order, as of `unique`, may join by chance
            self.selected.add(node)
            if sum(all(t.numel() > 0 for t in _tensors(value)) for value in self.values[node][1:]) > 1:
                self.shown.add(node)
        if not all(size.is_polynomial() for size in of_values) or (arguments and of_values):
            self.blocks.add(node)

    def _changes_with(self, node: fx.Node, source: fx.Node) -> bool:
        """Returns whether a node's value changes when a source changes as much as samples differ."""
        try:
            pairs = self._made_of(node, {}), self._made_of(node, {source: _moved(self.values[source][0], 0)})
        except Exception:
            return False
        return any(not is_close(one, other, EVIDENCE * _tolerance(one)) for one, other in zip(*pairs, strict=False))

    def _noise(self, value: torch.Tensor) -> torch.Tensor:
        """Returns factors about 1 for all elements. Values of one size have the same factors."""
        kind = value.numel(), value.dtype, value.device
        if kind not in self.noise:
            factors = 1 + 0.05 * torch.randn(10007, generator=torch.Generator().manual_seed(7))
            repeated = factors.repeat(-(-value.numel() // len(factors)))[: value.numel()]
            self.noise = {kind: repeated.to(value.device, value.dtype)}  # kept for one kind, since they take memory
        return self.noise[kind].view(value.shape)

    def _spread(self, node: fx.Node) -> None:
        """Gives parts the rows of the whole, so that rounding does not add up; adds noise, or repeats one sample."""
        values, dims = self.values[node], [how for how in self.joins[node] if isinstance(how, int)]
        goes_on = any(user.op != "output" for user in node.users)
        if not (dims and goes_on) or not self.written.isdisjoint(info(node).storages):
            return
        value, dim = values[0].detach(), dims[0]
        rows, rest = divmod(value.shape[dim], sum(self.parts))
        if node in self.features and _is_float(value) and self.is_noisy and value.numel() > 0:
            noise = self._noise(value)
            least, most = map(float, torch.aminmax(value))  # numbers: `clamp_` with tensors takes ten times as long
            if math.isnan(least):
                finite = value.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
                least, most = map(float, torch.aminmax(finite))
            # Equal values show nothing about samples: a state of zeros, a mask that hides everything.
            value = value + 2 * (noise - 1).abs() if least == most else (value * noise).clamp_(least, most)
            first = values[1].shape[dim]
            value.narrow(dim, first, value.shape[dim] - first).mul_(0.7)  # statistics of the parts differ
        elif self.mode == "equal" and not (rest or value.is_floating_point() or value.is_complex()):
            value = torch.cat([value.narrow(dim, 0, rows)] * sum(self.parts), dim)
        new = value, *value.split([v.shape[dim] for v in values[1:]], dim)
        self.values[node] = [_like(one, old) for one, old in zip(new, values, strict=True)]


def _value_sources(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments whose values a node uses; excludes those used only for sizes or dtype."""
    name, sources = base_opname(node), node.all_input_nodes
    if node.op in CALL_OPS and name in _LIKE_FIRST | _LIKE_SECOND and node.args:
        sources = [n for n in sources if (n is node.args[0]) == (name in _LIKE_SECOND)]
    return [n for n in sources if info(n).number is None]


def _mapped(node: fx.Node) -> Any:
    place = _MAPS[node.target]
    return node.args[place] if len(node.args) > place else None


def _is_last_map(node: fx.Node, written: frozenset[int]) -> bool:
    """Returns whether an output is a linear map of rows: with a large vocabulary it takes most of the time."""
    weights = [n for n in node.all_input_nodes[1:] if n.op != "get_attr"]
    if node.target is not F.linear or weights or not node.args or [n.op for n in node.users] != ["output"]:
        return False
    source = node.all_input_nodes[0]
    is_bare = source is node.args[0] and source.op in CALL_OPS and written.isdisjoint(info(source).storages)
    last = info(node).shapes[0].shape[-1]
    return is_bare and not last.free_symbols and not info(source).shapes[0].shape[-1].free_symbols


def _joins_of_tensors(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], sizes: Sequence[int], tolerance: float
) -> Joins:
    is_whole = functools.partial(is_close, whole, tolerance=tolerance)
    if whole.layout != torch.strided or any(part.dim() != whole.dim() for part in parts):
        return NO_JOIN
    if whole.numel() == 0 == sum(part.numel() for part in parts):
        dims = (dim for dim, size in enumerate(whole.shape) if size == sum(part.shape[dim] for part in parts))
        return frozenset((*dims, "sum", "mean", "same", "parts"))
    if any(part.shape != whole.shape for part in parts):
        dim = _dim_of_rows(whole, parts)
        if dim is None:
            return NO_JOIN
        rows = whole.split([part.shape[dim] for part in parts], dim)
        is_equal = all(map(torch.equal, rows, parts))  # nearly always, and then it takes no copy
        return frozenset((dim,)) if is_equal or is_whole(torch.cat([*parts], dim)) else NO_JOIN
    joins: set[int | str] = {"same"} if all(is_whole(part) for part in parts) else set()
    if whole.dtype != torch.bool and is_whole(sum(parts[1:], parts[0])):
        joins.add("sum")
    if whole.is_floating_point():
        weighted = [part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True)]
        if is_whole(sum(weighted[1:], weighted[0])):
            joins.add("mean")
    return frozenset(joins)


def _are_of_samples(whole: list[Any], *parts: list[Any]) -> bool:
    """Returns whether Python reads the same of the whole as of each part, or of all parts in turn."""
    ways = ([whole] * len(parts), parts), ([whole], [[one for part in parts for one in part]])
    return any(all(map(_are_near, *way)) for way in ways)


def _are_near(left: list[Any], right: list[Any]) -> bool:
    first, second = (torch.tensor(pytree.tree_leaves(one), dtype=torch.complex128) for one in (left, right))
    return first.shape == second.shape and not bool(((first - second).abs() > 1e-3 * first.abs()).any())


def _dim_of_rows(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> int | None:
    """Returns the dimension along which parts can be concatenated; None if there is none."""
    if any(part.dim() != whole.dim() for part in parts):
        return None
    dims = [d for d, size in enumerate(whole.shape) if any(part.shape[d] != size for part in parts)]
    return dims[0] if len(dims) == 1 and sum(part.shape[dims[0]] for part in parts) == whole.shape[dims[0]] else None


def _same_rows(left: torch.Tensor, right: torch.Tensor, dim: int, rows: Sequence[int], part: int) -> bool:
    """Returns whether rows outside of a part are the same. The part may have another number of rows on the right."""
    before, after = sum(rows[:part]), sum(rows[part + 1 :])
    if right.shape[dim] < before + after:
        return False
    ends = [(t.narrow(dim, 0, before), t.narrow(dim, t.shape[dim] - after, after)) for t in (left, right)]
    return all(map(is_close, *ends))


def _eps(value: Any) -> float:
    return max(
        (torch.finfo(t.dtype).eps for t in _tensors(value) if t.is_floating_point() or t.is_complex()), default=0.0
    )


def _tolerance(value: torch.Tensor) -> float:
    """Returns the tolerance for kernels of other sizes, relative to the largest element."""
    return max(2e-4, 4 * _eps(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout == torch.strided


def _may_move(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.numel() == 0:
        return False
    return value.is_floating_point() or value.dtype == torch.bool or bool((value != value.flatten()[0]).any())


def _copied(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), value)


def _like(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    new = new if new.is_contiguous() and old.is_contiguous() else torch.empty_like(old.detach()).copy_(new)
    return new.clone().requires_grad_() if old.requires_grad else new


def _moved(value: Any, seed: int) -> Any:
    """Returns a changed value, as different as samples are. Integers are permuted, since they may be indices."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return value
    if value.dtype == torch.bool:
        return ~value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).to(value.device)
    if not value.is_floating_point():
        return value.flatten()[noise.flatten().argsort()].view(value.shape)
    finite = value.double().nan_to_num(0.0, 0.0, 0.0)
    scale = float(finite.std(correction=0)) or float(finite.abs().mean()) or 1.0
    return value.nan_to_num(0.0, 0.0, 0.0) + (scale * noise).to(value.dtype)  # an observer starts at infinity


def _holds_integers(leaf: torch.Tensor) -> bool:
    """Returns whether an input holds integers: ids, masks, labels."""
    return not leaf.is_complex() and (not leaf.is_floating_point() or bool((leaf == leaf.round()).all()))
