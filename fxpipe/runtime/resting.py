"""The state in which a worker's thread rests, so that an action sets only what it has of its own.

To set the state of a thread and to put it back takes ten microseconds, and it is the same for nearly every action. So a
row sets it once: gradients as the caller has them, no autocast, which backward must not have, and no threads of
autograd's own. Forward and loss then set nothing unless the caller has autocast on. What user code in them leaves set,
a grad mode say, does not outlast it: a look at the end costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from fxpipe.thread_state import ThreadState, applied

T = TypeVar("T")


@contextmanager
def resting(state: ThreadState) -> Iterator[None]:
    """A block of a thread, for all actions of a row. `state`: of the caller."""
    with applied(state.without_autocast()), torch.autograd.set_multithreading_enabled(False):
        yield


class InForward:
    """Calls functions in the state of the caller, from a thread that rests.

    Where one raises, the row ends, and that puts everything back.
    """

    def __init__(self, state: ThreadState):
        self._state, self._rest = state, state.without_autocast()
        self._is_rest = self._rest == state

    def __call__(self, function: Callable[..., T], *args: Any) -> T:
        if not self._is_rest:
            with applied(self._state):
                return function(*args)
        found = function(*args)
        if torch.is_grad_enabled() is not self._rest.grad:
            torch.set_grad_enabled(self._rest.grad)
        if torch._C._is_any_autocast_enabled():
            for autocast in self._rest.autocast:
                autocast.set()
        return found
