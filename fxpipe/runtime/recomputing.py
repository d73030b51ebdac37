"""`is_recomputing`: whether code of the model runs for the first time or again."""

from __future__ import annotations

import threading


class _ThreadRecompute(threading.local):
    """The recompute flag of this thread."""

    recomputes = False


_thread_recompute = _ThreadRecompute()


def is_recomputing() -> bool:
    """Returns whether this code runs again for a micro-batch, to recompute values for the backward.

        @fxpipe.leaf
        def count(tokens):
            if not fxpipe.is_recomputing():
                seen.update(tokens.tolist())    # once for each micro-batch, whatever `checkpoint` is
            return tokens

    True only in the thread that recomputes, and only in Python code that runs in every step: functions marked by
    `fxpipe.leaf`, opaque modules, hooks on modules inside, `torch.autograd.Function`s. Recorded code runs only while
    the graph is recorded, when the answer is False. The result must not depend on the answer.
    """
    return _thread_recompute.recomputes


class RecomputeBlock:
    """A block in which `is_recomputing` is True."""

    def __enter__(self) -> None:
        _thread_recompute.recomputes = True

    def __exit__(self, *args: object) -> None:
        _thread_recompute.recomputes = False
