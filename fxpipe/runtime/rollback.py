"""Gradients of leaves as they were, where a hook on one of them raises after others have been handed out.

Autograd hands out the gradients of a step one after the other: each goes through the hooks on its leaf
(`register_hook`), is added to `.grad`, in place where there is one, and is shown to further hooks
(`register_post_accumulate_grad_hook`). Where a hook raises, the leaves before it have their gradients and the others
have none. So only leaves with hooks cost anything: then the gradients that all leaves have from before the step are
copied for as long as new ones are handed out.

What cannot be undone is what hooks have done themselves: an optimizer that they have stepped has changed parameters.
And hooks on a node of autograd (`get_gradient_edge(p).node.register_hook`) cannot be seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.variable import Variable


class _Gradients:
    """The gradients of some leaves at one time."""

    def __init__(self, leaves: Sequence[torch.Tensor]):
        with torch.no_grad():
            self._all = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves]

    @torch.no_grad()
    def put_back(self) -> None:
        for leaf, gradient, value in self._all:
            if gradient is not None and value is not None:
                gradient.copy_(value)  # somebody may hold the tensor itself, or one that it is a part of
            leaf.grad = gradient


@contextmanager
def rolled_back(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """A block that hands out gradients to leaves: where it fails, they have the gradients from before it."""
    if not any(map(has_hooks, leaves)):
        yield
        return
    before = _Gradients(leaves)
    try:
        # Of threads of autograd's own, for GPUs, one would still hand out gradients when a hook in another has raised.
        with torch.autograd.set_multithreading_enabled(False):
            yield
    except BaseException:
        before.put_back()
        raise


def roll_back_with_caller(leaves: Sequence[torch.Tensor]) -> None:
    """Within a backward that somebody else has called: the same, should it fail from here on.

    Only where all leaves are on the CPU, and so in the thread of who has called: a thread for a GPU might put gradients
    back later than the exception arrives.
    """
    if any(map(has_hooks, leaves)) and all(leaf.device.type == "cpu" for leaf in leaves):
        engine: Any = Variable._execution_engine
        engine.queue_callback(_End(_Gradients(leaves)))


class _End:
    """Autograd calls it when a backward has ended well, and drops it without a call when that has failed."""

    def __init__(self, before: _Gradients):
        self._before: _Gradients | None = before

    def __call__(self) -> None:
        self._before = None

    def __del__(self) -> None:
        if self._before is not None:
            self._before.put_back()


def has_hooks(leaf: Any) -> bool:
    """Does autograd call somebody when it hands out the gradient of this leaf?"""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)
