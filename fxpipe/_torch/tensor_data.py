"""The memory of a tensor, replaced by other memory while the tensor stays the same object.

Optional: torch does it itself, unless one memory is of the CPU and the other of a backend that is not torch's own. From
2.11 to 2.14 it has what is needed then.
"""

from __future__ import annotations

from typing import Any

import torch

from fxpipe._torch.autograd import gradient_edge_of
from fxpipe._torch.versions import optional_name
from fxpipe.errors import StateError

_swap_tensor_impl: Any = optional_name("torch", "_C._swap_tensor_impl")


def replace_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Gives a tensor other data, as `tensor.data = data` does, also of another device."""
    try:
        tensor.data = data
    except RuntimeError:
        if tensor.device.type == data.device.type or _swap_tensor_impl is None:
            raise
        _replace_tensor(tensor, data)


def _replace_tensor(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Puts a new tensor of C++ behind the object of Python, with all that autograd knows of the old one."""
    gradient = tensor.grad if tensor.is_leaf else None
    fresh = data.detach()
    if tensor.is_leaf:
        if tensor.requires_grad:
            gradient_edge_of(tensor).node.register_prehook(_refuse_late_gradient)
        fresh = fresh.requires_grad_(tensor.requires_grad)
    _swap_tensor_impl(tensor, fresh)
    # Hooks are the object's, but only called where they are registered with the tensor of C++.
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks) is not None:
            setattr(tensor, hooks, getattr(tensor, hooks))
    if gradient is not None:
        _put_gradient(tensor, gradient)


def _refuse_late_gradient(gradients: Any) -> None:
    """Refuses the gradient that a graph from before gives to the old tensor, which nobody has any more."""
    raise StateError(
        "this graph was made before a parameter in it moved to another type of device (a pipe moves parameters when it "
        "is planned), so its gradient would be lost; call backward before, or forward again"
    )


def _put_gradient(tensor: torch.Tensor, gradient: torch.Tensor) -> None:
    """Gives the tensor its gradient back, which has to be where the tensor is: it is moved behind it."""
    if gradient.device.type != tensor.device.type:
        replace_data(gradient, gradient.detach().to(tensor.device))
    tensor.grad = gradient
