"""Names and properties of torch's functions, and the arguments that an overload's schema declares as mutated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.module_internals import own_children
from fxpipe._torch.operators import OpOverload, schema_of


def opname(target: Any) -> str:
    """Returns the name of a function; for an overload (`aten.add.Tensor`) the operator's name."""
    if isinstance(target, OpOverload):
        return str(target._opname)
    return str(getattr(target, "__name__", target))


def overload_writes(overload: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for place, argument in enumerate(schema_of(overload).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)


def label_of(path: str, module: nn.Module | None, name: str, args: tuple[Any, ...]) -> str:
    """Returns the name of a node, with the path of the module that calls `name`, so that stage code reads like it.

    A function in a module of torch.nn without children is all that the module runs: the module's name suffices.
    """
    is_leaf = type(module).__module__.startswith("torch.nn.") and not own_children(module)  # type: ignore[arg-type]
    parts = [path] if is_leaf else [path, name]
    if args and isinstance(args[0], fx.Node) and args[0].op == "get_attr" and name.endswith("_"):
        parts = [path, str(args[0].target).rpartition(".")[2], name]  # `bn_num_batches_tracked_add`, not `bn`
    label = "_".join(part.strip("_").replace(".", "_") for part in parts if part.strip("_")) or name.strip("_")
    return f"_{label}" if label[0].isdigit() else label


def is_tensor_method(func: Any, name: str) -> bool:
    """Returns True for a tensor method, which a graph calls by name."""
    return (
        getattr(torch.Tensor, name, None) is func
        or type(func).__name__ in ("method_descriptor", "wrapper_descriptor")
        # Wrappers that torch._tensor does not export, such as `x ** 2`.
        or (getattr(func, "__module__", "") == "torch._tensor" and not hasattr(torch._tensor, name))
    )


def takes_only_arrays(args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    values = pytree.tree_leaves((tuple(args), dict(kwargs)))
    return any(type(v).__module__ == "numpy" and getattr(v, "shape", ()) for v in values) and not any(
        isinstance(v, torch.Tensor) for v in values
    )


# Functions without a node: their results are equal in every run of a graph, or are text for users.
NODELESS = frozenset(
    "dense_dim sparse_dim dim_order cudnn_is_acceptable dim ndimension is_floating_point is_complex is_signed "
    "element_size is_contiguous storage_offset data_ptr get_device __hash__ untyped_storage can_cast __dir__ "
    "result_type promote_types is_storage is_inference __dlpack_device__ has_names get_default_device "
    "is_same_size is_tensor is_grad_enabled "
    "is_autocast_enabled get_autocast_dtype get_default_dtype "
    "_set_grad_enabled _enter_autocast _exit_autocast".split()  # the last three are kept by ThreadState
)
# Functions that report the memory layout of a tensor, which depends on its sizes.
LAYOUT_QUESTIONS = frozenset("is_contiguous storage_offset dim_order is_non_overlapping_and_dense".split())
STORAGE_METHODS = frozenset("untyped_storage storage".split())
# Functions that read the values of a tensor.
VALUE_READS = frozenset(
    "item tolist numpy __array__ __bool__ __int__ __float__ __index__ __complex__ __contains__ is_nonzero equal "
    "allclose".split()
)
# Functions that return one tensor per index or piece of a dimension -> the position of the argument `dim`.
SPLIT_FUNCTIONS = {"__iter__": 1, "unbind": 1, "split": 2, "chunk": 2, "unsafe_split": 2, "unsafe_chunk": 2}
TEXT_METHODS = frozenset("__repr__ __format__ __str__".split())
TENSOR_ATTRIBUTES = frozenset("data T mT H mH real imag _base".split())  # other attributes are not tensors
GRADIENT_ATTRIBUTES = frozenset("requires_grad is_leaf grad_fn".split())
# Types compared by value, and further types that are arguments of a node unchanged.
PLAIN_TYPES = (bool, int, float, complex, str)
CONSTANT_TYPES = (type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format)
# Python's types, which torch takes as dtypes.
DTYPES_OF_PYTHON = {int: torch.int64, float: torch.float64, bool: torch.bool, complex: torch.complex128}
