"""A graph that is run with what makes a batch and its parts differ by itself left out.

Dropout drops nothing, batch norm takes its running statistics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from fxpipe._torch.thread_state import set_thread_state
from fxpipe.errors import DecisionError
from fxpipe.tracing.interpreter import NodeValues, run_nodes
from fxpipe.tracing.node_arguments import named_arguments
from fxpipe.tracing.node_info import info, state_of
from fxpipe.tracing.tensors import tensors_in
from fxpipe.tracing.traced import Traced, attribute_tensor, call_node
from fxpipe.tracing.verify.effects import Effects, running_statistics

ComparedOutputs: TypeAlias = Mapping[int, fx.Node]  # by place of an output: the node whose value is asked for

_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


def can_run_deterministically(traced: Traced) -> bool:
    """Returns whether everything that would make halves differ by itself is known here."""
    effects: Effects | None = traced.effects
    assert effects is not None
    states = {effects.alias[n] for n in traced.graph.nodes if n.op == "get_attr"}
    for node, classes in zip(effects.nodes, effects.written_classes, strict=True):
        is_norm = node.target is F.batch_norm and bool(running_statistics(node))
        is_counter = str(getattr(node.args[0], "target", "")).endswith("num_batches_tracked") if node.args else False
        if classes & states and not (is_norm or is_counter):
            return False
        if node.target is F.batch_norm and not is_norm and named_arguments(node).get("training"):
            return False  # no running statistics to take
        if info(node).is_scalar_draw and not node.users:
            continue
        if info(node).is_random and node.target not in (*_DROPOUTS, F.scaled_dot_product_attention):
            return False
    return not traced.carried_state


def run_deterministically(
    traced: Traced,
    asked: ComparedOutputs,
    sample: Sequence[Any],
    expected: int | None = None,
    change: Callable[[fx.Node, Any], Any] | None = None,
) -> dict[int, torch.Tensor]:
    """Runs the graph deterministically and returns what is asked, by place.

    Args:
        expected: the number of samples, if values are to be of the sizes that they have of so many.
        change: puts another value in the place of one of the graph.
    """
    left_out = {traced.results[place][0] for place in asked} - {*asked.values()}
    nodes = [node for node in traced.graph.nodes if node not in left_out]
    # Python that runs as it is may ask for gradients inside; nothing else does.
    grad = any(info(node).opaque is not None for node in traced.nodes)

    def placeholder(node: fx.Node) -> Any:
        value = sample[traced.place_of(node)].detach().clone()
        return value if change is None else change(node, value)

    def attribute(node: fx.Node) -> torch.Tensor:
        tensor = attribute_tensor(traced, node)
        held = tensor.detach() if isinstance(tensor, torch.nn.Parameter) else tensor.detach().clone()
        return held.requires_grad_(grad and tensor.requires_grad)

    def work(node: fx.Node, values: NodeValues) -> Any:
        with set_thread_state(state_of(node)), torch.set_grad_enabled(grad and state_of(node).grad):
            value = _run_deterministic_node(node, values)
        if expected is not None and not _have_expected_sizes(value, node, traced.batch, expected):
            raise DecisionError(f"{node.name} is of another size with {expected} samples")
        return value if change is None else change(node, value)

    values: NodeValues = {}
    for _ in run_nodes(nodes, values, placeholder, attribute, work, keep=asked.values()):
        pass
    return {place: values[node] for place, node in asked.items()}


def _have_expected_sizes(value: Any, node: fx.Node, batch: sympy.Symbol, samples: int) -> bool:
    """Returns whether the tensors of a value have the sizes that the graph has for so many samples."""
    shapes = info(node).shapes
    return all(
        all(
            size in (have, None)
            for size, have in zip(_sizes_at(shape.shape, batch, samples), tensor.shape, strict=False)
        )
        for shape, tensor in zip(shapes, tensors_in(value), strict=False)
    )


@functools.lru_cache(maxsize=4096)
def _sizes_at(shape: tuple[sympy.Expr, ...], batch: sympy.Symbol, samples: int) -> tuple[int | None, ...]:
    """Computes sizes for so many samples; None for what depends on values."""
    numbers = (size.subs(batch, samples) for size in shape)
    return tuple(int(number) if number.is_Integer else None for number in numbers)


def _run_deterministic_node(node: fx.Node, values: NodeValues) -> Any:
    """Runs a node so that nothing is random and batch norm looks at no batch."""

    def arguments() -> dict[str, Any]:
        bound: dict[str, Any] = fx.map_arg(named_arguments(node), values.__getitem__)
        return bound

    if node.target in _DROPOUTS:
        return arguments()["input"].clone()
    if node.target is F.batch_norm and running_statistics(node):
        return F.batch_norm(**arguments() | {"training": False})
    if node.target is F.scaled_dot_product_attention:
        return F.scaled_dot_product_attention(**arguments() | {"dropout_p": 0.0})
    return call_node(node, values.__getitem__)
