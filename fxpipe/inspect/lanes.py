"""A plan as a picture: every stage a lane, its modules as long as they take, and what goes from stage to stage.

    ┌───────────┬────────────────────────────┬────────────────────┐
    │ stage 0   │ ▇▇▇▇ down.0 ▇▇▇ ▇ down.1 ▇ │ down.0.5 → stage 3 ├──╮
    └───────────┴─────┬──────────────────────┴────────────────────┘  │
                      ▼ 64.0 KiB                                     │ portals: arcs over the lanes that they skip
    ┌───────────┬────────────────────────────┬────────────────────┐  │
    │ stage 1   │ ▇▇▇▇▇▇ bottom ▇▇▇▇▇▇▇▇▇▇▇▇ │                    │  │
    └───────────┴─────┬──────────────────────┴────────────────────┘  │

Lanes are rows, so that names and figures read as text, a plan of 64 stages is a page to scroll, and stages compare like
the bars of a chart: all lanes have one scale of time. Arcs have a side of their own, where nothing is written: the names
of portals stand in the lane that they leave. Portals with the same two ends are one arc. A picture of hundreds of arcs
says nothing: the largest are drawn, the others counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.inspect.colours import FAINT, INK
from fxpipe.inspect.grouping import NodeGroup, groups_of, short_name
from fxpipe.inspect.letters import fitted, text_width
from fxpipe.inspect.scene import Curve, Item, Rect, Scene, Text
from fxpipe.units import counted, human_bytes, human_seconds

if TYPE_CHECKING:
    from fxpipe.plans import Plan, Portal, StagePlan

MOST_GROUPS = 16  # in a lane
MOST_ARCS = 160
MANY_STAGES = 20  # from here on lanes are low
MOST_TITLES = 30  # lines of what is shown where the pointer rests

# Points.
MARGIN = 16.0
HEAD = 156.0  # what stands in front of a lane
BAR = 760.0  # the slowest stage
PORTS = 236.0  # for the names of portals
LEAST_BOX = 30.0  # smaller modules go together with their neighbours
GAP = 1.5  # between boxes
ROW = 13.0  # a line of text in a lane
SMALL, USUAL, LARGE = 10.0, 11.0, 15.0  # letters

BAND, LINE = "#f3f5f7", "#8b949e"
# For each worker: of its boxes, those of small modules together, and the mark at the head of a lane.
WORKERS = (
    ("#b9d6f2", "#dcebf8", "#0072b2"),
    ("#f6cfa8", "#fbe7d4", "#d55e00"),
    ("#b5e0d1", "#daf0e8", "#009e73"),
    ("#ecc9dd", "#f5e4ee", "#b85c94"),
    ("#f3e3a6", "#f9f1d3", "#a88000"),
    ("#cfcdf0", "#e7e6f7", "#5b55b5"),
)  # fmt: skip
ARCS = ("#0072b2", "#d55e00", "#009e73", "#b85c94", "#a88000", "#5b55b5", "#3aa0d8")


@dataclass(frozen=True, slots=True)
class Bundle:
    """The portals from one stage to another."""

    source: int
    target: int
    portals: tuple[Portal, ...]

    @property
    def bytes(self) -> int:
        return sum(portal.bytes for portal in self.portals)

    @property
    def label(self) -> str:
        return self.portals[0].name if len(self.portals) == 1 else f"{len(self.portals)} portals"


def bundles_of(portals: Sequence[Portal]) -> tuple[Bundle, ...]:
    """By their ends; the largest first."""
    found: defaultdict[tuple[int, int], list[Portal]] = defaultdict(list)
    for portal in portals:
        found[portal.source, portal.target].append(portal)
    bundles = [Bundle(source, target, tuple(members)) for (source, target), members in found.items()]
    return tuple(sorted(bundles, key=lambda bundle: (-bundle.bytes, bundle.source, bundle.target)))


def lanes(plan: Plan, title: str = "") -> Scene:
    """The picture. Bytes and seconds are those of one micro-batch."""
    frame = _Frame.of(plan)
    items: list[Item] = []
    items += _heading(plan, title)
    for stage in plan.stages:
        items += _lane(plan, stage, frame)
    for stage in plan.stages[:-1]:
        items += _arrow(plan, stage, frame)
    items += _arcs(frame)
    y = frame.bottom + 24
    for line in _notes(plan, frame):
        items.append(Text(MARGIN, y, line, SMALL, FAINT))
        y += 15
    return Scene(frame.width, y + MARGIN - 10, tuple(items), title or _summary(plan))


# -- where everything stands ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Frame:
    """The measures that the parts of the picture share."""

    stages: int
    slowest: float  # seconds of a stage, forward and backward
    drawn: tuple[Bundle, ...]  # as arcs
    left_out: tuple[Bundle, ...]
    leaving: dict[int, tuple[Bundle, ...]]  # by stage; the largest first
    arriving: dict[int, tuple[Bundle, ...]]

    @classmethod
    def of(cls, plan: Plan) -> _Frame:
        bundles = bundles_of(plan.portals)
        leaving: defaultdict[int, list[Bundle]] = defaultdict(list)
        arriving: defaultdict[int, list[Bundle]] = defaultdict(list)
        for bundle in bundles:
            leaving[bundle.source].append(bundle)
            arriving[bundle.target].append(bundle)
        return cls(
            len(plan.stages),
            max(_seconds(stage) for stage in plan.stages),
            bundles[:MOST_ARCS],
            bundles[MOST_ARCS:],
            {stage: tuple(found) for stage, found in leaving.items()},
            {stage: tuple(found) for stage, found in arriving.items()},
        )

    @property
    def is_low(self) -> bool:
        return self.stages >= MANY_STAGES

    @property
    def lane(self) -> float:
        """Its height."""
        return 2 * ROW + 10 if self.is_low else 4 * ROW + 14

    @property
    def between(self) -> float:
        return 18.0 if self.is_low else 28.0

    @property
    def right(self) -> float:
        """The end of the lanes, where arcs begin."""
        return MARGIN + HEAD + BAR + 10 + (PORTS if self.drawn else 0)

    @property
    def reach(self) -> float:
        """How far the widest arc goes."""
        farthest = max((b.target - b.source for b in self.drawn), default=0)
        return min(240.0, 50.0 + 16.0 * farthest) if farthest else 0.0

    @property
    def width(self) -> float:
        return self.right + self.reach + MARGIN

    @property
    def bottom(self) -> float:
        return self.top(self.stages - 1) + self.lane

    def top(self, stage: int) -> float:
        return 58.0 + stage * (self.lane + self.between)

    def length(self, stage: StagePlan) -> float:
        """Of its boxes; one that takes no time is still there."""
        return max(LEAST_BOX, BAR * (_seconds(stage) / self.slowest if self.slowest else 1.0))

    @property
    def rows(self) -> int:
        """Lines of text in a lane."""
        return 2 if self.is_low else 4

    def row(self, stage: int, k: int) -> float:
        """The middle of its k-th line."""
        return self.top(stage) + (self.lane - self.rows * ROW) / 2 + ROW * (k + 0.5)

    def first_row(self, stage: int) -> int:
        """The line in which the portals that leave begin: those that arrive have the one before."""
        return 1 if self.arriving.get(stage) else 0

    def row_of(self, bundle: Bundle) -> int:
        """The line in which it is named or, with others, counted."""
        place = self.leaving[bundle.source].index(bundle)
        return min(self.first_row(bundle.source) + place, self.rows - 1)


def _seconds(stage: StagePlan) -> float:
    return stage.forward_seconds + stage.backward_seconds


# -- what is drawn -------------------------------------------------------------------------------------------------------


def _heading(plan: Plan, title: str) -> Iterator[Item]:
    yield Text(MARGIN, 28, title or _summary(plan), LARGE, INK, is_bold=True)
    if title:
        yield Text(MARGIN, 46, _summary(plan), USUAL, FAINT)


def _summary(plan: Plan) -> str:
    stages, workers = len(plan.stages), len(plan.workers)
    on = f" on {counted(workers, 'worker')}" if workers != stages else ""
    most = "" if plan.micro_batches == 1 else "at most "
    return (
        f"{counted(stages, 'stage')}{on}, {counted(plan.micro_batches, 'micro-batch', 'es')} of {most}"
        f"{counted(plan.micro_batch, 'sample')}, {plan.schedule.partition(':')[0]}"
    )


def _notes(plan: Plan, frame: _Frame) -> Iterator[str]:
    yield (
        "A box is a module, as long as what it takes of a micro-batch, forward and backward: the longest lane is "
        f"{human_seconds(frame.slowest)}. Paler boxes are several small ones."
    )
    arcs = "; arcs: portals, straight to the stage that uses them" if frame.drawn else ""
    yield f"Arrows: values that the next stage uses{arcs}. Gradients go back the same ways."
    if frame.left_out:
        portals = sum(len(bundle.portals) for bundle in frame.left_out)
        size = human_bytes(sum(bundle.bytes for bundle in frame.left_out))
        yield f"Drawn are the {MOST_ARCS} largest arcs; {portals} portals between other stages, {size}, are counted only."


def _lane(plan: Plan, stage: StagePlan, frame: _Frame) -> Iterator[Item]:
    top, boxes, small, mark = frame.top(stage.index), *_colours(plan, stage)
    title = _stage_title(plan, stage)
    yield Rect(MARGIN, top, frame.right - MARGIN, frame.lane, BAND, radius=4, title=title)
    yield Rect(MARGIN, top, 5, frame.lane, mark, radius=2, title=title)
    yield from _head(plan, stage, frame)
    x, length = MARGIN + HEAD, frame.length(stage)
    groups = groups_of(stage, MOST_GROUPS, LEAST_BOX / length)
    for group in groups:
        width = length * group.share / (sum(g.share for g in groups) or 1.0)
        fill = small if group.is_elided else boxes
        yield Rect(
            x, top + 5, max(0.75, width - GAP), frame.lane - 10, fill, radius=2, title=_group_title(group, stage)
        )
        yield from _box_text(group, stage, x, width - GAP, frame)
        x += width
    yield from _ports(stage, frame)


def _colours(plan: Plan, stage: StagePlan) -> tuple[str, str, str]:
    """By worker where workers have several stages; else every lane is its own worker, and colours would tell nothing."""
    worker = plan.placement[stage.index] if len(plan.workers) < len(plan.stages) else 0
    return WORKERS[worker % len(WORKERS)]


def _head(plan: Plan, stage: StagePlan, frame: _Frame) -> Iterator[Item]:
    x, room = MARGIN + 13, HEAD - 20
    worker = plan.placement[stage.index]
    name = f"stage {stage.index}"
    where = f"worker {worker}, {stage.device}"
    time = f"{human_seconds(stage.forward_seconds)} + {human_seconds(stage.backward_seconds)}"
    base = 3.5  # from the middle of a line to its base line
    yield Text(x, frame.row(stage.index, 0) + base, name, USUAL, INK, is_bold=True)
    if frame.is_low:
        beside = text_width(name, USUAL, is_bold=True) + 6
        yield Text(x + beside, frame.row(stage.index, 0) + base, fitted(where, room - beside, SMALL), SMALL, FAINT)
        yield Text(x, frame.row(stage.index, 1) + base, time, SMALL, FAINT)
        return
    lines = (fitted(where, room, SMALL), time, f"{human_bytes(stage.parameter_bytes)} parameters")
    for k, line in enumerate(lines):
        yield Text(x, frame.row(stage.index, k + 1) + base, line, SMALL, FAINT)


def _stage_title(plan: Plan, stage: StagePlan) -> str:
    lines = [
        f"forward {human_seconds(stage.forward_seconds)}, backward {human_seconds(stage.backward_seconds)}",
        f"{human_bytes(stage.parameter_bytes)} of parameters",
        *([f"{counted(len(stage.copies), 'node')} of other stages computed here, too"] if stage.copies else ()),
    ]
    worker = plan.placement[stage.index]
    return _lines(f"stage {stage.index}, worker {worker}, {stage.device}: {counted(len(stage.nodes), 'node')}", lines)


def _box_text(group: NodeGroup, stage: StagePlan, x: float, width: float, frame: _Frame) -> Iterator[Item]:
    """Its name and its time, each where there is room."""
    room = width - 8
    name = counted(len(group.nodes), "node") if group.is_elided else short_name(group.name, room, SMALL)
    time = human_seconds(group.share * _seconds(stage))
    middle = frame.top(stage.index) + frame.lane / 2
    if not name or text_width(name, SMALL) > room:
        return
    has_time = text_width(time, SMALL) <= room
    yield Text(x + 4, middle + (-2.5 if has_time else 3.5), name, SMALL, INK)
    if has_time:
        yield Text(x + 4, middle + 9.5, time, SMALL, FAINT)


def _group_title(group: NodeGroup, stage: StagePlan) -> str:
    head = f"{group.name}: {counted(len(group.nodes), 'node')}, {human_seconds(group.share * _seconds(stage))}, {100 * group.share:.1f} % of stage"
    return _lines(f"{head} {stage.index}", [name for name in group.nodes if name != group.name])


def _lines(head: str, lines: Sequence[str]) -> str:
    shown = [head, *lines[:MOST_TITLES]]
    return "\n".join(shown if len(lines) <= MOST_TITLES else [*shown, f"and {len(lines) - MOST_TITLES} more"])


def _arrow(plan: Plan, stage: StagePlan, frame: _Frame) -> Iterator[Item]:
    """To the next stage."""
    if not stage.sent_bytes:
        return
    x, y, end = MARGIN + HEAD + 24, frame.top(stage.index) + frame.lane, frame.top(stage.index + 1)
    size = human_bytes(stage.sent_bytes)
    is_same = plan.placement[stage.index] == plan.placement[stage.index + 1]
    text = f"{size}, stays on the device" if is_same else size
    title = f"stage {stage.index} to stage {stage.index + 1}: {size} for each micro-batch"
    middle = (y + end) / 2
    yield Curve((x, y + 1), ((x, middle), (x, middle)), (x, end - 1), LINE if is_same else FAINT, 1.5, True, title)
    yield Text(x + 9, middle + 3.5, text, SMALL, FAINT)


def _ports(stage: StagePlan, frame: _Frame) -> Iterator[Item]:
    """What the lane says of its portals: those that arrive in sum, those that leave by name, as many as fit."""
    x, room = frame.right - PORTS, PORTS - 22
    j, base = stage.index, 3.5
    if arriving := frame.arriving.get(j, ()):
        yield Text(x, frame.row(j, 0) + base, _sum_of("in", arriving, room), SMALL, FAINT)
    leaving = frame.leaving.get(j, ())
    rows = frame.rows - frame.first_row(j)
    named = leaving if len(leaving) <= rows else leaving[: rows - 1]
    for bundle in named:
        size = f" → {bundle.target}, {human_bytes(bundle.bytes)}"
        name = fitted(bundle.label, room - text_width(size, SMALL), SMALL)
        yield Text(x, frame.row(j, frame.row_of(bundle)) + base, name + size, SMALL, INK)
    if rest := leaving[len(named) :]:
        yield Text(x, frame.row(j, frame.rows - 1) + base, _sum_of("and" if named else "out", rest, room), SMALL, FAINT)


def _sum_of(word: str, bundles: Sequence[Bundle], room: float) -> str:
    portals = counted(sum(len(bundle.portals) for bundle in bundles), "portal")
    return fitted(f"{word}: {portals}, {human_bytes(sum(bundle.bytes for bundle in bundles))}", room, SMALL)


def _arcs(frame: _Frame) -> Iterator[Item]:
    """The widest below, so that the short ones, which they would hide, are seen and pointed at."""
    farthest = max((bundle.target - bundle.source for bundle in frame.drawn), default=1)
    largest = max((bundle.bytes for bundle in frame.drawn), default=1) or 1
    for bundle in sorted(frame.drawn, key=lambda bundle: bundle.source - bundle.target):
        start = frame.row(bundle.source, frame.row_of(bundle))
        arriving = frame.arriving[bundle.target]
        place = (arriving.index(bundle) + 0.5) / len(arriving)
        end = frame.top(bundle.target) + 4 + (ROW + 2) * place
        part = (bundle.target - bundle.source) / farthest
        control = frame.right + (frame.reach * (0.2 + 0.8 * part)) / 0.75  # a Bézier curve goes three quarters as far
        thickness = 1.0 + 2.5 * (bundle.bytes / largest) ** 0.5
        colour = ARCS[bundle.source % len(ARCS)]
        yield Curve(
            (frame.right, start),
            ((control, start), (control, end)),
            (frame.right + 1, end),
            colour,
            thickness,
            True,
            _bundle_title(bundle),
        )


def _bundle_title(bundle: Bundle) -> str:
    head = f"stage {bundle.source} to stage {bundle.target}: {human_bytes(bundle.bytes)} for each micro-batch"
    by_size = sorted(bundle.portals, key=lambda portal: -portal.bytes)
    return _lines(head, [f"{portal.name}  {human_bytes(portal.bytes)}" for portal in by_size])
