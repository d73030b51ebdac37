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

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from fxpipe.inspect.axes import duration, time_ticks
from fxpipe.inspect.colours import FAINT, GRID, KIND_NAMES, KINDS, PAPER, RECEIVING, letters_on
from fxpipe.inspect.frames import Frame
from fxpipe.inspect.legends import Entry, legend
from fxpipe.inspect.letters import fitted, text_width
from fxpipe.inspect.memory_charts import HEAD, memory_chart
from fxpipe.inspect.scene import Bars, Group, Item, Line, Rect, Scene, Text
from fxpipe.scheduling.actions import Kind
from fxpipe.steps import Step
from fxpipe.text_timelines import has_loops, names_of
from fxpipe.timelines import Span

MARGIN = 16.0
NARROWEST, WIDEST = 720.0, 1500.0  # of the part where time runs
ROWS = 900.0  # points: as high as rows become together, where they may be
HIGHEST, LOWEST = 34.0, 4.0  # from a row to the next
SMALLEST = 6.5  # letters
LONGEST = 170.0  # of a device's name
MOST_BOXES = 4000
INSTANT = 1.0  # the width of an action that takes no time
NEARLY_ALL = 0.8  # of the boxes of a kind; the others, short by chance, stay without a name
RIM = 5.0  # a narrower box has none: it would hide the colour


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
    """The picture of a step.

    Args:
        title: stands above it; what the step is, if not given.
    """
    n = len(step.devices)
    pitch = min(HIGHEST, max(LOWEST, ROWS / max(1, n)))
    height = pitch * 0.82 if pitch > 8 else pitch - 1
    letters = min(11.0, height * 0.68)
    beside = min(10.0, max(SMALLEST, pitch * 0.72))  # letters beside the rows
    labels = _labels(step, beside)
    busy = [duration(seconds) for seconds in step.busy]
    bubble = [percent(share) for share in step.bubble]
    one, two = (
        max((text_width(text, 10) for text in texts), default=0) for texts in ((*busy, "busy"), (*bubble, "bubble"))
    )
    left = MARGIN + max((text_width(label, max(beside, 11)) for label in labels), default=0) + 8
    frame = Frame(left, left + _width(step, letters), step.seconds)
    width = frame.right + 8 + max(one + 14 + two, 70) + MARGIN
    headline, facts = title or _headline(step), _facts(step)

    still: list[Item] = [
        Text(MARGIN, MARGIN + 14, fitted(headline, width - 2 * MARGIN, 15, is_bold=True), 15, is_bold=True),
        Text(MARGIN, MARGIN + 32, fitted(facts, width - 2 * MARGIN, 11), 11, FAINT),
        *legend(_entries(step), frame.left, MARGIN + 54, frame.width),
    ]
    top = MARGIN + 68
    bottom = top + n * pitch
    columns = frame.right + 8 + one, frame.right + 8 + one + 14 + two
    still += [Text(x, top - 6, name, 9, FAINT, "end") for x, name in zip(columns, ("busy", "bubble"), strict=True)]
    every = max(1, -int(-(beside + 2) // pitch))  # rows, for one with its name beside it
    for d in range(0, n, every):
        y = top + d * pitch + height / 2 + beside * 0.36
        still.append(Text(frame.left - 8, y, labels[d], beside, anchor="end"))
        still += [Text(x, y, text[d], beside, anchor="end") for x, text in zip(columns, (busy, bubble), strict=True)]

    memory_top = bottom + 34
    chart = None
    grid = [(top - 2, bottom + 4)]
    end = bottom
    if step.memory:
        chart = memory_chart(step.memory, step.limits, [f"device {d}" for d in range(n)], frame, memory_top)
        end = memory_top + chart.height
        grid.append((memory_top + HEAD, end))
    axis = bottom + 15
    moving = [
        Group(tuple(_ticks(frame, axis, grid)), "ticks"),
        Group(tuple(_boxes(step, frame, top, pitch, height)), "boxes"),
        Group(tuple(_names(step, frame, top + height / 2, pitch, letters)), "names"),
    ]
    if chart:
        moving.append(Group(chart.moving, "memory"))
        still += chart.still
    told = f"{headline}. {facts}" if title else f"Timeline of {headline}. {facts}"
    depth = end + MARGIN + (0 if chart else 8)
    scene = Scene(width, depth, (Group(tuple(moving), "time"), *still), told)
    return Gantt(scene, frame, top, pitch, height, end, axis, tuple(grid))


def percent(share: float) -> str:
    """`0.333` -> `33.3 %`."""
    return f"{share * 100:.1f} %"


# -- words -----------------------------------------------------------------------------------------------------------


def _headline(step: Step) -> str:
    stages, m, n = step.stages, step.micro_batches, len(step.devices)
    where = "" if stages == n else f" on {n} device{'' if n == 1 else 's'}"
    return (
        f"{step.schedule}: {stages} stage{'' if stages == 1 else 's'}{where}, {m} micro-batch{'' if m == 1 else 'es'}"
    )


def _facts(step: Step) -> str:
    facts = [f"{'simulated' if step.is_simulated else 'measured'} step {duration(step.seconds)}"]
    facts.append(f"mean bubble {percent(step.mean_bubble)}")
    if step.away:
        facts.append(f"{duration(step.away)} between forward and backward left out")
    return ", ".join(facts)


def _labels(step: Step, size: float) -> list[str]:
    names = [f"device {d}: {name}" if name else f"device {d}" for d, name in enumerate(step.devices)]
    return [fitted(name, LONGEST, size) for name in names]


def _entries(step: Step) -> list[Entry]:
    kinds = {span.action.kind for span in step.spans}
    entries = [Entry(f"{kind} {KIND_NAMES[kind]}", KINDS[kind]) for kind in KINDS if kind in kinds]
    if any(span.receiving for span in step.spans):
        entries.append(Entry("receiving", RECEIVING))
    return [*entries, Entry("bubble", PAPER, border="#bbbbbb")]


def told(span: Span) -> str:
    """What a box says where the pointer rests on it."""
    action = span.action
    times = f"{duration(span.seconds)} from {duration(span.start)}"
    received = f", {duration(span.receiving)} of it receiving" if span.receiving else ""
    stage = f"stage {action.stage}, micro-batch {action.micro_batch}"
    return f"{KIND_NAMES[action.kind]}, {stage}: {times}{received}"


# -- boxes -----------------------------------------------------------------------------------------------------------


def _width(step: Step, letters: float) -> float:
    """As wide as the names of most actions need."""
    taking = [span.seconds for span in step.spans if span.seconds > 0]
    if not taking:
        return NARROWEST
    longest = max(text_width(name, letters) for name in names_of(step.spans)) + 4
    return min(WIDEST, max(NARROWEST, longest * step.seconds / median(taking)))


def _ticks(frame: Frame, axis: float, grid: Sequence[tuple[float, float]]) -> Iterator[Item]:
    """Lines and numbers at round times."""
    for time, name in time_ticks(frame.seconds, int(frame.width / 90)):
        x = frame.x(time)
        for top, bottom in grid:
            yield Line(((x, top), (x, bottom)), GRID)
        yield Text(x, axis, name, 9, FAINT, "middle")


def _boxes(step: Step, frame: Frame, top: float, pitch: float, height: float) -> Iterator[Item]:
    if len(step.spans) > MOST_BOXES:
        for d, row in enumerate(step.rows):
            yield from _merged(row, d, frame, top + d * pitch, height)
    else:
        for span in step.spans:
            yield from _box(span, frame, top + span.device * pitch, height)


def _box(span: Span, frame: Frame, y: float, height: float) -> Iterator[Item]:
    left, start, right = _places(span, frame)
    title = told(span)
    if start > left:
        yield Rect(left, y, start - left, height, RECEIVING, title=title)
    width = right - start
    if width > 0:
        yield Rect(start, y, width, height, KINDS[span.action.kind], PAPER if width >= RIM else "", title=title)


def _names(step: Step, frame: Frame, middle: float, pitch: float, letters: float) -> Iterator[Text]:
    """In the boxes of a kind on a device one sort of name: the longest and largest that has room in nearly all."""
    if letters < SMALLEST:
        return
    found: defaultdict[tuple[int, Kind], list[tuple[Span, str]]] = defaultdict(list)
    for span, name in zip(step.spans, names_of(step.spans), strict=True):
        found[span.device, span.action.kind].append((span, name))
    loops, small = has_loops(step.spans), max(SMALLEST, letters * 0.75)
    for (device, kind), row in found.items():
        whole = [name for _, name in row]
        sorts = [whole] if loops else [whole, [str(span.action.micro_batch) for span, _ in row]]
        rooms = [_places(span, frame)[1:] for span, _ in row]
        y = middle + device * pitch
        for names, size in ((names, size) for names in sorts for size in (letters, small)):
            fitting = [k for k, (a, b) in enumerate(rooms) if text_width(names[k], size) + 1.6 <= b - a]
            if len(fitting) >= NEARLY_ALL * len(row):
                fill = letters_on(KINDS[kind])
                for k in fitting:
                    yield Text(sum(rooms[k]) / 2, y + size * 0.36, names[k], size, fill, "middle")
                break


def _merged(row: Sequence[Span], device: int, frame: Frame, y: float, height: float) -> Iterator[Item]:
    """All of a kind as one shape."""
    by_colour: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    seconds: defaultdict[Kind, list[float]] = defaultdict(list)
    for span in row:
        left, start, right = _places(span, frame)
        if start > left:
            by_colour[RECEIVING].append((left, start))
        by_colour[KINDS[span.action.kind]].append((start, right))
        seconds[span.action.kind].append(span.seconds)
    if RECEIVING in by_colour:
        yield Bars(y, height, tuple(by_colour[RECEIVING]), RECEIVING, f"device {device}: receiving")
    for kind, found in seconds.items():
        title = f"device {device}: {KIND_NAMES[kind]}, {len(found)} times, {duration(sum(found))} in all"
        yield Bars(y, height, tuple(by_colour[KINDS[kind]]), KINDS[kind], title)


def _places(span: Span, frame: Frame) -> tuple[float, float, float]:
    """Where it begins, where it has received what it needs, where it ends; what takes no time is a thin stroke."""
    if not span.seconds:
        left = min(frame.x(span.start), frame.right - INSTANT)
        return left, left, left + INSTANT
    return frame.x(span.start), frame.x(span.start + span.receiving), frame.x(span.end)
