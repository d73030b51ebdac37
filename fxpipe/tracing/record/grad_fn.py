"""Autograd nodes: as forward sees them (`tensor.grad_fn`), and custom ones.

A stage has other nodes than the recording, and a hook on a recorded node would never run. So forward may look at nodes
only in a module that is kept whole.

A custom node, from an `autograd.Function` in Python or C++, is in the graph only if a recorded function created it. A
custom node that appears on a tensor later comes from an unrecorded function, whose inside was recorded instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from fxpipe._torch.autograd import forward_class_of
from fxpipe._torch.function_modes import without_torch_function

NODE_PROBLEM, NODE_REMEDY = "looks at a node of autograd (grad_fn)", "do so outside forward"


def is_grad_fn_access(func: Any, name: str) -> bool:
    return name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") == "grad_fn"


def custom_backward_name(tensor: torch.Tensor) -> str | None:
    """Returns the name of a tensor's node if it has a custom backward."""
    with without_torch_function():
        node: Any = tensor.grad_fn if tensor.requires_grad else None
    if isinstance(node, BackwardCFunction):
        return str(forward_class_of(node).__name__)
    if type(node).__name__ == "CppFunction":  # Python's type for custom C++ nodes
        return str(node.name())
    return None
