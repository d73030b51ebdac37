"""The function by which code of the model knows whether it runs for the first time or again."""

from __future__ import annotations

import threading


class _ThreadRecompute(threading.local):
    """The recompute flag of the worker in this thread."""

    recomputes = False


_thread_recompute = _ThreadRecompute()


def is_recomputing() -> bool:
    """Returns whether this code runs once more, for a micro-batch whose forward has been, to get what backward needs.

        @fxpipe.leaf
        def count(tokens):
            if not fxpipe.is_recomputing():
                seen.update(tokens.tolist())    # once for each micro-batch, whatever `checkpoint` is
            return tokens

    True only in the thread that recomputes, and only in Python that runs in every step: functions marked by
    `fxpipe.leaf`, modules kept whole, hooks on modules inside, `torch.autograd.Function`s. What is recorded runs while
    the graph is made, where the answer is False, and then no more. The result must be the same either way.
    """
    return _thread_recompute.recomputes


class RecomputeBlock:
    """A block that recomputes."""

    def __enter__(self) -> None:
        _thread_recompute.recomputes = True

    def __exit__(self, *args: object) -> None:
        _thread_recompute.recomputes = False
