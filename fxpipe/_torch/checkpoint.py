"""Checkpoints of `torch.utils.checkpoint` that are not reentrant, taken over for a block.

The function that each begins with is private and optional: `_checkpoint_without_reentrant_generator` from torch 2.11 to
2.13; from 2.14 on `..._impl`, which takes arguments by name. Where torch has neither, nothing is taken over.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint

from fxpipe._torch.versions import optional_name
from fxpipe.utils.locks import ForkSafeLock, call_in_forked_child

_NAMES = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
_NAME = next((name for name in _NAMES if optional_name("torch.utils.checkpoint", name) is not None), None)
_module: Any = checkpoint

Replay = Callable[[Callable[..., Any]], Callable[..., Any] | None]


def can_replay_checkpoints() -> bool:
    """Returns True if torch has what `CheckpointReplay` takes over."""
    return _NAME is not None


class CheckpointReplay:
    """Takes over checkpoints while a thread is within `active()`; when the last one leaves, torch is as it was.

    Args:
        replay: gives for the function of a checkpoint the one that is to run in its place when it is recomputed, with
            random numbers that it sees to by itself; or None, to leave this checkpoint to torch. Also asked in threads
            that are not in such a block.
    """

    def __init__(self, replay: Replay):
        self._replay = replay
        self._lock = ForkSafeLock()
        self._inside = 0  # threads in the block, and blocks nested in one
        self._plain: Any = None
        call_in_forked_child(self._restore)  # the threads inside are not in the child

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """A block in which checkpoints are taken over."""
        if _NAME is None:
            yield
            return
        with self._lock:
            if not self._inside:
                self._plain = getattr(_module, _NAME)
                setattr(_module, _NAME, self._replaying(self._plain))
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside = max(0, self._inside - 1)  # a forked child may have set it to 0
                if not self._inside:
                    self._restore()

    def _restore(self) -> None:
        self._inside = 0
        if self._plain is not None and _NAME is not None:
            setattr(_module, _NAME, self._plain)
            self._plain = None

    def _replaying(self, plain: Any) -> Callable[..., Any]:
        signature = inspect.signature(plain)

        def begin(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            arguments = bound.arguments
            replay = self._replay(arguments["fn"]) if arguments.get("preserve_rng_state", True) else None
            if replay is None:
                return plain(*args, **kwargs)
            arguments.update(fn=replay, preserve_rng_state=False)
            return plain(*bound.args, **bound.kwargs)

        return begin
