"""The loss of a micro-batch, and how the losses of micro-batches make the loss of the mini-batch.

Let L be the loss of the whole mini-batch. Micro-batch i, with b_i of b samples, counts

- `reduction="mean"`: b_i / b, as L is a mean over samples;
- `reduction="sum"`: 1;
- its own weight w_i over the sum of all weights, where `loss_fn` returns `(total, weight)`: a mean over tokens, say.
  The sum is known only when all are done; then, and only then, gradients are divided, since no loss can be scaled
  beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpipe.errors import ArgumentError, LossError

REDUCTIONS = ("mean", "sum")
REMEDIES = (
    "If it is a sum over samples, pass reduction='sum'. If it is a mean over something else than samples (tokens, "
    "pixels that count), let loss_fn return (total, weight). If it needs all samples at once (contrastive, Dice), use "
    "the drop-in: loss_fn(pipe(x), target).backward()"
)


@dataclass(slots=True)
class Losses:
    """The losses of one step, filled in by the worker of the last stage."""

    function: Callable[..., Any]
    reduction: str
    shares: Sequence[float]  # of each micro-batch in the batch
    targets: Sequence[tuple[Any, ...]]  # for each micro-batch: () or (target,)
    values: list[torch.Tensor | None] = field(init=False)
    weights: list[Any] = field(init=False)
    weighted: bool | None = None  # does the function return (total, weight)

    def __post_init__(self) -> None:
        self.values = [None] * len(self.shares)
        self.weights = [None] * len(self.shares)

    def __call__(self, output: Any, i: int) -> torch.Tensor:
        """The loss of micro-batch i, scaled for backward."""
        loss, weight = checked_loss(self.function(output, *self.targets[i]), f"micro-batch {i}")
        if not loss.requires_grad:
            raise LossError(
                f"the loss of micro-batch {i} does not require grad: neither a parameter nor an input that requires "
                "grad leads to it; is every parameter frozen, or the output detached?"
            )
        if self.weighted is not None and self.weighted != (weight is not None):
            raise LossError(
                "loss_fn returns (total, weight) for some micro-batches and a loss for others; return one kind"
            )
        self.weighted = weight is not None
        self.values[i] = loss.detach()
        self.weights[i] = weight.detach() if isinstance(weight, torch.Tensor) else weight
        return loss if self.weighted or self.reduction == "sum" else loss * self.shares[i]

    @property
    def divisor(self) -> Any:
        """What the gradients of all micro-batches together are still to be divided by; None for nothing."""
        return sum(self.weights[1:], self.weights[0]) if self.weighted else None

    def total(self) -> torch.Tensor:
        """The loss of the mini-batch."""
        values = [v for v in self.values if v is not None]
        if self.weighted:
            return torch.as_tensor(sum(values[1:], values[0]) / self.divisor)
        shares = self.shares if self.reduction == "mean" else [1] * len(values)
        scaled = [v * s for v, s in zip(values, shares, strict=True)]
        return sum(scaled[1:], scaled[0])

    def verify(self, output: Any, target: tuple[Any, ...]) -> None:
        """Compares with the loss of all outputs at once.

        Raises:
            LossError: the loss of the mini-batch is not what the losses of micro-batches add up to.
        """
        with torch.no_grad():
            whole, weight = checked_loss(self.function(output, *target), "the whole mini-batch")
        if weight is not None:
            whole = torch.as_tensor(whole / weight)
        ours = self.total()
        tolerance = 1e-4 if ours.dtype in (torch.float32, torch.float64) else 3e-2
        # What cancels out is known no better than the largest summand.
        largest = max(float(v.abs()) for v in self.values if v is not None)
        atol = tolerance * 1e-2 * max(1.0, largest if self.weights[0] is None else 1.0)
        if not torch.allclose(whole.double(), ours.double(), rtol=tolerance, atol=atol, equal_nan=True):
            raise LossError(
                f"loss_fn gives {float(whole):.6g} for the whole mini-batch, but its micro-batches add up to "
                f"{float(ours):.6g}: it is no mean over samples, and the gradients would be wrong. {REMEDIES}"
            )


def checked_loss(value: Any, where: str) -> tuple[torch.Tensor, Any]:
    """(loss, None), or (total, weight)."""
    loss, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point():
        return loss, weight
    what = (
        f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}"
        if isinstance(loss, torch.Tensor)
        else f"{type(loss).__name__}"
    )
    raise LossError(
        f"loss_fn returned {what} for {where}; expected a 0-dim floating point tensor (take .mean() or .sum()), or "
        "(total, weight)"
    )


def check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ArgumentError(
            f"reduction={reduction!r} is unknown; accepted are 'mean' and 'sum'; or let loss_fn return (total, weight)"
        )
