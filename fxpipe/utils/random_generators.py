"""Random numbers: mixed seeds, and locks for the default generators of the process."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from fxpipe.utils.locks import call_in_forked_child

_MASK = (1 << 64) - 1


def mix_seed(*numbers: int) -> int:
    """Computes a 63-bit seed, each bit of which depends on all `numbers`: splitmix64 (Steele et al., OOPSLA 2014)."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draws the seed of a step, by default from the process's generator."""
    return int(torch.randint(2**62, (), generator=generator, device="cpu").item())


def peek_seed() -> int:
    """Returns the next number of torch's generator without advancing it: the step draws from it."""
    generator = torch.Generator()
    generator.set_state(torch.default_generator.get_state())
    return draw_seed(generator)


def comparison_seed() -> int:
    """Returns the seed for comparing a model and its graph: a number that forward is unlikely to set itself."""
    return mix_seed(torch.default_generator.initial_seed()) % 2**31


_generator_locks: dict[torch.device, contextlib.AbstractContextManager[Any]] = {}  # for the default generators
call_in_forked_child(_generator_locks.clear)


def generator_lock(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Returns the lock to hold while drawing from the default generator of a device."""
    lock = _generator_locks.get(device)
    if lock is None:
        # `setdefault`: two threads that create a lock at the same time get the same.
        lock = _generator_locks.setdefault(device, threading.RLock())
    return lock
