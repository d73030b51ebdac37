"""Replacement of a tensor's memory that preserves the tensor object.

Optional (torch 2.11 to 2.14): needed only between the CPU and an out-of-tree backend.
"""

from __future__ import annotations

from typing import Any

import torch

from fxpipe._torch.autograd import gradient_edge_of
from fxpipe._torch.versions import optional_name
from fxpipe.errors import StateError

_swap_tensor_impl: Any = optional_name("torch", "_C._swap_tensor_impl")


def replace_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Sets the data of a tensor as `tensor.data = data`, also to another device."""
    try:
        tensor.data = data
    except RuntimeError:
        if tensor.device.type == data.device.type or _swap_tensor_impl is None:
            raise
        _replace_tensor(tensor, data)


def _replace_tensor(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Replaces the C++ tensor of a Python object, and preserves its autograd state."""
    gradient = tensor.grad if tensor.is_leaf else None
    fresh = data.detach()
    if tensor.is_leaf:
        if tensor.requires_grad:
            gradient_edge_of(tensor).node.register_prehook(_refuse_late_gradient)
        fresh = fresh.requires_grad_(tensor.requires_grad)
    _swap_tensor_impl(tensor, fresh)
    # Hooks belong to the Python object, but run only if they are registered with the C++ tensor.
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks) is not None:
            setattr(tensor, hooks, getattr(tensor, hooks))
    if gradient is not None:
        _put_gradient(tensor, gradient)


def _refuse_late_gradient(gradients: Any) -> None:
    """Refuses the gradient that an older graph would add to the old tensor, which is unreachable."""
    raise StateError(
        "this graph was made before a parameter in it moved to another type of device (a pipe moves parameters when it "
        "is planned), so its gradient would be lost; call backward before, or forward again"
    )


def _put_gradient(tensor: torch.Tensor, gradient: torch.Tensor) -> None:
    """Restores the gradient of the tensor, moved to the tensor's device."""
    if gradient.device.type != tensor.device.type:
        replace_data(gradient, gradient.detach().to(tensor.device))
    tensor.grad = gradient
