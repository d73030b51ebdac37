"""The memory traffic and the compute dtype of an operation, from which its seconds on any hardware follow.

An operation takes as long as its arithmetic, its memory traffic or its launch, whichever is longest (Williams,
Waterman and Patterson, Roofline: an insightful visual performance model, CACM 52(4), 2009; the launch is a third roof).
Arithmetic is counted by `torch.utils.flop_counter`, at the rate of the compute dtype, with autocast and TF32; traffic
is each tensor read or written, once. `Hardware` gives the achievable share of its peaks. Caches, and kernels that other
devices would choose, are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.operators import schema_of
from fxpipe.tracing.tensors import storage_of

# These read no more of their first argument than the size of their result.
_GATHERS = frozenset("embedding gather index index_select take".split())
_ALLOCATIONS = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())


def compute_dtype(func: Any, args: tuple[Any, ...]) -> str:
    """Returns the compute dtype of an operation, by its name; TF32 if torch would use it for float32 on a GPU."""
    dtype = next((t.dtype for t in _tensors_of(args) if t.is_floating_point() or t.is_complex()), torch.float32)
    if dtype is torch.float32:
        is_convolution = "conv" in func.overloadpacket.__name__
        backends: Any = torch.backends
        setting = backends.cudnn.conv if is_convolution else backends.cuda.matmul
        return "tfloat32" if setting.fp32_precision == "tf32" else "float32"
    return str(dtype).removeprefix("torch.")


def bytes_moved(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Returns the bytes that an operation reads and writes; 0 for views."""
    name = func.overloadpacket.__name__
    if name in _ALLOCATIONS:
        return 0
    read = {storage_of(t): t for t in _tensors_of((args, kwargs))}
    results = [t for t in _tensors_of(result) if storage_of(t) not in read]
    written = list(_written_arguments(func, args, kwargs))
    if not results and not written:
        return 0  # a view
    sizes = {storage: _tensor_bytes(t) for storage, t in read.items()}
    if name in _GATHERS:
        sizes[storage_of(args[0])] = sum(map(_tensor_bytes, results))
    return sum(sizes.values()) + sum(map(_tensor_bytes, (*results, *written)))


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only or place >= len(args) else args[place]
            yield from _tensors_of(value)


def _tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _tensor_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes in memory: an expanded tensor has only one copy of its values."""
    number = tensor.numel() * tensor.element_size()
    return min(number, tensor.untyped_storage().nbytes()) if tensor.layout == torch.strided else number
