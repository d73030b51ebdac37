"""A tensor as one piece of memory and the way to read it: what a copy has to move, and how it becomes a tensor again.

A copy between devices must not be told from what was copied. Not only its numbers, its strides too: where they have
gaps or overlap, `contiguous` copies, `view` refuses and kernels take other ways, and code that was recorded on the one
must do the same on the other. `Tensor.to` makes such tensors dense. So here

- what is dense in any order of its dimensions, or overlaps itself (`expand`, `unfold`), goes as the piece of storage
  that it covers, byte for byte;
- what has gaps (a slice of columns, one part of a `chunk`) is gathered, and spread out again behind the copy: its gaps
  belong to others, and may be larger than itself;
- that a tensor is to be read as conjugate or negative is noted, not carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Packed:
    """A plain tensor on its way."""

    memory: torch.Tensor  # of one dimension, dense
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_gathered: bool  # the memory holds the elements in order, without gaps
    is_conj: bool
    is_neg: bool

    def at(self, memory: torch.Tensor) -> Packed:
        """The same with its memory elsewhere."""
        return replace(self, memory=memory)

    def unpack(self) -> torch.Tensor:
        """The tensor, on the device where the memory is; on the current stream, where it is spread out."""
        if self.is_gathered:
            dense = self.memory.view(self.shape)
            found = torch.empty_strided(self.shape, self.stride, dtype=dense.dtype, device=dense.device).copy_(dense)
        else:
            found = self.memory.as_strided(self.shape, self.stride, 0).detach()  # detached: no view for autograd
        if self.is_neg:
            found = torch._neg_view(found)
        return found.conj() if self.is_conj else found


def is_plain(tensor: torch.Tensor) -> bool:
    """Can it be packed? Sparse and quantised tensors, and what others have derived from Tensor, go as they see fit."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
    )


def has_gaps(tensor: torch.Tensor) -> bool:
    """Does it leave out elements of the storage that it covers, and never use one twice?"""
    extent, overlaps = covered(tensor.shape, tensor.stride())
    return extent > tensor.numel() and not overlaps


def pack(tensor: torch.Tensor) -> Packed:
    """Takes a plain tensor apart; gathers, on the current stream, if it has gaps."""
    bare = tensor.detach()
    is_conj, is_neg = bare.is_conj(), bare.is_neg()
    bare = bare.conj() if is_conj else bare
    bare = torch._neg_view(bare) if is_neg else bare
    is_gathered = has_gaps(bare)
    if is_gathered:
        memory = bare.contiguous().view(-1)
    else:
        extent, _ = covered(bare.shape, bare.stride())
        memory = bare.as_strided((extent,), (1,), bare.storage_offset())
    return Packed(memory, tuple(bare.shape), bare.stride(), is_gathered, is_conj, is_neg)


def covered(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, bool]:
    """How many elements lie between the first and the last, both counted in; and may two of them be one?"""
    if 0 in shape:
        return 0, False
    reach, overlaps = 0, False
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        overlaps |= step <= reach
        reach += (size - 1) * step
    return reach + 1, overlaps
