"""Graphs that autograd records in forward, as values: if two are equal, so are their gradients.

A graph consists of functions, the values that they have saved, and edges from the outputs to leaves with names. Equal
graphs compute the same from any gradients of the outputs, so nothing has to be computed to compare them. A function in
Python, one that hides state, or a hook on saved values may compute anything; hooks on tensors are not recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from fxpipe._torch.autograd import HiddenStateError, backward_state
from fxpipe.tracing.tensors import storage_of

AutogradGraph: TypeAlias = list[Any]  # plain values and tensors: an entry for each output, then for each function

_PLAIN = (type(None), bool, int, float, complex, str, type, torch.dtype, torch.device, torch.layout)


def autograd_graph(
    outputs: Sequence[Any], leaves: Mapping[str, torch.Tensor], written: Collection[int] = ()
) -> AutogradGraph | None:
    """Returns the graph from outputs to leaves, or None if it does not show all that it computes.

    Saved values in the storages `written` are copied, because they may change.
    """
    names = {id(leaf): name for name, leaf in leaves.items()}
    numbers: dict[Any, int] = {}  # places of functions in `reached`
    reached: list[Any] = []  # functions in the order of their numbers

    def edge(function: Any, place: int) -> tuple[int, int] | None:
        if function is None:
            return None
        if function not in numbers:
            numbers[function] = len(reached)
            reached.append(function)
        return numbers[function], place

    def kept(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, nn.Parameter) or value.layout != torch.strided:
                raise HiddenStateError
            return value.detach().clone() if storage_of(value) in written else value.detach()
        if isinstance(value, (tuple, list)):
            return tuple(map(kept, value))
        if not isinstance(value, _PLAIN):
            raise HiddenStateError
        return value

    graph: AutogradGraph = []
    try:
        for output in outputs:
            if not isinstance(output, torch.Tensor) or not output.requires_grad:
                graph.append(None)
            else:
                is_leaf = output.grad_fn is None
                graph.append(names[id(output)] if is_leaf else edge(output.grad_fn, output.output_nr))
        for function in reached:  # edges add to it
            if not function.next_functions:  # a leaf
                graph.append(names[id(getattr(function, "variable", None))])
                continue
            graph.append((kept(backward_state(function)), [edge(*below) for below in function.next_functions]))
    except (HiddenStateError, KeyError, RuntimeError):  # RuntimeError: a saved value has been overwritten
        return None
    return graph


def are_equal(one: Any, other: Any) -> bool:
    """Returns whether two graphs, or values of them, are equal, bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.device, one.shape) != (other.dtype, other.device, other.shape):
            return False
        is_same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()  # a parameter
        return is_same or torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)
