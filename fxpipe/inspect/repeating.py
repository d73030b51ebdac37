"""Random weights for a model that is only looked at: drawn once, and repeated.

To draw 124 million numbers takes several times as long as to copy them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DRAWN = 1 << 16  # numbers of a tensor that are drawn
_aten = torch.ops.aten
_DRAWING = (_aten.normal_.default, _aten.uniform_.default)


class Repeating(TorchDispatchMode):
    """The mode under which large tensors are filled with few random numbers, again and again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _DRAWING or args[0].numel() <= DRAWN or args[0].is_meta or not args[0].is_contiguous():
            return func(*args, **kwargs)
        flat = args[0].view(-1)
        func(flat[:DRAWN], *args[1:], **kwargs)
        whole = len(flat) // DRAWN * DRAWN
        flat[DRAWN:whole].view(-1, DRAWN).copy_(flat[:DRAWN])  # which stay in the cache
        flat[whole:].copy_(flat[: len(flat) - whole])
        return args[0]
