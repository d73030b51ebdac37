"""The memory of tensors: identities of storages, and replacement of memory that preserves the tensor object.

A number of a storage stays unique after the storage is freed, unlike its address. Required, and unchanged from torch
2.11 to 2.14, are the address (`_cdata`) and the parts of sparse tensors. Optional is a swap of two tensors, needed only
between the CPU and an out-of-tree backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fxpipe._torch.autograd import gradient_edge_of
from fxpipe._torch.modes import is_traceable_wrapper_subclass
from fxpipe._torch.versions import optional_name, require_attributes
from fxpipe.errors import StateError

require_attributes(torch.UntypedStorage, "_cdata")
require_attributes(torch.Tensor, "_indices", "_values")  # also of tensors that are not coalesced

_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yields the storages of a tensor, or of the parts of a sparse tensor or wrapper subclass, if accessible."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages_of(getattr(tensor, name))
    elif tensor.layout == torch.strided:
        yield tensor.untyped_storage()
    else:
        for part in sparse_parts(tensor):
            yield from storages_of(part)


def storage_address(tensor: torch.Tensor) -> int:
    """Returns the address of a strided tensor's storage, unique while it lives and equal for shared memory."""
    address: int = tensor.untyped_storage()._cdata
    return address


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [getattr(tensor, name)() for name in _SPARSE_PARTS.get(tensor.layout, ())]


class StorageNumbers:
    def __init__(self) -> None:
        # A weak reference prevents the reuse of the address, and keeps no memory alive.
        self._seen: dict[int, StorageWeakRef] = {}
        self._kept: dict[int, torch.Tensor] = {}

    def number(self, storage: torch.UntypedStorage) -> int:
        number = int(storage._cdata)
        if number not in self._seen:
            self._seen[number] = StorageWeakRef(storage)
        return number

    def numbers(self, tensor: torch.Tensor) -> Iterator[int]:
        return map(self.number, storages_of(tensor))

    def name(self, tensor: torch.Tensor) -> int:
        """Returns one number for a tensor. A sparse tensor has several storages, which writes replace: its id."""
        if tensor.layout == torch.strided:
            return self.number(tensor.untyped_storage())
        self._kept[id(tensor)] = tensor
        return id(tensor)

    def is_gone(self, number: int) -> bool:
        return bool(self._seen[number].expired())


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
        if gradient.device.type != tensor.device.type:
            replace_data(gradient, gradient.detach().to(tensor.device))
        tensor.grad = gradient


def _refuse_late_gradient(gradients: Any) -> None:
    """Refuses the gradient that an older graph would add to the old tensor, which is unreachable."""
    raise StateError(
        "this graph was made before a parameter in it moved to another type of device (a pipe moves parameters when it "
        "is planned), so its gradient would be lost; call backward before, or forward again"
    )
