"""Random weights for a model that is only looked at: drawn once, and repeated.

To draw 124 million numbers takes several times as long as to copy them. And most weights are drawn two or three times
before a model is there (by the layer, by the model's own rule), some for a layer that will be tied to another. So they
get numbers at the end, or when torch does something else with them; what is read past torch (`numpy()`) has none yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fxpipe._torch.dispatch_modes import TorchDispatchMode
from fxpipe._torch.storages import storage_address, storage_of_weak_reference
from fxpipe.tracing.tensors import tensors_in

DRAWN_NUMBERS = 1 << 16  # numbers of a tensor that are drawn
_aten = torch.ops.aten
_DRAWING = (_aten.normal_.default, _aten.uniform_.default)
_ALIASING = (_aten.detach.default, _aten.alias.default)  # of them parameters are made, before and after they are drawn


@dataclass(frozen=True, slots=True)
class _PendingDraw:
    """A random initialization that is still to run: `function(tensor, *args, **kwargs)` on all of a storage."""

    storage: StorageWeakRef
    numbers: int
    dtype: torch.dtype
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def fill(self) -> None:
        """Draws, if the storage is still there."""
        storage = storage_of_weak_reference(self.storage.cdata)
        if storage is not None:
            flat = torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, 0, (self.numbers,), (1,))
            self.function(flat[:DRAWN_NUMBERS], *self.args, **self.kwargs)
            whole = len(flat) // DRAWN_NUMBERS * DRAWN_NUMBERS
            flat[DRAWN_NUMBERS:whole].view(-1, DRAWN_NUMBERS).copy_(flat[:DRAWN_NUMBERS])  # which stay in the cache
            flat[whole:].copy_(flat[: len(flat) - whole])


class RepeatedRandomWeights(TorchDispatchMode):
    """The mode under which large tensors are filled with few random numbers, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[int, _PendingDraw] = {}  # by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWING and _can_wait(args[0]) and kwargs.get("generator") is None:
            tensor, *others = args
            storage = StorageWeakRef(tensor.untyped_storage())
            self._waiting[storage.cdata] = _PendingDraw(
                storage, tensor.numel(), tensor.dtype, func, tuple(others), kwargs
            )
            return tensor
        if self._waiting and func not in _ALIASING:
            for tensor in tensors_in((args, kwargs)):
                self._fill(tensor)
        return func(*args, **kwargs)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for draw in self._waiting.values():
            draw.fill()
        self._waiting.clear()

    def _fill(self, tensor: torch.Tensor) -> None:
        if tensor.layout == torch.strided:
            draw = self._waiting.pop(storage_address(tensor), None)
            if draw is not None:
                draw.fill()


def _can_wait(tensor: torch.Tensor) -> bool:
    """Returns True for a tensor that is large, and all of its storage."""
    if tensor.device.type != "cpu" or tensor.numel() <= DRAWN_NUMBERS or not tensor.is_contiguous():
        return False
    if storage_of_weak_reference is None:  # it could not be found again
        return False
    return tensor.untyped_storage().nbytes() == tensor.nbytes
