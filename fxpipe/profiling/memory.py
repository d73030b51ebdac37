"""Bytes that autograd keeps, bytes that are taken for a moment, and FLOPs: counted, and said for every batch size.

The graph runs once with the samples of one micro-batch, and at two other sizes, the smallest ones that it holds for.
What is saved is as seen in the first run: whether `reshape` copies depends on the size, and so do kernels. How much it
is comes from shapes where a value shows it, else from what was counted at all sizes (`fit_counts`).

Values do not count, so on the CPU zeros do for matrix products (`SkipMatmul`), and in the other runs one node of each
kind does for all. Where something depends on values after all, such a run comes to an end, and another one computes
everything.

What cannot be exact:

- another micro-batch than the one that was looked at, where views become copies or other kernels run there;
- memory that a library allots in steps (the workspace of an LSTM in oneDNN), for other sizes;
- a view that is sent to another device: the copy there takes the size of the view, not that of its storage;
- what a function keeps in other places than autograd and the attributes of its context.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe.profiling.probe import Probe
from fxpipe.profiling.profile_data import SavedStorage
from fxpipe.profiling.saved_storages import ObservedStorage, StorageObservations, ValueLabel, observe_storages
from fxpipe.tracing.fake_tensors import in_fake_mode, is_faked
from fxpipe.tracing.model_state import preserve_state, slots_of
from fxpipe.tracing.node_info import info
from fxpipe.tracing.shapes.symbolic_shapes import bytes_at
from fxpipe.tracing.skip_matmul import SkipMatmul
from fxpipe.tracing.tensors import tensors_in
from fxpipe.tracing.traced import Traced, runs_python
from fxpipe.tracing.verify.effects import Effects
from fxpipe.tracing.verify.equivalence import take_samples
from fxpipe.utils.polynomial import fit_counts, polynomial_through

# -- Memory that a stage needs for a moment, beside parameters, their gradients and what autograd keeps --------------
#
# `working_bytes_of` is a number for each node, whatever the cut; a stage is taken to need all that it saves, and the
# most that one of its nodes works on:
#
#     forward    what the node reads and returns, where nothing keeps it so far for backward, and its temporary
#     backward   the gradients of these, and its temporary
#     working    the larger of both
#
# This is too much as saved storages are not all there at the moment that counts, and too little where other values are
# alive beside the node (the residual of a block, while its branch runs).


@dataclass(frozen=True, slots=True)
class StorageLifetime:
    """One storage that is not the model's own, from the node that makes it to the last that needs it."""

    bytes: sympy.Expr
    maker: int  # place of the node that made it; -1: an input that no node writes to
    users: tuple[int, ...]  # places of the nodes that read it, ascending; the number of nodes: the model's output
    savers: tuple[int, ...] = ()  # places of the nodes whose backward needs it, ascending
    returns: bool = False  # does a gradient come back to it


@dataclass(frozen=True, slots=True)
class TemporaryBytes:
    """Bytes that a node takes for a moment."""

    forward: sympy.Expr
    backward: sympy.Expr


def working_bytes_of(
    storages: Sequence[StorageLifetime], temporaries: Sequence[TemporaryBytes], batch: sympy.Symbol, samples: int
) -> tuple[sympy.Expr, ...]:
    """Computes for each node bytes held for a moment, by the rule above; in doubt by the formula for `samples`."""
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
        )
        for place, temporary in enumerate(temporaries)
    )


# -- sums of formulas --------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8192)
def sum_formulas(formulas: tuple[sympy.Expr, ...]) -> sympy.Expr:
    """Sums formulas. Equal nodes ask for equal sums."""
    return sympy.Add(*formulas)


@functools.lru_cache(maxsize=8192)
def larger_formula(left: sympy.Expr, right: sympy.Expr, batch: sympy.Symbol, samples: int) -> sympy.Expr:
    """A formula that is never smaller than both, if they are polynomials; else the one that is larger for `samples`."""
    if left == right or right == 0:
        return left
    if left.is_polynomial(batch) and right.is_polynomial(batch):
        both = [sympy.Poly(formula, batch).as_dict() for formula in (left, right)]
        degrees = sorted({*both[0], *both[1]})
        return sympy.Add(*(max(side.get(d, sympy.Integer(0)) for side in both) * batch ** d[0] for d in degrees))
    return max(left, right, key=lambda formula: bytes_at(formula, batch, samples))


# -- Nodes of which nobody reads a value: nothing that follows from it comes to code that runs as it is --------------
#
# A function of torch is asked for a result, and a dispatch mode sees what it does. A hook, a module kept whole or an
# opaque function is Python, and may look at the values it is given in ways that no mode sees.


def unread_nodes(effects: Effects) -> frozenset[fx.Node]:
    """Finds the nodes in one walk from the end: what a read node was given is read as well, and so is its memory."""
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


MAX_TRIED_SAMPLES = 13  # samples that are tried in other runs, where there are fewer in a micro-batch


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """Counts of one node; formulas in the batch size."""

    flops: sympy.Expr
    backward_flops: sympy.Expr
    saved_bytes: sympy.Expr  # storages kept for backward that no node before it keeps; inputs of the model apart
    working_bytes: sympy.Expr  # see `working_bytes_of`


@dataclass(frozen=True, slots=True)
class GraphCounts:
    """Counts of a graph, for a micro-batch."""

    nodes: Mapping[fx.Node, NodeCounts]
    saved: tuple[SavedStorage, ...]  # storages that autograd keeps; the model's own are not among them


def count_flops_and_bytes(traced: Traced, effects: Effects, leaves: Sequence[Any], samples: int) -> GraphCounts:
    """Runs the graph, and looks. The model, its gradients and all random states stay as they were.

    Args:
        leaves: flattened inputs, with any number of samples.
        samples: of one micro-batch.

    To be used in a block of `with_fake_tensors`.

    Raises:
        Exception: what a node raises with so many samples, with a note.
    """
    with in_fake_mode(), torch.inference_mode(False), torch.enable_grad():
        runs = _run_at_sizes(traced, effects, leaves, samples)
    seen = tuple(runs[samples].seen.values())
    storages = tuple(_storage(traced, s, runs, samples) for s in seen)
    probes = [{size: run.probes[node] for size, run in runs.items()} for node in effects.nodes]

    def formula(number: Callable[[Probe], int]) -> list[sympy.Expr]:
        return [
            fit_counts(tuple((size, number(p)) for size, p in of_node.items()), samples).formula for of_node in probes
        ]

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
        working_bytes_of(storages, temporaries, traced.batch, samples),
    )
    return GraphCounts(
        dict(zip(effects.nodes, nodes, strict=True)),
        tuple(_saved_storage(*pair) for pair in zip(seen, storages, strict=True) if pair[0].savers),
    )


# -- runs ------------------------------------------------------------------------------------------------------------


def _run_at_sizes(
    traced: Traced, effects: Effects, leaves: Sequence[Any], samples: int
) -> dict[int, StorageObservations]:
    """Runs the graph by number of samples: a micro-batch's, two others, and a third where these make no line."""
    nodes = unread_nodes(effects)
    values = (*tensors_in(leaves), *slots_of(traced.model).values())
    one_of_a_kind = is_faked() or (len(nodes) == len(effects.nodes) and all(t.device.type == "cpu" for t in values))
    runs = {samples: _run_at_size(traced, effects, leaves, samples, nodes)}
    for size in _other_sizes(traced, samples):
        if len(runs) == 4 or (len(runs) == 3 and not _grows_unevenly(runs)):
            break
        try:
            runs[size] = _run_at_size(traced, effects, leaves, size, nodes, one_of_a_kind)
        except Exception:  # a size that the model refuses, or samples for which it is another graph
            continue
    return runs


def _run_at_size(
    traced: Traced, effects: Effects, leaves: Sequence[Any], size: int, nodes: Collection[fx.Node], once: bool = False
) -> StorageObservations:
    """Runs the graph at a size with as little arithmetic as shows what there is to count.

    Args:
        nodes: of which nobody reads a value.
        once: is one node of each kind enough.
    """
    sample = take_samples(traced, leaves, 0, size)
    attempts = [(True, SkipMatmul(nodes, has_zeros=True))] if once else []
    for is_once, products in (*attempts, (False, SkipMatmul(nodes))):
        try:
            with preserve_state(traced.model):  # a module kept whole may write to what is not its own
                return observe_storages(traced, effects, sample, products, is_once)
        except Exception:  # something depends on values after all, or it would have been raised anyway
            if not products.has_zeros:
                raise
    with preserve_state(traced.model):
        return observe_storages(traced, effects, sample, SkipMatmul())


def _other_sizes(traced: Traced, samples: int) -> list[int]:
    """Orders the sizes to be tried: small ones; of a few samples also twice as many, since what small
    ones take may all fit into the one page of memory that a library allots."""
    twice = [2 * samples] if 1 < samples <= 4 else []
    sizes = dict.fromkeys([2, *twice, *range(3, MAX_TRIED_SAMPLES + 1)])
    return [size for size in sizes if size != samples and traced.holds_at(size)]


def _grows_unevenly(runs: Mapping[int, StorageObservations]) -> bool:
    """Returns whether a count is neither constant nor on a line."""
    first, *others = runs.values()
    series = {tuple(run.probes[node] for run in runs.values()) for node in first.probes}
    counts = {tuple(astuple(probe)[k] for probe in probes) for probes in series for k in range(len(fields(Probe)))}
    counts |= {(seen.bytes, *(run.bytes(seen.label) for run in others)) for seen in first.seen.values()}
    return any(
        None not in numbers and polynomial_through(tuple(zip(runs, numbers, strict=True))) is None for numbers in counts
    )


# -- storages --------------------------------------------------------------------------------------------------------


def _storage(
    traced: Traced, seen: ObservedStorage, runs: Mapping[int, StorageObservations], samples: int
) -> StorageLifetime:
    maker = seen.maker
    if maker < 0 and seen.writers:
        maker = seen.writers[0]  # the stage that writes to an input does so to a clone
    formula = _storage_bytes(traced, seen, runs, samples)
    return StorageLifetime(formula, maker, tuple(sorted(seen.users)), tuple(sorted(seen.savers)), seen.returns)


def _saved_storage(seen: ObservedStorage, storage: StorageLifetime) -> SavedStorage:
    """Makes what a stage keeps. It writes to clones of what it receives, so the node that wrote last is the maker."""
    writers = [w for w in seen.writers if w <= seen.savers[0]]
    return SavedStorage(storage.bytes, max((storage.maker, *writers)), storage.savers)


def _storage_bytes(
    traced: Traced, seen: ObservedStorage, runs: Mapping[int, StorageObservations], samples: int
) -> sympy.Expr:
    label = seen.label
    if isinstance(label, ValueLabel) and label.part == 0 and label.tensor < len(info(label.node).shapes):
        formula = info(label.node).shapes[label.tensor].bytes
        # It may be a part of something larger, which stays as a whole.
        if formula.free_symbols <= {traced.batch} and bytes_at(formula, traced.batch, samples) == seen.bytes:
            return formula
    counted = tuple((size, number) for size, run in runs.items() if (number := run.bytes(label)) is not None)
    return fit_counts(counted, samples).formula
