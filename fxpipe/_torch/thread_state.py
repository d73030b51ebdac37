"""Thread-local state that changes the results of torch functions: recorded with every node, and set when it runs.

Functions depend on grad mode and on autocast with its dtype, which a worker thread does not inherit.
`ThreadState.now()` is the state that a node is recorded under; `set_thread_state(state)` sets it for a block. Inference
mode, hooks for saved tensors and modes are in `runtime.caller_context`. The default dtype is process-wide; a model that
changes it in forward is refused.

The check of autocast for any device is private (torch 2.11 to 2.14) and optional.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe._torch.versions import optional_name
from fxpipe.utils.accelerator import accelerator_type


def autocast_devices() -> tuple[str, ...]:
    """Returns the device types whose autocast a stage may depend on: the CPU and the accelerator."""
    kind = accelerator_type()
    return ("cpu",) if kind is None else ("cpu", kind)


# Returns True if autocast is on in this thread for any device; if torch lacks the function, for the types of a pipe.
is_any_autocast_enabled: Callable[[], bool] = optional_name("torch", "_C._is_any_autocast_enabled") or (
    lambda: any(map(torch.is_autocast_enabled, autocast_devices()))
)


@dataclass(frozen=True, slots=True)
class AutocastState:
    device: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    def set(self) -> None:
        torch.set_autocast_enabled(self.device, self.enabled)
        torch.set_autocast_dtype(self.device, self.dtype)
        torch.set_autocast_cache_enabled(self.cache)
        if not self.enabled:
            torch.clear_autocast_cache()


@dataclass(frozen=True, slots=True)
class ThreadState:
    """The thread-local state that functions depend on: grad mode and autocast."""

    grad: bool  # False in `no_grad` and in `inference_mode`
    autocast: tuple[AutocastState, ...]  # one for each of `autocast_devices`

    @classmethod
    def now(cls) -> ThreadState:
        devices = autocast_devices()
        return _cached_state(
            devices,
            torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
            torch.is_autocast_cache_enabled(),
            *map(torch.is_autocast_enabled, devices),
            *map(torch.get_autocast_dtype, devices),
        )

    @functools.lru_cache(maxsize=64)  # noqa: B019 - there are few states
    def without_autocast(self) -> ThreadState:
        return ThreadState(self.grad, tuple(replace(one, enabled=False) for one in self.autocast))


@functools.lru_cache(maxsize=64)
def _cached_state(devices: tuple[str, ...], grad: bool, cache: bool, *autocast: Any) -> ThreadState:
    """Caches states, since each node reads the state and few states occur."""
    enabled, dtypes = autocast[: len(devices)], autocast[len(devices) :]
    return ThreadState(
        grad, tuple(AutocastState(*of_device, cache) for of_device in zip(devices, enabled, dtypes, strict=True))
    )


@contextlib.contextmanager
def set_thread_state(state: ThreadState) -> Iterator[None]:
    before = ThreadState.now()
    with torch.set_grad_enabled(state.grad):
        if state.autocast != before.autocast:
            for autocast in state.autocast:
                autocast.set()
            # The cast cache is process-wide: another worker that leaves its block would clear it.
            torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            if ThreadState.now().autocast != before.autocast:  # an inner block may have raised
                for autocast in before.autocast:
                    autocast.set()
