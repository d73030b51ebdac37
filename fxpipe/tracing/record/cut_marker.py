"""`fxpipe.cut()`: positions in forward at which the user wants a stage to end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fxpipe.errors import ArgumentError, TraceError
from fxpipe.tracing.record.opaque_call import active


class _MissedMarks(threading.local):
    marks = 0  # calls in this thread without a recorder


_missed = _MissedMarks()


def cut() -> None:
    """Marks a position in `forward` at which a stage ends and the next one begins.

        def forward(self, x):
            for k, layer in enumerate(self.layers):
                if k and k % 8 == 0:
                    fxpipe.cut()
                x = layer(x)
            return x

    Only planning uses marks; they do not change how the model runs. If there are fewer marks than cuts, the solver
    chooses the others. Marks require a recorded graph (not one from `tracer=`).

    Raises:
        ArgumentError: the mark is inside an opaque node (an opaque module, a hook, a `fxpipe.leaf`).
    """
    recorder = active.recorder
    if recorder is None:
        _missed.marks += 1
        return
    if recorder.paused:
        where = f"module {recorder.module!r}" if recorder.module else "the model"
        raise ArgumentError(
            f"fxpipe.cut() stands in a part of {where} that runs as one node, where no stage can end; move it out"
        )
    recorder.marks.append(recorder.source)


@contextmanager
def refuse_missed_marks() -> Iterator[None]:
    """A block that creates a graph without recording; raises `TraceError` at its end if it contained marks."""
    before = _missed.marks
    yield
    if _missed.marks != before:
        raise TraceError("fxpipe.cut() is seen by recording only; take the calls out, or cut by names (balance=[...])")
