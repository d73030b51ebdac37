"""Devices in a graph are those of the recording; a stage has its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

# Functions that make a tensor from nothing, on the default device where none is given.
_FACTORIES = frozenset(
    "arange bartlett_window blackman_window empty empty_strided eye full hamming_window hann_window kaiser_window linspace "
    "logspace ones rand randint randn randperm range scalar_tensor tensor tril_indices triu_indices zeros".split()
)


def on_device(node: fx.Node, device: torch.device) -> None:
    """Replaces every device among the node's arguments; a factory that names none is told."""

    def replace(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        if isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda"):
            return str(device)
        if isinstance(value, (tuple, list)):
            return type(value)(map(replace, value)) if not hasattr(value, "_fields") else value
        return value

    node.args = tuple(map(replace, node.args))
    node.kwargs = {key: replace(value) for key, value in node.kwargs.items()}
    name = getattr(node.target, "__name__", "")
    if node.op == "call_function" and name in _FACTORIES and "device" not in node.kwargs and device.type != "cpu":
        node.kwargs = {**node.kwargs, "device": device}
    if node.op == "call_method" and node.target in ("cuda", "cpu"):
        node.target, node.args, node.kwargs = "to", (node.args[0], device), {}
