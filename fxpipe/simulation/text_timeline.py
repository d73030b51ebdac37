"""A timeline as lines of text, one for each device: for terminals, logs and documents.

`F0` and `B0===` are actions, `.` is the bubble. If actions are shorter than a column, the columns of each kind, and of
the bubble, are in proportion to their time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fxpipe.scheduling import ActionKind
from fxpipe.simulation.timeline import HasTimeline, Span, StepTimeline
from fxpipe.utils.units import human_seconds, percent

TIMELINE_COLUMNS = 100  # default width
NARROWEST_COLUMNS = 20  # least columns of time; a narrower window breaks the lines


def timeline_text(source: HasTimeline, *, columns: int = TIMELINE_COLUMNS) -> str:
    """Formats a line for each device: its actions over time, and its busy time. `columns` is the width of a line."""
    step = source.as_step(has_memory=False)
    heads, ends = _row_heads(step), _row_ends(step)
    room = columns - len(heads[0]) - len(ends[0]) - 3 if heads else 0
    lines = timeline_lines(step.spans, len(step.devices), step.seconds, columns=max(NARROWEST_COLUMNS, room))
    return "\n".join(f"{a}|{line}| {b}" for a, line, b in zip(heads, lines, ends, strict=True))


def _row_heads(step: StepTimeline) -> list[str]:
    digits = len(str(len(step.devices) - 1))
    return [f"device {d:>{digits}} " for d in range(len(step.devices))]


def _row_ends(step: StepTimeline) -> list[str]:
    busy, bubbles = list(map(human_seconds, step.busy)), list(map(percent, step.bubble))
    longest, width = (max(map(len, texts), default=0) for texts in (busy, bubbles))
    return [f"busy {a:>{longest}}, bubble {b:>{width}}" for a, b in zip(busy, bubbles, strict=True)]


def timeline_lines(
    spans: Sequence[Span], devices: int, seconds: float, *, columns: int = TIMELINE_COLUMNS
) -> list[str]:
    """Draws a line for each device, at most `columns` wide. Actions too short for a name show only their kind."""
    names = span_names(spans)
    wanted = ((len(name) + 1) * (seconds / s.seconds) for s, name in zip(spans, names, strict=True) if s.seconds > 0)
    width = round(min(columns, max(wanted, default=0)))
    lines = []
    for row in span_rows(spans, devices):
        owners = span_per_column([spans[k] for k in row], seconds, width)
        lines.append("".join(_row_cells(owners, [(names[k], spans[k].action.kind) for k in row])))
    return lines


def span_rows(spans: Sequence[Span], devices: int) -> list[list[int]]:
    """Returns the indices in `spans` of the spans of each device."""
    rows: list[list[int]] = [[] for _ in range(devices)]
    for k, span in enumerate(spans):
        rows[span.device].append(k)
    return rows


def span_names(spans: Sequence[Span]) -> list[str]:
    """Names each span, as briefly as is unambiguous in the row of its device."""
    if has_looped_stages(spans):
        return [str(span.action) for span in spans]
    return [f"{span.action.kind}{span.action.micro_batch}" for span in spans]


def has_looped_stages(spans: Sequence[Span]) -> bool:
    """Returns True if a device has several stages, so that a micro-batch does not identify an action."""
    return len({(span.device, span.action.stage) for span in spans}) > len({span.device for span in spans})


def span_per_column(row: Sequence[Span], seconds: float, units: int) -> list[int | None]:
    """Cuts a step into `units` of equal length; returns the span that each unit shows, or None if the device idles.

    Spans shorter than a unit share it with each other and with bubbles. One of them shows, and the others are carried
    to the next unit, so that over several units each kind, and the bubble, has its share (Floyd and Steinberg, "An
    adaptive algorithm for spatial greyscale", 1976).
    """
    owners: list[int | None] = [None] * units
    if not seconds:
        return owners
    shares: defaultdict[int, defaultdict[ActionKind, float]] = defaultdict(lambda: defaultdict(float))
    taken: defaultdict[int, float] = defaultdict(float)  # covered share of each unit
    last: dict[tuple[int, ActionKind], int] = {}
    for k, span in enumerate(row):
        start, end = span.start / seconds * units, span.end / seconds * units
        is_short = end - start < 1
        if not is_short:
            first, behind = int(start + 0.5), int(end + 0.5)
            owners[first:behind] = [k] * (behind - first)
        for unit in {int(start), int(end)}:
            share = min(end, unit + 1) - max(start, unit)
            if is_short and share > 0 and unit < units:
                shares[unit][span.action.kind] += share
                last[unit, span.action.kind] = k
            taken[unit] += share

    due: defaultdict[ActionKind | None, float] = defaultdict(
        float
    )  # units that each kind, or the bubble, has not shown yet
    for unit, owner in enumerate(owners):
        if owner is not None or unit not in shares:
            due.clear()
            continue
        due[None] += 1 - taken[unit]
        for kind, share in shares[unit].items():
            due[kind] += share
        shown = max((None, *shares[unit]), key=lambda kind: (due[kind], kind is not None))
        due[shown] -= 1
        owners[unit] = None if shown is None else last[unit, shown]
    return owners


def _row_cells(owners: Sequence[int | None], names: Sequence[tuple[str, ActionKind]]) -> list[str]:
    cells = ["."] * len(owners)
    for k, cell in enumerate(owners):
        if cell is not None:
            cells[k] = str(names[cell][1])
    for k, (first, width) in column_extents(owners).items():
        name, _ = names[k]
        if width > len(name):
            cells[first : first + width] = name.ljust(width - 1, "=") + " "
    return cells


def column_extents(owners: Sequence[int | None]) -> dict[int, tuple[int, int]]:
    """Returns the first column and the number of columns of each span that is shown."""
    extents: dict[int, tuple[int, int]] = {}
    for place, k in enumerate(owners):
        if k is not None:
            first, width = extents.get(k, (place, 0))
            extents[k] = first, width + 1
    return extents
