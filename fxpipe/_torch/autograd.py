"""Graphs of autograd: where they end, and where there is no way back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.variable import Variable

_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def has_no_way_back(error: RuntimeError) -> bool:
    """Does torch raise this since no training step goes back through a function at all?

    It has no derivative, or forward has written to what its backward needs. Planning, which goes back through every
    node, takes such a backward to cost nothing: the model may be there for evaluation only.
    """
    return isinstance(error, NotImplementedError) or "modified by an inplace operation" in str(error)


def gradients_of(
    inputs: Sequence[Any], roots: Sequence[Any], gradients: Sequence[torch.Tensor], keep_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` for tensors and gradient edges; None where no root depends on an input.

    What torch does in Python around its engine takes longer than to go back through several small nodes: it looks for
    classes that override the function, compares shapes, which the engine does as well, and prepares for threads of the
    engine's own, which there are none: whoever calls has set `torch.autograd.set_multithreading_enabled(False)`.

    And not `.backward()`: AccumulateGrad would give each gradient the strides of its leaf, and the next kernel other
    bits.
    """
    ends, starts, engine = tuple(roots), tuple(inputs), Variable._execution_engine
    return engine.run_backward(ends, tuple(gradients), keep_graph, False, starts, True, accumulate_grad=False)


def gradient_edge_of(tensor: torch.Tensor) -> GradientEdge:
    """`get_gradient_edge`, in a third of the time where a function of torch has made the tensor."""
    node = tensor.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):  # a leaf; or a node in Python, which owns no graph
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def takes_gradient(tensor: torch.Tensor) -> bool:
    """Does a gradient go in at a tensor? A view made without gradients says that it requires grad if its base does."""
    if not tensor.requires_grad or tensor.grad_fn is not None:
        return tensor.requires_grad
    return not (tensor._is_view() and tensor._base is not None and tensor._base.requires_grad)


def leaves_below(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that a tensor depends on: of a loss, the outputs and whatever parameters its function uses."""
    found: list[torch.Tensor] = []
    todo: list[Any] = [tensor.grad_fn]
    seen: set[Any] = {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node) is _AccumulateGrad:  # a leaf has one, and it leads no further
            found.append(node.variable)
        else:
            for below, _ in node.next_functions:
                todo.append(below)
    return found


@contextmanager
def suspend_hooks(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """A block in which hooks on these tensors do not run: they are of a step, and `autograd.grad` runs them."""
    hooks = [(leaf, leaf._backward_hooks) for leaf in leaves]
    try:
        for leaf, _ in hooks:
            leaf._backward_hooks = None
        yield
    finally:
        for leaf, own in hooks:
            leaf._backward_hooks = own
