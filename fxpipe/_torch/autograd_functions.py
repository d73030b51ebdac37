"""Applications of an `autograd.Function`, intercepted for the duration of a block, whatever they are called through.

    tri = Tri.apply            # bound before the block
    tri(x)

Replacing the attribute `apply` would miss that one. So what all calls pass through is replaced:

- up to torch 2.13 `Function.apply` is a function of Python, one object for all classes: its code;
- from torch 2.14 on it is one of C. What asks for the attribute finds another; what was bound before runs, and the C
  code then asks the class for its parts, in this order: `_backward_cls`, which makes the context, `setup_context`, and
  `forward`, with gradients switched off. The metaclass tells (`ApplicationObserver`). In all versions that is also the
  way of a call of the C function itself.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction, FunctionMeta

from fxpipe._torch.thread_state import ThreadState

FunctionClass = type[torch.autograd.Function]
Apply = Callable[..., Any]  # (function, *args, **kwargs) -> what torch's own `apply` returns
ApplyHandler = Callable[[Apply, FunctionClass, tuple[Any, ...], dict[str, Any]], Any]

_SETUP_CONTEXT = torch.autograd.Function.setup_context
_handlers: list[
    Callable[[FunctionClass, tuple[Any, ...], dict[str, Any]], Any]
] = []  # that are open, the innermost last


class ApplicationObserver(Protocol):
    """Observes applications that only C sees."""

    def is_watching(self) -> bool:
        """Returns True if applications are to be reported to this observer. Called often, also in other threads."""

    def forward(
        self, function: FunctionClass, forward: Callable[..., Any], state: ThreadState, args: Any, kwargs: Any
    ) -> Any:
        """Runs `forward` in place of C; `state` is that of the caller."""

    def setup_context(self, setup: Callable[..., Any], args: Any) -> Any:
        """The same for `setup_context`."""


def has_context(function: FunctionClass) -> bool:
    """Returns True if the first argument of its forward is the context."""
    return function.setup_context is _SETUP_CONTEXT


@contextlib.contextmanager
def intercept_apply(call: ApplyHandler, inside: ApplicationObserver | None = None) -> Iterator[None]:
    """A block in which `call(apply, function, args, kwargs)` runs wherever an `autograd.Function` is applied.

    In all threads; blocks may be nested, and are left in the reverse order.
    """
    with contextlib.nullcontext() if inside is None else _observe_applications(inside):
        own = torch.autograd.Function.__dict__["apply"]
        shared: Any = getattr(own, "__func__", None)
        # Code can only be replaced by one that closes over the same: `super()`'s class, in all versions that are known.
        is_known = isinstance(shared, FunctionType) and shared.__code__.co_freevars == ("__class__",)
        with _replace_code(shared, call) if is_known else _replace_attribute(own, call):
            yield


@contextlib.contextmanager
def _replace_code(shared: Any, call: ApplyHandler) -> Iterator[None]:
    code = shared.__code__
    plain: Apply
    if _handlers:
        outer = _handlers[-1]

        def plain(function: FunctionClass, *args: Any, **kwargs: Any) -> Any:
            return outer(function, args, kwargs)

    else:
        plain = FunctionType(code, shared.__globals__, shared.__name__, shared.__defaults__, shared.__closure__)
        plain.__kwdefaults__ = shared.__kwdefaults__
    _handlers.append(lambda function, args, kwargs: call(plain, function, args, kwargs))
    shared.__code__ = _StandIn.__dict__["apply"].__code__
    try:
        yield
    finally:
        shared.__code__ = code
        _handlers.pop()


class _StandIn:
    """Holds the code that stands in for that of `Function.apply`, whose module has nothing of ours."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from fxpipe._torch.autograd_functions import dispatch_apply

        __class__  # type: ignore[name-defined]  # noqa: B018  # the cell that torch's code closes over
        return dispatch_apply(cls, args, kwargs)


def dispatch_apply(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the handler of the innermost block with an application of an autograd function."""
    return _handlers[-1](function, args, kwargs)


@contextlib.contextmanager
def _replace_attribute(own: Any, call: ApplyHandler) -> Iterator[None]:
    def plain(function: FunctionClass, *args: Any, **kwargs: Any) -> Any:
        return own.__get__(None, function)(*args, **kwargs)

    def apply(function: FunctionClass, *args: Any, **kwargs: Any) -> Any:
        return call(plain, function, args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]


@contextlib.contextmanager
def _observe_applications(inside: ApplicationObserver) -> Iterator[None]:
    """A block in which `inside` is told of applications that reach C without `intercept_apply` seeing them."""
    begun: list[Any] = [None, None]  # the application that C has begun: of which function, and the state until forward

    def getattribute(cls: Any, name: str) -> Any:
        value = type.__getattribute__(cls, name)
        if name not in ("_backward_cls", "setup_context", "forward") or not inside.is_watching():
            return value
        if name == "_backward_cls":
            begun[:] = cls, ThreadState.now()
        elif begun[0] is not cls:
            return value
        elif name == "setup_context" and value is not _SETUP_CONTEXT:  # C asks for it twice, before and behind forward
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
    """A block in which `note` is given what an `autograd.Function` has saved, before its backward gets it.

    In all threads; blocks may be nested, and are left in the reverse order.
    """
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
