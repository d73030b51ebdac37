"""Identities of storages that stay unique after a storage is freed, unlike its address.

The address of a storage (`_cdata`) and the parts of sparse tensors are required, and unchanged from torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fxpipe._torch.dispatch_modes import is_traceable_wrapper_subclass
from fxpipe._torch.versions import require_attributes

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
        for part in _SPARSE_PARTS.get(tensor.layout, ()):
            yield from storages_of(getattr(tensor, part)())


def storage_address(tensor: torch.Tensor) -> int:
    """Returns the address of a strided tensor's storage, unique while it lives and equal for shared memory."""
    address: int = tensor.untyped_storage()._cdata
    return address


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor._indices(), tensor._values()


class StorageNumbers:
    """Unique numbers for storages."""

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
