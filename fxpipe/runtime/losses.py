"""The losses of micro-batches, and the loss of the mini-batch that they add up to.

Micro-batch i, with b_i of b samples, has in the loss of the mini-batch the weight

- b_i / b with `reduction="mean"`, as the loss is a mean over samples;
- 1 with `reduction="sum"`;
- w_i over the sum of all w if `loss_fn` returns `(total, w_i)`: for example a mean over tokens. The sum is known only
  at the end, where gradients are divided by it. Until then a power of two, which is exact, keeps them near their final
  size: in half precision the gradient of a sum over all tokens would overflow.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch

from fxpipe.errors import ArgumentError, ArgumentTypeError, LossError
from fxpipe.utils.pytree import map_tensor_leaves
from fxpipe.utils.units import with_article

LOSS_REDUCTIONS = ("mean", "sum", "batch")
LOSS_REMEDIES = (
    "If it is a mean over something else than samples (tokens, pixels that count), let loss_fn return (total, weight): "
    "the sum over what counts, and how many that are. If it needs all samples together (contrastive, Dice), pass "
    "reduction='batch', or use the drop-in: loss_fn(pipe(x), target).backward()"
)
MODEL_LOSS_REMEDIES = (
    "Where the model takes the loss itself, in a way that its graph does not tell (a module kept whole, a function of "
    "your own), let it take it by functions of torch, or return the sum and the count as outputs of their own. "
    "In forward_backward a loss_fn that returns (out.loss * n, n) weighs it, n elements that count in the micro-batch. "
    "If micro-batches add up otherwise, say how: out_dims={'loss': 'sum'}, or 'mean' for a mean over samples."
)
LARGEST_UNIT = 2.0**60


@dataclass(frozen=True, slots=True)
class LossCall:
    """The loss of a step or a stream, as the caller passes it."""

    function: Callable[..., Any]
    reduction: str = "mean"
    scaler: torch.amp.GradScaler | None = None  # in this process
    return_outputs: bool = False


def model_loss(output: Any) -> Any:
    """Returns the model's output: the loss, if there is no loss_fn."""
    return output


@dataclass(slots=True)
class MicroBatchLosses:
    """The losses of one step, computed by the worker of the last stage."""

    function: Callable[..., Any]
    reduction: str
    shares: Sequence[float]  # by micro-batch: share of the samples
    targets: Sequence[tuple[Any, ...]]  # by micro-batch: () or (target,)
    scaler: torch.amp.GradScaler | None = None
    whole_target: tuple[Any, ...] | None = None  # if the loss of all outputs is compared
    values: list[torch.Tensor | None] = field(init=False)
    weights: list[Any] = field(init=False)
    returns_weights: bool | None = None
    unit: Any = None  # for pairs: a power of two near 1 / the sum of weights
    has_gradient: bool = False
    known: Mapping[int, Any] = field(default_factory=dict)  # pieces of the mini-batch, by place
    # Micro-batches of the caller: the loss is a weighted mean, or the sum, of their separate losses.
    is_handed_over: bool = False
    # There is one loss, of the outputs of all micro-batches together: shares and targets have one element.
    takes_all: bool = False
    portion: float = 1.0  # share of this mini-batch in a larger one, for its gradients
    reads: frozenset[str] = frozenset()  # names of attributes in the code of the function and of what it may call
    # With replicas of the pipe and `takes_all`: (outputs, their dimensions and names, target) -> the same of all.
    gather: Callable[..., contextlib.AbstractContextManager[tuple[list[Any], tuple[Any, ...]]]] | None = None
    # Copies tensors from the device of one replica of the last stage to another; sums are on the device of the first.
    bring: Callable[[Any, torch.device | None], Any] = lambda value, device: value

    def __post_init__(self) -> None:
        self.values = [None] * len(self.shares)
        self.weights = [None] * len(self.shares)

    def __call__(self, output: Any, i: int, own: Callable[[], Any] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss of micro-batch i, scaled for backward, and the gradient with which backward begins.

        `output` is combined so that the losses of micro-batches add up. `own`, if it differs, returns the output of the
        micro-batch alone, for functions that return pairs and do their own weighting.

        A scale that is a number goes into that gradient, with the same bits as a product. A loss may have no graph, for
        example of a micro-batch of padding.
        """
        value = self.function(own() if own is not None and self.returns_weights else output, *self.targets[i])
        if own is not None and self.returns_weights is None and isinstance(value, tuple):
            value = self.function(own(), *self.targets[i])
        loss, weight = checked_loss(value, f"micro-batch {i}")
        if self.returns_weights is not None and self.returns_weights != (weight is not None):
            raise LossError(
                "loss_fn returns (total, weight) for some micro-batches and a loss for others; return one kind"
            )
        self.returns_weights = weight is not None
        self.has_gradient |= loss.requires_grad
        self.values[i], self.weights[i] = loss.detach(), weight
        if self.returns_weights and self.unit is None:
            self.unit = _unit_near(weight, len(self.shares))
        factor = self.bring(self.unit, loss.device) if self.returns_weights else self.share(i) * self.scale
        if self.returns_weights or self.scaler is not None:
            loss = self._for_backward(loss, factor)
            return loss, torch.ones_like(loss)
        return loss, torch.full_like(loss, factor)

    def share(self, i: int) -> Any:
        """Returns the relative weight of micro-batch i."""
        return self.weights[i] if self.returns_weights else self.shares[i] if self.reduction == "mean" else 1

    @property
    def scale(self) -> Any:
        """The scale of the gradient: the portion for a mean over samples, 1 for sums and weighted means."""
        return self.portion if self.reduction == "mean" and not self.returns_weights and self.portion != 1 else 1

    def loss_of_whole(self, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss of all outputs together, detached, and the same loss scaled for backward."""
        assert self.whole_target is not None
        target = map_tensor_leaves(torch.clone, self.whole_target)  # loss_fn may write to it
        loss, weight = checked_loss(self.function(output, *target), "the whole mini-batch")
        if weight is not None:
            loss = torch.as_tensor(loss / weight)
        return loss.detach(), self._for_backward(loss, self.scale)

    def _for_backward(self, loss: torch.Tensor, factor: Any) -> torch.Tensor:
        scaled: torch.Tensor = loss if isinstance(factor, int) else loss * factor
        return scaled if self.scaler is None else self.scaler.scale(scaled)

    def remedies(self) -> str:
        other = "mean" if self.reduction == "sum" else "sum"
        return f"If it is a {other} over samples, pass reduction={other!r}. {LOSS_REMEDIES}"

    @property
    def divisor(self) -> Any:
        """The divisor of all gradients at the end, or None. If nothing counts, they stay zero, and the loss is 0/0."""
        if not self.returns_weights:
            return None
        weight, unit = self.sum_of(self.weights), self.bring(self.unit, None)
        return unit * (torch.where(weight == 0, 1, weight) if isinstance(weight, torch.Tensor) else weight or 1)

    def sum_of(self, values: Sequence[Any]) -> Any:
        """Returns the sum of values of micro-batches (`weights`, `values`), on one device, in order."""
        first, *more = [self.bring(value, None) for value in values if value is not None]
        return sum(more, first)

    def total(self) -> torch.Tensor:
        """Returns the loss of the mini-batch. Raises `LossError` if it does not require grad."""
        if not self.has_gradient:
            raise LossError("the loss does not require grad: is every parameter frozen, or the output detached?")
        if self.returns_weights:
            return torch.as_tensor(self.sum_of(self.values) / self.sum_of(self.weights))
        total: torch.Tensor = self.sum_of([None if v is None else v * self.share(i) for i, v in enumerate(self.values)])
        return total


def check_loss_function(loss_fn: Any, target: Any) -> None:
    if isinstance(loss_fn, type):
        raise ArgumentTypeError(f"loss_fn is the class {loss_fn.__name__}; give an instance: {loss_fn.__name__}()")
    if loss_fn is not None and not callable(loss_fn):
        raise ArgumentTypeError(f"loss_fn is {with_article(loss_fn)}; expected a function (output, target) -> loss")
    if loss_fn is None and target is not None:
        raise ArgumentError(
            "target without loss_fn: give loss_fn=..., or leave target out if the model returns its loss"
        )


def checked_loss(value: Any, where: str) -> tuple[torch.Tensor, Any]:
    """Returns (loss, None), or (total, weight) with a dtype of the weight whose sums do not overflow."""
    loss, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point():
        return loss, None if loss is value else _checked_weight(weight, where)
    is_tensor = isinstance(loss, torch.Tensor)
    what = f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}" if is_tensor else type(loss).__name__
    raise LossError(
        f"loss_fn returned {what} for {where}; expected a 0-dim floating point tensor (take .mean() or .sum()), or "
        "(total, weight)"
    )


def _checked_weight(weight: Any, where: str) -> Any:
    if isinstance(weight, torch.Tensor) and weight.dim() == 0 and not weight.is_complex():
        if weight.requires_grad:
            raise LossError(
                f"the weight that loss_fn returned for {where} requires grad, but weights are summed without a "
                "gradient: detach it (weight.detach()), or use the drop-in: loss_fn(pipe(x), target).backward()"
            )
        is_exact = weight.dtype in (torch.float32, torch.float64)
        return weight if is_exact else weight.float() if weight.is_floating_point() else weight.long()
    if isinstance(weight, Real):
        return int(weight) if isinstance(weight, Integral) else float(weight)
    what = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else type(weight).__name__
    raise LossError(
        f"loss_fn returned (total, weight) for {where} with {what} as weight; expected a number or a 0-dim tensor"
    )


def _unit_near(weight: Any, count: int) -> Any:
    """Returns a power of two near 1 / (count * weight), at most 1, on the weight's device without a synchronization."""
    if not isinstance(weight, torch.Tensor):
        size = min(max(abs(weight) * count, 1.0), LARGEST_UNIT)
        return math.frexp(size)[0] / size
    sizes = (weight.double().abs() * count).clamp(1, LARGEST_UNIT)
    return (torch.frexp(sizes).mantissa / sizes).to(torch.promote_types(weight.dtype, torch.float32))


def check_reduction(reduction: str) -> None:
    if reduction not in LOSS_REDUCTIONS:
        raise ArgumentError(
            f"reduction={reduction!r} is unknown; accepted are 'mean', 'sum' and 'batch' (loss_fn needs all samples); "
            "or let loss_fn return (total, weight)"
        )


def refuse_inputs_by_name(forward: Callable[..., Any], target: Any, loss_fn: Any, reduction: Any) -> None:
    """Raises `ArgumentError` if an argument of the loss can only be meant as the model's input of the same name."""
    try:
        takes_target = target is None or inspect.signature(loss_fn).bind(None, None) is not None
    except TypeError:
        takes_target = False
    except ValueError:  # unknown
        takes_target = True
    is_input = {
        "target": target is not None and not takes_target,
        "loss_fn": loss_fn is not None and not callable(loss_fn),
        "reduction": reduction not in LOSS_REDUCTIONS,
    }
    try:
        parameters = inspect.signature(forward).parameters
    except (TypeError, ValueError):  # functions in C have none
        return
    for name in (name for name, is_meant in is_input.items() if is_meant and name in parameters):
        places = ", ".join([*parameters][: [*parameters].index(name) + 1])
        raise ArgumentError(
            f"{name} is an argument of forward_backward and an input of the model's forward. By name it is the "
            f"{'loss function' if name == 'loss_fn' else name} of the loss, which this value cannot be; pass the input "
            f"by position, pipe.forward_backward({places}, ...), or, if forward takes it by keyword only, wrap the "
            "model in a module whose forward has another name for it"
        )


def check_scaler(scaler: Any) -> None:
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentTypeError(
            f"grad_scaler is {with_article(scaler)}; expected a torch.amp.GradScaler, whose scaler.step(optimizer) "
            "and scaler.update() stay yours to call"
        )


def are_bitwise_equal(some: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> bool:
    """Compares bit for bit; NaN equals NaN."""
    return all(
        a is b if a is None or b is None else torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(some, others, strict=True)
    )
