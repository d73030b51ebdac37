"""The arguments of a node by name, and the container of its value."""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_RUNNING = ("input", "weight", "bias", "running_mean", "running_var")
_MADE_IN_C: dict[Any, tuple[str, ...]] = {  # without a signature
    F.scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    torch.batch_norm: (*_RUNNING, "training", "momentum", "eps", "cudnn_enabled"),
    torch.instance_norm: (*_RUNNING, "use_input_stats", "momentum", "eps", "cudnn_enabled"),
}


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Returns the given arguments of a node, by name."""
    return dict(zip(parameter_names(node.target), node.args, strict=False)) | dict(node.kwargs)


def named_arguments_and_defaults(node: fx.Node) -> dict[str, Any]:
    """Returns all arguments of a Python function, by name, with defaults."""
    function: Any = node.target
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    return defaults | named_arguments(node)


@functools.lru_cache(maxsize=256)
def parameter_names(function: Any) -> tuple[str, ...]:
    return _MADE_IN_C.get(function) or tuple(inspect.signature(function).parameters)


def container_of(node: fx.Node) -> fx.Node | None:
    """Returns the node from whose value this node takes an item (`values[1]`); None for other nodes."""
    source = node.args[0] if node.target is operator.getitem else None
    return source if isinstance(source, fx.Node) else None
