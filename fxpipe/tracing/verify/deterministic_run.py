"""Runs a graph deterministically: without dropout, and with the running statistics of batch norm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.overrides import TorchFunctionMode

from fxpipe._torch.thread_state import set_thread_state
from fxpipe.tracing.interpreter import NodeValues, run_nodes
from fxpipe.tracing.node_arguments import named_arguments, parameter_names
from fxpipe.tracing.node_info import info, state_of
from fxpipe.tracing.traced import Traced, attribute_tensor, call_node
from fxpipe.tracing.verify.effects import Effects, running_statistics

_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_WITH_DROPOUT: Mapping[Any, str] = {
    F.scaled_dot_product_attention: "dropout_p",
    F.multi_head_attention_forward: "dropout_p",
}
_BATCH_NORMS = (F.batch_norm, torch.batch_norm)
MADE_DETERMINISTIC = frozenset((*_DROPOUTS, *_WITH_DROPOUT, *_BATCH_NORMS))


def can_run_deterministically(traced: Traced) -> bool:
    """Returns whether all functions that would make parts of a batch differ can run deterministically."""
    effects: Effects | None = traced.effects
    assert effects is not None
    states = {effects.alias[n] for n in traced.graph.nodes if n.op == "get_attr"}
    for node, classes in zip(effects.nodes, effects.written_classes, strict=True):
        is_norm = node.target in _BATCH_NORMS and bool(running_statistics(node))
        is_counter = str(getattr(node.args[0], "target", "")).endswith("num_batches_tracked") if node.args else False
        if classes & states and not (is_norm or is_counter):
            return False
        if node.target in _BATCH_NORMS and not is_norm and named_arguments(node).get("training"):
            return False
        if info(node).is_scalar_draw and not node.users:
            continue
        if info(node).is_random and node.target not in (*_DROPOUTS, *_WITH_DROPOUT):
            return False
    return not traced.carried_state


def run_deterministically(traced: Traced, sample: Sequence[Any]) -> list[Any]:
    """Returns the values that a micro-batch with these samples returns."""
    # Only opaque Python may compute gradients inside.
    grad = any(info(node).opaque is not None for node in traced.nodes)

    def placeholder(node: fx.Node) -> Any:
        return sample[traced.place_of(node)].detach().clone()

    def attribute(node: fx.Node) -> torch.Tensor:
        tensor = attribute_tensor(traced, node)
        held = tensor.detach() if isinstance(tensor, torch.nn.Parameter) else tensor.detach().clone()
        return held.requires_grad_(grad and tensor.requires_grad)

    def work(node: fx.Node, values: NodeValues) -> Any:
        with set_thread_state(state_of(node)), torch.set_grad_enabled(grad and state_of(node).grad):
            return run_deterministic_node(node, values.__getitem__)

    values: NodeValues = {}
    keep = [node for node in traced.handed_out if isinstance(node, fx.Node)]
    for _ in run_nodes([*traced.graph.nodes], values, placeholder, attribute, work, keep):
        pass
    return [values[one] if isinstance(one, fx.Node) else one for one in traced.handed_out]


def run_deterministic_node(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Runs a node with dropout disabled and without batch statistics, also inside opaque modules."""
    with _Deterministic() if info(node).opaque is not None else contextlib.nullcontext():
        if node.op == "call_function" and node.target in MADE_DETERMINISTIC:
            return _call_deterministically(node.target, *fx.map_arg((node.args, node.kwargs), value_of))
        return call_node(node, value_of)


class _Deterministic(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call_deterministically(func, args, kwargs or {})


def _call_deterministically(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if function not in MADE_DETERMINISTIC:
        return function(*args, **kwargs)
    bound = dict(zip(parameter_names(function), args, strict=False)) | dict(kwargs)
    if function in _DROPOUTS:
        return bound["input"].clone()
    if function in _WITH_DROPOUT:
        return function(**bound | {_WITH_DROPOUT[function]: 0.0})
    if bound.get("training") and bound.get("running_mean") is not None:
        bound["training"] = False
    elif bound.get("training") and bound.get("weight") is not None:  # without a weight it may be a loss over samples
        zeros = torch.zeros_like(bound["weight"])
        bound |= {"training": False, "running_mean": zeros, "running_var": zeros + 1}
    return function(**bound) if function is F.batch_norm else function(*map(bound.get, parameter_names(function)))
