"""Bytes that autograd keeps, bytes that are taken for a moment, and FLOPs: counted, and said for every batch size.

The graph runs once with the samples of one micro-batch, and at two other sizes, the smallest ones that it holds for.
What is saved is as seen in the first run: whether `reshape` copies hangs on the size, and so do kernels. How much it is
comes from shapes where a value shows it, else from what was counted at all sizes (`formulas.fitted`).

Values do not count, so on the CPU zeros do for products (`products`), and in the other runs one node of each kind does
for all. Where something hangs on values after all, such a run comes to an end, and another one computes everything.

What cannot be exact:

- another micro-batch than the one that was looked at, where views become copies or other kernels run there;
- memory that a library allots in steps (the workspace of an LSTM in oneDNN), for other sizes;
- a view that is sent to another device: the copy there takes the size of the view, not that of its storage;
- what a function keeps in other places than autograd and the attributes of its context.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import sympy
import torch
from torch import fx

from fxpipe.profiling.costs import Saved
from fxpipe.profiling.formulas import fitted, polynomial
from fxpipe.profiling.probing import Probe
from fxpipe.profiling.saving import Followed, OfValue, Seen, follow
from fxpipe.profiling.unread import unread
from fxpipe.profiling.working import Storage, Temporary, total, working
from fxpipe.tracing.checking.check import is_same_graph, take
from fxpipe.tracing.checking.effects import Effects
from fxpipe.tracing.containers import tensors_in
from fxpipe.tracing.products import WithoutProducts
from fxpipe.tracing.recording.fake import is_faked, running
from fxpipe.tracing.sizing.shapes import bytes_for
from fxpipe.tracing.snapshot import slots_of, undone
from fxpipe.tracing.traced import Traced

MOST = 13  # samples that are tried in other runs, where there are fewer in a micro-batch


@dataclass(frozen=True, slots=True)
class Count:
    """Of one node; formulas in the batch size."""

    flops: sympy.Expr
    backward_flops: sympy.Expr
    saved_bytes: sympy.Expr  # storages kept for backward that no node before it keeps; inputs of the model apart
    temporary_bytes: sympy.Expr  # taken for a moment in forward, beside what it reads, returns and saves
    working_bytes: sympy.Expr  # see `working`


@dataclass(frozen=True, slots=True)
class Counts:
    """Of a graph, for a micro-batch."""

    nodes: Mapping[fx.Node, Count]
    storages: tuple[Storage, ...]  # all but the model's own
    temporaries: tuple[Temporary, ...]  # by place
    saved: tuple[Saved, ...]  # of the storages those that autograd keeps


def count(traced: Traced, effects: Effects, leaves: Sequence[Any], samples: int) -> Counts:
    """Runs the graph, and looks. The model, its gradients and all random states stay as they were.

    Args:
        leaves: flattened inputs, with any number of samples.
        samples: of one micro-batch.

    To be used in a block of `tracing.fake.faked`.

    Raises:
        Exception: what a node raises with so many samples, with a note.
    """
    with running(), torch.inference_mode(False), torch.enable_grad():
        runs = _runs(traced, effects, leaves, samples)
    seen = tuple(runs[samples].seen.values())
    storages = tuple(_storage(traced, s, runs, samples) for s in seen)
    probes = [{size: run.probes[node] for size, run in runs.items()} for node in effects.nodes]

    def formula(number: Callable[[Probe], int]) -> list[sympy.Expr]:
        return [
            fitted(tuple((size, number(p)) for size, p in of_node.items()), samples, traced.batch) for of_node in probes
        ]

    temporaries = tuple(map(Temporary, formula(lambda p: p.temporary), formula(lambda p: p.backward_temporary)))
    saved: list[list[sympy.Expr]] = [[] for _ in effects.nodes]
    for s in storages:
        if s.savers and s.maker >= 0:
            saved[s.savers[0]].append(s.bytes)
    nodes = map(
        Count,
        formula(lambda p: p.flops),
        formula(lambda p: p.backward_flops),
        (total(tuple(bytes)) for bytes in saved),
        (t.forward for t in temporaries),
        working(storages, temporaries, traced.batch, samples),
    )
    return Counts(
        dict(zip(effects.nodes, nodes, strict=True)),
        storages,
        temporaries,
        tuple(_saved(*pair) for pair in zip(seen, storages, strict=True) if pair[0].savers),
    )


# -- runs ------------------------------------------------------------------------------------------------------------


def _runs(traced: Traced, effects: Effects, leaves: Sequence[Any], samples: int) -> dict[int, Followed]:
    """By number of samples: that of a micro-batch, two others, and a third where these make no line."""
    nodes = unread(effects)
    values = (*tensors_in(leaves), *slots_of(traced.model).values())
    one_of_a_kind = is_faked() or (len(nodes) == len(effects.nodes) and all(t.device.type == "cpu" for t in values))
    runs = {samples: _run(traced, effects, leaves, samples, nodes)}
    for size in _other_sizes(traced, samples):
        if len(runs) == 4 or (len(runs) == 3 and not _grows_unevenly(runs)):
            break
        try:
            runs[size] = _run(traced, effects, leaves, size, nodes, one_of_a_kind)
        except Exception:  # a size that the model refuses, or samples for which it is another graph
            continue
    return runs


def _run(
    traced: Traced, effects: Effects, leaves: Sequence[Any], size: int, nodes: Collection[fx.Node], once: bool = False
) -> Followed:
    """With as little arithmetic as shows what there is to count.

    Args:
        nodes: of which nobody reads a value.
        once: is one node of each kind enough.
    """
    sample = take(traced, leaves, 0, size)
    attempts = [(True, WithoutProducts(nodes, are_others=True))] if once else []
    for is_once, products in (*attempts, (False, WithoutProducts(nodes))):
        try:
            with undone(traced.model):  # a module kept whole may write to what is not its own
                return follow(traced, effects, sample, products, is_once)
        except Exception:  # something hangs on values after all, or it would have been raised anyway
            if not products.are_others:
                raise
    with undone(traced.model):
        return follow(traced, effects, sample, WithoutProducts())


def _other_sizes(traced: Traced, samples: int) -> list[int]:
    """In the order in which they are to be tried: small ones; of a few samples also twice as many, since what small
    ones take may all fit into the one page of memory that a library allots."""
    twice = [2 * samples] if 1 < samples <= 4 else []
    sizes = dict.fromkeys([2, *twice, *range(3, MOST + 1)])
    return [size for size in sizes if size != samples and is_same_graph(traced, size)]


def _grows_unevenly(runs: Mapping[int, Followed]) -> bool:
    """Is there a count that is neither constant nor on a line?"""
    first, *others = runs.values()
    series = {tuple(run.probes[node] for run in runs.values()) for node in first.probes}
    counts = {tuple(astuple(probe)[k] for probe in probes) for probes in series for k in range(len(fields(Probe)))}
    counts |= {(seen.bytes, *(run.bytes(seen.label) for run in others)) for seen in first.seen.values()}
    return any(None not in numbers and polynomial(tuple(zip(runs, numbers, strict=True))) is None for numbers in counts)


# -- storages --------------------------------------------------------------------------------------------------------


def _storage(traced: Traced, seen: Seen, runs: Mapping[int, Followed], samples: int) -> Storage:
    maker = seen.maker
    if maker < 0 and seen.writers:
        maker = seen.writers[0]  # the stage that writes to an input does so to a clone
    formula = _bytes(traced, seen, runs, samples)
    users, savers, writers = (tuple(sorted(places)) for places in (seen.users, seen.savers, seen.writers))
    return Storage(formula, maker, users, savers, seen.returns, writers)


def _saved(seen: Seen, storage: Storage) -> Saved:
    """A stage writes to a clone of what it receives, so what it keeps is made by the node that has written last."""
    writers = [w for w in seen.writers if w <= seen.savers[0]]
    return Saved(storage.bytes, max((storage.maker, *writers)), storage.savers)


def _bytes(traced: Traced, seen: Seen, runs: Mapping[int, Followed], samples: int) -> sympy.Expr:
    label = seen.label
    if isinstance(label, OfValue) and label.part == 0 and label.tensor < len(label.node.meta["shapes"]):
        formula = label.node.meta["shapes"][label.tensor].bytes
        # It may be a part of something larger, which stays as a whole.
        if formula.free_symbols <= {traced.batch} and bytes_for(formula, traced.batch, samples) == seen.bytes:
            return formula
    counted = tuple((size, number) for size, run in runs.items() if (number := run.bytes(label)) is not None)
    return fitted(counted, samples, traced.batch)
