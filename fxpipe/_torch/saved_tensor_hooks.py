"""Hooks that make a forward save no tensors, for graphs without a backward.

Recomputed values must be bitwise equal, and under `no_grad` torch uses other kernels (LSTM). So F builds a graph as R
will, and hooks drop all saved tensors. Tracing, where forward may read `requires_grad`, does the same.

`torch.func` refuses such hooks. It occurs only in opaque calls; there the hooks are suspended, and saved tensors live
as long as the graph, to the end of F. That is no more than R needs.

The stack of these hooks in a thread is required, and unchanged from torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fxpipe._torch.autograd import KEPT_TENSOR
from fxpipe._torch.versions import required_names
from fxpipe.errors import StateError


class _ThreadHooks(threading.local):
    hooks: NoSavedTensors | None = None  # the current block of this thread


_thread_hooks = _ThreadHooks()


class NoSavedTensors(saved_tensors_hooks):
    """A block in which autograd saves nothing for backward. It may be entered again.

    `was_read`: a dropped tensor was read. This raises, but the error may be caught.
    """

    def __init__(self) -> None:
        super().__init__(lambda tensor: None, self._answer)
        self.was_read = False

    def _answer(self, nothing: None) -> torch.Tensor:
        self.was_read = True
        raise StateError(KEPT_TENSOR)

    def __enter__(self) -> None:
        super().__enter__()
        _thread_hooks.hooks = self

    def __exit__(self, *args: object) -> None:
        _thread_hooks.hooks = None
        super().__exit__(*args)


_NOTHING = contextlib.nullcontext()
# Functions in C, and torch's functions in Python: none of them runs a backward.
_BUILTIN_TYPES = (str, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_TORCH_MODULES = ("torch._tensor", "torch.functional", "torch.nn.functional")

SavedTensorHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]  # pack, unpack
with required_names():
    _is_enabled: Any = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
    _top: Any = torch._C._autograd._top_saved_tensors_default_hooks
    _pop: Any = torch._C._autograd._pop_saved_tensors_default_hooks
    _push: Any = torch._C._autograd._push_saved_tensors_default_hooks


def current_hooks() -> SavedTensorHooks | None:
    """Returns the innermost hooks on saved tensors of this thread; only these run."""
    hooks: SavedTensorHooks | None = _top(False)
    return hooks


@contextlib.contextmanager
def hooks_suspended() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        while (hooks := _top(False)) is not None:
            _pop()
            stack.callback(_push, *hooks)
        yield


def saving_block_for(function: Any, block: NoSavedTensors) -> AbstractContextManager[Any]:
    """Returns `block` for torch's functions without active hooks; else an empty block, as others may run a backward."""
    is_of_torch = isinstance(function, _BUILTIN_TYPES) or getattr(function, "__module__", "") in _TORCH_MODULES
    if not (is_of_torch and _is_enabled()):
        return _NOTHING
    return _NOTHING if _top(False) else block


def is_hooks_error(error: BaseException | None) -> bool:
    """Returns True if an error was raised because hooks are not allowed there (by `torch.func`, the model)."""
    while error is not None:
        frames = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__))
        if saved_tensors_hooks.__module__ in frames:
            return True
        error = error.__cause__ or error.__context__
    return False


def with_saved_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function` so that it saves tensors also inside a `NoSavedTensors` block."""

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
