"""A timeline as a picture: the actions of each device over time, and its memory below.

    device 0 │ F0 F1 F2    B0    F3 B1          │ busy 12 s  bubble 33 %
    device 1 │    F0 F1 B0    F2 B1 …           │
             0      5 s     10 s     15 s
    memory     ▁▂▃▃▂▂▁

With many devices rows get lower; with many actions the picture gets wider, up to a bound. Beyond `MAX_BOXES` actions,
all actions of a kind in a row are one shape. Memory has a panel for each device, by parts; of many devices, those
closest to their limits. A limit is a dashed line, unless it is so far above the curves that they would be flat.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import ceil
from pathlib import Path

from fxpipe.inspect import style, svg
from fxpipe.inspect.table import device_table
from fxpipe.scheduling.actions import ActionKind
from fxpipe.simulation import MemoryFit, MemoryParts, MemoryTimeline, Span
from fxpipe.simulation.timeline import MEMORY_PARTS, HasTimeline, StepTimeline, span_names
from fxpipe.utils.files import check_output_path, write_atomically
from fxpipe.utils.units import count_text, human_bytes, human_seconds, percent

MAX_BOXES = 4000
INSTANT = 1.0  # the width of an action that takes no time
RIM = 5.0  # narrower boxes have no rim: it would hide the colour
SMALLEST_TEXT = 6.5  # font size
NAME_SLACK = 1.6  # points next to a name


def action_boxes(step: StepTimeline, layout: GanttLayout) -> Iterator[svg.Item]:
    """Draws the boxes of actions; if there are more than `MAX_BOXES`, those of a kind in a row as one shape."""
    bars: defaultdict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)  # by device and colour
    seconds: defaultdict[tuple[int, ActionKind], list[float]] = defaultdict(list)
    for span in step.spans:
        (left, start, right), y, action = layout.places(span), layout.y(span.device), span.action
        colour, rim = style.KIND_COLOURS[action.kind], svg.PAPER if right - start >= RIM else ""
        if len(step.spans) > MAX_BOXES:
            if start > left:
                bars[span.device, style.RECEIVING_COLOUR].append((left, start))
            bars[span.device, colour].append((start, right))
            seconds[span.device, action.kind].append(span.seconds)
            continue
        times = f"{human_seconds(span.seconds)} from {human_seconds(span.start)}"
        received = f", {human_seconds(span.receiving)} of it receiving" if span.receiving else ""
        title = f"{action.kind.words}, stage {action.stage}, micro-batch {action.micro_batch}: {times}{received}"
        if start > left:
            yield svg.Rect(left, y, start - left, layout.height, style.RECEIVING_COLOUR, title=title)
        if right > start:
            yield svg.Rect(start, y, right - start, layout.height, colour, rim, title=title)
    titles = {(d, style.RECEIVING_COLOUR): f"device {d}: receiving" for d in range(len(step.devices))}
    for (d, kind), lengths in seconds.items():
        total = f"{len(lengths)} times, {human_seconds(sum(lengths))} in all"
        titles[d, style.KIND_COLOURS[kind]] = f"device {d}: {kind.words}, {total}"
    for (d, colour), spans in bars.items():
        yield svg.Bars(layout.y(d), layout.height, tuple(spans), colour, titles[d, colour])


def box_names(step: StepTimeline, layout: GanttLayout) -> Iterator[svg.Text]:
    """Names the boxes, in their middle, whose names fit: `F3`, or `2F3` if a device has several stages."""
    size = layout.letters
    for span, name in zip(step.spans, span_names(step.spans), strict=True):
        _, left, right = layout.places(span)
        if size >= SMALLEST_TEXT and style.text_width(name, size) + NAME_SLACK <= right - left:
            fill = svg.PAPER if span.action.kind in style.DARK_KINDS else style.INK
            y = layout.y(span.device) + (layout.height - size) / 2 + 0.86 * size
            yield svg.Text((left + right) / 2, y, name, size, fill, "middle")


MAX_PANELS = 8  # devices
PANEL_HEIGHT, PANEL_GAP = 46.0, 10.0
CHART_HEAD = 38.0  # height of the title and the legend
FLAT_LIMIT_RATIO = 3.0  # a limit above this many times the peak is not drawn
PANEL_COLOUR = "#f7f7f7"


def memory_chart(
    memory: Sequence[MemoryTimeline], limits: Sequence[float | None], frame: style.TimeAxis, y: float
) -> tuple[list[svg.Item], float]:
    """Draws the memory of each device, with its parts stacked, from `y` downwards; also returns the bottom."""
    peaks, limits = [one.peak for one in memory], limits or (None,) * len(memory)
    peak, shown = max(peaks), sorted(MemoryFit(peaks, limits).fullest[:MAX_PANELS])
    known = {d: limit for d in shown if (limit := limits[d]) is not None}
    drawn = {d: limit for d, limit in known.items() if limit <= FLAT_LIMIT_RATIO * peak}
    scale = PANEL_HEIGHT / (max([peak, *drawn.values()]) * 1.04)  # points for each byte
    parts = [name for name in MEMORY_PARTS if any(getattr(size, name) for d in shown for _, size in memory[d].steps)]

    heading = "memory" if len(memory) == 1 else "memory, all on one scale"
    if len(shown) < len(memory):
        heading += f", of the {len(shown)} devices closest to their limits"
    if len(drawn) < len(known):
        above = min(limit for d, limit in known.items() if d not in drawn)
        heading += f"; the limit of {human_bytes(above)} lies above"
    entries = [style.LegendEntry(name, style.MEMORY_COLOURS[name]) for name in parts]
    if drawn:
        sizes = list(dict.fromkeys(map(human_bytes, (min(drawn.values()), max(drawn.values())))))
        name = f"limit{'s' if len(sizes) > 1 else ''} {' to '.join(sizes)}"
        entries.append(style.LegendEntry(name, style.LIMIT_COLOUR, is_line=True))
    items: list[svg.Item] = [svg.Text(frame.left, y + 12, heading, is_bold=True)]
    items += style.legend_items(entries, frame.left, y + 28, frame.width)
    for place, d in enumerate(shown):
        base = y + CHART_HEAD + (place + 1) * PANEL_HEIGHT + place * PANEL_GAP
        middle, right, label = base - PANEL_HEIGHT / 2, frame.right + 8, f"device {d}"
        items.append(svg.Rect(frame.left, base - PANEL_HEIGHT, frame.width, PANEL_HEIGHT, PANEL_COLOUR))
        items += _stacked_areas(memory[d], parts, frame, base, scale, label)
        if d in drawn:
            level, title = base - drawn[d] * scale, f"the limit, {human_bytes(drawn[d])}"
            items.append(svg.Line(((frame.left, level), (frame.right, level)), style.LIMIT_COLOUR, 1.2, (5, 3), title))
        colour = style.LIMIT_COLOUR if d in drawn and peaks[d] > drawn[d] else style.INK
        items.append(svg.Text(frame.left - 8, middle + 4, label, 10, anchor="end"))
        items.append(svg.Text(right, middle, "peak", 9, style.FAINT))
        items.append(svg.Text(right, middle + 12, human_bytes(peaks[d]), 10, colour))
    return items, y + CHART_HEAD + len(shown) * (PANEL_HEIGHT + PANEL_GAP)


def _stacked_areas(
    memory: MemoryTimeline, parts: Sequence[str], frame: style.TimeAxis, base: float, scale: float, label: str
) -> Iterator[svg.Item]:
    kept: list[tuple[float, MemoryParts]] = []  # of the steps on one point of the picture, the largest and the last
    for _, group in groupby(memory.steps, key=lambda step: int(frame.x(step[0]))):
        steps = list(group)
        highest = max(steps, key=lambda step: step[1].total)
        kept += [highest] if highest is steps[-1] else [highest, steps[-1]]
    sums = [(0.0, *accumulate(float(getattr(size, name)) for name in parts)) for _, size in kept]
    places = [frame.x(time) for time, _ in kept]

    def stairs(sizes: Sequence[float]) -> list[svg.Point]:
        points: list[svg.Point] = []
        level = sizes[0]
        for x, size in zip(places, sizes, strict=True):
            if size != level:
                points.append((x, base - level * scale))
            if size != level or not points:
                points.append((x, base - size * scale))
            level = size
        return [*points, (frame.right, base - level * scale)]

    for k, name in enumerate(parts):
        if all(row[k] == row[k + 1] for row in sums):
            continue
        upper, lower = stairs([row[k + 1] for row in sums]), stairs([row[k] for row in sums])
        most = human_bytes(max(row[k + 1] - row[k] for row in sums))
        yield svg.Area((*upper, *reversed(lower)), style.MEMORY_COLOURS[name], title=f"{label}: {name}, at most {most}")


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
    frame: style.TimeAxis
    top: float  # y of the first row
    pitch: float  # from a row to the next
    height: float

    @property
    def letters(self) -> float:
        """The font size in boxes."""
        return letters_of(self.height)

    def y(self, device: int) -> float:
        return self.top + device * self.pitch

    def places(self, span: Span) -> tuple[float, float, float]:
        """Returns the x of a span's start, end of receiving, and end; an instant gets a thin stroke."""
        frame = self.frame
        if not span.seconds:
            left = min(frame.x(span.start), frame.right - INSTANT)
            return left, left, left + INSTANT
        return frame.x(span.start), frame.x(span.start + span.receiving), frame.x(span.end)


def letters_of(height: float) -> float:
    return min(11.0, height * 0.68)


def gantt_layout(step: StepTimeline) -> GanttLayout:
    pitch = min(HIGHEST_PITCH, max(LOWEST_PITCH, ROWS_HEIGHT / max(1, len(step.devices))))
    height = pitch * 0.82 if pitch > 8 else pitch - 1
    names = [f"device {d}: {name}".removesuffix(": ") for d, name in enumerate(step.devices)]
    labels = [style.fit_text(name, LONGEST_LABEL, LABEL_SIZE) for name in names]
    figures = {"busy": [*map(human_seconds, step.busy)], "bubble": [*map(percent, step.bubble)]}
    left = GANTT_MARGIN + max((style.text_width(label, LABEL_SIZE) for label in labels), default=0) + 8
    width = NARROWEST_GANTT
    if taking := sorted(span.seconds - span.receiving for span in step.spans if span.seconds > span.receiving):
        longest, seconds = max(span_names(step.spans), key=len), taking[len(taking) // 10]  # nearly all names fit
        wanted = (style.text_width(longest, letters_of(height)) + NAME_SLACK) * step.seconds / seconds
        width = min(WIDEST_GANTT, max(NARROWEST_GANTT, 1.01 * wanted))
    frame = style.TimeAxis(left, left + width, step.seconds)
    return GanttLayout(labels, figures, frame, GANTT_MARGIN + 68, pitch, height)


def draw_gantt(step: StepTimeline, *, title: str = "") -> svg.Scene:
    """Draws a step. `title` is the heading. Default: a description of the step."""
    layout, n = gantt_layout(step), len(step.devices)
    frame = layout.frame
    labels = list(_row_labels(layout))
    width = max(frame.right + 8 + 70, *(label.x for label in labels)) + GANTT_MARGIN
    headline, facts = " ".join(svg.printable(title).split()) or _headline(step), _facts(step)

    bottom = end = layout.top + n * layout.pitch
    chart: list[svg.Item] = []
    grid = [(layout.top - 2, bottom + 4)]
    if step.memory:
        chart, end = memory_chart(step.memory, step.limits, frame, bottom + 34)
        grid.append((bottom + 34 + CHART_HEAD, end))
    bold_title = style.fit_text(headline, width - 2 * GANTT_MARGIN, 15, is_bold=True)
    ticks: list[svg.Item] = []
    for time, name in style.time_ticks(frame.seconds, int(frame.width / 90)):
        x = frame.x(time)
        ticks += [svg.Line(((x, first), (x, last)), style.GRID) for first, last in grid]
        ticks.append(svg.Text(x, bottom + 15, name, 9, style.FAINT, "middle"))
    kinds = {span.action.kind for span in step.spans}
    entries = [style.LegendEntry(f"{kind} {kind.words}", c) for kind, c in style.KIND_COLOURS.items() if kind in kinds]
    if any(span.receiving for span in step.spans):
        entries.append(style.LegendEntry("receiving", style.RECEIVING_COLOUR))
    entries.append(style.LegendEntry("bubble", svg.PAPER, border="#bbbbbb"))
    items = (
        *ticks,
        *action_boxes(step, layout),
        *box_names(step, layout),
        *chart,
        svg.Text(GANTT_MARGIN, GANTT_MARGIN + 14, bold_title, 15, is_bold=True),
        svg.Text(GANTT_MARGIN, GANTT_MARGIN + 32, style.fit_text(facts, width - 2 * GANTT_MARGIN, 11), 11, style.FAINT),
        *style.legend_items(entries, frame.left, GANTT_MARGIN + 54, frame.width),
        *labels,
    )
    described = f"{headline}. {facts}" if title else f"Timeline of {headline}. {facts}"
    return svg.Scene(width, end + GANTT_MARGIN + (0 if chart else 8), items, described)


def _row_labels(layout: GanttLayout) -> Iterator[svg.Text]:
    """Yields names and figures of the devices; skips rows if rows are lower than letters."""
    labels, frame, top = layout.labels, layout.frame, layout.top
    size = min(LABEL_SIZE, max(SMALLEST_TEXT, layout.pitch * 0.72))
    shown = range(0, len(labels), ceil((size + 2) / layout.pitch))
    base = layout.height / 2 + size * 0.36
    yield from (svg.Text(frame.left - 8, layout.y(d) + base, labels[d], size, anchor="end") for d in shown)
    right = frame.right - 6  # of a column of figures
    for name, texts in layout.figures.items():
        right += 14 + max(style.text_width(text, LABEL_SIZE) for text in (*texts, name))
        yield svg.Text(right, top - 6, name, 9, style.FAINT, "end")
        yield from (svg.Text(right, layout.y(d) + base, texts[d], size, anchor="end") for d in shown)


def _headline(step: StepTimeline) -> str:
    stages, n = len({span.action.stage for span in step.spans}), len(step.devices)
    m = len({span.action.micro_batch for span in step.spans})
    where = "" if stages == n else f" on {count_text(n, 'device')}"
    return f"{step.schedule}: {count_text(stages, 'stage')}{where}, {count_text(m, 'micro-batch', 'es')}"


def _facts(step: StepTimeline) -> str:
    away = f", {human_seconds(step.away)} between forward and backward left out" if step.away else ""
    kind = "simulated" if step.is_simulated else "measured"
    return f"{kind} step {human_seconds(step.seconds)}, mean bubble {percent(step.mean_bubble)}{away}"


TIMELINE_FORMATS = ("svg", "json")


def save_timeline(source: HasTimeline, path: str | Path, *, title: str = "") -> None:
    """See `HasTimeline.save_timeline`."""
    form = check_output_path(path, TIMELINE_FORMATS, "a timeline")
    if form == "json":
        from fxpipe.inspect.perfetto import perfetto_text

        content = perfetto_text(source)
    else:
        content = svg.svg_of(draw_gantt(source.as_step(), title=title))
    write_atomically(path, content.encode(), "a timeline")


def step_html(step: StepTimeline) -> str:
    """Formats a step for a notebook: the timeline, and the time and (of a simulation) memory of each device."""
    table = device_table(step, *MEMORY_PARTS)
    view = "overflow-x:auto;max-width:100%;background:#fff;border-radius:4px;margin:0.4em 0"  # white, as paper
    picture = f'<div style="{view}">{svg.svg_of(draw_gantt(step))}</div>'
    return svg.notebook_view(_headline(step), _facts(step), picture, table.for_notebook())
