"""A timeline as a picture: the actions of each device over time, and its memory below.

    device 0 │ F0 F1 F2    B0    F3 B1          │ busy 12 s  bubble 33 %
    device 1 │    F0 F1 B0    F2 B1 …           │
             0      5 s     10 s     15 s
    memory     ▁▂▃▃▂▂▁

With many devices rows get lower; with many actions the picture gets wider, up to a bound. An action too narrow for its
name shows only its colour. Beyond `MAX_BOXES` actions, all actions of a kind in a row are one shape. White is bubble.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import ceil
from pathlib import Path

from fxpipe.errors import ArgumentTypeError
from fxpipe.inspect.memory_chart import CHART_HEAD, memory_chart
from fxpipe.inspect.scene import Bars, Item, Line, Rect, Scene, Text
from fxpipe.inspect.style import (
    DARK_KINDS,
    FAINT,
    GRID,
    INK,
    KIND_COLOURS,
    PAPER,
    RECEIVING_COLOUR,
    LegendEntry,
    TimeAxis,
    fit_text,
    legend_items,
    printable,
    text_width,
    time_ticks,
)
from fxpipe.inspect.svg import notebook_picture, notebook_view, svg_of
from fxpipe.inspect.table import device_table
from fxpipe.scheduling.actions import ActionKind
from fxpipe.simulation.timeline import MEMORY_PARTS, HasTimeline, Span, StepTimeline, has_looped_stages, span_names
from fxpipe.utils.files import check_output_path, write_atomically
from fxpipe.utils.units import count_text, human_seconds, percent

MAX_BOXES = 4000
INSTANT = 1.0  # the width of an action that takes no time
NEARLY_ALL = 0.8  # share of the boxes of a kind that a name must fit; the others have no name
RIM = 5.0  # narrower boxes have no rim: it would hide the colour
SMALLEST_TEXT = 6.5  # font size
LEADING = 1.15  # line spacing, as a factor of the font size
NAME_SLACK = 1.6  # points next to a name


def action_boxes(step: StepTimeline, frame: TimeAxis, top: float, pitch: float, height: float) -> Iterator[Item]:
    """Draws the boxes of actions from `top` downwards; a row is `height` high, `pitch` below the row before."""
    if len(step.spans) > MAX_BOXES:
        for d, row in enumerate(step.rows):
            yield from _merged_boxes(row, d, frame, top + d * pitch, height)
    else:
        for span in step.spans:
            yield from _span_boxes(span, frame, top + span.device * pitch, height)


def _span_boxes(span: Span, frame: TimeAxis, y: float, height: float) -> Iterator[Item]:
    left, start, right = _span_places(span, frame)
    title = span_title(span)
    if start > left:
        yield Rect(left, y, start - left, height, RECEIVING_COLOUR, title=title)
    width = right - start
    if width > 0:
        yield Rect(start, y, width, height, KIND_COLOURS[span.action.kind], PAPER if width >= RIM else "", title=title)


def box_names(step: StepTimeline, frame: TimeAxis, top: float, pitch: float, height: float) -> Iterator[Text]:
    """Names the boxes of a kind on a device in one form: the longest and largest that fits nearly all, or the first.

    The forms are `F3`, then `3`; if a device has several stages, `2F3`, then 2 above 3.
    """
    letters, loops = text_size_for(height), has_looped_stages(step.spans)
    if letters < SMALLEST_TEXT:
        return
    spans_by_kind: defaultdict[tuple[int, ActionKind], list[tuple[Span, str]]] = defaultdict(list)
    for span, name in zip(step.spans, span_names(step.spans), strict=True):
        spans_by_kind[span.device, span.action.kind].append((span, name))
    for (device, _), row in spans_by_kind.items():
        options: list[list[list[Text]]] = []  # by form, the lines of each name that fits
        for is_short, size in product((False, True), (letters, smaller_text_size(letters))):
            options.append([])
            for span, name in row:
                numbers = (span.action.stage, span.action.micro_batch)[0 if loops else 1 :]
                lines = list(map(str, numbers)) if is_short else [name]
                options[-1] += _fitting_lines(lines, size, span, frame, top + device * pitch, height)
        chosen = next((names for names in options if len(names) >= NEARLY_ALL * len(row)), options[0])
        yield from chain(*chosen)


def _fitting_lines(
    lines: Sequence[str], size: float, span: Span, frame: TimeAxis, y: float, height: float
) -> Iterator[list[Text]]:
    """Yields the lines in the middle of a span's box if they fit."""
    _, left, right = _span_places(span, frame)
    depth = size * (1 + LEADING * (len(lines) - 1))
    if max(text_width(line, size) for line in lines) + NAME_SLACK <= right - left and depth <= height:
        fill, base = PAPER if span.action.kind in DARK_KINDS else INK, y + (height - depth) / 2 + 0.86 * size
        middle = (left + right) / 2
        yield [Text(middle, base + k * LEADING * size, line, size, fill, "middle") for k, line in enumerate(lines)]


def text_size_for(height: float) -> float:
    return min(11.0, height * 0.68)


def smaller_text_size(letters: float) -> float:
    return max(SMALLEST_TEXT, letters * 0.75)


def _merged_boxes(row: Sequence[Span], device: int, frame: TimeAxis, y: float, height: float) -> Iterator[Item]:
    """Draws all boxes of a kind as one shape."""
    by_colour: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    seconds: defaultdict[ActionKind, list[float]] = defaultdict(list)
    for span in row:
        left, start, right = _span_places(span, frame)
        if start > left:
            by_colour[RECEIVING_COLOUR].append((left, start))
        by_colour[KIND_COLOURS[span.action.kind]].append((start, right))
        seconds[span.action.kind].append(span.seconds)
    if RECEIVING_COLOUR in by_colour:
        yield Bars(y, height, tuple(by_colour[RECEIVING_COLOUR]), RECEIVING_COLOUR, f"device {device}: receiving")
    for kind, lengths in seconds.items():
        title = f"device {device}: {kind.words}, {len(lengths)} times, {human_seconds(sum(lengths))} in all"
        yield Bars(y, height, tuple(by_colour[KIND_COLOURS[kind]]), KIND_COLOURS[kind], title)


def _span_places(span: Span, frame: TimeAxis) -> tuple[float, float, float]:
    """Returns the x of a span's start, end of receiving, and end; an instant gets a thin stroke."""
    if not span.seconds:
        left = min(frame.x(span.start), frame.right - INSTANT)
        return left, left, left + INSTANT
    return frame.x(span.start), frame.x(span.start + span.receiving), frame.x(span.end)


def span_title(span: Span) -> str:
    action = span.action
    times = f"{human_seconds(span.seconds)} from {human_seconds(span.start)}"
    received = f", {human_seconds(span.receiving)} of it receiving" if span.receiving else ""
    stage = f"stage {action.stage}, micro-batch {action.micro_batch}"
    return f"{action.kind.words}, {stage}: {times}{received}"


GANTT_MARGIN = 16.0
NARROWEST_GANTT, WIDEST_GANTT = 720.0, 1500.0  # width of the time axis
ROWS_HEIGHT = 900.0  # points: the preferred height of all rows together
HIGHEST_PITCH, LOWEST_PITCH = 34.0, 4.0  # from a row to the next
LABEL_SIZE = 10.0  # font size next to the rows, if it fits
LONGEST_LABEL = 170.0  # width of a device's name


@dataclass(frozen=True, slots=True)
class GanttLayout:
    """The rows of a picture with their labels and figures; lengths in points."""

    labels: list[str]
    figures: dict[str, list[str]]  # columns at the right
    frame: TimeAxis
    top: float  # y of the first row
    pitch: float  # from a row to the next
    height: float

    @property
    def columns(self) -> tuple[float, float]:
        """The right ends of the columns of figures."""
        first, second = (
            max(text_width(text, LABEL_SIZE) for text in (*texts, name)) for name, texts in self.figures.items()
        )
        return self.frame.right + 8 + first, self.frame.right + 8 + first + second + 14


def gantt_layout(step: StepTimeline) -> GanttLayout:
    pitch = min(HIGHEST_PITCH, max(LOWEST_PITCH, ROWS_HEIGHT / max(1, len(step.devices))))
    height = pitch * 0.82 if pitch > 8 else pitch - 1
    labels = [fit_text(name, LONGEST_LABEL, LABEL_SIZE) for name in _device_labels(step)]
    figures = {"busy": [*map(human_seconds, step.busy)], "bubble": [*map(percent, step.bubble)]}
    left = GANTT_MARGIN + max((text_width(label, LABEL_SIZE) for label in labels), default=0) + 8
    frame = TimeAxis(left, left + _time_width(step, text_size_for(height)), step.seconds)
    return GanttLayout(labels, figures, frame, GANTT_MARGIN + 68, pitch, height)


def draw_gantt(step: StepTimeline, *, title: str = "") -> Scene:
    """Draws a step. `title` is the heading. Default: a description of the step."""
    layout, n = gantt_layout(step), len(step.devices)
    frame, rows = layout.frame, (layout.top, layout.pitch, layout.height)
    width = max(layout.columns[-1], frame.right + 8 + 70) + GANTT_MARGIN
    names = list(box_names(step, frame, *rows))
    headline, facts = " ".join(printable(title).split()) or _headline(step), _facts(step)
    if has_looped_stages(step.spans) and any(name.text.isdecimal() for name in names):
        facts += "; numbers in boxes: stage above micro-batch"

    bottom = end = layout.top + n * layout.pitch
    chart: list[Item] = []
    grid = [(layout.top - 2, bottom + 4)]
    if step.memory:
        chart, end = memory_chart(step.memory, step.limits, frame, bottom + 34)
        grid.append((bottom + 34 + CHART_HEAD, end))
    bold_title = fit_text(headline, width - 2 * GANTT_MARGIN, 15, is_bold=True)
    items = (
        *_time_ticks(frame, bottom + 15, grid),
        *action_boxes(step, frame, *rows),
        *names,
        *chart,
        Text(GANTT_MARGIN, GANTT_MARGIN + 14, bold_title, 15, is_bold=True),
        Text(GANTT_MARGIN, GANTT_MARGIN + 32, fit_text(facts, width - 2 * GANTT_MARGIN, 11), 11, FAINT),
        *legend_items(_legend_entries(step), frame.left, GANTT_MARGIN + 54, frame.width),
        *_row_labels(layout),
    )
    described = f"{headline}. {facts}" if title else f"Timeline of {headline}. {facts}"
    return Scene(width, end + GANTT_MARGIN + (0 if chart else 8), items, described)


def _row_labels(layout: GanttLayout) -> Iterator[Text]:
    """Yields names and figures of the devices; skips rows if rows are lower than letters."""
    labels, frame, top, columns = layout.labels, layout.frame, layout.top, layout.columns
    size = min(LABEL_SIZE, max(SMALLEST_TEXT, layout.pitch * 0.72))
    for x, name in zip(columns, layout.figures, strict=True):
        yield Text(x, top - 6, name, 9, FAINT, "end")
    for d in range(0, len(labels), ceil((size + 2) / layout.pitch)):
        y = top + d * layout.pitch + layout.height / 2 + size * 0.36
        yield Text(frame.left - 8, y, labels[d], size, anchor="end")
        for x, texts in zip(columns, layout.figures.values(), strict=True):
            yield Text(x, y, texts[d], size, anchor="end")


def _time_ticks(frame: TimeAxis, axis: float, grid: Sequence[tuple[float, float]]) -> Iterator[Item]:
    for time, name in time_ticks(frame.seconds, int(frame.width / 90)):
        x = frame.x(time)
        for top, bottom in grid:
            yield Line(((x, top), (x, bottom)), GRID)
        yield Text(x, axis, name, 9, FAINT, "middle")


def _time_width(step: StepTimeline, letters: float) -> float:
    """Computes a width in which most names fit in the usual font size, and nearly all in the small font size."""
    taking = sorted(span.seconds - span.receiving for span in step.spans if span.seconds > span.receiving)
    if not taking:
        return NARROWEST_GANTT
    longest = max(span_names(step.spans), key=len)
    usual, short = taking[len(taking) // 2], taking[len(taking) // 10]
    wanted = max(
        (text_width(longest, letters) + NAME_SLACK) * step.seconds / usual,
        (text_width(longest, smaller_text_size(letters)) + NAME_SLACK) * step.seconds / short,
    )
    return min(WIDEST_GANTT, max(NARROWEST_GANTT, 1.01 * wanted))


def _headline(step: StepTimeline) -> str:
    stages, m, n = step.stages, step.micro_batches, len(step.devices)
    where = "" if stages == n else f" on {count_text(n, 'device')}"
    return f"{step.schedule}: {count_text(stages, 'stage')}{where}, {count_text(m, 'micro-batch', 'es')}"


def _facts(step: StepTimeline) -> str:
    facts = [f"{'simulated' if step.is_simulated else 'measured'} step {human_seconds(step.seconds)}"]
    facts.append(f"mean bubble {percent(step.mean_bubble)}")
    if step.away:
        facts.append(f"{human_seconds(step.away)} between forward and backward left out")
    return ", ".join(facts)


def _device_labels(step: StepTimeline) -> list[str]:
    return [f"device {d}: {name}" if name else f"device {d}" for d, name in enumerate(step.devices)]


def _legend_entries(step: StepTimeline) -> list[LegendEntry]:
    kinds = {span.action.kind for span in step.spans}
    entries = [LegendEntry(f"{kind} {kind.words}", KIND_COLOURS[kind]) for kind in KIND_COLOURS if kind in kinds]
    if any(span.receiving for span in step.spans):
        entries.append(LegendEntry("receiving", RECEIVING_COLOUR))
    return [*entries, LegendEntry("bubble", PAPER, border="#bbbbbb")]


TIMELINE_FORMATS = ("svg", "json")
TIMELINE_FILE = "a timeline"


def save_timeline(source: HasTimeline, path: str | Path, *, title: str = "") -> None:
    """Writes a timeline of what each device does and, for a simulation, of its memory.

    >>> save_timeline(pipe.last_step, "step.svg")  # doctest: +SKIP

    Args:
        source: a `Simulation`, or `pipe.last_step`.
        path: the suffix is the format: `.svg`, or `.json` for https://ui.perfetto.dev and chrome://tracing.
        title: heading of the picture. Default: the schedule and its size.

    Raises:
        ArgumentError: the path has another suffix.
        FileError: the file cannot be written.
        ArgumentTypeError: the source, or the path, has another type.
    """
    form = check_output_path(path, TIMELINE_FORMATS, TIMELINE_FILE)
    if not isinstance(source, HasTimeline):
        raise ArgumentTypeError(
            f"a timeline is that of a Simulation or a StepRecord (pipe.last_step), not of {type(source).__name__}"
        )
    if form == "json":
        from fxpipe.inspect.perfetto import perfetto_text

        content = perfetto_text(source)
    else:
        content = svg_of(draw_gantt(source.as_step(), title=title))
    write_atomically(path, content.encode(), TIMELINE_FILE)


def step_html(step: StepTimeline) -> str:
    """Formats a step for a notebook: the timeline, and the time and (of a simulation) memory of each device."""
    table = device_table(step.devices, step.busy, step.bubble, step.memory, step.limits, *MEMORY_PARTS)
    picture = notebook_picture(svg_of(draw_gantt(step)))
    return notebook_view(_headline(step), _facts(step), picture, table.for_notebook())
