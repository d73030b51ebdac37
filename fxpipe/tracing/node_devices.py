"""Changes the devices in a graph from the recording's to a stage's."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpipe._torch.functions import opname
from fxpipe.tracing.node_arguments import container_of
from fxpipe.tracing.node_info import info
from fxpipe.utils.accelerator import accelerator_type

# Functions that create a tensor, on the default device if no device is given.
_FACTORIES = frozenset(
    "arange as_tensor asarray bartlett_window blackman_window empty empty_strided eye fft_fftfreq fft_rfftfreq full "
    "hamming_window hann_window kaiser_window linspace logspace ones rand randint randn randperm range scalar_tensor "
    "tensor tril_indices triu_indices zeros".split()
)


def set_node_device(node: fx.Node, device: torch.device) -> None:
    """Replaces every device among a node's arguments, and adds it to a factory without one."""

    def replaced(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return type(value)(map(replaced, value))
        return value

    node.args = tuple(map(replaced, node.args))
    node.kwargs = {key: replaced(value) for key, value in node.kwargs.items()}
    if node.kwargs.get("device") is not None:  # a name ("cuda:0") or the number of a GPU
        node.kwargs = {**node.kwargs, "device": device}
    if node.op == "call_method":
        if node.target in ("cpu", accelerator_type()):
            node.target, node.args, node.kwargs = "to", (node.args[0], device), {}
        elif node.target == "to" and len(node.args) > 1 and isinstance(node.args[1], (str, int)):
            node.args = (node.args[0], device, *node.args[2:])
    elif _is_factory(node) and node.kwargs.get("device") is None and device.type != "cpu":
        node.kwargs = {**node.kwargs, "device": device}


def is_for_host(node: fx.Node) -> bool:
    """Returns whether only opaque calls use a value, and want it on the CPU."""
    return bool(node.users) and all(_takes_on_host(user, node) for user in node.users)


def _takes_on_host(user: fx.Node, node: fx.Node) -> bool:
    call = info(user).opaque
    if call is None or container_of(user) is not None:
        return False
    tensors, values = user.args
    places = {place for place, value in enumerate(values) if value is node}  # type: ignore[arg-type]
    return node not in tensors and places <= call.host_places  # type: ignore[operator]


def _is_factory(node: fx.Node) -> bool:
    function = node.target
    is_torchs = str(getattr(function, "__module__", None) or "torch").startswith("torch")
    return is_torchs and opname(function) in _FACTORIES
