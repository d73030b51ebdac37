"""Measures the backward of nodes, many in a row, as in a real backward.

Nodes wait until those that have gone forward have made `WINDOW_BYTES` bytes, or parameters brought to the device take
too much memory; then all go back, the last first. If each node went back directly after its forward, small nodes would
take up to twice as long, since their code is cold, and large ones too little, since their values are still warm.

A node with inputs and parameters goes back twice: to all of them, and to its inputs alone. The second pass waits until
all nodes have made the first, with two exceptions over the same graph: a product, whose gradients of inputs and of
parameters share nothing and are timed apart; and a node that takes long, for which being warm matters little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import fx

from fxpipe.profiling.clock import Clock
from fxpipe.profiling.node_kinds import NodeValue, TensorSignature
from fxpipe.tracing.interpreter import naming_node
from fxpipe.tracing.node_devices import set_node_device
from fxpipe.tracing.tensors import bytes_in, storage_of
from fxpipe.tracing.traced import CALL_OPS, Traced
from fxpipe.utils import accelerator

WINDOW_BYTES = 32 << 20  # bytes made by nodes that have still to go back
# Of what is free of a device's memory, the most that parameters of such nodes may take which were brought there.
_PARAMETER_SHARE = 1 / 8
_SUM_SAMPLES = 5  # samples of how long it takes to add gradients of one kind


@dataclass(frozen=True, slots=True)
class PendingBackward:
    """A node that has gone forward and has still to go back."""

    node: fx.Node
    ends: list[torch.Tensor]  # from which its backward starts
    starts: list[torch.Tensor]  # and to which it goes
    totals: list[torch.Tensor | None]  # of gradients of parameters
    times: list[float]  # where its seconds go
    then: PendingBackward | None = None  # another way back over the same graph, at once
    includes_second_pass: bool = False  # the way `then` goes is a part of this one, which leaves it out


@dataclass(slots=True)
class BackwardQueue:
    """The nodes that wait to go back."""

    clock: Clock
    room: float = math.inf  # bytes for parameters that were brought to the device
    first: list[PendingBackward] = field(default_factory=list)
    again: list[tuple[PendingBackward, list[torch.Tensor]]] = field(
        default_factory=list
    )  # with the ends of the first way
    _bytes: int = 0
    _parameter_bytes: int = 0
    _strides: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)  # of gradients, by the tensor

    @classmethod
    def on(cls, clock: Clock, device: torch.device | None) -> BackwardQueue:
        figures = None if device is None else accelerator.memory_figures(device)
        return cls(clock) if figures is None else cls(clock, _PARAMETER_SHARE * figures.available)

    def __bool__(self) -> bool:
        return bool(self.first)

    def wait(self, waiting: PendingBackward) -> None:
        self.first.append(waiting)
        self._count(waiting)

    def add_second_pass(self, waiting: PendingBackward, ends: list[torch.Tensor]) -> None:
        """Waits to go back another way than from `ends`, from equal tensors."""
        self.again.append((waiting, ends))
        self._count(waiting)

    def _count(self, waiting: PendingBackward) -> None:
        self._bytes += bytes_in(waiting.ends)

    def hold_parameters(self, size: int) -> None:
        """Counts the bytes of parameters that were brought to the device for nodes that wait."""
        self._parameter_bytes += size

    @property
    def is_full(self) -> bool:
        return self._bytes > WINDOW_BYTES or self._parameter_bytes > self.room

    def go(self) -> None:
        """Times the backward of all nodes that wait for it.

        Each starts from ones, since gradients that go back through many nodes may become so small that arithmetic with
        them is slow; but from ones that lie in memory as the gradient does that its users give it.
        """
        while self.first:
            waiting = self.first.pop()
            self._one(waiting, waiting.ends)
            if waiting.then is not None:
                self._one(waiting.then, waiting.ends)
                if waiting.includes_second_pass:
                    waiting.times[-1] += waiting.then.times[-1]
        while self.again:
            self._one(*self.again.pop())
        self.clear()

    def clear(self) -> None:
        self.first.clear()
        self.again.clear()
        self._strides.clear()
        self._bytes = self._parameter_bytes = 0

    def _one(self, waiting: PendingBackward, like: list[torch.Tensor]) -> None:
        ones = [_ones_with_stride(t, self._strides.get(_memory_location(t))) for t in like]
        with naming_node(waiting.node, "measuring"):
            seconds, gradients = self.clock.backward_seconds(
                waiting.ends, waiting.starts, ones, waiting.totals, keeps_graph=waiting.then is not None
            )
        waiting.times.append(seconds)
        for start, gradient in zip(waiting.starts, gradients, strict=False):
            if gradient is not None and gradient.layout == torch.strided:
                self._strides.setdefault(_memory_location(start), gradient.stride())


@dataclass(slots=True)
class GradientSumTimes:
    """Times of adding a gradient to another."""

    clock: Clock
    _seconds: dict[TensorSignature, float] = field(default_factory=dict)  # seconds

    def seconds(self, value: torch.Tensor) -> float:
        """Measures the sum of two gradients of `value`, once for those that are alike."""
        if value.layout != torch.strided:
            return 0.0
        like = TensorSignature.of(value)
        if like not in self._seconds:
            with torch.no_grad():
                total, gradient = torch.zeros_like(value), torch.zeros_like(value)
                samples = [self.clock.seconds(total.add_, gradient)[0] for _ in range(_SUM_SAMPLES + 1)]
            self._seconds[like] = median(samples[1:])  # the first is not warm
        return self._seconds[like]


def _memory_location(tensor: torch.Tensor) -> Hashable:
    """Returns the location of a tensor in memory: the same for a value and for what it was detached from."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return storage_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _ones_with_stride(like: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    if stride is None:
        return torch.ones_like(like)
    size = 1 + sum((n - 1) * s for n, s in zip(like.shape, stride, strict=True)) if like.numel() else 0
    return torch.ones(size, dtype=like.dtype, device=like.device).as_strided(like.shape, stride)


# -- Calls of nodes, ready to be timed: nothing but the function itself runs between two looks at the clock ----------


@dataclass(frozen=True, slots=True)
class NodeCall:
    """The function that a working node calls, and the nodes and constants that it is given."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_method: bool

    def bound(self, values: Mapping[fx.Node, NodeValue]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The function and its arguments, ready to be called."""
        args, kwargs = fx.map_arg((self.args, self.kwargs), values.__getitem__)
        if self.is_method:
            return getattr(args[0], self.target), args[1:], kwargs
        return self.target, args, kwargs


def calls_on(traced: Traced, device: torch.device | None) -> dict[fx.Node, NodeCall]:
    """The calls of all working nodes, with the devices among their arguments as in a stage on `device`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    calls = {}
    for node in traced.graph.nodes:
        if node.op == "output":
            continue
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op in CALL_OPS:
            if device is not None:
                set_node_device(copy, device)
            originals = {copies[n]: n for n in node.all_input_nodes}
            args, kwargs = fx.map_arg((copy.args, copy.kwargs), originals.__getitem__)
            calls[node] = NodeCall(copy.target, args, kwargs, copy.op == "call_method")
    return calls
