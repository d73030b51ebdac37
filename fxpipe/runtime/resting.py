"""The state in which a worker's thread rests, so that an action sets only what it has of its own.

To set the state of a thread and to put it back takes ten microseconds, and it is the same for nearly every action. So a
row sets it once: gradients as the caller has them, no autocast, which backward must not have, and no threads of
autograd's own. Forward and loss then set nothing unless the caller has autocast on. What user code in them leaves set,
a grad mode say, ends with the action as it ever did: a look at the end costs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from fxpipe.thread_state import ThreadState, applied

Around = Callable[[], AbstractContextManager[None]]


@contextmanager
def resting(state: ThreadState) -> Iterator[None]:
    """A block of a thread, for all actions of a row. `state`: of the caller."""
    with applied(state.without_autocast()), torch.autograd.set_multithreading_enabled(False):
        yield


def around_forward(state: ThreadState) -> Around:
    """Makes blocks in which a resting thread is in `state`."""
    rest = state.without_autocast()
    if rest != state:
        return functools.partial(applied, state)
    block = _PutBack(rest)
    return lambda: block


class _PutBack(AbstractContextManager[None]):
    """A block that begins, and therefore ends, in the state of rest; one for all blocks and threads."""

    def __init__(self, rest: ThreadState):
        self._rest = rest

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        rest = self._rest
        if torch.is_grad_enabled() is not rest.grad:
            torch.set_grad_enabled(rest.grad)
        if torch._C._is_any_autocast_enabled():
            for autocast in rest.autocast:
                autocast.set()
