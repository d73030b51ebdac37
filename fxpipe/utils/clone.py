"""Copies of tensors that preserve strides."""

from __future__ import annotations

import torch


def clone(value: torch.Tensor) -> torch.Tensor:
    """Returns a copy that the stage may write to.

    Unlike `Tensor.clone` it preserves strides with gaps, so that `contiguous` copies in the same cases as before.
    Tensors with overlapping memory (stride 0) become dense; torch refuses to write to them anyway.
    """
    copy = value.clone()
    if copy.stride() == value.stride() or 0 in value.stride():
        return copy
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
