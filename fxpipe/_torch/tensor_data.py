"""The memory of a tensor, replaced by other memory while the tensor stays the same object.

Optional: torch does it itself, unless one memory is of the CPU and the other of a backend that is not torch's own. From
2.11 to 2.14 it has what is needed then.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from fxpipe._torch.versions import optional_name

_swap_tensor_impl: Any = optional_name("torch", "_C._swap_tensor_impl")
_use_count: Any = optional_name("torch", "Tensor._use_count")


def replace_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Gives a tensor other data, as `tensor.data = data` does, also of another device.

    Raises:
        RuntimeError: a graph of autograd holds the tensor, and torch cannot move it from one type of device to another
            then.
    """
    try:
        tensor.data = data
    except RuntimeError as error:
        if tensor.device.type == data.device.type or _swap_tensor_impl is None or _use_count is None:
            raise
        if _use_count(tensor) > 1:
            gc.collect()  # a recording that was given up holds its graph with the exception that ended it
        if _use_count(tensor) > 1:  # a graph would give its gradient to a tensor that nobody has any more
            error.add_note(
                f"fxpipe: a tensor of the model has to move from {tensor.device} to {data.device}, which torch cannot "
                "do while a graph of autograd holds it; drop outputs and losses of earlier calls of the model, or move "
                f"the model to {data.device} before"
            )
            raise
        _replace_tensor(tensor, data)


def _replace_tensor(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Puts a new tensor of C++ behind the object of Python, with all that autograd knows of the old one."""
    gradient = tensor.grad if tensor.is_leaf else None
    if gradient is not None:
        tensor.grad = None  # nothing else may hold it when it moves
    fresh = data.detach()
    fresh = fresh.requires_grad_(tensor.requires_grad) if tensor.is_leaf else fresh
    _swap_tensor_impl(tensor, fresh)
    # Hooks are the object's, but only called where they are registered with the tensor of C++.
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks) is not None:
            setattr(tensor, hooks, getattr(tensor, hooks))
    if gradient is not None:
        _put_gradient(tensor, gradient)


def _put_gradient(tensor: torch.Tensor, gradient: torch.Tensor) -> None:
    """Gives the tensor its gradient back, which has to be where the tensor is: it is moved behind it."""
    if gradient.device.type != tensor.device.type:
        replace_data(gradient, gradient.detach().to(tensor.device))
    tensor.grad = gradient
