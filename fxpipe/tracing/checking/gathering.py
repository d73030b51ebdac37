"""Are the outputs of micro-batches, put together, the output of the batch?

They are not where samples act on each other: a loss that is no mean over samples, logits of all against all, rows in
another order than the samples. Nor where an input was taken for batched that is not. So the graph is run on a batch and
on its two halves, with what is meant to differ left out: dropout drops nothing, batch norm takes its running
statistics. A graph with other random nodes, or that changes other buffers, cannot be compared so, and is not.

All of the graph, and with its own weights, as dear as that is. Less does not do: maps that make few features and repeat
them find attention over the samples to be attention to oneself; and of nodes that are alike the first may be given what
shows nothing, a state of zeros, equal queries for all samples, scores that are masked with -1e9.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from fxpipe.errors import ArgumentError, DecisionError
from fxpipe.thread_state import applied
from fxpipe.tracing.checking.check import agree, is_same_graph, take
from fxpipe.tracing.checking.effects import Effects, running_statistics
from fxpipe.tracing.containers import tensors_in
from fxpipe.tracing.evaluation import Values, evaluate, last_uses
from fxpipe.tracing.sizing.shapes import batched_nodes
from fxpipe.tracing.traced import WORKING, Traced, call, lookup

_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
# Samples that tell what many would: of two, rows that go round by two (`x.roll(2, 0)`) stay where they are. If they say
# no all are asked, and where forward takes some out of the batch of which so few have none (`x[8:]`): values then are
# not of the sizes that they have of many.
FEW = 3
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p")


def check_gathering(traced: Traced, leaves: Sequence[Any]) -> None:
    """Compares a batch with its halves put together.

    Raises:
        ArgumentError: they differ; names the output and the remedies.
    """
    batch = traced.batch_of(leaves)
    if not _can_be_calm(traced):
        return
    # A mean may hang on samples that are unlike the first ones (shorter texts): all have a say.
    if batch > FEW and "mean" not in traced.out_dims and _holds_for_halves(traced, FEW):
        with contextlib.suppress(Exception):  # the model may need an even number, or more of them
            return _compare_halves(traced, leaves, FEW, expects_sizes=True)
    if batch > 1 and _holds_for_halves(traced, batch):
        with contextlib.suppress(DecisionError):  # a half is of another graph
            _compare_halves(traced, leaves, batch)


def _holds_for_halves(traced: Traced, batch: int) -> bool:
    """Is it the graph of so many samples, and of each half of them?"""
    return all(is_same_graph(traced, size) for size in (batch, (batch + 1) // 2, batch // 2))


def _compare_halves(traced: Traced, leaves: Sequence[Any], batch: int, expects_sizes: bool = False) -> None:
    """Compares the first `batch` samples with their halves put together."""
    cut = (batch + 1) // 2
    expected = batch if expects_sizes else None
    asked = _asked(traced)
    runs = [
        _run_calmly(traced, asked, take(traced, leaves, *bound), samples)
        for bound, samples in (((0, batch), expected), ((0, cut), None), ((cut, batch), None))
    ]
    for place, (node, dim) in enumerate(zip(traced.outputs, traced.out_dims, strict=True)):
        if place not in asked:
            continue
        assert isinstance(node, fx.Node)
        whole, first, second = (run[place] for run in runs)
        if isinstance(dim, int):
            together = torch.cat([first, second], dim)
        else:  # found, not given: it can only be "mean"
            together = first * (cut / batch) + second * (1 - cut / batch)
        # Other sizes take other kernels: compare to half of the digits.
        if not agree(whole, together, torch.finfo(whole.dtype).eps ** 0.5):
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


def _asked(traced: Traced) -> dict[int, fx.Node]:
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


def _can_be_calm(traced: Traced) -> bool:
    """Is everything that would make halves differ by itself known here?"""
    effects: Effects | None = traced.effects
    assert effects is not None
    states = {effects.alias[n] for n in traced.graph.nodes if n.op == "get_attr"}
    for node, classes in zip(effects.nodes, effects.writes, strict=True):
        is_norm = node.target is F.batch_norm and bool(running_statistics(node))
        is_counter = str(getattr(node.args[0], "target", "")).endswith("num_batches_tracked") if node.args else False
        if classes & states and not (is_norm or is_counter):
            return False
        if node.target is F.batch_norm and not is_norm and _given(node, _BATCH_NORM).get("training"):
            return False  # no running statistics to take
        if node.meta.get("draw") and not node.users:
            continue
        if node.meta.get("random") and node.target not in (*_DROPOUTS, F.scaled_dot_product_attention):
            return False
    return not traced.assigned


def _given(node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _run_calmly(
    traced: Traced, asked: Mapping[int, fx.Node], sample: Sequence[Any], expected: int | None
) -> dict[int, Any]:
    """What is asked, by place.

    Args:
        expected: the number of samples, if values are to be of the sizes that they have of so many.
    """
    left_out = {traced.outputs[place] for place, node in asked.items()} - {*asked.values()}
    nodes = [node for node in traced.graph.nodes if node not in left_out]
    last = last_uses(nodes, asked.values())
    # Python that runs as it is may ask for gradients inside; nothing else does.
    grad = any(node.meta.get("opaque") for node in traced.nodes)

    def given(node: fx.Node) -> Any:
        return sample[traced.place_of(node)].detach().clone()

    def attribute(node: fx.Node) -> torch.Tensor:
        tensor = lookup(traced, node)
        held = tensor.detach() if isinstance(tensor, torch.nn.Parameter) else tensor.detach().clone()
        return held.requires_grad_(grad and tensor.requires_grad)

    def work(node: fx.Node, values: Values) -> Any:
        with applied(node.meta["state"]), torch.set_grad_enabled(grad and node.meta["state"].grad):
            value = _calm(node, values)
        if expected is not None and not _are_expected(value, node, traced.batch, expected):
            raise DecisionError(f"{node.name} is of another size with {expected} samples")
        return value

    values: Values = {}
    for node in evaluate(nodes, values, given, attribute, work):
        for used in last.get(node, ()):
            del values[used]
    return {place: values[node] for place, node in asked.items()}


def _are_expected(value: Any, node: fx.Node, batch: sympy.Symbol, samples: int) -> bool:
    """Are the tensors of a value of the sizes that the graph has for so many samples?"""
    shapes = node.meta.get("shapes", ())
    return all(
        all(size in (have, None) for size, have in zip(_sizes(shape.shape, batch, samples), tensor.shape, strict=False))
        for shape, tensor in zip(shapes, tensors_in(value), strict=False)
    )


@functools.lru_cache(maxsize=4096)
def _sizes(shape: tuple[sympy.Expr, ...], batch: sympy.Symbol, samples: int) -> tuple[int | None, ...]:
    """None for what hangs on values."""
    numbers = (size.subs(batch, samples) for size in shape)
    return tuple(int(number) if number.is_Integer else None for number in numbers)


def _calm(node: fx.Node, values: Values) -> Any:
    """What a node makes where nothing is random and batch norm looks at no batch."""

    def given(names: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = fx.map_arg(_given(node, names), values.__getitem__)
        return found

    if node.target in _DROPOUTS:
        return given(("input",))["input"].clone()
    if node.target is F.batch_norm and running_statistics(node):
        return F.batch_norm(**given(_BATCH_NORM) | {"training": False})
    if node.target is F.scaled_dot_product_attention:
        return F.scaled_dot_product_attention(**given(_ATTENTION) | {"dropout_p": 0.0})
    return call(node, values.__getitem__)
