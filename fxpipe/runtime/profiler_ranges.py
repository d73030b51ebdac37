"""Ranges of a profiler: each action is one, `fxpipe F stage 1 micro-batch 3`.

`torch.profiler.profile()` sees the thread that starts it and no other, unless its `experimental_config` says so (torch
2.13). A thread cannot be added later. So a profiler that would not see the workers is warned of.
"""

from __future__ import annotations

import contextlib
import warnings
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler

from fxpipe._torch.profiler import ALL_THREADS_CONFIG, is_profiler_on, sees_this_thread_only
from fxpipe.scheduling.actions import Action

_NOTHING = contextlib.nullcontext()


def profiler_range(action: Action) -> AbstractContextManager[Any]:
    """The range of an action; nothing where no profiler is on in the process."""
    return profiler.record_function(action.range_name) if is_profiler_on() else _NOTHING


def warn_of_unseen_workers() -> None:
    """Warns, where a step starts, if this thread is profiled and no other."""
    if sees_this_thread_only():
        warnings.warn(
            "the profiler sees only the thread that started it, and none of the pipe's workers; let it see all: "
            f"torch.profiler.profile(..., experimental_config={ALL_THREADS_CONFIG})",
            stacklevel=2,
        )
