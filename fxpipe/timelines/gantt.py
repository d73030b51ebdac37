"""A timeline as a picture: what each device does when, and below it what it holds in memory.

    device 0 │ F0 F1 F2    B0    F3 B1          │ busy 12 s  bubble 33 %
    device 1 │    F0 F1 B0    F2 B1 …           │
             0      5 s     10 s     15 s
    memory     ▁▂▃▃▂▂▁

A picture has room for a few hundred labels and a few thousand boxes. So the rows get lower where there are many
devices; the picture gets wider, up to a bound, where there are many actions; an action that is still too narrow for its
name shows its colour only; and where there are more actions than boxes, all of a kind in a row are drawn as one shape.
Widths and gaps are exact always, so that white is bubble.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from fxpipe.drawing.axes import time_ticks
from fxpipe.drawing.colours import FAINT, GRID, KINDS, PAPER, RECEIVING
from fxpipe.drawing.legends import Entry, legend
from fxpipe.drawing.letters import fitted, printable, text_width
from fxpipe.drawing.scene import Group, Item, Line, Scene, Text
from fxpipe.timelines.boxes import SLACK, SMALLEST, box_names, boxes, letters_of, smaller
from fxpipe.timelines.frames import Frame
from fxpipe.timelines.memory_charts import HEAD, memory_chart
from fxpipe.timelines.steps import Step
from fxpipe.timelines.text import names_of
from fxpipe.units import counted, human_seconds, percent

MARGIN = 16.0
NARROWEST, WIDEST = 720.0, 1500.0  # of the part where time runs
ROWS = 900.0  # points: as high as rows become together, where they may be
HIGHEST, LOWEST = 34.0, 4.0  # from a row to the next
BESIDE = 10.0  # letters beside the rows, where there is room
LONGEST = 170.0  # of a device's name


@dataclass(frozen=True, slots=True)
class Gantt:
    """The picture, and where in it what is."""

    scene: Scene
    frame: Frame
    top: float  # of the first row
    pitch: float  # from a row to the next
    height: float  # of a row
    bottom: float  # of all that stands on the time axis
    axis: float  # the base line of its numbers
    grid: tuple[tuple[float, float], ...]  # from where to where, downwards, lines at round times go


def gantt(step: Step, *, title: str = "") -> Gantt:
    """The picture of a step. `title` stands above it; what the step is, if not given."""
    n = len(step.devices)
    pitch = min(HIGHEST, max(LOWEST, ROWS / max(1, n)))
    height = pitch * 0.82 if pitch > 8 else pitch - 1
    labels = [fitted(name, LONGEST, BESIDE) for name in _labels(step)]
    figures = _Figures([human_seconds(seconds) for seconds in step.busy], [percent(share) for share in step.bubble])
    left = MARGIN + max((text_width(label, BESIDE) for label in labels), default=0) + 8
    frame = Frame(left, left + _width(step, letters_of(height)), step.seconds)
    width = frame.right + 8 + max(figures.width, 70) + MARGIN
    top = MARGIN + 68
    names = box_names(step, frame, top, pitch, height)
    headline, facts = " ".join(printable(title).split()) or _headline(step), _facts(step)
    if names.are_stacked:
        facts += "; numbers in boxes: stage above micro-batch"

    still: list[Item] = [
        Text(MARGIN, MARGIN + 14, fitted(headline, width - 2 * MARGIN, 15, is_bold=True), 15, is_bold=True),
        Text(MARGIN, MARGIN + 32, fitted(facts, width - 2 * MARGIN, 11), 11, FAINT),
        *legend(_entries(step), frame.left, MARGIN + 54, frame.width),
    ]
    bottom = end = top + n * pitch
    still += _beside(labels, figures, frame, top, pitch, height)
    grid = [(top - 2, bottom + 4)]
    axis = bottom + 15
    chart = None
    if step.memory:
        begin = bottom + 34
        chart = memory_chart(step.memory, step.limits, [f"device {d}" for d in range(n)], frame, begin)
        end = begin + chart.height
        grid.append((begin + HEAD, end))
        still += chart.still
    moving = [
        Group(tuple(_ticks(frame, axis, grid)), "ticks"),
        Group(tuple(boxes(step, frame, top, pitch, height)), "boxes"),
        Group(names.texts, "names"),
        *([Group(chart.moving, "memory")] if chart else []),
    ]
    told = f"{headline}. {facts}" if title else f"Timeline of {headline}. {facts}"
    depth = end + MARGIN + (0 if chart else 8)
    scene = Scene(width, depth, (Group(tuple(moving), "time"), *still), told)
    return Gantt(scene, frame, top, pitch, height, end, axis, tuple(grid))


# -- beside the rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Figures:
    """What stands behind each row."""

    busy: list[str]
    bubble: list[str]

    @property
    def widths(self) -> tuple[float, float]:
        busy, bubble = (
            max(text_width(text, BESIDE) for text in (*texts, name))
            for texts, name in ((self.busy, "busy"), (self.bubble, "bubble"))
        )
        return busy, bubble

    @property
    def width(self) -> float:
        return sum(self.widths) + 14


def _beside(
    labels: Sequence[str], figures: _Figures, frame: Frame, top: float, pitch: float, height: float
) -> Iterator[Text]:
    """Names and figures of the devices; of every few, where rows are lower than letters."""
    size = min(BESIDE, max(SMALLEST, pitch * 0.72))
    one, _ = figures.widths
    columns = frame.right + 8 + one, frame.right + 8 + figures.width
    for x, name in zip(columns, ("busy", "bubble"), strict=True):
        yield Text(x, top - 6, name, 9, FAINT, "end")
    for d in range(0, len(labels), ceil((size + 2) / pitch)):
        y = top + d * pitch + height / 2 + size * 0.36
        yield Text(frame.left - 8, y, labels[d], size, anchor="end")
        for x, text in zip(columns, (figures.busy[d], figures.bubble[d]), strict=True):
            yield Text(x, y, text, size, anchor="end")


def _ticks(frame: Frame, axis: float, grid: Sequence[tuple[float, float]]) -> Iterator[Item]:
    """Lines and numbers at round times."""
    for time, name in time_ticks(frame.seconds, int(frame.width / 90)):
        x = frame.x(time)
        for top, bottom in grid:
            yield Line(((x, top), (x, bottom)), GRID)
        yield Text(x, axis, name, 9, FAINT, "middle")


def _width(step: Step, letters: float) -> float:
    """As wide as names need: most in letters of the usual size, nearly all in small ones."""
    taking = sorted(span.seconds - span.receiving for span in step.spans if span.seconds > span.receiving)
    if not taking:
        return NARROWEST
    longest = max(names_of(step.spans), key=len)
    usual, short = taking[len(taking) // 2], taking[len(taking) // 10]
    wanted = max(
        (text_width(longest, letters) + SLACK) * step.seconds / usual,
        (text_width(longest, smaller(letters)) + SLACK) * step.seconds / short,
    )
    return min(WIDEST, max(NARROWEST, 1.01 * wanted))


# -- words -----------------------------------------------------------------------------------------------------------


def _headline(step: Step) -> str:
    stages, m, n = step.stages, step.micro_batches, len(step.devices)
    where = "" if stages == n else f" on {counted(n, 'device')}"
    return f"{step.schedule}: {counted(stages, 'stage')}{where}, {counted(m, 'micro-batch', 'es')}"


def _facts(step: Step) -> str:
    facts = [f"{'simulated' if step.is_simulated else 'measured'} step {human_seconds(step.seconds)}"]
    facts.append(f"mean bubble {percent(step.mean_bubble)}")
    if step.away:
        facts.append(f"{human_seconds(step.away)} between forward and backward left out")
    return ", ".join(facts)


def _labels(step: Step) -> list[str]:
    return [f"device {d}: {name}" if name else f"device {d}" for d, name in enumerate(step.devices)]


def _entries(step: Step) -> list[Entry]:
    kinds = {span.action.kind for span in step.spans}
    entries = [Entry(f"{kind} {kind.words}", KINDS[kind]) for kind in KINDS if kind in kinds]
    if any(span.receiving for span in step.spans):
        entries.append(Entry("receiving", RECEIVING))
    return [*entries, Entry("bubble", PAPER, border="#bbbbbb")]
