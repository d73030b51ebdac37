"""Kinds of nodes, and their samples: nodes of one kind take the same time, so they share what is measured.

Noise must not decide where a model of equal blocks is cut. Of one kind are nodes with the same function, constants and
thread state, whose inputs agree in shape, stride, dtype, device and requires_grad: what a module of the same class with
the same sizes does. A module kept whole is a function of its own, so there class and settings stand for the function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxpipe.tracing.recording.recorder import PLAIN
from fxpipe.tracing.sizing.alike import same_function
from fxpipe.tracing.snapshot import OWN_NAMES
from fxpipe.tracing.traced import Traced

Value = Any  # of a node: a tensor, a number, or a nest of them

TOLERANCE = 0.02  # of the median of a kind's samples
NEGLIGIBLE = 0.0005  # of the time of the whole graph: what a kind may be wrong by, all its nodes together
MOST = 60  # samples of one kind


@dataclass(frozen=True, slots=True)
class Like:
    """What of a tensor decides how long a node works on it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int | str, ...]  # or the layout of a sparse one
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Like:
        stride = tensor.stride() if tensor.layout == torch.strided else (str(tensor.layout),)
        return cls(tensor.dtype, tuple(tensor.shape), stride, tensor.device, tensor.requires_grad)


@dataclass(slots=True)
class Samples:
    """Seconds of one kind of node. What disturbs a sample only makes it longer, so the median of them counts."""

    is_warm: bool = False
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    to_inputs: list[float] = field(default_factory=list)  # backward without the gradients of parameters
    gives_grad: tuple[bool, ...] = ()  # by tensor of its value: does it require grad
    leaves_grad: tuple[bool, ...] = ()  # by tensor that it writes to: does it require grad afterwards

    def add(self, forward: float, backward: float, to_inputs: float) -> None:
        if self.is_warm:
            self.forward.append(forward)
            self.backward.append(backward)
            self.to_inputs.append(to_inputs)
        self.is_warm = True

    def __len__(self) -> int:
        return len(self.forward)

    @property
    def seconds(self) -> float:
        return median(self.forward) + median(self.backward) if self.forward else 0.0

    def are_close(self, negligible: float) -> bool:
        """Are the medians known well enough, or to `negligible` seconds?

        The median of n samples lies about their interquartile range over the root of n from where it will settle.
        """
        for found in (self.forward, self.backward):
            lower, middle, upper = quantiles(found, n=4, method="inclusive")
            if (upper - lower) / len(found) ** 0.5 > max(TOLERANCE * middle, negligible):
                return False
        return True


def kind_of(traced: Traced, node: fx.Node, arguments: Any, values: Mapping[fx.Node, Value]) -> Hashable:
    """The same for nodes that take the same time; `arguments` are those that it is called with."""
    args = fx.map_arg(arguments, lambda n: mapped(Like.of, values[n]))
    function = _module_kind(traced, node) if "whole" in node.meta else same_function(node.target)
    return node.op, function, repr(args), node.meta["state"]


def _module_kind(traced: Traced, node: fx.Node) -> Hashable:
    """Classes and settings of a module that is kept whole and of all in it, and the constants that it is given."""
    fixed, spec = node.meta["constants"]
    constants = tuple((place, _frozen(value)) for place, value in fixed.items())
    modules = traced.model.get_submodule(node.meta["whole"]).named_modules()
    return repr(spec), constants, tuple((path, type(m), m.training, _settings(m)) for path, m in modules)


def _settings(module: nn.Module) -> Hashable:
    own = module.__dict__.items()
    settings = [(k, _frozen(v)) for k, v in own if k not in OWN_NAMES and not isinstance(v, torch.Tensor)]
    hooks = [(k, tuple(map(id, v.values()))) for k, v in own if k.endswith("_hooks") and isinstance(v, dict)]
    return tuple(settings), tuple(hooks)


def _frozen(value: Any) -> Hashable:
    """Numbers and texts by what they are; anything else is itself alone."""
    if type(value) in (*PLAIN, type(None)):
        return type(value), repr(value)
    if type(value) in (tuple, list):
        return type(value), tuple(map(_frozen, value))
    return id(value)


def mapped(function: Callable[[torch.Tensor], Any], value: Value) -> Value:
    return pytree.tree_map_only(torch.Tensor, function, value)


def distinct(tensors: Iterator[torch.Tensor] | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)
