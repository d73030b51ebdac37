"""Kinds of nodes: nodes of one kind take the same time, so they share measurements.

Otherwise noise would decide the cuts of a model of equal blocks. Nodes of one kind have the same function, constants
and thread state, and inputs of equal shape, stride, dtype, device and requires_grad. For an opaque module its class and
settings replace the function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.functions import PLAIN_TYPES
from fxpipe._torch.module_internals import MODULE_DICT_KEYS
from fxpipe.tracing.node_info import info, opaque_call_of, state_of
from fxpipe.tracing.shapes.symbolic_run import function_key
from fxpipe.tracing.traced import Traced

NodeValue = Any  # a tensor, a number, or a nest of them


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """The properties of a tensor on which the time of a node depends."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int | str, ...]  # or the layout of a sparse tensor
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSignature:
        stride = tensor.stride() if tensor.layout == torch.strided else (str(tensor.layout),)
        return cls(tensor.dtype, tuple(tensor.shape), stride, tensor.device, tensor.requires_grad)


def kind_of_node(
    traced: Traced,
    node: fx.Node,
    arguments: Any,
    values: Mapping[fx.Node, NodeValue],
    written: Collection[fx.Node] = (),
) -> Hashable:
    """Returns a key that is equal for nodes with the same cost. `written`: the inputs whose memory the node changes."""
    args = fx.map_arg(arguments, lambda n: map_tensors_in(TensorSignature.of, values[n]))
    function = _module_kind(traced, node) if info(node).opaque_module is not None else function_key(node.target)
    changed = tuple(place for place, n in enumerate(node.all_input_nodes) if n in written)
    return node.op, function, repr(args), state_of(node), changed


def _module_kind(traced: Traced, node: fx.Node) -> Hashable:
    """Returns the classes and settings of an opaque module and its submodules, and its constant arguments."""
    call = opaque_call_of(node)
    constants = tuple((place, _frozen(value)) for place, value in call.constants.items())
    kinds = []
    for path, module in traced.model.get_submodule(call.module or "").named_modules():
        own = module.__dict__.items()
        values = [(k, _frozen(v)) for k, v in own if k not in MODULE_DICT_KEYS and not isinstance(v, torch.Tensor)]
        hooks = [(k, tuple(map(id, v.values()))) for k, v in own if k.endswith("_hooks") and isinstance(v, dict)]
        kinds.append((path, type(module), module.training, tuple(values), tuple(hooks)))
    return repr(call.arguments), call.method, constants, tuple(kinds)


def _frozen(value: Any) -> Hashable:
    """Returns a key of a value: numbers and strings by value, other objects by identity."""
    if type(value) in (*PLAIN_TYPES, type(None)):
        return type(value), repr(value)
    if type(value) in (tuple, list):
        return type(value), tuple(map(_frozen, value))
    return id(value)


def map_tensors_in(function: Callable[[torch.Tensor], Any], value: NodeValue) -> NodeValue:
    if isinstance(value, torch.Tensor):
        return function(value)
    return pytree.tree_map_only(torch.Tensor, function, value)


def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def distinct_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())
