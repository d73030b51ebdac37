"""What a call of a torch function becomes in the graph: the kind of its node, and a name after the module's path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree


def is_one_function(module: nn.Module) -> bool:
    """Is it a module of torch.nn that computes by itself?"""
    return type(module).__module__.startswith("torch.nn.") and not module._modules


def label_of(path: str, name: str, args: tuple[Any, ...], is_all_of_module: bool) -> str:
    """The name of a node, after the module, so that stage code reads like the model.

    Args:
        path: of the module in which the function `name` is called.
        args: of the node.
        is_all_of_module: the function is what a torch.nn module does; then the module's name says enough.
    """
    parts = [path] if is_all_of_module else [path, name]
    if args and isinstance(args[0], fx.Node) and args[0].op == "get_attr" and name.endswith("_"):
        parts = [path, str(args[0].target).rpartition(".")[2], name]  # `bn_num_batches_tracked_add`; not `bn`
    label = "_".join(part.strip("_").replace(".", "_") for part in parts if part.strip("_")) or name.strip("_")
    return f"_{label}" if label[0].isdigit() else label


def is_method(func: Any, name: str) -> bool:
    """Is it a method of tensors, which a graph calls by its name?"""
    return (
        getattr(torch.Tensor, name, None) is func
        or type(func).__name__ in ("method_descriptor", "wrapper_descriptor")
        # `x ** 2` and the like: wrappers that torch._tensor does not export.
        or (getattr(func, "__module__", "") == "torch._tensor" and not hasattr(torch._tensor, name))
    )


def is_of_numpy(args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """Does a function make a tensor of arrays only?"""
    values = pytree.tree_leaves((tuple(args), dict(kwargs)))
    return any(type(v).__module__ == "numpy" and getattr(v, "shape", ()) for v in values) and not any(
        isinstance(v, torch.Tensor) for v in values
    )


def holds_numbers(result: Any) -> bool:
    return result is not None and any(isinstance(leaf, (int, float, complex)) for leaf in pytree.tree_leaves(result))
