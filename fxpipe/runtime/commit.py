"""Gradients of a step are committed once, when it has ended well.

`Commit` stands in the caller's autograd graph for the whole pipeline: its inputs are the model's parameters and the
inputs that require grad, its outputs are the outputs of the pipe. When the caller's backward reaches it, it has the
workers run theirs and returns the sums. So hooks on parameters fire once for a step, `.grad` accumulates as ever,
`autograd.grad` works, and a step that fails leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxpipe.errors import StateError

Gradients = list[torch.Tensor | None]


class Commit(torch.autograd.Function):
    """`finish(gradients of outputs)` returns the gradients of `inputs` in a list, which is emptied."""

    @staticmethod
    def forward(
        ctx: Any,
        finish: Callable[[Sequence[torch.Tensor | None]], Gradients],
        outputs: Sequence[torch.Tensor],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.finish = finish
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        finish, ctx.finish = ctx.finish, None
        if finish is None:
            raise StateError(
                "the backward of this forward has already run, and what it needed is gone; add the losses and call "
                "backward once: (loss1 + loss2).backward()"
            )
        is_graph_wanted = torch.is_grad_enabled()  # create_graph=True
        with torch.no_grad():
            found = finish(gradients)
        if is_graph_wanted:
            found = _only_once(found)
        # `pop` leaves no second reference, so that AccumulateGrad takes the tensors without a copy.
        found.reverse()
        return (None, None, *(found.pop() for _ in range(len(found))))


class _Undifferentiable(torch.autograd.Function):
    """What it returns requires grad, and cannot have any."""

    @staticmethod
    def forward(ctx: Any, requires_grad: torch.Tensor, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(gradient.detach() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise StateError(
            "gradients that a pipe has made cannot be differentiated again (create_graph=True, a gradient penalty): "
            "its graphs are gone with its backward; take what needs second derivatives through the model itself, "
            "pipe.model, on one device"
        )


def _only_once(found: Gradients) -> Gradients:
    made = _Undifferentiable.apply(torch.zeros((), requires_grad=True), *(g for g in found if g is not None))
    rest = iter(made)
    return [None if g is None else next(rest) for g in found]


def add_gradient(have: torch.Tensor | None, new: torch.Tensor, count: int) -> torch.Tensor:
    """The sum of `count` gradients before and `new`.

    The first is kept as autograd gave it, and may share storage with another one; so the second is added out of place,
    and only the sum that is then ours is added to in place.
    """
    if have is None:
        return new
    return have + new if count < 2 or new.is_sparse else have.add_(new)
