"""The arguments of a node: by name, on another device than in the recording; and the container of its value."""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxpipe._torch.functions import opname
from fxpipe.utils.accelerator import accelerator_type

_RUNNING = ("input", "weight", "bias", "running_mean", "running_var")
_MADE_IN_C: dict[Any, tuple[str, ...]] = {  # without a signature
    F.scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    torch.batch_norm: (*_RUNNING, "training", "momentum", "eps", "cudnn_enabled"),
    torch.instance_norm: (*_RUNNING, "use_input_stats", "momentum", "eps", "cudnn_enabled"),
}
# Functions that create a tensor, on the default device if no device is given.
_FACTORIES = frozenset(
    "arange as_tensor asarray bartlett_window blackman_window empty empty_strided eye fft_fftfreq fft_rfftfreq full "
    "hamming_window hann_window kaiser_window linspace logspace ones rand randint randn randperm range scalar_tensor "
    "tensor tril_indices triu_indices zeros".split()
)


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Returns the given arguments of a node, by name."""
    return dict(zip(parameter_names(node.target), node.args, strict=False)) | dict(node.kwargs)


def named_arguments_and_defaults(node: fx.Node) -> dict[str, Any]:
    """Returns all arguments of a Python function, by name, with defaults."""
    function: Any = node.target
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    return defaults | named_arguments(node)


@functools.lru_cache(maxsize=256)
def parameter_names(function: Any) -> tuple[str, ...]:
    return _MADE_IN_C.get(function) or tuple(inspect.signature(function).parameters)


def container_of(node: fx.Node) -> fx.Node | None:
    """Returns the node from whose value this node takes an item (`values[1]`); None for other nodes."""
    source = node.args[0] if node.target is operator.getitem else None
    return source if isinstance(source, fx.Node) else None


# -- devices: the recording's and a stage's ----------------------------------------------------------------------------


def set_node_device(node: fx.Node, device: torch.device) -> None:
    """Sets what a node calls to its call on a device."""
    node.target, node.args, node.kwargs = call_on_device(node, device)


def call_on_device(node: fx.Node, device: torch.device) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns target and arguments of a node with each device replaced; a factory without one gets it."""

    def replaced(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return type(value)(map(replaced, value))
        return value

    target, args = node.target, tuple(map(replaced, node.args))
    kwargs = {key: replaced(value) for key, value in node.kwargs.items()}
    if kwargs.get("device") is not None:  # a name ("cuda:0") or the number of a GPU
        kwargs["device"] = device
    if node.op == "call_method":
        if target in ("cpu", accelerator_type()):
            return "to", (args[0], device), {}
        if target == "to" and len(args) > 1 and isinstance(args[1], (str, int)):
            args = (args[0], device, *args[2:])
    elif kwargs.get("device") is None and device.type != "cpu":
        is_of_torch = str(getattr(target, "__module__", None) or "torch").startswith("torch")
        if is_of_torch and opname(target) in _FACTORIES:
            kwargs["device"] = device
    return target, args, kwargs
