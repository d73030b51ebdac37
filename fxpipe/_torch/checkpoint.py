"""Checkpoints of `torch.utils.checkpoint` that are not reentrant, taken over for a block of one thread.

The function that each begins with is private and optional: `_checkpoint_without_reentrant_generator` from torch 2.11 to
2.13; from 2.14 on `..._impl`, which takes arguments by name. Where torch has neither, nothing is taken over.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint

from fxpipe._torch.versions import optional_name
from fxpipe.utils.locks import ForkSafeLock, call_in_forked_child

_NAMES = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
_NAME = next((name for name in _NAMES if optional_name("torch.utils.checkpoint", name) is not None), None)
_module: Any = checkpoint

Replay = Callable[[Callable[..., Any]], Callable[..., Any]]


def can_replay_checkpoints() -> bool:
    """Returns True if torch has what is taken over."""
    return _NAME is not None


@contextlib.contextmanager
def replay_checkpoints(replay: Replay) -> Iterator[None]:
    """A block in which this thread's checkpoints recompute something else.

    Args:
        replay: gives for the function of a checkpoint the one that is to run in its place when it is recomputed, with
            random numbers that it sees to by itself.
    """
    with _takeover.block(replay):
        yield


@contextlib.contextmanager
def call_checkpoints_through() -> Iterator[None]:
    """A block in which this thread's checkpoints are calls of their functions: nothing is recomputed."""
    with _takeover.block(None):
        yield


class _Blocks(threading.local):
    def __init__(self) -> None:
        self.inside: list[Replay | None] = []  # those that this thread is in, the innermost last


class _Takeover:
    """Takes checkpoints over while any thread is in a block; when the last one leaves, torch is as it was."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._count = 0  # blocks of all threads
        self._plain: Any = None
        self._blocks = _Blocks()
        call_in_forked_child(self._restore)  # the threads inside are not in the child

    @contextlib.contextmanager
    def block(self, replay: Replay | None) -> Iterator[None]:
        if _NAME is None:
            yield
            return
        with self._lock:
            if not self._count:
                self._plain = getattr(_module, _NAME)
                setattr(_module, _NAME, self._replaying(self._plain))
            self._count += 1
        self._blocks.inside.append(replay)
        try:
            yield
        finally:
            self._blocks.inside.pop()
            with self._lock:
                self._count = max(0, self._count - 1)  # a forked child may have set it to 0
                if not self._count:
                    self._restore()

    def _restore(self) -> None:
        self._count = 0
        if self._plain is not None and _NAME is not None:
            setattr(_module, _NAME, self._plain)
            self._plain = None

    def _replaying(self, plain: Any) -> Callable[..., Any]:
        signature = inspect.signature(plain)

        def begin(*args: Any, **kwargs: Any) -> Any:
            if not self._blocks.inside:
                return plain(*args, **kwargs)
            replay = self._blocks.inside[-1]
            if replay is None:
                return _call_through()
            bound = signature.bind(*args, **kwargs)
            arguments = bound.arguments
            if not arguments.get("preserve_rng_state", True):
                return plain(*args, **kwargs)
            arguments.update(fn=replay(arguments["fn"]), preserve_rng_state=False)
            return plain(*bound.args, **bound.kwargs)

        return begin


def _call_through() -> Iterator[None]:
    """Stands for what a checkpoint does around its function, which runs at the yield."""
    yield


_takeover = _Takeover()
