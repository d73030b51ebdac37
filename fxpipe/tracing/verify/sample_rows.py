"""Checks that samples are independent, so that the joined outputs of micro-batches equal the output of the batch.

The check judges what runs on a few samples and on parts of them show (`side_by_side`). The loud run suffices if no
value that joins is computed from a value that does not. Otherwise, a value that ends a block must change in some run
when an argument that does not join changes, or a gate is closed; and it must not contain a reduction over samples,
which a gate may let through later. Values computed from such a value do not join either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxpipe.errors import ArgumentError
from fxpipe.tracing.node_info import dependencies_of, info
from fxpipe.tracing.shapes.batch_reductions import UnknownReductionError
from fxpipe.tracing.shapes.output_dims import InputValues, shared_values, with_out_dims
from fxpipe.tracing.traced import Traced, without_attributes
from fxpipe.tracing.verify import compared_sizes
from fxpipe.tracing.verify.equivalence import take_samples
from fxpipe.tracing.verify.side_by_side import Findings, Joins, run_side_by_side
from fxpipe.utils.batch_split import samples_per_micro_batch

SAMPLES = 4  # samples of the runs; the example repeats if it has fewer


def join_sample_rows(traced: Traced, leaves: Sequence[Any], chunks: int, out_dims: Any = None) -> tuple[Traced, bool]:
    """Checks that each result of micro-batches, joined, equals the result of the batch.

    If an output does not join, it is computed once, from values further back that do. Returns the graph, and whether
    the check holds for all micro-batch sizes: not if samples belong together in pairs, or the graph runs only at these.
    Raises `ArgumentError` with the line that mixes samples, and remedies, if samples depend on each other, or may.
    """
    refusal, is_told = _refusal_of(traced, leaves, chunks)
    if refusal is not None and chunks > 1 and (names := _unkept_attributes(traced, refusal)):
        traced = without_attributes(traced, names)
        refusal, is_told = _refusal_of(traced, leaves, chunks)
    if refusal is None:
        return traced, is_told
    output = traced.graph.output_node()
    ways = [(traced, output.args, refusal, is_told)]
    if shared := _of_any_batch(traced, leaves):  # from here on the same in all micro-batches
        with contextlib.suppress(ArgumentError):
            headed = with_out_dims(replace(traced, shared=shared), out_dims)
            other, is_for_all = _refusal_of(headed, leaves, chunks)
            if is_for_all and other is None:
                return headed, True
            ways += [(headed, output.args, other, True)] if is_for_all and other is not None else []
    for way, output.args, why, is_told in ways:
        try:
            return _with_longer_tail(way, out_dims, why), is_told
        except ArgumentError as error:
            failure = error
    raise failure


def _unkept_attributes(traced: Traced, refusal: _Refusal) -> list[str]:
    """Returns the attributes that forward sets to what does not join, such as the loss that a router leaves."""
    dims, buffers = traced.left_attribute_dims, dict(traced.model.named_buffers())
    left = traced.left if refusal.joins else {}
    return [name for name, node in left.items() if name not in buffers and dims[name] not in refusal.joins[node]]


def _of_any_batch(traced: Traced, leaves: Sequence[Any]) -> frozenset[fx.Node]:
    """Returns the shared values, without those whose size is another one in a part."""
    shared = dict(enumerate(shared_values(traced)))
    values = InputValues.of(traced, shared, torch.device("cpu"))
    sizes = {traced.batch_of(leaves), max(1, traced.batch_of(leaves) // 2)}
    with contextlib.suppress(Exception):  # a part may not run
        runs = [values(take_samples(traced, leaves, 0, size), size) for size in sizes]
        return frozenset(node for place, node in shared.items() if runs[0][place].shape == runs[-1][place].shape)
    return frozenset()


def _refusal_of(traced: Traced, leaves: Sequence[Any], chunks: int) -> tuple[_Refusal | None, bool]:
    """Returns why results of micro-batches do not join, and whether this is so for all micro-batch sizes."""
    claims = [*_claims(traced)]
    if not claims:
        return None, True
    batch = traced.batch_of(leaves)
    own = tuple(samples_per_micro_batch(batch, min(chunks, batch)))
    # A few samples prove nothing about more if forward treats few differently: `min(len(x), 4)`.
    asked = {*own, batch, SAMPLES - 1, SAMPLES} - {1}
    shows_less = not all(read.holds(size) for read in traced.batch_conditions for size in asked)
    compared_sizes.excuse_sizes(traced, leaves, range(1, SAMPLES + 1))
    if (
        shows_less
        and len(own) > 1
        and _holds_at(traced, own)
        and (refusal := _refusal(traced, leaves, own, own, claims))
    ):
        return refusal, False
    few: list[tuple[int, ...]] = [(1, SAMPLES - 1), (SAMPLES // 2,) * 2]
    if 1 < batch < SAMPLES:  # if the order of samples matters, they cannot repeat
        few.append((1, batch - 1))
    # If a size is no polynomial in the batch size (`b // 8 * 8`), a few samples prove nothing.
    numbers = {number for node in traced.graph.nodes if (number := info(node).number) is not None}
    numbers |= {size for node in traced.graph.nodes for shape in info(node).shapes for size in shape.shape}
    grow_evenly = all(number.is_polynomial(traced.batch) for number in numbers if not number.is_number)
    splits = [parts for parts in few if grow_evenly and _holds_at(traced, parts)]
    splits = splits or [parts for parts in [own] if len(parts) > 1]
    if not splits or not _holds_at(traced, splits[0]):
        return None, False  # holds for this batch only: other micro-batches are compared when they run
    first: _Refusal | None = None
    for parts in splits:
        refusal = _refusal(traced, leaves, parts, own, claims)
        if refusal is None:
            return None, parts == few[0]
        first = first or (refusal if refusal.joins else None)
        if refusal.has_run and (parts[0] > 1 or not compared_sizes.can_run_deterministically(traced)):
            break  # even micro-batches would need a comparison in each step
    return first or refusal, splits[0] == few[0]


@dataclass(slots=True)
class _Refusal:
    error: ArgumentError
    joins: dict[fx.Node, Joins] = field(default_factory=dict)  # joins in all runs; empty if the parts did not run
    has_run: bool = False  # did each node run on the parts?


# No model of the zoo: a loss of statistics over the batch needs it (behaviour/test_joint_tail.py).
def _with_longer_tail(traced: Traced, out_dims: Any, refusal: _Refusal) -> Traced:
    """Returns the graph with outputs that do not join computed once, from values that do; else raises the refusal."""
    last = len(traced.outputs) + len(traced.pieces)
    of_outputs = {node for node, _ in traced.results[:last]}
    if not refusal.joins or any(how not in refusal.joins[n] for _, n, how in _claims(traced) if n not in of_outputs):
        raise refusal.error
    try:
        return with_out_dims(traced, out_dims, refusal.joins)
    except UnknownReductionError as reason:
        raise ArgumentError(f"{refusal.error}. What is made of all samples cannot run once: {reason}") from None


def _refusal(
    traced: Traced,
    leaves: Sequence[Any],
    parts: tuple[int, ...],
    own: tuple[int, ...],
    claims: Sequence[tuple[str, fx.Node, Any]],
) -> _Refusal | None:
    try:
        findings = _look_for(Findings(), traced, leaves, parts, own)
    except Exception as error:
        refusal = ArgumentError(
            f"whether samples act on each other cannot be told, since parts of the batch do not run: {error}; "
            f"{_REMEDIES}"
        )
        refusal.__cause__ = error
        try:
            findings = _look_for(Findings(may_fail=True), traced, leaves, parts, own)
        except Exception:
            return _Refusal(refusal)
    for _, node, _ in claims:
        if node in findings.selected:  # no rows join in any way
            findings.blocks |= findings.selected.intersection(dependencies_of(node)) - findings.shown
    hiding = findings.distrust()
    for name, node, how in claims:
        if how not in findings.joins[node]:
            is_hidden = bool(hiding & {*dependencies_of(node)})
            mixing = _mixing_error(traced, name, node, findings.meeting(node), is_hidden)
            return _Refusal(mixing, findings.joins, not findings.may_fail)
    for node, how in traced.results if findings.failed else ():
        if how != "combined" and isinstance(node, fx.Node) and not findings.failed.isdisjoint(dependencies_of(node)):
            return _Refusal(refusal)
    return None  # only what runs once for the mini-batch fails on parts


def _look_for(
    findings: Findings, traced: Traced, leaves: Sequence[Any], parts: tuple[int, ...], own: tuple[int, ...]
) -> Findings:
    even = (sum(parts) // 2,) * 2 if sum(parts) == SAMPLES and _holds_at(traced, [SAMPLES // 2]) else parts
    results = [node for _, node, _ in _claims(traced)]
    for mode, split in dict.fromkeys((("loud", parts), ("plain", parts), ("loud", even), ("equal", even))):
        run = run_side_by_side(traced, leaves, split, mode, findings, results)
        findings.add(run)
        hides = findings.blocks or run.has_python or not run.is_noisy or run.selected or findings.hiding()
        if not hides:
            return findings  # each function keeps samples independent: other values show no more
    if findings.reads_values and parts != own != own[:1] and _holds_at(traced, own):  # few may not take all branches
        findings.add(run_side_by_side(traced, leaves, own, "plain", findings, results))
    return findings


def _holds_at(traced: Traced, parts: Sequence[int]) -> bool:
    return all(traced.holds_at(size) for size in {sum(parts), *parts})


def _claims(traced: Traced) -> Iterator[tuple[str, fx.Node, int | str]]:
    """Yields the results of micro-batches: name, node, and how the results join."""
    first, last = len(traced.outputs), len(traced.outputs) + len(traced.pieces)
    places = {piece: one.output for one in traced.combinations for piece in one.pieces}
    names = [*traced.left]
    for place, (node, how) in enumerate(traced.results):
        output = places.get(place, place) if place < last else None
        is_told = bool(traced.told) if output is None else output in traced.told
        if is_told or how is None or how == "combined" or not info(node).shapes or info(node).number is not None:
            continue
        name = f"output {output}"
        if place >= last:
            left = place - len(traced.results) + len(names)
            name = f"what forward sets {names[left]!r} to" if left >= 0 else "what forward writes to an input"
        elif place >= first:
            if place in places:
                name = f"output {output} ({traced.outputs[places[place]].name}), of which a part"
            elif traced.update is not None:
                name = f"{traced.update.combination.where}, of which a part"
        yield name, node, how


_REMEDIES = (
    "compute each sample by itself (another dimension), or keep the mini-batch whole (chunks=1, or micro-batches of "
    "your own: forward_backward(micro_batches=...)); say with out_dims how the outputs go together (a dimension, "
    "'stack', 'mean', 'sum') if it is meant for micro-batches, or with in_dims what holds the batch"
)


def _mixing_error(traced: Traced, name: str, node: fx.Node, meeting: fx.Node, is_hidden: bool) -> ArgumentError:
    shape = info(node).shapes[0]
    hidden = (
        " These values may hide it (a gate that is zero, a mask, a branch, an example with few selected rows), and "
        "whether it stays hidden cannot be told."
    )
    loss = (
        " A loss must be a sum or a mean over samples, or made of such by functions of torch: let the model return "
        "what it sums and what it divides by."
    )
    numbers = [info(n).number for n in meeting.all_input_nodes]
    why = f"{meeting.name} goes over the samples"
    if any(number is not None and number.has(traced.batch) for number in numbers):
        why = (
            f"{meeting.name} uses a number made of the number of samples, which is another one in a micro-batch: keep "
            "the size a size, x / x.shape[0], or use a function of tensors, x.mean()"
        )
    in_dims = {leaf.head: dim for leaf, dim in zip(traced.leaves, traced.in_dims, strict=True) if leaf.is_tensor}
    return ArgumentError(
        f"{name} ({node.name}, {shape}, made at {info(node).source or 'the input'}): samples act on each other at "
        f"{info(meeting).source or 'the input'} ({why}), so the outputs of "
        f"micro-batches, put together, are not the output of the batch.{hidden if is_hidden else ''}"
        f"{'' if shape.shape else loss} {_REMEDIES[0].upper()}{_REMEDIES[1:]} (in_dims={in_dims} was taken); and keep "
        "rows in the order of the samples"
    )
