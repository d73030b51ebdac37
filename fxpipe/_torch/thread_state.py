"""The state of a thread that changes what torch functions do: recorded with every node, set again where the node runs.

A function depends on more than its arguments: whether gradients are recorded, and autocast with its dtype. Both belong
to a thread, so a worker does not inherit them. `ThreadState.now()` is the state that a node was recorded under;
`set_thread_state(state)` sets it for a block. Inference mode, hooks for saved tensors and modes are in
`runtime.caller_context`. The default dtype belongs to the process; a model that changes it in forward is refused.

Private is only what tells that autocast is on for whatever device (torch 2.11 to 2.14), and it is optional.
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

_is_any_autocast_enabled: Any = optional_name("torch", "_C._is_any_autocast_enabled")


def autocast_devices() -> tuple[str, ...]:
    """Returns the types of devices whose autocast a stage may depend on: the CPU, and the accelerator."""
    kind = accelerator_type()
    return ("cpu",) if kind is None else ("cpu", kind)


def _is_known_autocast_enabled() -> bool:
    return any(map(torch.is_autocast_enabled, autocast_devices()))


# Is autocast on in this thread, for whatever device? Without a function of torch's for it, for those of a pipe.
is_any_autocast_enabled: Callable[[], bool] = _is_any_autocast_enabled or _is_known_autocast_enabled


@dataclass(frozen=True, slots=True)
class AutocastState:
    """Autocast for one kind of device."""

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
    """The thread-local state that a function depends on besides its arguments: grad mode and autocast."""

    grad: bool  # are gradients recorded; False in `no_grad` and in `inference_mode`
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

    @functools.lru_cache(maxsize=64)  # noqa: B019 - of states, of which there are few
    def without_autocast(self) -> ThreadState:
        return ThreadState(self.grad, tuple(replace(one, enabled=False) for one in self.autocast))


@functools.lru_cache(maxsize=64)
def _cached_state(devices: tuple[str, ...], grad: bool, cache: bool, *autocast: Any) -> ThreadState:
    """Every node is recorded and run under one of a few states, which are asked for at each of them."""
    enabled, dtypes = autocast[: len(devices)], autocast[len(devices) :]
    return ThreadState(
        grad,
        tuple(AutocastState(*of_device, cache) for of_device in zip(devices, enabled, dtypes, strict=True)),
    )


@contextlib.contextmanager
def set_thread_state(state: ThreadState) -> Iterator[None]:
    """Sets `state` in this thread for a block."""
    before = ThreadState.now()
    with torch.set_grad_enabled(state.grad):
        if state.autocast != before.autocast:
            for autocast in state.autocast:
                autocast.set()
            # The cache of casts is the process's: another worker that leaves its block would empty it under this one.
            torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            if ThreadState.now().autocast != before.autocast:  # what ran may have raised within a block of its own
                for autocast in before.autocast:
                    autocast.set()
