"""A plan as a picture: a lane for each stage, its modules in proportion to their time, and values between stages.

    ┌───────────┬────────────────────────────┬────────────────────┐
    │ stage 0   │ ▇▇▇▇ down.0 ▇▇▇ ▇ down.1 ▇ │ down.0.5 → stage 3 ├──╮
    └───────────┴─────┬──────────────────────┴────────────────────┘  │
                      ▼ 64.0 KiB                                     │ portals: arcs over the lanes that they skip
    ┌───────────┬────────────────────────────┬────────────────────┐  │
    │ stage 1   │ ▇▇▇▇▇▇ bottom ▇▇▇▇▇▇▇▇▇▇▇▇ │                    │  │

All lanes share one time scale. Portals between the same two stages are one arc.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, takewhile
from pathlib import Path
from typing import NamedTuple

from fxpipe.inspect.plan_text import plan_headline
from fxpipe.inspect.style import FAINT, INK, fit_text, text_width
from fxpipe.inspect.svg import Curve, Item, Rect, Scene, Text, svg_of
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.data import Portal, StagePlan
from fxpipe.utils.files import check_output_path, write_atomically
from fxpipe.utils.text_table import number_ranges
from fxpipe.utils.units import count_text, human_bytes, human_seconds, percent

MAX_TITLE_LINES = 30  # lines of a hover title
GRAPH_MARGIN = 16.0  # points, like all lengths
LANE_HEAD = 156.0  # the labels left of a lane
LONGEST_BAR = 760.0
PORTAL_NAMES_WIDTH = 236.0
LEAST_BOX_WIDTH = 30.0  # smaller modules are merged with their neighbours
BOX_GAP = 1.5
TEXT_ROW = 13.0
LANE_ROWS = 4  # lines of text
LANE_HEIGHT, BETWEEN_LANES = LANE_ROWS * TEXT_ROW + 14, 28.0
SMALL_LETTERS, USUAL_LETTERS, LARGE_LETTERS = 10.0, 11.0, 15.0  # font sizes


@dataclass(frozen=True, slots=True)
class PortalBundle:
    source: int
    target: int
    portals: tuple[Portal, ...]

    @property
    def bytes(self) -> int:
        return sum(portal.bytes for portal in self.portals)


def bundles_of(portals: Sequence[Portal]) -> tuple[PortalBundle, ...]:
    """Bundles portals by source and target, largest bundle first."""
    members: defaultdict[tuple[int, int], list[Portal]] = defaultdict(list)
    for portal in portals:
        members[portal.source, portal.target].append(portal)
    bundles = [PortalBundle(*ends, tuple(same)) for ends, same in members.items()]
    return tuple(sorted(bundles, key=lambda bundle: (-bundle.bytes, bundle.source, bundle.target)))


@dataclass(frozen=True, slots=True)
class GraphLayout:
    slowest: float  # seconds of the slowest stage, forward and backward
    bundles: tuple[PortalBundle, ...]  # largest first

    def leaving(self, stage: int) -> list[PortalBundle]:
        return [bundle for bundle in self.bundles if bundle.source == stage]

    def arriving(self, stage: int) -> list[PortalBundle]:
        return [bundle for bundle in self.bundles if bundle.target == stage]

    @property
    def right(self) -> float:
        """The right end of the lanes, where arcs begin."""
        return GRAPH_MARGIN + LANE_HEAD + LONGEST_BAR + 10 + (PORTAL_NAMES_WIDTH if self.bundles else 0)

    @property
    def farthest(self) -> int:
        """The largest number of stages from the source of a portal to its target; 0 without portals."""
        return max((bundle.target - bundle.source for bundle in self.bundles), default=0)

    @property
    def reach(self) -> float:
        return min(240.0, 50.0 + 16.0 * self.farthest) if self.farthest else 0.0

    def top(self, stage: int) -> float:
        return 58.0 + stage * (LANE_HEIGHT + BETWEEN_LANES)

    def row(self, stage: int, k: int) -> float:
        """Returns the y of the middle of a lane's k-th line."""
        return self.top(stage) + (LANE_HEIGHT - LANE_ROWS * TEXT_ROW) / 2 + TEXT_ROW * (k + 0.5)

    def label(self, stage: int, k: int, x: float, text: str, width: float) -> Text:
        """Returns a small text in a lane's k-th line, shortened to `width`."""
        return Text(x, self.row(stage, k) + 3.5, fit_text(text, width, SMALL_LETTERS), SMALL_LETTERS, FAINT)

    def line_of(self, bundle: PortalBundle) -> int:
        """Returns the line in which a bundle is named, or counted with others; a sum of incoming portals is before."""
        place = self.leaving(bundle.source).index(bundle)
        return min(bool(self.arriving(bundle.source)) + place, LANE_ROWS - 1)


def hover_title(head: str, lines: Sequence[str]) -> str:
    """Makes a hover title of at most `MAX_TITLE_LINES` lines and a count."""
    more = [f"and {len(lines) - MAX_TITLE_LINES} more"] if len(lines) > MAX_TITLE_LINES else []
    return "\n".join([head, *lines[:MAX_TITLE_LINES], *more])


ARC_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b85c94", "#a88000", "#5b55b5", "#3aa0d8")  # by source stage


def portal_labels(j: int, frame: GraphLayout) -> Iterator[Item]:
    """Yields the labels of a lane's portals: a sum of incoming portals, and names of outgoing portals that fit."""
    x, room = frame.right - PORTAL_NAMES_WIDTH, PORTAL_NAMES_WIDTH - 22
    if arriving := frame.arriving(j):
        yield frame.label(j, 0, x, _bundles_text("in", arriving), room)
    leaving, rows = frame.leaving(j), LANE_ROWS - bool(arriving)
    named = leaving if len(leaving) <= rows else leaving[: rows - 1]
    for bundle in named:
        size = f" → {bundle.target}, {human_bytes(bundle.bytes)}"
        label = bundle.portals[0].name if len(bundle.portals) == 1 else f"{len(bundle.portals)} portals"
        name = fit_text(label, room - text_width(size, SMALL_LETTERS), SMALL_LETTERS)
        yield replace(frame.label(j, frame.line_of(bundle), x, name + size, room), fill=INK)
    if rest := leaving[len(named) :]:
        yield frame.label(j, LANE_ROWS - 1, x, _bundles_text("and", rest), room)


def _bundles_text(word: str, bundles: Sequence[PortalBundle]) -> str:
    portals = count_text(sum(len(bundle.portals) for bundle in bundles), "portal")
    return f"{word}: {portals}, {human_bytes(sum(bundle.bytes for bundle in bundles))}"


def portal_arcs(frame: GraphLayout) -> Iterator[Item]:
    """Yields the arcs, widest first, so that shorter arcs are on top."""
    largest = max((bundle.bytes for bundle in frame.bundles), default=1) or 1
    for bundle in sorted(frame.bundles, key=lambda bundle: bundle.source - bundle.target):
        start, arriving = frame.row(bundle.source, frame.line_of(bundle)), frame.arriving(bundle.target)
        end = frame.top(bundle.target) + 4 + (TEXT_ROW + 2) * (arriving.index(bundle) + 0.5) / len(arriving)
        part = (bundle.target - bundle.source) / frame.farthest
        control = frame.right + (frame.reach * (0.2 + 0.8 * part)) / 0.75  # the curve reaches 3/4 of this
        controls = ((control, start), (control, end))
        colour, width = ARC_COLOURS[bundle.source % len(ARC_COLOURS)], 1.0 + 2.5 * (bundle.bytes / largest) ** 0.5
        head = f"stage {bundle.source} to stage {bundle.target}: {human_bytes(bundle.bytes)} for each micro-batch"
        by_size = sorted(bundle.portals, key=lambda portal: -portal.bytes)
        title = hover_title(head, [f"{portal.name}  {human_bytes(portal.bytes)}" for portal in by_size])
        yield Curve((frame.right, start), controls, (frame.right + 1, end), colour, width, title)


MAX_GROUPS = 16

BAND, LOCAL_ARROW_COLOUR = "#f3f5f7", "#8b949e"
# For each device: the colours of boxes, of merged small modules, and of the mark at the left of a lane.
DEVICE_COLOURS = (
    ("#b9d6f2", "#dcebf8", "#0072b2"),
    ("#f6cfa8", "#fbe7d4", "#d55e00"),
    ("#b5e0d1", "#daf0e8", "#009e73"),
    ("#ecc9dd", "#f5e4ee", "#b85c94"),
    ("#f3e3a6", "#f9f1d3", "#a88000"),
    ("#cfcdf0", "#e7e6f7", "#5b55b5"),
)  # fmt: skip


def draw_stage_graph(plan: Plan, title: str = "") -> Scene:
    """Draws the stage graph. Bytes and seconds are for one micro-batch."""
    frame = GraphLayout(max(stage.seconds for stage in plan.stages), bundles_of(plan.portals))
    summary = f"{plan_headline(plan)}, {plan.schedule.partition(':')[0]}"
    items: list[Item] = [Text(GRAPH_MARGIN, 28, title or summary, LARGE_LETTERS, INK, is_bold=True)]
    if title:
        items.append(Text(GRAPH_MARGIN, 46, summary, USUAL_LETTERS, FAINT))
    for stage in plan.stages:
        items += _lane_items(plan, stage, frame)
    for stage in plan.stages[:-1]:
        if not stage.sent_bytes:
            continue
        x, top, end = GRAPH_MARGIN + LANE_HEAD + 24, frame.top(stage.index) + LANE_HEIGHT, frame.top(stage.index + 1)
        is_same = plan.placement[stage.index] == plan.placement[stage.index + 1]
        size, stays = human_bytes(stage.sent_bytes), ", stays on the device" if is_same else ""
        name = f"stage {stage.index} to stage {stage.index + 1}: {size} for each micro-batch"
        middle, colour = (top + end) / 2, LOCAL_ARROW_COLOUR if is_same else FAINT
        items.append(Curve((x, top + 1), ((x, middle), (x, middle)), (x, end - 1), colour, 1.5, name))
        items.append(Text(x + 9, middle + 3.5, f"{size}{stays}", SMALL_LETTERS, FAINT))
    items += portal_arcs(frame)
    arcs = "; arcs: portals, straight to the stage that uses them" if frame.bundles else ""
    notes = (
        "A box is a module, as long as what it takes of a micro-batch, forward and backward: the longest lane is "
        f"{human_seconds(frame.slowest)}. Paler boxes are several small ones.",
        f"Arrows: values that the next stage uses{arcs}. Gradients go back the same ways.",
    )
    y = frame.top(len(plan.stages) - 1) + LANE_HEIGHT + 24
    items += [Text(GRAPH_MARGIN, y + 15 * k, line, SMALL_LETTERS, FAINT) for k, line in enumerate(notes)]
    return Scene(frame.right + frame.reach + GRAPH_MARGIN, y + 36, tuple(items), title or summary)


def _lane_items(plan: Plan, stage: StagePlan, frame: GraphLayout) -> Iterator[Item]:
    # One colour for all if each device has one stage.
    device = plan.placement[stage.index] if len(plan.workers) < len(plan.stages) else 0
    boxes, small, mark = DEVICE_COLOURS[device % len(DEVICE_COLOURS)]
    top, rows = frame.top(stage.index), plan.stage_rows[stage.index]  # several if replicas take turns
    names = dict.fromkeys(plan.row_devices[row] for row in rows)
    devices = f"device{'s' if len(rows) > 1 else ''} {number_ranges(rows)}, {' '.join(names)}"
    title = f"stage {stage.index}, {devices}: {count_text(len(stage.nodes), 'node')}"
    yield Rect(GRAPH_MARGIN, top, frame.right - GRAPH_MARGIN, LANE_HEIGHT, BAND, radius=4, title=title)
    yield Rect(GRAPH_MARGIN, top, 5, LANE_HEIGHT, mark, radius=2, title=title)
    head = (
        f"stage {stage.index}",
        devices,
        f"{human_seconds(stage.forward_seconds)} + {human_seconds(stage.backward_seconds)}",
        f"{human_bytes(stage.parameter_bytes)} parameters",
    )
    first, *rest = (frame.label(stage.index, k, GRAPH_MARGIN + 13, line, LANE_HEAD - 20) for k, line in enumerate(head))
    yield from (replace(first, size=USUAL_LETTERS, fill=INK, is_bold=True), *rest)
    x, share = GRAPH_MARGIN + LANE_HEAD, stage.seconds / frame.slowest if frame.slowest else 1.0
    length = max(LEAST_BOX_WIDTH, LONGEST_BAR * share)  # a stage that takes no time is drawn, too
    groups = node_groups_of(stage, MAX_GROUPS, LEAST_BOX_WIDTH / length)
    for group in groups:
        width = length * group.share / (sum(g.share for g in groups) or 1.0)
        yield from _group_items(group, stage, x, width, small if group.is_elided else boxes, top)
        x += width
    yield from portal_labels(stage.index, frame)


def _group_items(group: NodeGroup, stage: StagePlan, x: float, width: float, fill: str, y: float) -> Iterator[Item]:
    """Yields a box, and below the top `y` of its lane the name and time of its nodes if they fit."""
    time, count = human_seconds(group.share * stage.seconds), count_text(len(group.nodes), "node")
    head = f"{group.name}: {count}, {time}, {percent(group.share)} of stage {stage.index}"
    title = hover_title(head, [name for name in group.nodes if name != group.name])
    shown = max(min(0.75, width), width - BOX_GAP)
    yield Rect(x, y + 5, shown, LANE_HEIGHT - 10, fill, radius=2, title=title)
    room, middle = width - BOX_GAP - 8, y + LANE_HEIGHT / 2
    name = count if group.is_elided else short_group_name(group.name, room, SMALL_LETTERS)
    if not name or text_width(name, SMALL_LETTERS) > room:
        return
    has_time = text_width(time, SMALL_LETTERS) <= room
    yield Text(x + 4, middle + (-2.5 if has_time else 3.5), name, SMALL_LETTERS, INK)
    if has_time:
        yield Text(x + 4, middle + 9.5, time, SMALL_LETTERS, FAINT)


def save_graph(plan: Plan, path: str | Path, *, title: str = "") -> None:
    """Writes a picture of a plan: stages as lanes of modules, values between them, and portals as arcs.

        save_graph(plan, "graph.svg")

    Args:
        path: ends in `.svg`.
        title: heading, such as the model's name.

    Raises:
        ArgumentError: the path has another suffix.
        FileError: the path cannot be written.
    """
    check_output_path(path, ("svg",), "a graph")
    write_atomically(path, svg_of(draw_stage_graph(plan, title)).encode(), "a graph")


RANGE_DASH = " – "  # from the first name to the last
NUMBER_LETTERS = frozenset("0123456789.…" + RANGE_DASH)
MIN_LETTERS = 4.5  # minimum width of a name cut in its middle, as a multiple of the font size


class StageNode(NamedTuple):
    name: str
    path: tuple[str, ...]  # path of its module
    share: float  # share of the stage's seconds, 0 to 1


@dataclass(frozen=True)  # no slots, for the cached property
class NodeGroup:
    """Consecutive nodes of a stage."""

    members: Sequence[StageNode]
    is_elided: bool = False  # joined only because they are small
    is_outside_module: bool = False  # a node shown by its name instead of its module's

    @cached_property
    def share(self) -> float:
        return sum(node.share for node in self.members)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.members)

    @property
    def prefix(self) -> tuple[str, ...]:
        """The common prefix of the module paths of all nodes."""
        paths = [node.path for node in self.members]
        pairs = zip(min(paths), max(paths), strict=False)
        return tuple(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def name(self) -> str:
        """The module of the nodes; for several modules, the first and the last."""
        first, last = self.members[0], self.members[-1]
        if len(self.members) == 1:
            return first.name if self.is_outside_module else ".".join(first.path) or first.name
        if self.prefix and not self.is_elided:
            return ".".join(self.prefix)
        ends = [".".join(node.path) or node.name for node in (first, last)]
        return RANGE_DASH.join(dict.fromkeys(ends))


def node_groups_of(stage: StagePlan, most: int, least: float) -> list[NodeGroup]:
    """Divides the stage into at most `most` groups. Only groups between larger ones have a share below `least`."""
    # The slowest group is opened again and again: from the stage to several modules, a module's children and
    # operations, then nodes. Small groups are joined with their neighbors. Groups keep the execution order: a module
    # whose nodes run in several runs is several groups.
    # Without shares or modules in the plan, shares are even, and nodes have no module.
    shares = stage.shares or (1 / max(1, len(stage.nodes)),) * len(stage.nodes)
    modules = stage.modules or ("",) * len(stage.nodes)
    paths = (tuple(module.split(".")) if module else () for module in modules)
    nodes = list(map(StageNode, stage.nodes, paths, shares))
    groups, closed = [NodeGroup(nodes)] if nodes else [], [False] if nodes else []
    while not all(closed):
        at = max((k for k in range(len(groups)) if not closed[k]), key=lambda k: groups[k].share)
        members, depth = groups[at].members, len(groups[at].prefix)
        if all(len(node.path) == depth for node in members):
            parts = [NodeGroup([node], is_outside_module=True) for node in members]
        else:
            by_child = groupby(members, key=lambda node: node.path[depth : depth + 1])
            parts = [NodeGroup(list(same)) for _, same in by_child]
        parts = _join_small(parts, least)
        if len(parts) == 1 or len(groups) + len(parts) - 1 > most:
            closed[at] = True
            continue
        groups[at : at + 1] = parts
        closed[at : at + 1] = [len(part.nodes) == 1 or part.share < least for part in parts]
    return _join_small(groups, least)  # now also joins nodes of different modules


def short_group_name(name: str, width: float, size: float) -> str:
    """Shortens a name to its last parts: `transformer.h.0.attn` -> `…0.attn`; if only digits remain, to both ends."""
    ends = [end.split(".") for end in name.split(RANGE_DASH)]
    for kept in range(max(map(len, ends)), 0, -1):
        short = RANGE_DASH.join(("…" if kept < len(end) else "") + ".".join(end[-kept:]) for end in ends)
        if text_width(short, size) <= width:
            if set(short) <= NUMBER_LETTERS:  # only layer numbers
                break
            return short
    return fit_text(name, width, size) if width >= MIN_LETTERS * size else ""


def _join_small(groups: Sequence[NodeGroup], least: float) -> list[NodeGroup]:
    joined: list[NodeGroup] = []
    for is_small, same in groupby(groups, key=lambda group: group.share < least):
        run = list(same)
        if is_small and len(run) > 1:
            joined.append(NodeGroup([node for group in run for node in group.members], is_elided=True))
        else:
            joined += run
    return joined
