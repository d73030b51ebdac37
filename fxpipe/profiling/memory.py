"""Bytes that autograd keeps, bytes of temporary memory, and FLOPs, as formulas in the sizes.

The graph runs with the samples of one micro-batch, and at two other, small numbers of samples. With other dynamic
sizes it also runs at some of these: each size alone, then combinations of the sizes with growing counts.

    size s
      │   ·  ·           These give all terms of counts that grow with b and s**2, b*s**2 too.
      │   ·  ·     ●     planned
      └───┴──┴─────┴── samples

The first run observes which storages are saved. Their bytes are the formula of a shape if they belong to a value, else
they are fitted to the counts (`fit_counts`). Not exact: other micro-batches for which views become copies or other
kernels run; workspaces that a library allocates in steps; tensors that a function keeps outside of autograd.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe.profiling.flops import work_of
from fxpipe.profiling.formulas import (
    other_lengths,
    output_bytes,
    parameter_bytes,
    planned_lengths,
    resize_inputs,
    size_point,
)
from fxpipe.profiling.probe import Probe
from fxpipe.profiling.profile_data import NO_TIME, NodeCost, SavedStorage
from fxpipe.profiling.saved_storages import INPUT_PLACE, ObservedStorage, StorageObservations, observe_storages
from fxpipe.tracing.dynamic_sizes import Lengths
from fxpipe.tracing.fake_tensors import in_fake_mode, is_faked
from fxpipe.tracing.model_state import preserve_state, slots_of
from fxpipe.tracing.node_info import bytes_at, info
from fxpipe.tracing.tensors import tensors_in
from fxpipe.tracing.traced import Traced, runs_python
from fxpipe.tracing.verify.effects import Effects
from fxpipe.utils.polynomial import SizePoint, fit_counts, polynomial_through

# A stage is assumed to need, for working, all that it saves, and the maximum of `working_bytes_of` its nodes:
#
#     forward    values that the node reads and returns and no node has saved so far, and its temporary
#     backward   the gradients of these, and its temporary
#     working    the larger of both
#
# This is too much since not all saved storages exist at that moment, and too little if other values are alive (the
# residual of a block, while its branch runs).


def working_bytes_of(
    storages: Sequence[tuple[ObservedStorage, sympy.Expr]],
    temporaries: Sequence[tuple[sympy.Expr, sympy.Expr]],
    batch: sympy.Symbol,
    samples: int,
    lengths: Lengths = (),
) -> tuple[sympy.Expr, ...]:
    """Computes temporary bytes for each node by the rule above; if not polynomials, the larger at `samples`.

    `storages`: with their bytes. `temporaries`: of each node, forward and backward.
    """
    forward = [[one] for one, _ in temporaries]
    backward = [[one] for _, one in temporaries]
    for storage, size in storages:
        for place in {storage.maker, *storage.users} - {INPUT_PLACE, len(temporaries)}:
            if storage.maker >= 0 and not (storage.savers and storage.savers[0] <= place):
                forward[place].append(size)
            if storage.returns:
                backward[place].append(size)
    return tuple(
        larger_formula(sum_formulas(tuple(ahead)), sum_formulas(tuple(back)), batch, samples, lengths)
        for ahead, back in zip(forward, backward, strict=True)
    )


@functools.lru_cache(maxsize=8192)
def sum_formulas(formulas: tuple[sympy.Expr, ...]) -> sympy.Expr:
    """Sums formulas. Cached, since equal nodes have equal sums."""
    return sympy.Add(*formulas)


@functools.lru_cache(maxsize=8192)
def larger_formula(
    left: sympy.Expr, right: sympy.Expr, batch: sympy.Symbol, samples: int, lengths: Lengths = ()
) -> sympy.Expr:
    """Returns an upper bound of two polynomials; for other formulas, the one that is larger for `samples`."""
    if left == right or right == 0:
        return left
    sizes = (batch, *(symbol for symbol, _ in lengths))
    if left.is_polynomial(*sizes) and right.is_polynomial(*sizes):
        both = [sympy.Poly(formula, *sizes).as_dict() for formula in (left, right)]
        degrees = sorted({*both[0], *both[1]})
        monomials = {d: sympy.Mul(*(size**power for size, power in zip(sizes, d, strict=True))) for d in degrees}
        return sympy.Add(*(max(side.get(d, sympy.Integer(0)) for side in both) * monomials[d] for d in degrees))
    return max(left, right, key=lambda formula: bytes_at(formula, batch, samples, lengths))


@dataclass(frozen=True, slots=True)
class GraphCounts:
    nodes: Mapping[fx.Node, NodeCost]  # without seconds
    saved: tuple[SavedStorage, ...]  # storages that autograd keeps, without the model's tensors
    runs: Mapping[SizePoint, StorageObservations] = field(default_factory=dict)  # by size, the micro-batch first


def count_flops_and_bytes(
    traced: Traced, effects: Effects, leaves: Sequence[Any], samples: int, keeps_outputs: bool = False
) -> GraphCounts:
    """Runs the graph and counts. The model, its gradients and all random states are not changed.

    Call it in a block of `with_fake_tensors`. Raises errors of nodes with a note.

    Args:
        leaves: flattened inputs, with any number of samples.
        samples: samples of one micro-batch.
        keeps_outputs: the runs keep the outputs of the model.
    """
    lengths = planned_lengths(traced, leaves)
    here = size_point(samples, lengths)
    with in_fake_mode(), torch.inference_mode(False), torch.enable_grad():
        runs = _SizeRuns(traced, effects, leaves, samples, lengths, keeps_outputs).run()
    storages = [(s, _storage_bytes(traced, s, runs, samples, lengths)) for s in runs[here].seen.values()]
    probes = [{size: run.probes[node] for size, run in runs.items()} for node in effects.nodes]

    def formula(number: Callable[[Probe], int]) -> list[sympy.Expr]:
        return [fit_counts(tuple((size, number(p)) for size, p in of_node.items()), here).formula for of_node in probes]

    forward, backward = formula(lambda p: p.temporary_bytes), formula(lambda p: p.backward_temporary_bytes)
    saved: list[list[sympy.Expr]] = [[] for _ in effects.nodes]
    entries = []
    for s, size in storages:
        if not s.savers:
            continue
        if s.maker >= 0:
            saved[s.savers[0]].append(size)
        # A stage writes to clones of received values, so the last writer is the maker.
        maker = max((s.maker, *(w for w in s.writers if w <= s.savers[0])))
        entries.append(SavedStorage(size, maker, tuple(s.savers)))
    parameters, outputs = parameter_bytes(traced), output_bytes(traced, effects, runs[here].value_bytes, samples)
    flops, backward_flops = formula(lambda p: p.flops), formula(lambda p: p.backward_flops)
    working = working_bytes_of(storages, [*zip(forward, backward, strict=True)], traced.batch, samples, lengths)
    nodes = {
        node: NodeCost(
            node.name,
            NO_TIME,
            NO_TIME,
            parameters[node],
            outputs[node],
            flops=flops[k],
            backward_flops=backward_flops[k],
            saved_bytes=sum_formulas(tuple(saved[k])),
            working_bytes=working[k],
            work=work_of(tuple((size, probe.operations) for size, probe in probes[k].items()), here),
        )
        for k, node in enumerate(effects.nodes)
    }
    return GraphCounts(nodes, tuple(entries), runs)


def _storage_bytes(
    traced: Traced, seen: ObservedStorage, runs: Mapping[SizePoint, StorageObservations], samples: int, lengths: Lengths
) -> sympy.Expr:
    label = seen.label
    if label.is_in_value and label.part == 0 and label.index < len(info(label.node).shapes):
        formula = info(label.node).full_shapes[label.index].bytes
        is_told = formula.free_symbols <= {traced.batch, *traced.dynamic.symbols}
        # It may be a part of a larger storage, which stays allocated.
        if is_told and bytes_at(formula, traced.batch, samples, lengths) == seen.bytes:
            return formula
    counted = tuple((size, number) for size, run in runs.items() if (number := run.bytes(label)) is not None)
    return fit_counts(counted, size_point(samples, lengths)).formula


MAX_TRIED_SAMPLES = 13  # largest number of samples tried in other runs
MAX_LENGTH_RUNS = 40  # limit of runs at other dynamic sizes; if more are needed, some terms are guessed
_PROBED = ("flops", "backward_flops", "temporary_bytes", "backward_temporary_bytes")


@dataclass(slots=True)
class _SizeRuns:
    traced: Traced
    effects: Effects
    leaves: Sequence[Any]
    samples: int
    lengths: Lengths
    keeps_outputs: bool
    runs: dict[SizePoint, StorageObservations] = field(default_factory=dict)
    _once: bool = False  # one node of each kind runs

    def run(self) -> dict[SizePoint, StorageObservations]:
        """Runs for the micro-batch, and for one to three other numbers of samples, until all counts have a formula."""
        samples, runs = self.samples, self.runs
        values = (*tensors_in(self.leaves), *slots_of(self.traced.model).values())
        reads = any(map(runs_python, self.effects.nodes))
        runs[size_point(samples, self.lengths)] = self._observe(samples, self.lengths)
        self._once = is_faked() or (not reads and all(t.device.type == "cpu" for t in values))
        # With few samples also twice their number: small tensors may all fit into one page of memory of a library.
        twice = [2 * samples] if 1 < samples <= 4 else []
        for size in dict.fromkeys([2, *twice, *range(3, MAX_TRIED_SAMPLES + 1)]):
            if len(runs) == 4 or (len(runs) > 1 and _degree_along(runs) is not None):
                break
            if self.traced.holds_at(size, self.lengths):
                self._run_also(size, self.lengths)
        if self.lengths:
            self._run_at_other_lengths(sorted(point.b for point in runs))
        return runs

    def _run_also(self, size: int, lengths: Lengths) -> bool:
        point = size_point(size, lengths)
        if point not in self.runs:
            try:
                self.runs[point] = self._observe(size, lengths)
            except Exception:  # the model does not accept the size, or has another graph for it
                return False
        return True

    def _observe(self, size: int, lengths: Lengths) -> StorageObservations:
        sample = resize_inputs(self.traced, self.leaves, size, lengths)
        observe = functools.partial(observe_storages, self.traced, self.effects, sample)
        skips = not (self.keeps_outputs or any(map(runs_python, self.effects.nodes)))  # products are not computed
        if self._once or skips:  # if something depends on values, all nodes run, with their products
            with contextlib.suppress(Exception), preserve_state(self.traced.model):
                return observe(self._once, self.keeps_outputs, skips)
        with preserve_state(self.traced.model):  # an opaque module may write to memory that it does not own
            return observe(False, self.keeps_outputs)

    def _run_at_other_lengths(self, batches: Sequence[int]) -> None:
        """Runs at other dynamic sizes: each alone, then combined. `batches`: samples of earlier runs, ascending."""
        few = batches[0]
        axes: list[list[tuple[sympy.Symbol, int]]] = []  # for each size the values that its counts need
        for symbol, size in self.lengths:
            known = [size]
            for others in other_lengths(self.traced, symbol, few, self.lengths):
                degree = _degree_along(self._line(few, symbol))
                if len(known) == 4 or (len(known) == 3 and degree is not None):
                    break
                if self._run_also(few, others):
                    known.append(dict(others)[symbol])
            degree = _degree_along(self._line(few, symbol))
            axes.append([(symbol, value) for value in known[: 1 + (2 if degree is None else degree)]])
        own = size_point(few, self.lengths).others
        degree = _degree_along({point: run for point, run in self.runs.items() if point.others == own})
        counts = batches[: 1 + (2 if degree is None else degree)]
        for size, *others in itertools.islice(itertools.product(counts, *axes), MAX_LENGTH_RUNS):
            if self.traced.holds_at(size, tuple(others)):
                self._run_also(size, tuple(others))

    def _line(self, samples: int, symbol: sympy.Symbol) -> dict[SizePoint, StorageObservations]:
        """Returns the runs with this number of samples that differ in one dynamic size only."""
        same = {(s.name, size) for s, size in self.lengths if s != symbol}
        return {point: run for point, run in self.runs.items() if point.b == samples and same <= {*point.others}}


def _degree_along(runs: Mapping[SizePoint, StorageObservations]) -> int | None:
    """Returns the highest degree of all counts along the one size that differs; None if some are on no polynomial.

    Two counts tell only if they are equal, or as the sizes.
    """
    points = [tuple(point.values.values()) for point in runs]
    (place, *_) = [*(k for k, of in enumerate(zip(*points, strict=True)) if len({*of}) > 1), 0]
    first, *others = runs.values()
    probes = {tuple(run.probes[node] for run in runs.values()) for node in first.probes}
    counts = {tuple(getattr(probe, name) for probe in of) for of in probes for name in _PROBED}
    seen = {(storage.bytes, *(run.bytes(storage.label) for run in others)) for storage in first.seen.values()}
    counts |= {tuple(n for n in numbers if n is not None) for numbers in seen if None not in numbers}
    degree = 0
    for numbers in counts:
        fitted = polynomial_through([(point[place], n) for point, n in zip(points, numbers, strict=True)])
        is_plain = (
            len({*numbers}) == 1 or len({n / point[place] for point, n in zip(points, numbers, strict=True)}) == 1
        )
        if fitted is None or (len(points) == 2 and not is_plain):
            return None
        degree = max(degree, *(power for monomial, _ in fitted.terms for _, power in monomial), 0)
    return degree
