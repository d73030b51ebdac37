"""A forward whose autograd graph nobody will go back through: it saves nothing.

What is recomputed must come to the same bits, and under `no_grad` torch takes other kernels (LSTM). So F makes a graph
as R will, and hooks on saved tensors let go of each of them at once. Nor does anybody go back through what is run to
trace a model, which may ask what requires grad.

`torch.func` refuses such hooks. It occurs only in Python that runs as it is; there they are taken off, and what that
saves lives as long as the graph, which is to the end of F. That is no more than R needs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fxpipe.errors import InternalError


class _ThreadHooks(threading.local):
    hooks: NoSavedTensors | None = None  # of the block that runs in this thread


_thread_hooks = _ThreadHooks()


class NoSavedTensors(saved_tensors_hooks):
    """A block in which autograd saves nothing for backward. It may be entered again.

    `was_asked`: has somebody wanted what was not saved? It raises there, which may go unheard.
    """

    def __init__(self) -> None:
        super().__init__(_discard, self._answer)
        self.was_read = False

    def _answer(self, nothing: None) -> torch.Tensor:
        self.was_read = True
        raise InternalError("backward of a forward that has saved nothing")

    def __enter__(self) -> None:
        super().__enter__()
        _thread_hooks.hooks = self

    def __exit__(self, *args: object) -> None:
        _thread_hooks.hooks = None
        super().__exit__(*args)


_NOTHING = contextlib.nullcontext()
# Functions in C, and what torch has of its own in Python: none of them goes back through anything.
_BUILTIN_TYPES = (str, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_TORCH_MODULES = ("torch._tensor", "torch.functional", "torch.nn.functional")
_autograd: Any = torch._C._autograd


def saving_block_for(function: Any, block: NoSavedTensors) -> AbstractContextManager[Any]:
    """The block, to call a function or a method of tensors in; for those that are not torch's own, one that saves.

    For they may go back through what they have done. And hooks of the user's, of which the innermost count, stay.
    """
    is_of_torch = isinstance(function, _BUILTIN_TYPES) or getattr(function, "__module__", "") in _TORCH_MODULES
    if not (is_of_torch and _autograd._saved_tensors_hooks_is_enabled()):
        return _NOTHING
    return _NOTHING if _autograd._top_saved_tensors_default_hooks(False) else block


def is_hooks_error(error: BaseException | None) -> bool:
    """Was it raised since there are hooks where whoever ran (`torch.func`, the model) allows none?"""
    while error is not None:
        frames = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__))
        if saved_tensors_hooks.__module__ in frames:
            return True
        error = error.__cause__ or error.__context__
    return False


def with_saved_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with what it saves, also where everything around it forgets."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        hooks = _thread_hooks.hooks
        if hooks is None:
            return function(*args)
        hooks.__exit__()
        try:
            return function(*args)
        finally:
            hooks.__enter__()

    return call


def _discard(tensor: torch.Tensor) -> None:
    """What forward would save for backward."""
