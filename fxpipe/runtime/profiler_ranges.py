"""Ranges of a profiler: each action is one, `fxpipe F stage 1 micro-batch 3`.

`torch.profiler.profile()` sees the thread that starts it and no other, unless it is told (torch 2.13):

    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=config) as prof: ...

A thread cannot be added later. So a profiler that would not see the workers is warned of.
"""

from __future__ import annotations

import contextlib
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler

from fxpipe.scheduling.actions import Action
from fxpipe.simulation.timeline import range_name

_NOTHING = contextlib.nullcontext()


def is_profiler_on() -> bool:
    """Is a profiler on in the process?"""
    return profiler._is_profiler_enabled


def profiler_range(action: Action) -> AbstractContextManager[Any]:
    """The range of an action; nothing where no profiler is on in the process."""
    return profiler.record_function(range_name(action)) if is_profiler_on() else _NOTHING


def warn_of_unseen_workers() -> None:
    """Called where a step starts: is this thread profiled, and no other?"""
    if not profiler._is_profiler_enabled or not torch._C._autograd._profiler_enabled():
        return  # a profiler of all threads is none of this one
    if torch._C._autograd._profiler_type() == torch._C._profiler.ActiveProfilerType.KINETO:
        warnings.warn(
            "the profiler sees only the thread that started it, and none of the pipe's workers; let it see all: "
            "torch.profiler.profile(..., experimental_config=torch._C._profiler._ExperimentalConfig("
            "profile_all_threads=True))",
            stacklevel=2,
        )
