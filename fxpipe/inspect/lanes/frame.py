"""Where everything stands in a picture of lanes: the measures that lanes and arcs share, in points."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxpipe.plans import Plan, Portal, StagePlan

MOST_ARCS = 160
MANY_STAGES = 20  # from here on lanes are low
MOST_TITLES = 30  # lines of what is shown where the pointer rests

MARGIN = 16.0
HEAD = 156.0  # what stands in front of a lane
BAR = 760.0  # the slowest stage
PORTS = 236.0  # for the names of portals
LEAST_BOX = 30.0  # smaller modules go together with their neighbours
GAP = 1.5  # between boxes
ROW = 13.0  # a line of text in a lane
SMALL, USUAL, LARGE = 10.0, 11.0, 15.0  # letters


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


@dataclass(frozen=True, slots=True)
class Frame:
    """The measures that the parts of the picture share."""

    stages: int
    slowest: float  # seconds of a stage, forward and backward
    drawn: tuple[Bundle, ...]  # as arcs
    left_out: tuple[Bundle, ...]
    leaving: dict[int, tuple[Bundle, ...]]  # by stage; the largest first
    arriving: dict[int, tuple[Bundle, ...]]

    @classmethod
    def of(cls, plan: Plan) -> Frame:
        bundles = bundles_of(plan.portals)
        leaving: defaultdict[int, list[Bundle]] = defaultdict(list)
        arriving: defaultdict[int, list[Bundle]] = defaultdict(list)
        for bundle in bundles:
            leaving[bundle.source].append(bundle)
            arriving[bundle.target].append(bundle)
        return cls(
            len(plan.stages),
            max(seconds_of(stage) for stage in plan.stages),
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
        return max(LEAST_BOX, BAR * (seconds_of(stage) / self.slowest if self.slowest else 1.0))

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


def seconds_of(stage: StagePlan) -> float:
    """What its lane is as long as."""
    return stage.forward_seconds + stage.backward_seconds


def title_of(head: str, lines: Sequence[str]) -> str:
    """What is shown where the pointer rests: not more than a person reads."""
    shown = [head, *lines[:MOST_TITLES]]
    return "\n".join(shown if len(lines) <= MOST_TITLES else [*shown, f"and {len(lines) - MOST_TITLES} more"])
