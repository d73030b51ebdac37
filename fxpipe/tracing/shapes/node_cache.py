"""A cache of calls with equal results: a model of many equal blocks computes a shape once, not once for each block.

A function on fake tensors with symbolic sizes takes milliseconds. The result depends on the function, its constants,
the thread state, and the metadata of the fake tensors among its arguments (sizes, strides, dtype). So each value gets a
*number*, equal for values with equal metadata, and a known call returns the same object again. The graph runs without
the cache if a function changes its argument (`unsqueeze_`, `resize_`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxpipe._torch.fake_tensor_mode import FakeTensor, first_expression
from fxpipe.tracing.node_info import state_of

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


class ChangedInPlaceError(Exception):
    """A function has changed the sizes or strides of its argument, which may represent several values."""


class NodeCache:
    """The cache. It refers to values by id, so all of them must outlive it."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._number_of: dict[int, int] = {}  # id of a value -> its number
        self._values: dict[Hashable, Any] = {}

    def number(self, value: Any) -> int:
        """Returns the number of a value, equal for values with equal metadata."""
        if id(value) not in self._number_of:
            self._number_of[id(value)] = self._numbers.setdefault(_value_key(value), len(self._numbers))
        return self._number_of[id(value)]

    def add(self, key: Hashable, value: Any) -> None:
        self._values[key] = value

    def known(self, key: Hashable) -> Any:
        return self._values.get(key)

    def key(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Hashable | None:
        """Returns the key of a call; None if it cannot be cached."""
        key = (
            node.op,
            function_key(node.target),
            self._frozen(node.args, values),
            self._frozen(node.kwargs, values),
            state_of(node),
        )
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def keep(self, node: fx.Node, key: Hashable | None, value: Any, values: Mapping[fx.Node, Any]) -> None:
        """Stores the result of a call. Raises `ChangedInPlaceError` if the call has changed its arguments as well."""
        arguments = [values[n] for n in node.all_input_nodes]
        if any(self._numbers.get(_value_key(a)) != self.number(a) for a in arguments):
            raise ChangedInPlaceError
        # A size that depends on values differs in each call.
        if key is not None and not (_unbacked_sizes(value) - _unbacked_sizes(arguments)):
            self._values[key] = value

    def _frozen(self, argument: Any, values: Mapping[fx.Node, Any]) -> Hashable:
        if isinstance(argument, fx.Node):
            return fx.Node, self.number(values[argument])
        if isinstance(argument, (tuple, list)):
            return type(argument), tuple(self._frozen(item, values) for item in argument)
        if isinstance(argument, dict):
            return dict, tuple((key, self._frozen(item, values)) for key, item in argument.items())
        if isinstance(argument, slice):
            return slice, tuple(self._frozen(a, values) for a in (argument.start, argument.stop, argument.step))
        return type(argument), argument  # with its type: 1, 1.0 and True are equal


def function_key(target: Any) -> Hashable:
    """Returns a key of a function. Calls of one `autograd.Function` are closures with equal code and equal cells."""
    if isinstance(target, FunctionType) and target.__closure__:
        return target.__code__, tuple(id(cell.cell_contents) for cell in target.__closure__)
    return target  # type: ignore[no-any-return]


def tensor_key(tensor: torch.Tensor) -> Hashable | None:
    """Returns the metadata of a tensor of the model; None for a tensor of a special kind."""
    if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return None
    sizes = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return torch.Tensor, tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg(), sizes


def _value_key(value: Any) -> Hashable:
    """Returns the metadata of a fake value; the id for other types."""
    if type(value) is FakeTensor and value.layout == torch.strided and value.constant is None:
        sizes = tuple(map(_expression, (value.storage_offset(), *value.shape, *value.stride())))
        return FakeTensor, value.dtype, value.device, value.is_conj(), value.is_neg(), sizes
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return type(value), _expression(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_value_key, value))
    if type(value) in _PLAIN:
        return type(value), value
    return id(value)


def _expression(size: Any) -> Hashable:
    """Returns the original expression of a size, which stays the same when symbols are unified."""
    return first_expression(size) if isinstance(size, (torch.SymInt, torch.SymFloat)) else size  # type: ignore[no-any-return]


def _unbacked_sizes(value: Any) -> set[Any]:
    try:
        return set(free_unbacked_symbols(value))
    except AssertionError:  # a container of another kind
        return {id(value)}
