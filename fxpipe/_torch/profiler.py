"""The state of torch's profiler: whether it is active, and for which threads.

Optional, and unchanged from torch 2.11 to 2.14. Without the process-wide flag actions have no ranges; without the other
names fxpipe does not warn of a profiler that sees only one thread.
"""

from __future__ import annotations

from torch.autograd import profiler

from fxpipe._torch.versions import optional_name

# The profiler configuration for all threads, for messages (torch 2.13).
ALL_THREADS_CONFIG = "torch._C._profiler._ExperimentalConfig(profile_all_threads=True)"

_is_on_in_thread = optional_name("torch", "_C._autograd._profiler_enabled")
_profiler_type = optional_name("torch", "_C._autograd._profiler_type")
_kineto = optional_name("torch", "_C._profiler.ActiveProfilerType.KINETO")


def is_profiler_on() -> bool:
    return getattr(profiler, "_is_profiler_enabled", False)


def sees_this_thread_only() -> bool:
    """Returns True if a profiler that sees only this thread was started in it; False if unknown."""
    if not is_profiler_on() or None in (_is_on_in_thread, _profiler_type, _kineto):
        return False
    return bool(_is_on_in_thread() and _profiler_type() == _kineto)  # not on in the thread if it profiles all threads
