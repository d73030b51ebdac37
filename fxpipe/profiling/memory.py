"""Bytes that autograd keeps, bytes of temporary memory, and FLOPs, as formulas in the sizes.

The graph runs with the samples of one micro-batch, and at two other, small numbers of samples. With other dynamic
sizes it also runs at some of these: each size alone, then combinations of the sizes with growing counts.

    size s
      │   ·  ·           These give all terms of counts that grow with b and s**2, b*s**2 too.
      │   ·
      │   ·  ·
      │   ·  ·     ●     planned
      └───┴──┴─────┴── samples

The first run observes which storages are saved. Their bytes are the formula of a shape if they belong to a value, else
they are fitted to the counts (`fit_counts`). Values do not matter: on the CPU zeros replace matrix products
(`SkipMatmul`), and in the other runs one node of each kind runs. A run that depends on values is repeated with values.

Not exact: other micro-batches for which views become copies or other kernels run; workspaces that a library allocates
in steps; a view copied to another device, whose copy has the size of the view; tensors that a function keeps outside of
autograd and of the attributes of its context.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe.profiling.formulas import other_lengths, planned_lengths, resize_inputs, size_point
from fxpipe.profiling.probe import Probe
from fxpipe.profiling.profile_data import SavedStorage
from fxpipe.profiling.saved_storages import ObservedStorage, StorageObservations, ValueLabel, observe_storages
from fxpipe.profiling.skip_matmul import SkipMatmul
from fxpipe.tracing.dynamic_sizes import Lengths
from fxpipe.tracing.fake_tensors import in_fake_mode, is_faked
from fxpipe.tracing.model_state import preserve_state, slots_of
from fxpipe.tracing.node_info import bytes_at, info
from fxpipe.tracing.tensors import tensors_in
from fxpipe.tracing.traced import Traced, runs_python
from fxpipe.tracing.verify.effects import Effects
from fxpipe.utils.polynomial import Monomial, SizePoint, fit_counts, polynomial_through

# -- Temporary memory of a stage, in addition to parameters, gradients and saved storages ----------------------------
#
# A stage is assumed to need everything that it saves, and the maximum of `working_bytes_of` its nodes:
#
#     forward    values that the node reads and returns and no node has saved so far, and its temporary
#     backward   the gradients of these, and its temporary
#     working    the larger of both
#
# This is too much since not all saved storages exist at that moment, and too little if other values are alive (the
# residual of a block, while its branch runs).


@dataclass(frozen=True, slots=True)
class StorageLifetime:
    """The lifetime of a storage that does not belong to the model, from its first node to its last."""

    bytes: sympy.Expr
    maker: int  # place of the node that creates it; -1: an input that no node writes to
    users: tuple[int, ...]  # places of the nodes that read it, ascending; the number of nodes: the model's output
    savers: tuple[int, ...] = ()  # places of the nodes whose backward needs it, ascending
    returns: bool = False  # it receives a gradient


@dataclass(frozen=True, slots=True)
class TemporaryBytes:
    forward: sympy.Expr
    backward: sympy.Expr


def working_bytes_of(
    storages: Sequence[StorageLifetime],
    temporaries: Sequence[TemporaryBytes],
    batch: sympy.Symbol,
    samples: int,
    lengths: Lengths = (),
) -> tuple[sympy.Expr, ...]:
    """Computes temporary bytes for each node by the rule above; if not polynomials, the larger at `samples`."""
    forward: dict[int, list[sympy.Expr]] = defaultdict(list)
    backward: dict[int, list[sympy.Expr]] = defaultdict(list)
    end = len(temporaries)
    for storage in storages:
        for place in {storage.maker, *storage.users} - {-1, end}:
            if storage.maker >= 0 and not (storage.savers and storage.savers[0] <= place):
                forward[place].append(storage.bytes)
            if storage.returns:
                backward[place].append(storage.bytes)
    return tuple(
        larger_formula(
            sum_formulas((*forward[place], temporary.forward)),
            sum_formulas((*backward[place], temporary.backward)),
            batch,
            samples,
            lengths,
        )
        for place, temporary in enumerate(temporaries)
    )


# -- sums of formulas --------------------------------------------------------------------------------------------------


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


# -- Nodes whose values no Python reads (a hook, an opaque module or function), directly or later ---------------------


def unread_nodes(effects: Effects) -> frozenset[fx.Node]:
    """Finds the nodes in one walk from the end: inputs of a read node are read as well, and so is their memory."""
    unread: set[fx.Node] = set()
    read: set[fx.Node] = set()
    memory: set[int | None] = set()  # alias classes
    for node, written in zip(reversed(effects.nodes), reversed(effects.written_classes), strict=True):
        is_read = node in read or effects.alias[node] in memory or not memory.isdisjoint(written)
        if is_read or runs_python(node):
            read.update(node.all_input_nodes)
            memory.update(alias for n in node.all_input_nodes if (alias := effects.alias[n]) is not None)
        else:
            unread.add(node)
    return frozenset(unread)


MAX_TRIED_SAMPLES = 13  # largest number of samples tried in other runs


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """Counts of one node; formulas in the batch size and the dynamic sizes."""

    flops: sympy.Expr
    backward_flops: sympy.Expr
    saved_bytes: sympy.Expr  # storages kept for backward that no earlier node keeps; without model inputs
    working_bytes: sympy.Expr  # see `working_bytes_of`


@dataclass(frozen=True, slots=True)
class GraphCounts:
    nodes: Mapping[fx.Node, NodeCounts]
    saved: tuple[SavedStorage, ...]  # storages that autograd keeps, without the model's tensors
    runs: Mapping[SizePoint, StorageObservations] = field(default_factory=dict)  # by size, the micro-batch first


def count_flops_and_bytes(
    traced: Traced, effects: Effects, leaves: Sequence[Any], samples: int, keeps_outputs: bool = False
) -> GraphCounts:
    """Runs the graph and counts. The model, its gradients and all random states are not changed.

    Call it in a block of `with_fake_tensors`.

    Args:
        leaves: flattened inputs, with any number of samples.
        samples: samples of one micro-batch.
        keeps_outputs: the runs keep the outputs of the model.

    Raises:
        Exception: raised by a node with this number of samples, with a note.
    """
    lengths = planned_lengths(traced, leaves)
    here = size_point(samples, lengths)
    with in_fake_mode(), torch.inference_mode(False), torch.enable_grad():
        runs = _run_at_sizes(traced, effects, leaves, samples, lengths, keeps_outputs)
    seen = tuple(runs[here].seen.values())
    storages = tuple(_storage(traced, s, runs, samples, lengths) for s in seen)
    probes = [{size: run.probes[node] for size, run in runs.items()} for node in effects.nodes]

    def formula(number: Callable[[Probe], int]) -> list[sympy.Expr]:
        return [fit_counts(tuple((size, number(p)) for size, p in of_node.items()), here).formula for of_node in probes]

    temporaries = tuple(
        map(TemporaryBytes, formula(lambda p: p.temporary_bytes), formula(lambda p: p.backward_temporary_bytes))
    )
    saved: list[list[sympy.Expr]] = [[] for _ in effects.nodes]
    for s in storages:
        if s.savers and s.maker >= 0:
            saved[s.savers[0]].append(s.bytes)
    nodes = map(
        NodeCounts,
        formula(lambda p: p.flops),
        formula(lambda p: p.backward_flops),
        (sum_formulas(tuple(bytes)) for bytes in saved),
        working_bytes_of(storages, temporaries, traced.batch, samples, lengths),
    )
    return GraphCounts(
        dict(zip(effects.nodes, nodes, strict=True)),
        tuple(_saved_storage(*pair) for pair in zip(seen, storages, strict=True) if pair[0].savers),
        runs,
    )


# -- runs ------------------------------------------------------------------------------------------------------------


def _run_at_sizes(
    traced: Traced, effects: Effects, leaves: Sequence[Any], samples: int, lengths: Lengths, keeps_outputs: bool
) -> dict[SizePoint, StorageObservations]:
    """Runs the graph for a micro-batch, for two other numbers of samples, and for a third if these are on no line.

    With dynamic sizes it then runs at others of these.
    """
    nodes = unread_nodes(effects)
    values = (*tensors_in(leaves), *slots_of(traced.model).values())
    one_of_a_kind = is_faked() or (len(nodes) == len(effects.nodes) and all(t.device.type == "cpu" for t in values))
    here = size_point(samples, lengths)
    runs = {here: _run_at_size(traced, effects, leaves, samples, lengths, nodes, False, keeps_outputs)}

    def run_also(size: int, others: Lengths) -> bool:
        point = size_point(size, others)
        if point not in runs:
            try:
                runs[point] = _run_at_size(traced, effects, leaves, size, others, nodes, one_of_a_kind, keeps_outputs)
            except Exception:  # the model does not accept the size, or has another graph for it
                return False
        return True

    for size in _other_sizes(traced, samples, lengths):
        if len(runs) == 4 or (len(runs) == 3 and not _grows_unevenly(runs)):
            break
        run_also(size, lengths)
    if lengths:
        _run_at_other_lengths(traced, sorted(point.b for point in runs), samples, lengths, runs, run_also)
    return runs


MAX_LENGTH_RUNS = 40  # limit of runs at other dynamic sizes; if more are needed, some terms are guessed


def _run_at_other_lengths(
    traced: Traced,
    batches: Sequence[int],
    samples: int,
    lengths: Lengths,
    runs: Mapping[SizePoint, StorageObservations],
    run_also: Callable[[int, Lengths], bool],
) -> None:
    """Runs the graph at other dynamic sizes, with few samples: each size alone, then combinations.

    `batches`: numbers of samples at which it has run, ascending.
    """
    few = batches[0]
    axes: list[list[tuple[sympy.Symbol, int]]] = []  # for each size the values that its counts need
    for symbol, size in lengths:
        known = [size]
        for others in other_lengths(traced, symbol, few, lengths):
            line = {
                point: run for point, run in runs.items() if point.b == few and _differs_only(point, symbol, lengths)
            }
            if len(known) == 4 or (len(known) == 3 and not _grows_unevenly(line)):
                break
            if run_also(few, others):
                known.append(dict(others)[symbol])
        line = {point: run for point, run in runs.items() if point.b == few and _differs_only(point, symbol, lengths)}
        axes.append([(symbol, value) for value in known[: _degree_along(line) + 1]])
    of_batch = {point: run for point, run in runs.items() if point.others == size_point(few, lengths).others}
    counts = batches[: _degree_along(of_batch) + 1]
    for number, (size, *others) in enumerate(itertools.product(counts, *axes)):
        if number >= MAX_LENGTH_RUNS:
            break
        if traced.holds_at(size, tuple(others)):
            run_also(size, tuple(others))


def _differs_only(point: SizePoint, symbol: sympy.Symbol, lengths: Lengths) -> bool:
    return all(dict(point.others)[s.name] == size for s, size in lengths if s != symbol)


def _degree_along(runs: Mapping[SizePoint, StorageObservations]) -> int:
    """Returns the highest degree of the counts along one size; 2 if no polynomial fits."""
    fitted = (polynomial_through(_along(series)) for series in _count_series(runs))
    return max((2 if one is None else max((_power(m) for m, _ in one.terms), default=0) for one in fitted), default=0)


def _power(monomial: Monomial) -> int:
    return sum(power for _, power in monomial)


def _along(series: Sequence[tuple[SizePoint, int]]) -> list[tuple[int, int]]:
    """Returns the counts by the one size that differs."""
    values = [tuple(point.values.values()) for point, _ in series]
    (place, *_) = [*(k for k, of in enumerate(zip(*values, strict=True)) if len({*of}) > 1), 0]
    return [(value[place], count) for value, (_, count) in zip(values, series, strict=True)]


def _run_at_size(
    traced: Traced,
    effects: Effects,
    leaves: Sequence[Any],
    size: int,
    lengths: Lengths,
    nodes: Collection[fx.Node],
    once: bool,
    keeps_outputs: bool,
) -> StorageObservations:
    """Runs the graph at a size, with as little arithmetic as the counts allow.

    `nodes`: nodes whose values no Python reads. `once`, `keeps_outputs`: see `observe_storages`.
    """
    sample = resize_inputs(traced, leaves, size, lengths)
    attempts = [(True, SkipMatmul(nodes, has_zeros=True))] if once else []
    for is_once, products in (*attempts, (False, SkipMatmul(nodes))):
        try:
            with preserve_state(traced.model):  # an opaque module may write to memory that it does not own
                return observe_storages(traced, effects, sample, products, is_once, keeps_outputs)
        except Exception:  # something depends on values, or the next run raises it, too
            if not products.has_zeros:
                raise
    with preserve_state(traced.model):
        return observe_storages(traced, effects, sample, SkipMatmul(), False, keeps_outputs)


def _other_sizes(traced: Traced, samples: int, lengths: Lengths) -> list[int]:
    """Orders the sizes to try: small ones; for few samples also twice their number, since small tensors may all fit
    into one page of memory of a library."""
    twice = [2 * samples] if 1 < samples <= 4 else []
    sizes = dict.fromkeys([2, *twice, *range(3, MAX_TRIED_SAMPLES + 1)])
    return [size for size in sizes if size != samples and traced.holds_at(size, lengths)]


def _grows_unevenly(runs: Mapping[SizePoint, StorageObservations]) -> bool:
    """Returns whether a count is neither constant nor on a line, along the one size that differs."""
    return any(polynomial_through(_along(series)) is None for series in _count_series(runs))


_PROBED = ("flops", "backward_flops", "temporary_bytes", "backward_temporary_bytes")


def _count_series(runs: Mapping[SizePoint, StorageObservations]) -> set[tuple[tuple[SizePoint, int], ...]]:
    """Returns all counts of these runs, each by the sizes of the runs."""
    first, *others = runs.values()
    probes = {tuple(run.probes[node] for run in runs.values()) for node in first.probes}
    counts = {tuple(getattr(probe, name) for probe in of) for of in probes for name in _PROBED}
    seen = {(storage.bytes, *(run.bytes(storage.label) for run in others)) for storage in first.seen.values()}
    known: set[tuple[int, ...]] = counts | {
        tuple(n for n in numbers if n is not None) for numbers in seen if None not in numbers
    }
    return {tuple(zip(runs, numbers, strict=True)) for numbers in known}


# -- storages --------------------------------------------------------------------------------------------------------


def _storage(
    traced: Traced,
    seen: ObservedStorage,
    runs: Mapping[SizePoint, StorageObservations],
    samples: int,
    lengths: Lengths,
) -> StorageLifetime:
    maker = seen.maker
    if maker < 0 and seen.writers:
        maker = seen.writers[0]  # a stage that writes to an input writes to a clone
    formula = _storage_bytes(traced, seen, runs, samples, lengths)
    return StorageLifetime(formula, maker, tuple(sorted(seen.users)), tuple(sorted(seen.savers)), seen.returns)


def _saved_storage(seen: ObservedStorage, storage: StorageLifetime) -> SavedStorage:
    """Makes the entry of a profile. A stage writes to clones of received values, so the last writer is the maker."""
    writers = [w for w in seen.writers if w <= seen.savers[0]]
    return SavedStorage(storage.bytes, max((storage.maker, *writers)), storage.savers)


def _storage_bytes(
    traced: Traced,
    seen: ObservedStorage,
    runs: Mapping[SizePoint, StorageObservations],
    samples: int,
    lengths: Lengths,
) -> sympy.Expr:
    label = seen.label
    if isinstance(label, ValueLabel) and label.part == 0 and label.tensor < len(info(label.node).shapes):
        formula = info(label.node).full_shapes[label.tensor].bytes
        is_told = formula.free_symbols <= {traced.batch, *traced.dynamic.symbols}
        # It may be a part of a larger storage, which stays allocated.
        if is_told and bytes_at(formula, traced.batch, samples, lengths) == seen.bytes:
            return formula
    counted = tuple((size, number) for size, run in runs.items() if (number := run.bytes(label)) is not None)
    return fit_counts(counted, size_point(samples, lengths)).formula
