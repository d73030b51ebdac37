"""The state of torch's profiler: whether one is on, and what it sees. All of it is optional.

From torch 2.11 to 2.14 it is all there. Without the flag of the process actions have no ranges; without the rest nobody
is warned of a profiler that sees one thread only.
"""

from __future__ import annotations

from torch.autograd import profiler

from fxpipe._torch.versions import optional_name

# How a user lets a profiler see all threads (torch 2.13).
ALL_THREADS_CONFIG = "torch._C._profiler._ExperimentalConfig(profile_all_threads=True)"

_is_on_in_thread = optional_name("torch", "_C._autograd._profiler_enabled")
_profiler_type = optional_name("torch", "_C._autograd._profiler_type")
_kineto = optional_name("torch", "_C._profiler.ActiveProfilerType.KINETO")


def is_profiler_on() -> bool:
    """Returns True if a profiler is on in the process."""
    return profiler._is_profiler_enabled


def _no_profiler() -> bool:
    return False


if optional_name("torch.autograd.profiler", "_is_profiler_enabled") is None:
    is_profiler_on = _no_profiler


def sees_this_thread_only() -> bool:
    """Returns True if a profiler that sees only this thread was started in it. False where torch does not tell."""
    if not is_profiler_on() or None in (_is_on_in_thread, _profiler_type, _kineto):
        return False
    return bool(_is_on_in_thread() and _profiler_type() == _kineto)  # a profiler of all threads is none of this one
