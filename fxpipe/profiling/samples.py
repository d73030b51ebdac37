"""Kinds of nodes, and their samples: nodes of one kind take the same time, so they share what is measured.

Noise must not decide where a model of equal blocks is cut. Of one kind are nodes with the same function, constants and
thread state, whose inputs agree in shape, stride, dtype, device and requires_grad: what a module of the same class with
the same sizes does. A module kept whole is a function of its own, so there class and settings stand for the function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxpipe.tracing.recording.names import PLAIN
from fxpipe.tracing.sizing.alike import same_function
from fxpipe.tracing.snapshot import OWN_NAMES
from fxpipe.tracing.traced import Traced

Value = Any  # of a node: a tensor, a number, or a nest of them

# What the median of a kind's samples may be wrong by: one of these.
TOLERANCE = 0.02  # of it
NEGLIGIBLE = 0.002  # of the seconds of the whole graph, for all nodes of the kind together
UNIMPORTANT = 5e-6  # seconds
MOST = 25  # samples of one kind


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
    """Seconds of one kind of node. What disturbs a sample only makes it longer, so the median of them counts.

    Backward goes to all tensors that want a gradient, and once more only to those that are no parameters.
    """

    is_warm: bool  # is the next one kept
    is_seldom: bool  # is one enough
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    to_inputs: list[float] = field(default_factory=list)  # where backward goes to both, inputs and parameters
    has_inputs: bool = False  # does backward go to any
    has_parameters: bool = False
    gives_grad: tuple[bool, ...] = ()  # by tensor of its value: does it require grad
    leaves_grad: tuple[bool, ...] = ()  # by tensor that it writes to: does it require grad afterwards

    @property
    def has_both(self) -> bool:
        return self.has_inputs and self.has_parameters

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds if self.forward else 0.0

    @property
    def forward_seconds(self) -> float:
        return median(self.forward)

    @property
    def backward_seconds(self) -> float:
        return max(0.0, median(self.backward))

    @property
    def weight_seconds(self) -> float:
        """The part of backward that goes to parameters."""
        if not self.has_both:
            return self.backward_seconds if self.has_parameters else 0.0
        if not self.to_inputs:  # nobody asked
            return 0.0
        return self.backward_seconds - min(self.backward_seconds, max(0.0, median(self.to_inputs)))

    def are_close(self, negligible: float) -> bool:
        """Are the medians known well enough, or to `negligible` seconds?

        The median of n samples lies about their interquartile range over the root of n from where it will settle.
        """
        for found in (self.forward, self.backward, self.to_inputs):
            if len(found) > 1:
                lower, middle, upper = quantiles(found, n=4, method="inclusive")
                if (upper - lower) / len(found) ** 0.5 > max(TOLERANCE * middle, negligible):
                    return False
        return True


def kind_of(
    traced: Traced, node: fx.Node, arguments: Any, values: Mapping[fx.Node, Value], written: Collection[fx.Node] = ()
) -> Hashable:
    """The same for nodes that take the same time; `arguments` are those that it is called with.

    `written`: those of its inputs whose memory it changes, which may be more than one where they share it.
    """
    args = fx.map_arg(arguments, lambda n: mapped(Like.of, values[n]))
    function = _module_kind(traced, node) if "whole" in node.meta else same_function(node.target)
    changed = tuple(place for place, n in enumerate(node.all_input_nodes) if n in written)
    return node.op, function, repr(args), node.meta["state"], changed


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
    if isinstance(value, torch.Tensor):
        return function(value)
    return pytree.tree_map_only(torch.Tensor, function, value)


def distinct(tensors: Iterator[torch.Tensor] | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())
