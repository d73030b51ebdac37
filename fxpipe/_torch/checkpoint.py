"""Disabling of non-reentrant checkpoints of `torch.utils.checkpoint` in a block of one thread.

Their first function is private and optional: `_checkpoint_without_reentrant_generator` from torch 2.11 to 2.13; from
2.14 on `..._impl`, which takes keyword arguments. If torch has neither, nothing is disabled.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch.utils import checkpoint

from fxpipe._torch.versions import optional_name
from fxpipe.utils.locks import ForkSafeLock, call_in_forked_child

_NAMES = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
_NAME = next((name for name in _NAMES if optional_name("torch.utils.checkpoint", name) is not None), None)
_module: Any = checkpoint


def can_call_checkpoints_through() -> bool:
    return _NAME is not None


class _Blocks(threading.local):
    depth = 0  # open blocks of this thread


class _Switch:
    """Replaces torch's function while any thread is in a block, and restores it after the last block."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._count = 0  # open blocks of all threads
        self._plain: Any = None
        self._blocks = _Blocks()
        call_in_forked_child(self._restore)  # the child has no other threads

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        if _NAME is None:
            yield
            return
        with self._lock:
            if not self._count:
                self._plain = plain = getattr(_module, _NAME)
                setattr(_module, _NAME, lambda *a, **k: _call_through() if self._blocks.depth else plain(*a, **k))
            self._count += 1
        self._blocks.depth += 1
        try:
            yield
        finally:
            self._blocks.depth -= 1
            with self._lock:
                self._count = max(0, self._count - 1)  # a forked child may have set it to 0
                if not self._count:
                    self._restore()

    def _restore(self) -> None:
        self._count = 0
        if self._plain is not None and _NAME is not None:
            setattr(_module, _NAME, self._plain)
            self._plain = None


def _call_through() -> Iterator[None]:
    """Replaces the checkpoint around its function, which runs at the yield."""
    yield


# A block in which checkpoints of this thread only call their functions: nothing is recomputed.
call_checkpoints_through = _Switch().block
