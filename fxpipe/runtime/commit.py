"""Commits the gradients of a step once, after it has succeeded.

`Commit` is one node in the caller's autograd graph for the whole pipeline: from the outputs of the pipe to the model's
parameters and the inputs that require grad. When the caller's backward reaches it, the workers run their backwards, and
it returns the sums. So hooks on parameters fire once for a step, `.grad` accumulates, `autograd.grad` works, and a
failed step changes nothing. Autograd runs each node of a GPU in a thread and on the stream of that GPU:

    outputs ◀── Caught ◀── Commit ◀── Handed of cuda:0 ◀── parameters and inputs there
    (cuda:1)    (cuda:1)    (CPU)  ◀── Handed of cuda:1 ◀── parameters and inputs there

So Commit waits in the thread that calls backward, and each gradient is returned by a node of its own device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from fxpipe._torch.autograd import has_gradient_hooks
from fxpipe.errors import StateError

GradientList = list[torch.Tensor | None]

_CPU = torch.device("cpu")


class Commit(torch.autograd.Function):
    """A node whose backward returns `finish(gradients of outputs)`, the gradients of `inputs`, emptying that list."""

    # It runs once, in a block of `running`. If that block refuses to begin, backward may be called again.

    @staticmethod
    def forward(
        ctx: Any,
        finish: Callable[[Sequence[torch.Tensor | None]], GradientList],
        running: Callable[[], AbstractContextManager[None]],
        outputs: Sequence[torch.Tensor],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.finish, ctx.running = finish, running
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        if ctx.finish is None:
            raise StateError(
                "the backward of this forward has already run, and what it needed is gone; add the losses and call "
                "backward once: (loss1 + loss2).backward()"
            )
        with torch.no_grad(), ctx.running():
            finish, ctx.finish = ctx.finish, None
            input_gradients = finish(gradients)
        return (None, None, None, *_take_gradients(input_gradients))


class _GradientCatcher(torch.autograd.Function):
    """An identity of outputs on a GPU, whose backward stores their gradients in a list for Commit."""

    @staticmethod
    def forward(
        ctx: Any, caught: GradientList, outputs: Sequence[torch.Tensor], root: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.caught[:] = gradients
        return None, None, _empty_tensor_on(_CPU)


class _GradientHandout(torch.autograd.Function):
    """A node whose backward returns the gradients of `inputs`, all on one device, from a list that Commit filled."""

    @staticmethod
    def forward(ctx: Any, gradients: GradientList, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return _empty_tensor_on(inputs[0].device)

    @staticmethod
    def backward(ctx: Any, nothing: torch.Tensor) -> tuple[Any, ...]:
        return (None, *_take_gradients(ctx.gradients))


def attach_commit(
    finish: Callable[[Sequence[torch.Tensor | None]], GradientList],
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    running: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[torch.Tensor, ...]:
    """Attaches `outputs`, all on one device, to a graph whose backward calls `finish` for the gradients of `inputs`."""
    if all(tensor.device == _CPU for tensor in (*outputs, *inputs)):
        attached: tuple[torch.Tensor, ...] = Commit.apply(finish, running, outputs, *inputs)
        return attached
    caught: GradientList = []
    handed: dict[torch.device, GradientList] = {tensor.device: [] for tensor in inputs}

    def finish_from_afar(_: object) -> GradientList:
        arrived = tuple(caught)
        caught.clear()
        gradients = finish(arrived)
        for tensor, gradient in zip(inputs, gradients, strict=True):
            handed[tensor.device].append(gradient)
        gradients.clear()
        return [_empty_tensor_on(device) for device in handed]

    ways = [_GradientHandout.apply(handed[device], *(t for t in inputs if t.device == device)) for device in handed]
    (root,) = Commit.apply(finish_from_afar, running, [_empty_tensor_on(_CPU)], *ways)
    attached = _GradientCatcher.apply(caught, outputs, root)
    return attached


def _empty_tensor_on(device: torch.device) -> torch.Tensor:
    """Returns a tensor on a device without memory or a kernel."""
    return torch.empty(0, device=device)


def _take_gradients(gradients: GradientList) -> GradientList:
    """Returns these gradients in the form for a backward; the list is emptied."""
    if torch.is_grad_enabled():  # create_graph=True
        begin = torch.zeros((), device=_CPU, requires_grad=True)
        results = iter(_Undifferentiable.apply(begin, *(g for g in gradients if g is not None)))
        gradients[:] = [None if g is None else next(results) for g in gradients]
    # `pop` leaves no second reference, so that AccumulateGrad uses the tensors without a copy.
    gradients.reverse()
    return [gradients.pop() for _ in range(len(gradients))]


class _Undifferentiable(torch.autograd.Function):
    """A function whose results require grad but cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, requires_grad: torch.Tensor, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(gradient.detach() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise StateError(
            "gradients that a pipe has made cannot be differentiated again (create_graph=True, a gradient penalty): "
            "its graphs are gone with its backward; take what needs second derivatives through the model itself, "
            "fxpipe.unwrap(pipe), on one device"
        )


def add_gradient(have: torch.Tensor | None, new: torch.Tensor, count: int = 1) -> torch.Tensor:
    """Returns the sum of `count` earlier gradients and `new`, dense or sparse."""
    # The first, of autograd, may share storage with another: the second is added out of place, further ones in place.
    if have is None:
        return new
    if have.is_sparse and not new.is_sparse:  # torch adds only in this order
        return new + have
    return have + new if count < 2 or new.is_sparse else have.add_(new)


# Autograd passes gradients to one leaf after another. If a hook of a leaf raises, earlier leaves have theirs, and later
# ones not. So if a leaf has hooks, the gradients from before the step are copied first. Side effects of hooks cannot be
# undone, and hooks on autograd nodes are not visible. The drop-in's backward keeps gradients as plain torch does.


@contextmanager
def gradient_rollback(leaves: Sequence[torch.Tensor], is_certain: bool = False) -> Iterator[None]:
    """A block that passes gradients to leaves; failing, it restores those with hooks, or all if `is_certain`."""
    if not (is_certain or any(map(has_gradient_hooks, leaves))):
        yield
        return
    with torch.no_grad():
        before = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves]
    try:
        # With autograd's threads for GPUs, one could still pass gradients after a hook in another has raised.
        with torch.autograd.set_multithreading_enabled(False):
            yield
    except BaseException:
        with torch.no_grad():
            for leaf, gradient, value in before:
                if gradient is not None and value is not None:
                    gradient.copy_(value)  # other code may hold the tensor, or a larger one that it is a part of
                leaf.grad = gradient
        raise
