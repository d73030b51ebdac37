"""Modes of `__torch_function__`: the stack of active modes of a thread, and the mode of the default device.

Required, and unchanged from torch 2.11 to 2.14.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

from fxpipe._torch.versions import required_names

with required_names():
    from torch.overrides import _get_current_function_mode_stack as current_modes
    from torch.overrides import _pop_mode as pop_function_mode
    from torch.overrides import _push_mode as push_function_mode
    from torch.utils._device import DeviceContext

    # A block in which overrides by modes and tensor subclasses are disabled.
    without_torch_function = torch._C.DisableTorchFunction

__all__ = [
    "DeviceContext",
    "current_function_modes",
    "pop_function_mode",
    "push_function_mode",
    "without_torch_function",
]


def current_function_modes() -> tuple[TorchFunctionMode, ...]:
    """Returns the active modes of this thread, outermost first; a default device is a `DeviceContext`."""
    return tuple(current_modes())
