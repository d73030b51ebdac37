"""Models of a few layers: the class says which, and the body what forward does with them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Layer = int | tuple[int, int] | Callable[[], Any]


class Layered(nn.Module):
    """A module that makes its layers in the order of the keywords of its class, as an `__init__` would.

    `class Model(Layered, first=4, norm=lambda: nn.BatchNorm1d(4), last=(4, 2))`: a number is the width of an
    `nn.Linear`, a pair its input and output features, and a function makes any other layer, parameter or buffer.
    Arguments become attributes and buffers, too: `Model(function=torch.relu)`.
    """

    _layers: dict[str, Layer]

    def __init_subclass__(cls, **layers: Layer):
        super().__init_subclass__()
        cls._layers = {**getattr(cls, "_layers", {}), **layers}

    def __init__(self, **attributes: Any):
        super().__init__()
        for name, layer in self._layers.items():
            if isinstance(layer, int):
                layer = layer, layer
            self._add(name, nn.Linear(*layer) if isinstance(layer, tuple) else layer())
        for name, value in attributes.items():
            self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        if type(value) is torch.Tensor:
            self.register_buffer(name, value)
        else:
            setattr(self, name, value)
