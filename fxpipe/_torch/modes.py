"""Modes of `__torch_dispatch__` and `__torch_function__`: their classes, and the stacks of active modes of a thread.

Required, and unchanged from torch 2.11 to 2.14.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxpipe._torch.versions import missing_name, required_names

with required_names():
    from torch.overrides import _get_current_function_mode_stack as current_modes_of_functions
    from torch.overrides import _pop_mode as pop_function_mode
    from torch.overrides import _push_mode as push_function_mode
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as current_modes
    from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
    from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

    # A block in which overrides by modes and tensor subclasses are disabled.
    without_torch_function = torch._C.DisableTorchFunction

__all__ = [
    "DeviceContext",
    "TorchDispatchMode",
    "current_dispatch_modes",
    "current_function_modes",
    "dispatch_modes_suspended",
    "is_infrastructure_mode",
    "is_traceable_wrapper_subclass",
    "pop_dispatch_mode",
    "pop_function_mode",
    "push_dispatch_mode",
    "push_function_mode",
    "without_torch_function",
]


def current_function_modes() -> tuple[TorchFunctionMode, ...]:
    """Returns the active modes of this thread, outermost first; a default device is a `DeviceContext`."""
    return tuple(current_modes_of_functions())


def current_dispatch_modes() -> tuple[TorchDispatchMode, ...]:
    """Returns the active modes of this thread, outermost first."""
    return tuple(current_modes())


def dispatch_modes_suspended() -> AbstractContextManager[Any]:
    block: AbstractContextManager[Any] = disable_current_modes()
    return block


def is_infrastructure_mode(mode: TorchDispatchMode) -> bool:
    """Returns True for torch's modes for fake, functional and proxy tensors.

    Raises:
        TorchVersionError: these modes have no key in this version of torch.
    """
    _require_mode_keys()
    return getattr(mode, "_mode_key", None) is not None


@functools.cache
def _require_mode_keys() -> None:
    """Checks a mode with a key. Other modes lack the attribute, so a renaming would go unnoticed."""
    from fxpipe._torch.fake_tensor_mode import FakeTensorMode

    if getattr(FakeTensorMode(), "_mode_key", None) is None:
        raise missing_name("FakeTensorMode has no attribute '_mode_key'")
