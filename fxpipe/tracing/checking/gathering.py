"""Are the outputs of micro-batches, put together, the output of the batch?

They are not where samples act on each other: a loss that is no mean over samples, logits of all against all, rows in
another order than the samples. Nor where an input was taken for batched that is not. So the graph is run on a batch and
on its two halves, with what is meant to differ left out: dropout drops nothing, batch norm takes its running
statistics. A graph with other random nodes, or that changes other buffers, cannot be compared so, and is not.

Samples may be in the order that forward sorts them into, by chance or as they are kept. So halves are run from the last
sample to the first where they are of a few samples; and where these do not tell, since samples belong together by two,
say, the halves are put together in both orders.

All of the graph, and with its own weights, as dear as that is. Less does not do: maps that make few features and repeat
them find attention over the samples to be attention to oneself; and of nodes that are alike the first may be given what
shows nothing, a state of zeros, equal queries for all samples, scores that are masked with -1e9.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxpipe.errors import ArgumentError, DecisionError
from fxpipe.tracing.checking.calm import Asked, can_be_calm, run_calmly
from fxpipe.tracing.checking.check import agree, is_same_graph, take
from fxpipe.tracing.checking.effects import Effects
from fxpipe.tracing.sizing.shapes import batched_nodes
from fxpipe.tracing.traced import WORKING, Traced

# Samples that tell what many would: of two, rows that go round by two (`x.roll(2, 0)`) stay where they are. If they say
# no all are asked, and where forward takes some out of the batch of which so few have none (`x[8:]`): values then are
# not of the sizes that they have of many.
FEW = 3

Found = Mapping[int, torch.Tensor]  # by place of an output


def check_gathering(traced: Traced, leaves: Sequence[Any]) -> None:
    """Compares a batch with its halves put together.

    Raises:
        ArgumentError: they differ; names the output and the remedies.
    """
    batch, asked = traced.batch_of(leaves), _asked(traced)
    if not asked or not can_be_calm(traced):
        return
    # A mean may hang on samples that are unlike the first ones (shorter texts): all have a say.
    if batch > FEW and "mean" not in traced.out_dims and _holds_for_halves(traced, FEW):
        with contextlib.suppress(Exception):  # the model may need an even number, or more of them
            return _compare_few(traced, asked, leaves)
    if batch > 1 and _holds_for_halves(traced, batch):
        with contextlib.suppress(DecisionError):  # a half is of another graph
            _compare_all(traced, asked, leaves, batch)


def _holds_for_halves(traced: Traced, batch: int) -> bool:
    """Is it the graph of so many samples, and of each half of them?"""
    return all(is_same_graph(traced, size) for size in (batch, (batch + 1) // 2, batch // 2))


def _compare_few(traced: Traced, asked: Asked, leaves: Sequence[Any]) -> None:
    """Compares the first few samples with their halves, which are turned round."""
    whole = run_calmly(traced, asked, take(traced, leaves, 0, FEW), FEW)
    cut, halves = (FEW + 1) // 2, []
    for start, stop in ((0, cut), (cut, FEW)):
        sample = take(traced, leaves, start, stop)
        turned = [leaf if dim is None else leaf.flip(dim) for leaf, dim in zip(sample, traced.in_dims, strict=True)]
        half = run_calmly(traced, asked, turned)
        halves.append({n: _turned(value, traced.out_dims[n], stop - start) for n, value in half.items()})
    _refuse_others(traced, asked, whole, halves, cut / FEW)


def _turned(value: torch.Tensor, dim: int | str | None, samples: int) -> torch.Tensor:
    """Its last sample first, where it holds some rows of each."""
    if not isinstance(dim, int) or value.shape[dim] % samples:
        return value
    turned: torch.Tensor = value.unflatten(dim, (samples, -1)).flip(dim).flatten(dim, dim + 1)
    return turned


def _compare_all(traced: Traced, asked: Asked, leaves: Sequence[Any], batch: int) -> None:
    """Compares all samples with their halves, put together in their order, and the second half first."""
    cut = (batch + 1) // 2
    bounds = ((0, batch), (0, cut), (cut, batch))
    whole, *halves = (run_calmly(traced, asked, take(traced, leaves, *bound)) for bound in bounds)
    _refuse_others(traced, asked, whole, halves, cut / batch)
    if all(traced.out_dims[place] == "mean" for place in asked):
        return
    try:
        whole = run_calmly(traced, asked, take(traced, leaves, cut, cut + batch))
    except Exception:  # they have to come in their order: the longest text first
        return
    _refuse_others(traced, asked, whole, halves[::-1], 1 - cut / batch)


def _refuse_others(traced: Traced, asked: Asked, whole: Found, halves: Sequence[Found], share: float) -> None:
    """Refuses a batch whose halves, of which the first has this share of it, are not it when put together."""
    dtypes = {
        shape.dtype for node in traced.nodes for shape in node.meta.get("shapes", ()) if shape.dtype.is_floating_point
    }
    # Nothing but doubles, or values that may have been made wider.
    least = torch.finfo(torch.float64 if dtypes == {torch.float64} else torch.float32).eps
    for place, (node, dim) in enumerate(zip(traced.outputs, traced.out_dims, strict=True)):
        if place not in asked:
            continue
        assert isinstance(node, fx.Node)
        first, second = (half[place] for half in halves)
        if isinstance(dim, int):
            together = torch.cat([first, second], dim)
        else:  # found, not given: it can only be "mean"
            together = first * share + second * (1 - share)
        # Other sizes take other kernels: compare to half of the digits.
        if not agree(whole[place], together, max(least, torch.finfo(together.dtype).eps) ** 0.5):
            raise ArgumentError(
                f"output {place} ({node.name}, {node.meta['shapes'][0]}, made at "
                f"{node.meta.get('source', 'the input')}): the outputs of micro-batches, put together, are not the "
                "output of the batch. Do samples act on each other (a loss that is no mean over samples, normalisation "
                f"over the batch), are rows in another order than the samples (give the batch a dimension of its own), "
                f"or is an input not batched (in_dims={_taken(traced)} was taken)? Say with in_dims what is batched, "
                "or with out_dims how the outputs go together ('stack', 'mean', 'sum', a dimension), if that is meant. "
                "A mean over tokens that the model takes itself: out_dims='mean', and in forward_backward a loss_fn "
                "that returns (out.loss * n, n), n tokens that count"
            )


def _asked(traced: Traced) -> Asked:
    """By place of an output that is put together: what to compare for it, itself or what says the same."""
    found = {}
    for place, (node, dim) in enumerate(zip(traced.outputs, traced.out_dims, strict=True)):
        shapes = node.meta["shapes"] if isinstance(node, fx.Node) else ()
        if dim is not None and shapes and shapes[0].dtype.is_floating_point:
            assert isinstance(node, fx.Node)
            found[place] = node.all_input_nodes[0] if _is_by_sample(traced, node, dim) else node
    return found


def _is_by_sample(traced: Traced, node: fx.Node, dim: int | str) -> bool:
    """Does an output say no more than its input, of which a linear map makes it for each sample by itself?

    To multiply with a vocabulary may take as long as all before it.
    """
    effects: Effects | None = traced.effects
    assert effects is not None
    if node.target is not F.linear or not node.args or not isinstance(dim, int):
        return False
    source, *weights = node.all_input_nodes
    return (
        source is node.args[0]
        and source.op in WORKING
        and source.meta["shapes"][0].dtype == node.meta["shapes"][0].dtype
        and dim < len(node.meta["shapes"][0].shape) - 1
        and batched_nodes(traced).isdisjoint(weights)
        and effects.alias[source] not in set().union(*effects.writes)
        and node.users.keys() == {traced.graph.output_node()}
    )


def _taken(traced: Traced) -> dict[str, int | None]:
    return {leaf.head: dim for leaf, dim in zip(traced.leaves, traced.in_dims, strict=True) if leaf.is_tensor}
