"""Interception of all applications of an `autograd.Function`, and of all calls of vmap, in a block.

    tri = Tri.apply            # bound before the block
    tri(x)

The attribute `apply` is replaced, which misses this call. An `apply` that was bound earlier runs C code, which reads
attributes of the class, in this order: `_backward_cls`, which creates the context, `setup_context`, and `forward`, with
gradients disabled. The metaclass reports these reads (`ApplicationObserver`), from torch 2.11 to 2.14.

Detection of a transform of `torch.func` is required, and unchanged from torch 2.11 to 2.14. `apis.vmap_impl`, through
which every vmap passes, is optional: without it a model is refused at its first function inside vmap, or becomes opaque
there.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction, FunctionMeta

from fxpipe._torch.thread_state import ThreadState
from fxpipe._torch.versions import optional_name, required_names

with required_names():
    _peek_interpreter_stack: Any = torch._C._functorch.peek_interpreter_stack

FunctionClass = type[torch.autograd.Function]
Apply = Callable[..., Any]  # (function, *args, **kwargs) -> what torch's own `apply` returns
ApplyHandler = Callable[[Apply, FunctionClass, tuple[Any, ...], dict[str, Any]], Any]

_SETUP_CONTEXT = torch.autograd.Function.setup_context


class ApplicationObserver(Protocol):
    """Observes applications that are visible only in C."""

    def is_watching(self) -> bool:
        """Returns True if this observer wants reports. Called often, also in other threads."""

    def forward(
        self, function: FunctionClass, forward: Callable[..., Any], state: ThreadState, args: Any, kwargs: Any
    ) -> Any:
        """Runs `forward` instead of C; `state` is the caller's thread state."""

    def setup_context(self, setup: Callable[..., Any], args: Any) -> Any:
        """Runs `setup_context` instead of C."""


def has_context(function: FunctionClass) -> bool:
    """Returns True if the first argument of its forward is the context."""
    return function.setup_context is _SETUP_CONTEXT


@contextlib.contextmanager
def intercept_apply(call: ApplyHandler, inside: ApplicationObserver | None = None) -> Iterator[None]:
    """A block in which `call(apply, function, args, kwargs)` runs for each application of an `autograd.Function`.

    In all threads. Blocks may be nested. Applications by an `apply` that was bound earlier are only `inside`'s.
    """
    own = torch.autograd.Function.__dict__["apply"]

    def plain(function: FunctionClass, *args: Any, **kwargs: Any) -> Any:
        return own.__get__(None, function)(*args, **kwargs)

    def apply(function: FunctionClass, *args: Any, **kwargs: Any) -> Any:
        return call(plain, function, args, kwargs)

    with contextlib.nullcontext() if inside is None else _observe_applications(inside):
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.autograd.Function.apply = own  # type: ignore[method-assign]


@contextlib.contextmanager
def _observe_applications(inside: ApplicationObserver) -> Iterator[None]:
    """A block in which `inside` observes applications that reach C and bypass `intercept_apply`."""
    begun: list[Any] = [None, None]  # the application that C has begun: its function, and its state until forward

    def getattribute(cls: Any, name: str) -> Any:
        value = type.__getattribute__(cls, name)
        if name not in ("_backward_cls", "setup_context", "forward") or not inside.is_watching():
            return value
        if name == "_backward_cls":
            begun[:] = cls, ThreadState.now()
        elif begun[0] is not cls:
            return value
        elif name == "setup_context" and value is not _SETUP_CONTEXT:  # C reads it twice, before and after forward
            return lambda *args: inside.setup_context(value, args)
        elif name == "forward" and begun[1] is not None and not torch.is_grad_enabled():
            state, begun[1] = begun[1], None
            return lambda *args, **kwargs: inside.forward(cls, value, state, args, kwargs)
        return value

    FunctionMeta.__getattribute__ = getattribute  # type: ignore[method-assign]
    try:
        yield
    finally:
        del FunctionMeta.__getattribute__


@contextlib.contextmanager
def watch_saved_tensors(note: Callable[[Iterable[torch.Tensor]], object]) -> Iterator[None]:
    """A block, for all threads, in which `note` gets an `autograd.Function`'s saved tensors before its backward."""
    own: Any = inspect.getattr_static(BackwardCFunction, "saved_tensors")
    is_replaced = "saved_tensors" in vars(BackwardCFunction)

    def saved_tensors(context: Any) -> Any:
        tensors = own.__get__(context, type(context))
        note(tensor for tensor in tensors if tensor is not None)
        return tensors

    BackwardCFunction.saved_tensors = property(saved_tensors)  # type: ignore[assignment]
    try:
        yield
    finally:
        if is_replaced:
            BackwardCFunction.saved_tensors = own
        else:
            del BackwardCFunction.saved_tensors


def is_in_functorch_transform() -> bool:
    return _peek_interpreter_stack() is not None


@contextlib.contextmanager
def intercept_vmap(call: Callable[..., Any]) -> Iterator[None]:
    """A block in which each call of vmap, in all threads, runs `call(vmap, function, *arguments, **kwargs)`.

    `vmap` takes the function, four settings, and the arguments of the function.
    """
    plain = optional_name("torch._functorch.apis", "vmap_impl")
    if plain is None:
        yield
        return
    apis: Any = sys.modules["torch._functorch.apis"]

    def vmap(function: Any, *settings_and_args: Any, **kwargs: Any) -> Any:
        return call(plain, function, *settings_and_args, **kwargs)

    apis.vmap_impl = vmap
    try:
        yield
    finally:
        apis.vmap_impl = plain
