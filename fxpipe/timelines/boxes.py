"""The boxes of a timeline, one for each action, and the names in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxpipe.drawing.colours import KINDS, PAPER, RECEIVING, letters_on
from fxpipe.drawing.letters import text_width
from fxpipe.drawing.scene import Bars, Item, Rect, Text
from fxpipe.scheduling.actions import Kind
from fxpipe.timelines import Span
from fxpipe.timelines.frames import Frame
from fxpipe.timelines.steps import Step
from fxpipe.timelines.text import has_loops, names_of
from fxpipe.units import human_seconds

MOST_BOXES = 4000
INSTANT = 1.0  # the width of an action that takes no time
NEARLY_ALL = 0.8  # of the boxes of a kind; the others, short by chance, stay without a name
RIM = 5.0  # a narrower box has none: it would hide the colour
SMALLEST = 6.5  # letters
LEADING = 1.15  # from a line to the next, in heights of letters
SLACK = 1.6  # points beside a name


def boxes(step: Step, frame: Frame, top: float, pitch: float, height: float) -> Iterator[Item]:
    """From `top` downwards; a row is `height` high, and begins `pitch` below the one before."""
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


@dataclass(frozen=True, slots=True)
class Names:
    """What stands in the boxes."""

    texts: tuple[Text, ...]
    are_stacked: bool  # somewhere the stage stands above the micro-batch


def box_names(step: Step, frame: Frame, top: float, pitch: float, height: float) -> Names:
    """In the boxes of a kind on a device one sort of name: the longest and largest that has room in nearly all.

    `F3`, or `2F3` where a device has several stages; then `3`, or 2 above 3. Where no sort has room, as of a measured
    step whose actions are of all lengths, names stand where they have.
    """
    letters = letters_of(height)
    if letters < SMALLEST:
        return Names((), False)
    found: defaultdict[tuple[int, Kind], list[tuple[Span, str]]] = defaultdict(list)
    for span, name in zip(step.spans, names_of(step.spans), strict=True):
        found[span.device, span.action.kind].append((span, name))
    loops = has_loops(step.spans)
    texts: list[Text] = []
    are_stacked = False
    for (device, kind), row in found.items():
        sorts: list[list[tuple[str, ...]]] = [[(name,) for _, name in row]]
        if not loops:
            sorts.append([(str(span.action.micro_batch),) for span, _ in row])
        elif height >= 2 * LEADING * SMALLEST:
            sorts.append([(str(span.action.stage), str(span.action.micro_batch)) for span, _ in row])
        rooms = [_places(span, frame)[1:] for span, _ in row]
        options = [
            (names, size, _fitting(names, size, rooms))
            for names in sorts
            for size in (letters, smaller(letters))
            if len(names[0]) * LEADING * size <= height or len(names[0]) == 1
        ]
        good = (one for one in options if len(one[2]) >= NEARLY_ALL * len(row))
        chosen, size, fitting = next(good, options[0])
        are_stacked = are_stacked or len(chosen[0]) > 1
        for k in fitting:
            for place, text in enumerate(chosen[k]):
                y = top + device * pitch + height / 2 + size * (0.36 + LEADING * (place - (len(chosen[k]) - 1) / 2))
                texts.append(Text(sum(rooms[k]) / 2, y, text, size, letters_on(KINDS[kind]), "middle"))
    return Names(tuple(texts), are_stacked)


def letters_of(height: float) -> float:
    """In a box of that height."""
    return min(11.0, height * 0.68)


def smaller(letters: float) -> float:
    """Where there is less room."""
    return max(SMALLEST, letters * 0.75)


def _fitting(names: Sequence[tuple[str, ...]], size: float, rooms: Sequence[tuple[float, float]]) -> list[int]:
    widths = (max(text_width(line, size) for line in lines) for lines in names)
    return [k for k, (width, (a, b)) in enumerate(zip(widths, rooms, strict=True)) if width + SLACK <= b - a]


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
        title = f"device {device}: {kind.words}, {len(found)} times, {human_seconds(sum(found))} in all"
        yield Bars(y, height, tuple(by_colour[KINDS[kind]]), KINDS[kind], title)


def _places(span: Span, frame: Frame) -> tuple[float, float, float]:
    """Where it begins, where it has received what it needs, where it ends; what takes no time is a thin stroke."""
    if not span.seconds:
        left = min(frame.x(span.start), frame.right - INSTANT)
        return left, left, left + INSTANT
    return frame.x(span.start), frame.x(span.start + span.receiving), frame.x(span.end)


def told(span: Span) -> str:
    """What a box says where the pointer rests on it."""
    action = span.action
    times = f"{human_seconds(span.seconds)} from {human_seconds(span.start)}"
    received = f", {human_seconds(span.receiving)} of it receiving" if span.receiving else ""
    stage = f"stage {action.stage}, micro-batch {action.micro_batch}"
    return f"{action.kind.words}, {stage}: {times}{received}"
