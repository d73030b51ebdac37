"""A step as a trace that chrome://tracing and https://ui.perfetto.dev open.

One process is the step, one row (a thread, there) each device. An action is a complete event ("X") with what it was and
what it moved; an arrow, a pair of flow events ("s", "f"), leads from the action that made a value or a gradient to the
one that used it. Times are in microseconds. The format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from fxpipe.runtime.ranges import range_name
from fxpipe.runtime.record import ActionRecord, StepRecord, TransferRecord
from fxpipe.scheduling.actions import Action, Kind

PROCESS = 1
CATEGORIES = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.WEIGHT: "backward of weights",
    Kind.UPDATE: "update",
}


def write_trace(record: StepRecord, path: str | Path) -> None:
    """Raises `OSError` where the file cannot be written."""
    text = json.dumps(trace_of(record))
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        error.add_note(f"fxpipe: the trace of a step cannot be written to {str(path)!r}; give the path of a file")
        raise


def trace_of(record: StepRecord) -> dict[str, Any]:
    """The trace as a JSON document."""
    at = {one.action: one for one in record.actions}
    numbers = count(1)
    events = [*_names(record), *map(_event, record.actions)]
    for transfer in record.transfers:
        events += _arrow(transfer, at, next(numbers))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"schedule": record.schedule, "seconds": record.seconds, "seconds left out": record.away},
    }


def _names(record: StepRecord) -> Iterator[dict[str, Any]]:
    yield _about("process_name", 0, name=f"fxpipe {record.schedule}")
    for d, device in enumerate(record.devices):
        yield _about("thread_name", d, name=f"device {d}: {device.name}")
        yield _about("thread_sort_index", d, sort_index=d)


def _about(what: str, device: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": PROCESS, "tid": device, "args": args}


def _event(one: ActionRecord) -> dict[str, Any]:
    action = one.action
    start, end = _nanoseconds(one)
    return {
        "ph": "X",
        "name": str(action),
        "cat": CATEGORIES[action.kind],
        "pid": PROCESS,
        "tid": one.device,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": {
            "range": range_name(action),
            "stage": action.stage,
            "micro-batch": action.micro_batch,
            "waited before (us)": round(one.waited * 1e6, 3),
            "bytes received": one.received,
            "bytes sent": one.sent,
        },
    }


def _arrow(transfer: TransferRecord, at: dict[Action, ActionRecord], number: int) -> Iterator[dict[str, Any]]:
    """From within the maker's event, at its end, to the start of the user's: an end belongs to the event it lies in."""
    maker, user = at[transfer.maker], at[transfer.user]
    start, end = _nanoseconds(maker)
    kind = "gradient" if transfer.is_gradient else "value"
    common = {"cat": kind, "name": kind, "id": number, "pid": PROCESS}
    args = {"value": transfer.value, "bytes": transfer.bytes}
    yield {"ph": "s", **common, "tid": maker.device, "ts": max(start, end - 1) / 1e3, "args": args}
    yield {"ph": "f", "bp": "e", **common, "tid": user.device, "ts": _nanoseconds(user)[0] / 1e3, "args": args}


def _nanoseconds(one: ActionRecord) -> tuple[int, int]:
    """Whole ones, at which an arrow and its event meet."""
    return round(one.start * 1e9), round(one.end * 1e9)
