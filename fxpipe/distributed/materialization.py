"""Memory for this process's part of a model that was built on the meta device.

Tensors stay the same objects, so ties, optimizers and references in modules remain valid. A tensor on the meta device
has no values yet: the code that gives it memory also fills it, or takes the memory back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch

from fxpipe._torch.tensor_data import replace_data
from fxpipe.tracing.tensors import has_values, storage_of


class GivenMemory:
    """Memory for tensors without values, which can be taken back from tensors that get none."""

    def __init__(self, tensors: Iterable[torch.Tensor], device_of: Callable[[torch.Tensor], torch.device]):
        """Skips tensors that have values."""
        self.tensors = list({id(tensor): tensor for tensor in tensors if not has_values(tensor)}.values())
        self._before = [tensor.detach() for tensor in self.tensors]
        for device in dict.fromkeys(map(device_of, self.tensors)):
            here = [tensor for tensor in self.tensors if device_of(tensor) == device]
            memories = _empty_on(device, [tensor.detach() for tensor in here])
            for tensor, memory in zip(here, memories, strict=True):
                replace_data(tensor, memory)

    def take_back(self, keep: Callable[[torch.Tensor], bool] = lambda tensor: False) -> None:
        """Takes the memory back, except from tensors for which `keep` returns True."""
        for tensor, before in zip(self.tensors, self._before, strict=True):
            if tensor.numel() and not keep(tensor):
                replace_data(tensor, before)


def _empty_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Creates uninitialized tensors like these, which share memory if these do."""
    tensors = list(tensors)
    sharing = Counter(storage_of(tensor) for tensor in tensors)
    storages: dict[int, torch.UntypedStorage] = {}

    def like(tensor: torch.Tensor) -> torch.Tensor:
        key = storage_of(tensor)
        if tensor.layout != torch.strided or sharing[key] < 2:
            return torch.empty_like(tensor, device=device)
        if key not in storages:
            size = tensor.untyped_storage().nbytes()
            storages[key] = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        part = torch.empty(0, dtype=tensor.dtype, device=device)
        return part.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())

    return [like(tensor) for tensor in tensors]
