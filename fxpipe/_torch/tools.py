"""The state of torch's tools: `torch.compile` and the profiler.

Optional, and unchanged from torch 2.11 to 2.14. Without the process-wide flag of the profiler actions have no ranges;
without its other names fxpipe does not warn of a profiler that sees only one thread.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import profiler

from fxpipe._torch.versions import optional_name


def is_compiler_loaded() -> bool:
    """Returns True if this process may have compiled code."""
    return "torch._dynamo" in sys.modules


def compile_backward_at_once() -> contextlib.AbstractContextManager[Any]:
    """A block in which `torch.compile` compiles the backward with the forward, if torch has this setting."""
    config = "torch._functorch.config"
    patch = optional_name(config, "patch")
    if patch is None or optional_name(config, "force_non_lazy_backward_lowering") is None:
        return contextlib.nullcontext()
    block: contextlib.AbstractContextManager[Any] = patch(force_non_lazy_backward_lowering=True)
    return block


def mark_dynamic_dims(tensor: torch.Tensor, dims: Sequence[int]) -> None:
    """Makes `torch.compile` treat these dimensions as dynamic before a second size occurs, if torch supports it."""
    mark = optional_name("torch._dynamo", "maybe_mark_dynamic")
    if mark is not None:
        mark(tensor, list(dims))


# The profiler configuration for all threads, for messages (torch 2.13).
ALL_THREADS_CONFIG = "torch._C._profiler._ExperimentalConfig(profile_all_threads=True)"

_is_on_in_thread = optional_name("torch", "_C._autograd._profiler_enabled")
_profiler_type = optional_name("torch", "_C._autograd._profiler_type")
_kineto = optional_name("torch", "_C._profiler.ActiveProfilerType.KINETO")
_knows_profiler = optional_name("torch.autograd.profiler", "_is_profiler_enabled") is not None


def is_profiler_on() -> bool:
    return _knows_profiler and profiler._is_profiler_enabled


def sees_this_thread_only() -> bool:
    """Returns True if a profiler that sees only this thread was started in it; False if unknown."""
    if not is_profiler_on() or None in (_is_on_in_thread, _profiler_type, _kineto):
        return False
    return bool(_is_on_in_thread() and _profiler_type() == _kineto)  # not on in the thread if it profiles all threads
