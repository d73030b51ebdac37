"""`fxpipe.cut()`: places in forward at which the user wants a stage to end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fxpipe.errors import ArgumentError, TraceError
from fxpipe.tracing.record.opaque_call import active


class _MissedMarks(threading.local):
    marks = 0  # calls in this thread that no recorder has seen


_missed = _MissedMarks()


def cut() -> None:
    """Marks a place in `forward` at which a stage ends, and the next one begins.

        def forward(self, x):
            for k, layer in enumerate(self.layers):
                if k and k % 8 == 0:
                    fxpipe.cut()
                x = layer(x)
            return x

    Only planning looks at it: the model runs as it does without. Where there are fewer marks than cuts, the solver
    chooses the others. It takes a recorded graph: one that a function makes (`tracer=`) has no marks.

    Raises:
        ArgumentError: it stands in what runs as one node (a module kept whole, a hook, a `fxpipe.leaf`).
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
    """A block that makes a graph without recording; raises `TraceError` at its end if there were marks."""
    before = _missed.marks
    yield
    if _missed.marks != before:
        raise TraceError("fxpipe.cut() is seen by recording only; take the calls out, or cut by names (balance=[...])")
