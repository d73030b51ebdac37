"""Tensors inside nested values."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from fxpipe._torch.fake_tensor_mode import FakeTensor
from fxpipe._torch.tensor_data import sparse_parts, storage_address
from fxpipe.utils.batch_split import rows_per_sample
from fxpipe.utils.python_objects import held_objects

_ATOMS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))  # the most frequent types


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields every tensor inside a value, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in _ATOMS:
        return
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def bytes_in(value: Any) -> int:
    """Computes the bytes of all elements of the tensors inside a value; a sparse tensor counts like a dense one."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


def has_values(value: Any) -> bool:
    """Returns whether a value is neither a meta tensor nor a fake one."""
    return not isinstance(value, torch.Tensor) or not (value.is_meta or isinstance(value, FakeTensor))


def storage_of(tensor: torch.Tensor) -> int:
    """Returns an id of a tensor's memory, valid while it lives; sparse tensors count as unshared."""
    return storage_address(tensor) if tensor.layout == torch.strided else id(tensor)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Computes the bytes of a tensor's memory; for a sparse tensor, of its values and indices."""
    if tensor.layout == torch.strided:
        return tensor.nbytes
    parts = sparse_parts(tensor)
    return sum(part.nbytes for part in parts) if parts else tensor.numel() * tensor.element_size()


def hidden_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in any object, each once, at any depth of attributes, including those in modules."""
    return (item for item in held_objects(value) if isinstance(item, torch.Tensor))


def detached(value: Any, own: Collection[int] = ()) -> Any:
    """Detaches a tensor to free its graph; copies it if its storage is in `own`."""
    if not isinstance(value, torch.Tensor):
        return value
    bare = value.detach().clone() if own and storage_of(value) in own else value.detach()
    return bare.requires_grad_(value.requires_grad)


def slice_samples(leaves: Sequence[Any], dims: Sequence[int | None], start: int, stop: int) -> list[Any]:
    """Returns samples start..stop of inputs that hold the batch in `dims`; repeats from the first after the last."""

    def part(leaf: torch.Tensor, dim: int) -> torch.Tensor:
        size, rows = leaf.shape[dim], rows_per_sample(dim)
        first, last = start * rows, stop * rows
        if last <= size:
            piece = leaf.narrow(dim, first, last - first)
            return piece.contiguous() if leaf.is_contiguous() else piece
        again, over = divmod(last, size)
        parts = [leaf.narrow(dim, first, size - first), *[leaf] * (again - 1), leaf.narrow(dim, 0, over)]
        order = sorted(range(leaf.dim()), key=leaf.stride, reverse=True)  # memory order, which `cat` does not preserve
        whole = torch.cat([one.permute(order) for one in parts], order.index(dim))
        return whole.permute([order.index(d) for d in range(leaf.dim())])

    parts: dict[Any, torch.Tensor] = {}  # a tensor that is passed twice has one part
    pairs = list(zip(leaves, dims, strict=True))
    return [leaf if dim is None else parts.setdefault((id(leaf), dim), part(leaf, dim)) for leaf, dim in pairs]
