"""Ways to cut a row of nodes into stages, and how far each is from the best cut there is."""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from fxpipe.partitioning.block import block_partition
from fxpipe.partitioning.chain import Chain, StageSite, stage_loads
from fxpipe.partitioning.optimal import optimal_partition

Starts = Sequence[int]


@dataclass(frozen=True)
class Case:
    """Something to cut: a chain for sites, with the parameters of each node.

    Where cuts are forbidden, the nodes on both sides hang together as one *item*; what all ways but `optimal` cut are
    items, and what they return are numbers of items.
    """

    chain: Chain
    sites: tuple[StageSite, ...]
    parameters: tuple[float, ...]  # by node, in any unit
    layers: tuple[int, ...] | None = None  # the first node of each layer; each node is one if not given

    @cached_property
    def items(self) -> list[int]:
        """The first node of each."""
        return [place for place in range(len(self.chain)) if place not in self.chain.forbidden_cuts]

    def by_item(self, of_nodes: Sequence[float]) -> list[float]:
        return [math.fsum(of_nodes[start:end]) for start, end in pairwise([*self.items, len(self.chain)])]

    @cached_property
    def seconds(self) -> list[float]:
        """Of each item."""
        return self.by_item([f + b for f, b in zip(self.chain.forward[0], self.chain.backward[0], strict=True)])


# ---- the ways ----


def by_block(case: Case) -> Starts:
    lengths = block_partition(case.seconds, len(case.sites))
    return tuple(accumulate(lengths[:-1], initial=0))


def by_torchgpipe(case: Case) -> Starts:
    from torchgpipe.balance import blockpartition

    blocks = blockpartition.solve(case.seconds, partitions=len(case.sites))
    return [0, *accumulate(len(block) for block in blocks[:-1])]


def by_parameters(case: Case) -> Starts:
    """Each cut where the parameters before it are nearest to their even share; no stage is empty."""
    parameters, stages = case.by_item(case.parameters), len(case.sites)
    n = len(parameters)
    sums = list(accumulate(parameters, initial=0.0))
    starts = [0]
    for j in range(1, stages):
        share = sums[-1] * j / stages
        place = bisect_left(sums, share)
        if place and share - sums[place - 1] < sums[place] - share:
            place -= 1
        starts.append(min(max(place, starts[-1] + 1), n - (stages - j)))
    return starts


def by_layers(case: Case) -> Starts | None:
    """Equal numbers of layers, one more in the first stages where they do not divide. None: there are too few.

    What stands before the first layer goes with it, and what follows one with that.
    """
    items = case.items
    layers = range(len(items)) if case.layers is None else [bisect_left(items, place) for place in case.layers]
    each, more = divmod(len(layers), len(case.sites))
    if not each:
        return None
    return [0, *(layers[j * each + min(j, more)] for j in range(1, len(case.sites)))]


WAYS: dict[str, Callable[[Case], Starts | None]] = {
    "fxpipe, block": by_block,
    "torchgpipe": by_torchgpipe,
    "equal parameters": by_parameters,
    "equal layers": by_layers,
}
OPTIMAL = "fxpipe, optimal"


def ways() -> dict[str, Callable[[Case], Starts | None]]:
    """Those that are installed; each takes a case and returns the first node of each stage."""

    def of_items(way: Callable[[Case], Starts | None]) -> Callable[[Case], Starts | None]:
        def cut(case: Case) -> Starts | None:
            starts, items = way(case), case.items
            return None if starts is None else [items[start] for start in starts]

        return cut

    found: dict[str, Callable[[Case], Starts | None]] = {
        OPTIMAL: lambda case: optimal_partition(case.chain, case.sites).starts
    }
    found |= {name: of_items(way) for name, way in WAYS.items()}
    try:
        import torchgpipe.balance.blockpartition  # noqa: F401
    except ImportError:
        print("torchgpipe is not installed: left out")
        del found["torchgpipe"]
    return found


# ---- comparison ----


@dataclass(frozen=True)
class Outcome:
    """Of one way to cut one case."""

    ratio: float  # the largest stage over the least possible one
    seconds: float  # that the cut took to find


def compare(case: Case, ways: Mapping[str, Callable[[Case], Starts | None]]) -> dict[str, Outcome | None]:
    """Every way to cut a case, judged by the same loads; None for one that cannot. The optimum comes first."""
    found: dict[str, Outcome | None] = {}
    assert case.seconds  # made here, and not on the time of who asks first
    least = 0.0
    for name, way in ways.items():
        begin = time.perf_counter()
        starts = way(case)
        took = time.perf_counter() - begin
        if starts is None:
            found[name] = None
            continue
        bottleneck = max(load.seconds for load in stage_loads(case.chain, case.sites, starts, [False] * len(starts)))
        least = least or bottleneck
        found[name] = Outcome(bottleneck / least, took)
    return found


def report(label: str, outcomes: Sequence[Mapping[str, Outcome | None]]) -> tuple[list[str], list[str]]:
    """A row of ratios, median and worst, and a row of milliseconds."""
    columns = [[outcome[name] for outcome in outcomes] for name in outcomes[0]]
    return [label, *map(_ratio, columns)], [label, *map(_milliseconds, columns)]


def _ratio(column: Iterable[Outcome | None]) -> str:
    found = [outcome.ratio for outcome in column if outcome]
    if not found:
        return "–"
    median, worst = statistics.median(found), max(found)
    return f"{median:.3f}" if worst - median < 5e-4 else f"{median:.3f}  {worst:.3f}"


def _milliseconds(column: Iterable[Outcome | None]) -> str:
    found = [outcome.seconds for outcome in column if outcome]
    return f"{1e3 * statistics.median(found):.3g}" if found else "–"
