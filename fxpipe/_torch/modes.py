"""Modes of `__torch_dispatch__` and `__torch_function__`: their classes, and the stacks of active modes of a thread.

Required, and unchanged from torch 2.11 to 2.14.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import overrides

from fxpipe._torch.versions import missing_name, required_names

with required_names():
    from torch.utils import _python_dispatch
    from torch.utils._device import DeviceContext as DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

    # Lists of the active modes of this thread, outermost first; a default device is a `DeviceContext`.
    current_function_modes = overrides._get_current_function_mode_stack
    current_dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack
    pop_function_mode, push_function_mode = overrides._pop_mode, overrides._push_mode
    pop_dispatch_mode, push_dispatch_mode = _python_dispatch._pop_mode, _python_dispatch._push_mode
    dispatch_modes_suspended: Any = _python_dispatch._disable_current_modes
    # A block in which overrides by modes and tensor subclasses are disabled.
    without_torch_function = torch._C.DisableTorchFunction


def is_infrastructure_mode(mode: TorchDispatchMode) -> bool:
    """Returns True for torch's modes for fake, functional and proxy tensors, by their key."""
    _require_mode_keys()
    return getattr(mode, "_mode_key", None) is not None


@functools.cache
def _require_mode_keys() -> None:
    """Checks a mode with a key. Other modes lack the attribute, so a renaming would go unnoticed."""
    from fxpipe._torch.fake_tensor_mode import FakeTensorMode

    if getattr(FakeTensorMode(), "_mode_key", None) is None:
        raise missing_name("FakeTensorMode has no attribute '_mode_key'")
