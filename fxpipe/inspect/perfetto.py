"""A step as a trace for chrome://tracing and https://ui.perfetto.dev ("Trace Event Format", Google, 2016).

The step is a process, each device a thread. An action is a complete event ("X"). A pair of flow events ("s", "f") leads
from the action that made a value or gradient to the action that used it. The memory of a device is a counter ("C").
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from fxpipe.scheduling.actions import Action
from fxpipe.simulation.timeline import MEMORY_PARTS, HasTimeline, Span, StepTimeline, TransferRecord

PERFETTO_PROCESS = 1


def perfetto_text(source: HasTimeline) -> str:
    step, arrows = source.as_step(), tuple(source.arrows())
    at = {span.action: span for span in step.spans}
    process = f"fxpipe {step.schedule}{', simulated' if step.is_simulated else ''}"
    events = [_metadata_event("process_name", 0, name=process)]
    for d, device in enumerate(step.devices):
        events.append(_metadata_event("thread_name", d, name=f"device {d}: {device}" if device else f"device {d}"))
        events.append(_metadata_event("thread_sort_index", d, sort_index=d))
    events += _action_events(step, arrows)
    for number, arrow in enumerate(arrows, 1):
        events += _flow_events(arrow, at, number)
    for d, memory in enumerate(step.memory):  # the bytes of all parts that are ever nonzero; viewers stack them
        held = [name for name in MEMORY_PARTS if any(getattr(parts, name) for _, parts in memory.steps)]
        common = {"ph": "C", "name": f"memory of device {d}", "cat": "memory", "pid": PERFETTO_PROCESS, "tid": d}
        for time, parts in memory.steps:
            sizes = {name: getattr(parts, name) for name in held}
            events.append({**common, "ts": round(time * 1e9) / 1e3, "args": sizes})
    others = {"schedule": step.schedule, "seconds": step.seconds, "seconds left out": step.away}
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": others}
    return json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n"


def _metadata_event(what: str, device: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": PERFETTO_PROCESS, "tid": device, "args": args}


def _action_events(step: StepTimeline, arrows: Sequence[TransferRecord]) -> Iterator[dict[str, Any]]:
    received: defaultdict[Action, float] = defaultdict(int)
    sent: defaultdict[Action, float] = defaultdict(int)
    for arrow in arrows:
        received[arrow.user] += arrow.bytes
        sent[arrow.maker] += arrow.bytes
    ended = [0.0] * len(step.devices)
    for place, span in enumerate(step.spans):
        waited = step.waited[place] if step.waited else max(0.0, span.start - ended[span.device])
        ended[span.device] = span.end
        action = span.action
        start, end = _nanoseconds(span)
        yield {
            "ph": "X",
            "name": str(action),
            "cat": action.kind.words,
            "pid": PERFETTO_PROCESS,
            "tid": span.device,
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
            "args": {
                **({} if step.is_simulated else {"range": action.range_name}),
                "stage": action.stage,
                "micro-batch": action.micro_batch,
                "waited before (us)": round(waited * 1e6, 3),
                **({"receiving (us)": round(span.receiving * 1e6, 3)} if span.receiving else {}),
                "bytes received": received[action],
                "bytes sent": sent[action],
            },
        }


def _flow_events(arrow: TransferRecord, at: dict[Action, Span], number: int) -> Iterator[dict[str, Any]]:
    """Yields a flow from the last nanosecond of the maker's event, which must contain it, to the user's start."""
    maker, user = at[arrow.maker], at[arrow.user]
    start, end = _nanoseconds(maker)
    kind = "gradient" if arrow.is_gradient else "value"
    common = {"cat": kind, "name": kind, "id": number, "pid": PERFETTO_PROCESS}
    args = {**({"value": arrow.value} if arrow.value else {}), "bytes": arrow.bytes}
    yield {"ph": "s", **common, "tid": maker.device, "ts": max(start, end - 1) / 1e3, "args": args}
    yield {"ph": "f", "bp": "e", **common, "tid": user.device, "ts": _nanoseconds(user)[0] / 1e3, "args": args}


def _nanoseconds(span: Span) -> tuple[int, int]:
    """Rounds start and end to nanoseconds, so that arrows meet their events."""
    return round(span.start * 1e9), round(span.end * 1e9)
