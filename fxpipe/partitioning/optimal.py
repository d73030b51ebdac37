"""Cuts a chain so that the step waits for as little as possible: the exact least bottleneck, within memory.

The question: n nodes stand in a row, and stage j will run on site j. What stages come to there, in seconds with all
that they receive and in bytes, says `loads.py`. Cut the row into stages, none empty. In order of priority:

1. every stage fits into its memory; it recomputes if it must, or if it may and does not fit otherwise;
2. the *bottleneck*, the largest `seconds` of a stage, is the least possible. So a cut is moved rather than a stage made
   to recompute where that is faster;
3. of such cuts, as few stages as possible recompute;
4. of those, the stages are even: from the first on, each ends where the larger of its seconds and the mean of what is
   left for each later stage is least, among the ends from which (1) to (3) can still be had.

(1) to (3) are exact, by integers (`ranges.py`), and tested against every cut of small chains.

The way (`search.py`): a limit L on seconds is tested by going from stage to stage with the set of places where the next
one can start.

    starts of stage j      . . . x . x x . .        each start leads to the ends that L and its memory allow;
    starts of stage j + 1  . . . . . x . x x        all of them together are the starts of the next stage

Nothing is monotone here (a stage that is one node longer can be done sooner, if it sends less), so the sets have holes.
But a stage cannot compute less than its nodes do. From that alone follow a least L to begin with, by bisection, and how
early a stage can start so that the later ones hold the rest. If the first L is too low, it is raised in growing steps,
then bisected until the values between are few; the least bottleneck is the seconds of some stage, so it is one of those
values, and bisection among them ends the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.partitioning.chain import Chain, Site
from fxpipe.partitioning.loads import StageLoad, stage_loads
from fxpipe.partitioning.search import Search


@dataclass(frozen=True, slots=True)
class Optimal:
    """The cut with the least bottleneck. Prints a line for each stage."""

    starts: tuple[int, ...]  # the place of the first node of each stage; starts[0] == 0
    recompute: tuple[bool, ...]  # by stage
    loads: tuple[StageLoad, ...]

    @property
    def bottleneck(self) -> float:
        """The largest `seconds` of a stage."""
        return max(load.seconds for load in self.loads)


def optimal_partition(chain: Chain, sites: Sequence[Site]) -> Optimal | None:
    search = Search(chain, sites)
    limit = search.least_bottleneck()
    if limit is None:
        return None
    starts, recompute = search.cut(limit)
    return Optimal(starts, recompute, stage_loads(chain, sites, starts, recompute))
