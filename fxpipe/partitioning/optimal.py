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
values, and bisection among them ends the search: about 25 tests in all. Most limits that can be kept are kept by a cut
whose stages end near even shares; that is tried first, and only where it fails all starts are followed.

A test takes time in proportion to the starts that it reaches: some for each stage where stages come out nearly even,
and all n for each of k stages where one node dwarfs an even share or memory dictates the cut; for each start one
bisection for each kind of site, and one operation on a set of n bits. 5,663 nodes are cut into 8 stages in 0.3 to 2
seconds, 10,000 into 64 in 2 to 10, and in half a minute if the last node is as large as two and a half even shares
(Python 3.11, one core at 2.5 GHz; tools/bench/README.md). Setup takes memory in proportion to n times the number of
values that are alive across a cut. What could be better: (4) is greedy, and its mean of what is left knows nothing of
transfers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fxpipe.errors import MemoryLimitError, PartitionError
from fxpipe.partitioning.chain import Chain, Site
from fxpipe.partitioning.loads import StageLoad, stage_loads
from fxpipe.partitioning.nodes import Nodes
from fxpipe.partitioning.search import Search
from fxpipe.partitioning.shortage import Trial, no_cut_fits, shortage
from fxpipe.units import human_bytes


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

    def __str__(self) -> str:
        total = math.fsum(load.seconds for load in self.loads)
        stops = [*(str(start - 1) for start in self.starts[1:]), ""]  # how many nodes there are is not known here
        lines = [f"optimal: {len(self.starts)} stages, bottleneck {self.bottleneck:.4g} s"]
        for j, (start, stop, load) in enumerate(zip(self.starts, stops, self.loads, strict=True)):
            share = load.seconds / total if total else 0.0
            receives = f", {load.receive_seconds:.4g} s of it to receive" if load.receive_seconds else ""
            recomputes = ", recomputes" if load.recompute else ""
            lines.append(
                f"  stage {j}: places {start}-{stop}, {load.seconds:.4g} s{receives}, share {share:.1%}, "
                f"{human_bytes(load.memory)}{recomputes}"
            )
        return "\n".join(lines)


def optimal_partition(
    chain: Chain,
    sites: Sequence[Site],
    *,
    names: Sequence[str] = (),
    remedies: Iterable[Iterable[Trial]] = (),
    explains: bool = True,
) -> Optimal:
    """Cuts a chain into as many stages as there are sites; see the module's text for what is the best cut.

        >>> chain = Chain(forward=((1.0, 1.0, 2.0, 2.0),), backward=((2.0, 2.0, 4.0, 4.0),))
        >>> print(optimal_partition(chain, [Site(), Site()]))
        optimal: 2 stages, bottleneck 12 s
          stage 0: places 0-1, 6 s, share 33.3%, 0 B
          stage 1: places 2-, 12 s, share 66.7%, 0 B

    Args:
        chain: at least one node.
        sites: one for each stage, in order.
        names: of the nodes, for errors; or none.
        remedies: what is tried where no cut fits into memory, and offered if it would; see `shortage.py`.
        explains: say why no cut fits, which takes several times as long as to find that none does.

    Raises:
        MemoryLimitError: no cut fits into memory.
        PartitionError: there is no such cut at all.
    """
    search = Search(chain, sites)
    limit = search.least_bottleneck()
    if limit is None:
        if not Search(chain, [replace(site, memory=None) for site in sites]).fits():
            raise PartitionError(_why_no_cut(chain, len(sites), names))
        if not explains:
            raise MemoryLimitError(no_cut_fits(len(sites)))
        raise shortage(chain, sites, names, remedies)
    starts, recompute = search.cut(limit)
    return Optimal(starts, recompute, stage_loads(chain, sites, starts, recompute))


def _why_no_cut(chain: Chain, stages: int, names: Sequence[str]) -> str:
    nodes = Nodes(chain.forward[0], tuple(names), (), chain.forbidden)
    if stages > len(nodes.items()):
        return nodes.why_not_so_many(stages)
    return (
        f"no cut into {stages} stages puts every node into a stage where it may be: of what is pinned, some is out of "
        "order, leaves a stage without nodes, or hangs together with what is pinned elsewhere"
    )
