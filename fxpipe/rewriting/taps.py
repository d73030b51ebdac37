"""Taps: what a split node of a stage for the compiler tells the runtime, as `tape` is for a stage that runs as it is.

A compiled graph is one node to autograd, with no edges inside that B could ask for gradients at. It can ask for those
of the graph's inputs. So a split node gets an input of its own, a tap, that is added to its output: the gradient of the
tap is that of the output. And what the node was applied to becomes an output:

    F    y = F.linear(x, w.detach(), b.detach()) + tap      x goes out
    B    asks autograd for the gradients of received values, of all other parameters, and of the taps
    W    gradient.t() @ x

A tap has no memory: it is one element, expanded, and not even that is read. Forward adds zeros that the compiler knows,
and leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy
import torch

# (gradient, what went out, weight, bias, wants the one's gradient, wants the other's) -> those that are wanted
Weigh = Callable[..., list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Tap:
    """Of one split node."""

    names: tuple[str, str | None]  # of the weight and the bias
    shape: tuple[sympy.Expr, ...]  # of the node's output, in sizes that can be measured
    dtype: torch.dtype | None  # under autocast; None: the weight's
    weigh: Weigh


@dataclass(frozen=True, slots=True)
class Measure:
    """Where the code finds a size that shapes hang on: the batch, as a rule."""

    symbol: sympy.Symbol
    place: int  # among received values
    dim: int
    factor: int  # that dimension has so many times the size


@dataclass(frozen=True, slots=True)
class Taps:
    """Of one stage: its code takes one for each split node first, and returns as many inputs of split nodes last."""

    taps: tuple[Tap, ...]
    measures: tuple[Measure, ...]


class _Lift(torch.autograd.Function):
    """Zeros of the tap's shape, whose gradient is the tap's. (Negative: the sum with these is the same bits.)"""

    @staticmethod
    def forward(ctx: object, tap: torch.Tensor) -> torch.Tensor:
        return tap.new_full(tap.shape, -0.0)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def lifted(tap: torch.Tensor) -> torch.Tensor:
    """To be added to an output."""
    zeros: torch.Tensor = _Lift.apply(tap)
    return zeros
