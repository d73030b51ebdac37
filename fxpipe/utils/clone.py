"""Copies of tensors with their strides."""

from __future__ import annotations

import torch


def clone(value: torch.Tensor) -> torch.Tensor:
    """A copy that the stage may write to.

    It has the strides of the value, also where these leave gaps, which `Tensor.clone` closes: `contiguous` must go on
    to copy what it copied. (What overlaps itself becomes dense; torch refuses to write to it anyway.)
    """
    copy = value.clone()
    if copy.stride() == value.stride() or 0 in value.stride():
        return copy
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
