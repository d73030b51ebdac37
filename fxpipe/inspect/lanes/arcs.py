"""The portals of a plan in the picture of its lanes: named in the lane that they leave, drawn beside the lanes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxpipe.drawing.colours import FAINT, INK
from fxpipe.drawing.letters import fitted, text_width
from fxpipe.drawing.scene import Curve, Item, Text
from fxpipe.inspect.lanes.frame import PORTS, ROW, SMALL, Bundle, Frame, title_of
from fxpipe.units import counted, human_bytes

ARCS = ("#0072b2", "#d55e00", "#009e73", "#b85c94", "#a88000", "#5b55b5", "#3aa0d8")  # by the stage that they leave


def ports(j: int, frame: Frame) -> Iterator[Item]:
    """What the lane says of its portals: those that arrive in sum, those that leave by name, as many as fit."""
    x, room = frame.right - PORTS, PORTS - 22
    base = 3.5  # from the middle of a line to its base line
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


def arcs(frame: Frame) -> Iterator[Item]:
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
    return title_of(head, [f"{portal.name}  {human_bytes(portal.bytes)}" for portal in by_size])
