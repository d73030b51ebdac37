"""A plan as a picture: every stage a lane, its modules as long as they take, and what goes from stage to stage.

    ┌───────────┬────────────────────────────┬────────────────────┐
    │ stage 0   │ ▇▇▇▇ down.0 ▇▇▇ ▇ down.1 ▇ │ down.0.5 → stage 3 ├──╮
    └───────────┴─────┬──────────────────────┴────────────────────┘  │
                      ▼ 64.0 KiB                                     │ portals: arcs over the lanes that they skip
    ┌───────────┬────────────────────────────┬────────────────────┐  │
    │ stage 1   │ ▇▇▇▇▇▇ bottom ▇▇▇▇▇▇▇▇▇▇▇▇ │                    │  │
    └───────────┴─────┬──────────────────────┴────────────────────┘  │

Lanes are rows, so that names and figures read as text, a plan of 64 stages is a page to scroll, and stages compare
like the bars of a chart: all lanes have one scale of time. Arcs have a side of their own, where nothing is written: the
names of portals stand in the lane that they leave. Portals with the same two ends are one arc. A picture of hundreds of
arcs says nothing: the largest are drawn, the others counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fxpipe.drawing.colours import FAINT, INK
from fxpipe.drawing.letters import fitted, text_width
from fxpipe.drawing.scene import Curve, Item, Rect, Scene, Text
from fxpipe.inspect.lanes.arcs import arcs, ports
from fxpipe.inspect.lanes.frame import (
    GAP,
    HEAD,
    LARGE,
    LEAST_BOX,
    MARGIN,
    MOST_ARCS,
    SMALL,
    USUAL,
    Frame,
    seconds_of,
    title_of,
)
from fxpipe.plans.grouping import NodeGroup, groups_of, short_name
from fxpipe.units import counted, human_bytes, human_seconds, percent

if TYPE_CHECKING:
    from fxpipe.plans import Plan, StagePlan

MOST_GROUPS = 16  # in a lane

BAND, LINE = "#f3f5f7", "#8b949e"
# For each device: of its boxes, those of small modules together, and the mark at the head of a lane.
DEVICES = (
    ("#b9d6f2", "#dcebf8", "#0072b2"),
    ("#f6cfa8", "#fbe7d4", "#d55e00"),
    ("#b5e0d1", "#daf0e8", "#009e73"),
    ("#ecc9dd", "#f5e4ee", "#b85c94"),
    ("#f3e3a6", "#f9f1d3", "#a88000"),
    ("#cfcdf0", "#e7e6f7", "#5b55b5"),
)  # fmt: skip


def lanes(plan: Plan, title: str = "") -> Scene:
    """The picture. Bytes and seconds are those of one micro-batch."""
    frame = Frame.of(plan)
    items: list[Item] = []
    items += _heading(plan, title)
    for stage in plan.stages:
        items += _lane(plan, stage, frame)
    for stage in plan.stages[:-1]:
        items += _arrow(plan, stage, frame)
    items += arcs(frame)
    y = frame.bottom + 24
    for line in _notes(plan, frame):
        items.append(Text(MARGIN, y, line, SMALL, FAINT))
        y += 15
    return Scene(frame.width, y + MARGIN - 10, tuple(items), title or _summary(plan))


def _heading(plan: Plan, title: str) -> Iterator[Item]:
    yield Text(MARGIN, 28, title or _summary(plan), LARGE, INK, is_bold=True)
    if title:
        yield Text(MARGIN, 46, _summary(plan), USUAL, FAINT)


def _summary(plan: Plan) -> str:
    stages, devices = len(plan.stages), len(plan.workers)
    on = f" on {counted(devices, 'device')}" if devices != stages else ""
    most = "" if plan.micro_batches == 1 else "at most "
    return (
        f"{counted(stages, 'stage')}{on}, {counted(plan.micro_batches, 'micro-batch', 'es')} of {most}"
        f"{counted(plan.micro_batch, 'sample')}, {plan.schedule.partition(':')[0]}"
    )


def _notes(plan: Plan, frame: Frame) -> Iterator[str]:
    yield (
        "A box is a module, as long as what it takes of a micro-batch, forward and backward: the longest lane is "
        f"{human_seconds(frame.slowest)}. Paler boxes are several small ones."
    )
    arcs = "; arcs: portals, straight to the stage that uses them" if frame.drawn else ""
    yield f"Arrows: values that the next stage uses{arcs}. Gradients go back the same ways."
    if frame.left_out:
        portals = sum(len(bundle.portals) for bundle in frame.left_out)
        size = human_bytes(sum(bundle.bytes for bundle in frame.left_out))
        yield f"Only the {MOST_ARCS} largest arcs are drawn: {portals} more portals between other stages, {size}."


def _lane(plan: Plan, stage: StagePlan, frame: Frame) -> Iterator[Item]:
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
            x,
            top + 5,
            max(min(0.75, width), width - GAP),
            frame.lane - 10,
            fill,
            radius=2,
            title=_group_title(group, stage),
        )
        yield from _box_text(group, stage, x, width - GAP, frame)
        x += width
    yield from ports(stage.index, frame)


def _colours(plan: Plan, stage: StagePlan) -> tuple[str, str, str]:
    """By device, where devices have several stages; where each lane has its own, colours would tell nothing."""
    device = plan.placement[stage.index] if len(plan.workers) < len(plan.stages) else 0
    return DEVICES[device % len(DEVICES)]


def _head(plan: Plan, stage: StagePlan, frame: Frame) -> Iterator[Item]:
    x, room = MARGIN + 13, HEAD - 20
    device = plan.placement[stage.index]
    name = f"stage {stage.index}"
    where = f"device {device}, {stage.device}"
    time = f"{human_seconds(stage.forward_seconds)} + {human_seconds(stage.backward_seconds)}"
    base = 3.5  # from the middle of a line to its base line
    yield Text(x, frame.row(stage.index, 0) + base, name, USUAL, INK, is_bold=True)
    if frame.is_low:
        beside = text_width(name, USUAL, is_bold=True) + 6
        short = f"device {device}" if len(plan.workers) < len(plan.stages) else stage.device
        yield Text(x + beside, frame.row(stage.index, 0) + base, fitted(short, room - beside, SMALL), SMALL, FAINT)
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
    device = plan.placement[stage.index]
    return title_of(f"stage {stage.index}, device {device}, {stage.device}: {counted(len(stage.nodes), 'node')}", lines)


def _box_text(group: NodeGroup, stage: StagePlan, x: float, width: float, frame: Frame) -> Iterator[Item]:
    """Its name and its time, each where there is room."""
    room = width - 8
    name = counted(len(group.nodes), "node") if group.is_elided else short_name(group.name, room, SMALL)
    time = human_seconds(group.share * seconds_of(stage))
    middle = frame.top(stage.index) + frame.lane / 2
    if not name or text_width(name, SMALL) > room:
        return
    has_time = text_width(time, SMALL) <= room
    yield Text(x + 4, middle + (-2.5 if has_time else 3.5), name, SMALL, INK)
    if has_time:
        yield Text(x + 4, middle + 9.5, time, SMALL, FAINT)


def _group_title(group: NodeGroup, stage: StagePlan) -> str:
    time = human_seconds(group.share * seconds_of(stage))
    head = f"{group.name}: {counted(len(group.nodes), 'node')}, {time}, {percent(group.share)} of stage {stage.index}"
    return title_of(head, [name for name in group.nodes if name != group.name])


def _arrow(plan: Plan, stage: StagePlan, frame: Frame) -> Iterator[Item]:
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
