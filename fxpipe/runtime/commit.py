"""Gradients of a step are committed once, when it has ended well.

`Commit` stands in the caller's autograd graph for the whole pipeline: its inputs are the model's parameters and the
inputs that require grad, its outputs are the outputs of the pipe. When the caller's backward reaches it, it has the
workers run theirs and returns the sums. So hooks on parameters fire once for a step, `.grad` accumulates as ever,
`autograd.grad` works, and a step that fails leaves nothing behind.

On GPUs it has nodes around it, since autograd reckons with one stream for each node, on which all that the node hands
out is ready, and runs the nodes of a GPU in a thread of that GPU:

    outputs ◀── Caught ◀── Commit ◀── Handed of cuda:0 ◀── parameters and inputs there
    (cuda:1)    (cuda:1)    (CPU)  ◀── Handed of cuda:1 ◀── parameters and inputs there

So Commit, of which nothing is on a GPU, waits in the thread that calls backward, where Ctrl-C and context variables are
the caller's, and keeps no thread of a GPU from other work. And each gradient comes from a node of its own device, whose
stream is the step's there. One node for all would have the stream of the outputs: other GPUs would wait for that one,
and not for their own (torch warns that AccumulateGrad has another stream).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxpipe.errors import StateError

Gradients = list[torch.Tensor | None]

_CPU = torch.device("cpu")


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
        with torch.no_grad():
            found = finish(gradients)
        return (None, None, *_handed_out(found))


class _Caught(torch.autograd.Function):
    """Outputs of a GPU; leaves their gradients in a list, for Commit, which comes next."""

    @staticmethod
    def forward(
        ctx: Any, caught: Gradients, outputs: Sequence[torch.Tensor], root: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.caught[:] = gradients
        return None, None, _nothing_on(_CPU)


class _Handed(torch.autograd.Function):
    """Hands out the gradients of `inputs`, all on one device, that Commit has left in a list."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return _nothing_on(inputs[0].device)

    @staticmethod
    def backward(ctx: Any, nothing: torch.Tensor) -> tuple[Any, ...]:
        return (None, *_handed_out(ctx.gradients))


def committed(
    finish: Callable[[Sequence[torch.Tensor | None]], Gradients],
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """`outputs`, all on one device, in a graph whose backward calls `finish` and gives the result to `inputs`."""
    if all(tensor.device == _CPU for tensor in (*outputs, *inputs)):
        made: tuple[torch.Tensor, ...] = Commit.apply(finish, outputs, *inputs)
        return made
    caught: Gradients = []
    handed: dict[torch.device, Gradients] = {tensor.device: [] for tensor in inputs}

    def finish_from_afar(_: object) -> Gradients:
        given = tuple(caught)
        caught.clear()
        found = finish(given)
        for tensor, gradient in zip(inputs, found, strict=True):
            handed[tensor.device].append(gradient)
        found.clear()
        return [_nothing_on(device) for device in handed]

    ways = [_Handed.apply(handed[device], *(t for t in inputs if t.device == device)) for device in handed]
    (root,) = Commit.apply(finish_from_afar, [_nothing_on(_CPU)], *ways)
    made = _Caught.apply(caught, outputs, root)
    return made


def _nothing_on(device: torch.device) -> torch.Tensor:
    """A tensor that only is somewhere: no memory, no kernel."""
    return torch.empty(0, device=device)


def _handed_out(found: Gradients) -> Gradients:
    """What a backward returns of these; the list is emptied."""
    if torch.is_grad_enabled():  # create_graph=True
        found[:] = _only_once(found)
    # `pop` leaves no second reference, so that AccumulateGrad takes the tensors without a copy.
    found.reverse()
    return [found.pop() for _ in range(len(found))]


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
    begin = torch.zeros((), device=_CPU, requires_grad=True)
    made = _Undifferentiable.apply(begin, *(g for g in found if g is not None))
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
