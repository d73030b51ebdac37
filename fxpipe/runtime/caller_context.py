"""Thread-local state of the caller, set in the worker for each action. (`ThreadState` is recorded with every node.)

                            F, R and the loss           B (and W)
    inference mode          of the call                 (there is no B)
    autocast                recorded with the nodes     of the call of backward(); none in forward_backward
    saved-tensor hooks      of the call                 (torch binds them in forward)
    modes                   of the call                 of the call of backward(), as for R in the drop-in
    default device          the stage's device, if the caller has a default device

Modes (`__torch_dispatch__`, `__torch_function__`) do not support several threads: if the caller has any, one action
runs at a time. While the caller's thread plans, scatters and gathers, its modes and hooks are off.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from fxpipe._torch import modes as torch_modes
from fxpipe._torch.autograd import is_in_forward_mode, is_jit_tracing
from fxpipe._torch.autograd_functions import is_in_functorch_transform
from fxpipe._torch.modes import DeviceContext, TorchDispatchMode
from fxpipe._torch.saved_tensor_hooks import SavedTensorHooks, current_hooks, hooks_suspended
from fxpipe._torch.thread_state import ThreadState, is_any_autocast_enabled, set_thread_state
from fxpipe.errors import StateError
from fxpipe.scheduling.actions import ActionKind

_BACKWARD = (ActionKind.BACKWARD, ActionKind.WEIGHT)
_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class CallerContext:
    """The state of the calling thread, except `ThreadState`."""

    inference: bool = False
    autocast: ThreadState | None = None  # for B; None for none
    hooks: SavedTensorHooks | None = None  # for saved tensors: only the innermost are used
    has_device: bool = False  # a default device is set
    functions: tuple[TorchFunctionMode, ...] = ()  # outermost first, without the mode of the default device
    dispatch_modes: tuple[TorchDispatchMode, ...] = ()
    is_empty: bool = True
    turn: Any = _NOTHING  # a lock, if there are modes

    @classmethod
    def now(cls) -> CallerContext:
        """Returns the context of this thread; raises if a pipe cannot run here."""
        if is_in_functorch_transform():
            raise StateError("a pipe cannot run inside a transform of torch.func (vmap, grad); use loss.backward()")
        if is_jit_tracing():
            raise StateError(
                "a pipe cannot be traced by torch.jit, which does not see its workers; trace the model: "
                "fxpipe.unwrap(pipe)"
            )
        if is_in_forward_mode():
            raise StateError(
                "a pipe cannot run inside torch.autograd.forward_ad.dual_level: tangents would stop at its stages; use "
                "the model: fxpipe.unwrap(pipe)"
            )
        stack = torch_modes.current_function_modes()
        functions = tuple(mode for mode in stack if not isinstance(mode, DeviceContext))
        dispatches = tuple(torch_modes.current_dispatch_modes())
        for mode in filter(torch_modes.is_infrastructure_mode, dispatches):  # torch's own, which replace tensors
            raise StateError(
                f"a pipe cannot run inside {type(mode).__name__} (fake tensors, torch.export, make_fx): its stages "
                "need values; give the model itself (fxpipe.unwrap(pipe)), or use fxpipe.plan, which takes fake tensors"
            )
        inference, hooks = torch.is_inference_mode_enabled(), current_hooks()
        if not (inference or hooks or stack or dispatches):
            return _EMPTY_CONTEXT
        turn = threading.Lock() if functions or dispatches else _NOTHING
        has_device = len(functions) < len(stack)
        return cls(inference, None, hooks, has_device, functions, dispatches, False, turn)

    @property
    def takes_turns(self) -> bool:
        """True if only one action may run at a time."""
        return self.turn is not _NOTHING

    def for_backward(self, forward: CallerContext) -> CallerContext:
        """Returns the context of the thread that calls a drop-in's backward, with the hooks of its forward, for R."""
        state = ThreadState.now()
        autocast = state if any(one.enabled for one in state.autocast) else None
        is_empty = replace(self, hooks=None, is_empty=True) == _EMPTY_CONTEXT and not (autocast or forward.hooks)
        return replace(self, hooks=forward.hooks, autocast=autocast, is_empty=is_empty)

    @contextmanager
    def for_action(self, kind: ActionKind, device: torch.device) -> Iterator[None]:
        with self.turn, ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if self.autocast is not None and kind in _BACKWARD:
                stack.enter_context(set_thread_state(self.autocast))
            if self.hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.hooks))
            # Push modes without entering them: they have been entered, and some start again each time.
            if self.has_device and device.type != "cpu":
                _push(stack, DeviceContext(device))
            modes: tuple[TorchFunctionMode | TorchDispatchMode, ...] = (*self.functions, *self.dispatch_modes)
            for mode in modes:
                _push(stack, mode)
            yield

    def suspended(self) -> AbstractContextManager[Any]:
        """A block of this thread without modes and hooks; the default device stays."""
        return _NOTHING if self.is_empty else _modes_suspended()


_EMPTY_CONTEXT = CallerContext()


@contextmanager
def _modes_suspended() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch_modes.dispatch_modes_suspended())
        modes = [torch_modes.pop_function_mode() for _ in torch_modes.current_function_modes()]
        for mode in modes:  # innermost first; restored in reverse order
            stack.callback(torch_modes.push_function_mode, mode)
        stack.enter_context(hooks_suspended())
        with ExitStack() as device:
            for mode in modes:
                if isinstance(mode, DeviceContext):
                    _push(device, mode)
            yield


def _push(stack: ExitStack, mode: TorchFunctionMode | TorchDispatchMode) -> None:
    """Makes a mode the innermost one, until the end of `stack`."""
    if isinstance(mode, TorchFunctionMode):
        torch_modes.push_function_mode(mode)
        stack.callback(torch_modes.pop_function_mode)
    else:
        torch_modes.push_dispatch_mode(mode)
        stack.callback(torch_modes.pop_dispatch_mode)


T = TypeVar("T")


class CallerStateRunner:
    """Calls functions in the state of the caller, from a thread in the state of `Run.in_row`."""

    # A grad mode that user code leaves set is reset: checking for it is cheap. The end of a row restores the state.

    def __init__(self, state: ThreadState):
        self._state, self._rest = state, state.without_autocast()
        self._is_rest = self._rest == state

    def __call__(self, function: Callable[..., T], *args: Any) -> T:
        if not self._is_rest:
            with set_thread_state(self._state):
                return function(*args)
        result = function(*args)
        if torch.is_grad_enabled() is not self._rest.grad:
            torch.set_grad_enabled(self._rest.grad)
        if is_any_autocast_enabled():
            for autocast in self._rest.autocast:
                autocast.set()
        return result
