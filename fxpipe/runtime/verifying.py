"""Is the loss of the mini-batch what the losses of its micro-batches add up to?

The loss is taken once more, of all outputs at once, and compared by its value and by the gradients of the outputs. The
value alone would not do: a model whose head begins with zeros has the same loss for every token, so that a mean over
tokens looks like one over samples in its first step.

What an output without the batch says of the mini-batch is only known where it is the same for all micro-batches, or
where it is a mean or sum that the loss takes as such. A weighted mean of losses that the model itself takes is neither:
then the gradients of the other outputs are compared, and nothing where there are none.
A loss that draws random numbers draws others for the whole mini-batch: see `loss_draws`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.errors import LossError
from fxpipe.runtime.loss_draws import are_equal
from fxpipe.runtime.losses import Losses

EXACT = (torch.float32, torch.float64, torch.complex64, torch.complex128)


@dataclass(frozen=True, slots=True)
class Output:
    """An output of the mini-batch, and what its micro-batches have come to."""

    value: Any  # gathered
    how: int | str | None  # it was gathered
    gradients: Sequence[torch.Tensor | None]  # of the micro-batches


def verify(losses: Losses, outputs: Sequence[Output], tree: Callable[[list[Any]], Any]) -> bool:
    """Compares with the loss of all outputs at once.

    Args:
        losses: of all micro-batches.
        outputs: of the last stages.
        tree: the model's output from their values.

    Returns:
        Whether there was anything to compare.

    Raises:
        LossError: the loss of the mini-batch is not what the losses of micro-batches add up to.
    """
    trained = [any(g is not None for g in output.gradients) for output in outputs]
    if any(is_trained and output.how == "stack" for output, is_trained in zip(outputs, trained, strict=True)):
        return False  # it has another shape than the loss has seen
    whole, found = _taken(losses, outputs, trained, tree)
    given = [output for output, is_trained in zip(outputs, trained, strict=True) if is_trained]
    pairs = [*zip(given, found, strict=True)] if found else []
    is_seen = not any(gradient is not None and output.how in ("mean", "sum") for output, gradient in pairs)
    try:
        if is_seen or not losses.weighted:
            _compare_values(losses, whole)
        for output, gradient in pairs:
            if isinstance(output.how, int) and gradient is not None:
                _compare_gradients(losses, gradient, _gathered(output.gradients, output.how, losses.divisor))
    except LossError:
        again, found_again = _taken(losses, outputs, trained, tree)
        if are_equal([whole, *found], [again, *found_again]):
            raise
        return False  # it is random: nothing says what it would have been
    return is_seen


def _taken(
    losses: Losses, outputs: Sequence[Output], trained: Sequence[bool], tree: Callable[[list[Any]], Any]
) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
    """The loss of all outputs at once, and the gradients of those that are trained."""
    values = [o.value.detach().requires_grad_() if t else o.value for o, t in zip(outputs, trained, strict=True)]
    try:
        with torch.enable_grad():
            whole, scaled = losses.of_whole(tree(values))
    except LossError:
        raise
    except Exception as error:
        error.add_note("fxpipe: raised by loss_fn on the gathered outputs of the mini-batch, to verify the loss")
        raise
    leaves = [value for value, is_trained in zip(values, trained, strict=True) if is_trained]
    found = torch.autograd.grad(scaled, leaves, allow_unused=True) if scaled.requires_grad and leaves else ()
    return whole, found


def _compare_values(losses: Losses, whole: torch.Tensor) -> None:
    ours = losses.total()
    tolerance = 1e-4 if ours.dtype in EXACT else 3e-2
    # What cancels out is known no better than the largest summand.
    largest = max(float(v.abs()) for v in losses.values if v is not None)
    atol = tolerance * 1e-2 * max(1.0, largest if not losses.weighted else 1.0)
    if not torch.allclose(whole.double(), ours.double().to(whole.device), rtol=tolerance, atol=atol, equal_nan=True):
        raise LossError(
            f"loss_fn gives {float(whole):.6g} for the whole mini-batch, but its micro-batches add up to "
            f"{float(ours):.6g}: it is no {_kind(losses)}, and the gradients would be wrong. {losses.remedies()}"
        )


def _gathered(gradients: Sequence[torch.Tensor | None], dim: int, divisor: Any) -> torch.Tensor:
    """The gradient of the mini-batch that those of micro-batches make."""
    parts = [g for g in gradients if g is not None]
    whole = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
    return whole if divisor is None else whole / divisor


def _compare_gradients(losses: Losses, whole: torch.Tensor, ours: torch.Tensor) -> None:
    """By their norm: single elements cancel out."""
    is_exact = whole.dtype in EXACT and losses.total().dtype in EXACT
    wide = torch.complex128 if whole.is_complex() else torch.float64
    whole, ours = whole.to(wide), ours.to(whole.device, wide)
    known = whole.isfinite() & ours.isfinite()  # what overflows is the scaler's business
    difference = float(torch.where(known, whole - ours, 0).norm())
    size = max(float(torch.where(known, g, 0).norm()) for g in (whole, ours))
    if difference > (1e-3 if is_exact else 5e-2) * size:
        raise LossError(
            f"loss_fn gives the same loss for the whole mini-batch, but the gradients of its micro-batches are "
            f"{difference / size:.2g} of their size away from its own: it is no {_kind(losses)}. {losses.remedies()}"
        )


def _kind(losses: Losses) -> str:
    return "weighted mean" if losses.weighted else "mean over samples" if losses.reduction == "mean" else "sum"
