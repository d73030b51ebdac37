"""Hides the gradients of parameters while a stream is open.

Each stage assigns gradients, updates its parameters and drops the gradients, while other stages are at other
mini-batches. Code between two losses that reads `.grad` (`clip_grad_norm_`, another optimizer, a logger) would find
None, and skip all parameters silently. So `.grad` is a `StreamGradient`, which raises in any computation, except while
a stage updates. (Code that reads it while all stages update gets the error the next time.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fxpipe.errors import StateError

NO_GRADIENTS = (
    "the gradient of a parameter is asked for in the middle of a stream (train_stream), in which each stage updates as "
    "soon as it has gradients, and there is no time at which those of all stages are there. What needs them all "
    "(clip_grad_norm_, clip_grad_value_, GradScaler, another optimizer, logging norms) needs forward_backward, and "
    "stands between it and optimizer.step(); or let the stream end, or close it"
)


class StreamGradient(torch.Tensor):
    """The `.grad` of a parameter while a stream is open. It has no memory of the parameter's size."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise StateError(NO_GRADIENTS)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "StreamGradient()"


class HiddenGradients:
    """The gradients of some parameters, hidden except during an update."""

    def __init__(self, parameters: Iterable[torch.Tensor]):
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._hidden: list[StreamGradient] = []  # reused, since creating them is slow

    def hide(self) -> None:
        """Sets `.grad` of parameters without a gradient to an unusable one."""
        if not self._hidden:
            self._hidden = [_unusable_gradient(parameter) for parameter in self._parameters]
        for parameter, hidden in zip(self._parameters, self._hidden, strict=True):
            if parameter.grad is None:
                parameter.grad = hidden

    def show(self) -> None:
        """Removes the unusable gradients."""
        for parameter in self._parameters:
            if type(parameter.grad) is StreamGradient:
                parameter.grad = None


def _unusable_gradient(parameter: torch.Tensor) -> StreamGradient:
    empty = torch.empty((), dtype=parameter.dtype, device=parameter.device)
    return empty.expand(parameter.shape).as_subclass(StreamGradient)
