"""Random weights for a model that is only planned: few numbers are drawn, and copied, which is several times faster."""

from __future__ import annotations

from typing import Any

import torch

from fxpipe._torch.dispatch_modes import TorchDispatchMode

DRAWN_NUMBERS = 1 << 16  # numbers that are drawn for a tensor
_DRAWING = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


class RepeatedRandomWeights(TorchDispatchMode):
    """A mode that fills large tensors with repetitions of few random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _DRAWING or not _is_large(args[0]) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        tensor, *others = args
        flat = tensor.view(-1)
        func(flat[:DRAWN_NUMBERS], *others, **kwargs)
        whole = len(flat) // DRAWN_NUMBERS * DRAWN_NUMBERS
        flat[DRAWN_NUMBERS:whole].view(-1, DRAWN_NUMBERS).copy_(flat[:DRAWN_NUMBERS])  # the source stays in cache
        flat[whole:].copy_(flat[: len(flat) - whole])
        return tensor


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() > DRAWN_NUMBERS and tensor.is_contiguous()
