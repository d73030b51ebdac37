"""Tensors that torch requires on the CPU, such as the lengths of a packed sequence.

Stages move all tensors to their device. An opaque call whose functions need such tensors copies them back, which waits
for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxpipe._torch.functions import opname

# By function: index and name of the argument that must be on the CPU if it is a tensor.
_HOST_PARAMETERS = {
    "_pack_padded_sequence": (1, "lengths"),
    "_pad_packed_sequence": (1, "batch_sizes"),
    "tensor_split": (1, "tensor_indices_or_sections"),
}


def is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


class HostArgumentConversion(TorchFunctionMode):
    """A block in which functions get the arguments that they require on the CPU from there."""

    has_found = False  # True if a function in a block required an argument on the CPU

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place, name = _HOST_PARAMETERS.get(opname(func), (0, ""))
        host = args[place] if name and place < len(args) else kwargs.get(name)
        self.has_found |= isinstance(host, torch.Tensor)
        if isinstance(host, torch.Tensor) and is_on_device(host):
            there = host.cpu()
            args = tuple(there if value is host else value for value in args)
            kwargs = {key: there if value is host else value for key, value in kwargs.items()}
        return func(*args, **kwargs)
