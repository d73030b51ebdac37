"""One device for model and inputs while they are traced.

Inputs may be anywhere. And once a model is spread over the devices of its stages, it cannot be run as it is; for
another graph of it (evaluation, say) its tensors come to the CPU for the while.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fxpipe.tracing.containers import has_values
from fxpipe.tracing.snapshot import held_in_containers, slots_of
from fxpipe.trees import mapped


@contextlib.contextmanager
def on_one_device(model: nn.Module) -> Iterator[torch.device | None]:
    """The device on which the whole model is, for this block; None for a model without tensors, or without values."""
    held = (*slots_of(model).values(), *held_in_containers(model).values())
    tensors = list({id(tensor): tensor for tensor in held}.values())
    if not all(map(has_values, tensors)):
        yield None  # fake ones will stand for them
        return
    devices = {tensor.device for tensor in tensors}
    if len(devices) < 2:
        yield next(iter(devices), None)
        return
    with on_the_cpu(tensors):
        yield torch.device("cpu")


@contextlib.contextmanager
def on_the_cpu(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """The data of these tensors is on the CPU in this block. The tensors stay the same objects.

    They have no gradients there: torch refuses to assign one that is on another type of device. After the block each
    has the gradient that it had, the same object.
    """
    away = [(tensor, tensor.data, tensor.grad if tensor.is_leaf else None) for tensor in tensors]
    try:
        for tensor, data, gradient in away:
            if gradient is not None:
                tensor.grad = None
            tensor.data = data.cpu()
        yield
    finally:
        for tensor, data, gradient in away:
            tensor.data = data
            if tensor.is_leaf:
                tensor.grad = gradient


def moved(inputs: Any, device: torch.device | None) -> Any:
    """The inputs on `device`, to be traced with."""
    if device is None:
        return inputs

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == device or not has_values(tensor):
            return tensor
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    return mapped(move, inputs)
