"""A forward whose autograd graph nobody will go back through: it saves nothing.

What is recomputed must come to the same bits, and under `no_grad` torch takes other kernels (LSTM). So F makes a graph
as R will, and hooks on saved tensors let go of each of them at once.

`torch.func` refuses such hooks. It occurs only in Python that runs as it is; there they are taken off, and what that
saves lives as long as the graph, which is to the end of F. That is no more than R needs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fxpipe.errors import InternalError


class _Now(threading.local):
    hooks: forgetting | None = None  # of the block that runs in this thread


_now = _Now()


class forgetting(saved_tensors_hooks):
    """A block in which autograd saves nothing for backward."""

    def __init__(self) -> None:
        super().__init__(_forget, _forgotten)

    def __enter__(self) -> None:
        super().__enter__()
        _now.hooks = self

    def __exit__(self, *args: object) -> None:
        _now.hooks = None
        super().__exit__(*args)


def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with what it saves, also where everything around it forgets."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        hooks = _now.hooks
        if hooks is None:
            return function(*args)
        hooks.__exit__()
        try:
            return function(*args)
        finally:
            hooks.__enter__()

    return call


def _forget(tensor: torch.Tensor) -> None:
    """What a forward that will be recomputed would save for backward."""


def _forgotten(nothing: None) -> torch.Tensor:
    raise InternalError("backward of a forward that was to be recomputed")
