"""Cuts the nodes of a graph into stages by their costs, between the user's cuts.

A node's *place* is its index, 0 to n - 1, in execution order. A cut is *before* a place. A forbidden cut does not
separate its two nodes; a run of inseparable nodes is an *item*.

    place      0   1   2   3   4   5          forbidden={1: "...", 4: "..."}
    cost       1   2   1   5   0   1
    items     [1   2] [1] [5   0] [1]         sums 3, 1, 5, 1
    stages    [        ] [          ]         sums 4, 6
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from fxpipe.errors import PartitionError
from fxpipe.partitioning.block import exact_integers, partition_integers
from fxpipe.partitioning.manual_cuts import NodeSequence


def cut_by_block(nodes: NodeSequence, stages: int, required: Sequence[int] = ()) -> tuple[int, ...]:
    """Finds the starts of stages: at required places, and elsewhere to minimize the largest cost of a stage.

    One more stage never raises a part's largest cost, so adding stages one at a time to the part with the largest cost
    leads to the least bottleneck.
    """
    costs = exact_integers(nodes.costs)
    parts = [_ItemRun.of(start, stop, costs, nodes) for start, stop in pairwise([0, *required, len(costs)])]
    if len(parts) == 1:
        return parts[0].in_stages(stages).starts
    for _ in range(stages - len(parts)):
        at = max((p for p, part in enumerate(parts) if part.can_be_cut), key=lambda p: parts[p].bottleneck)
        parts[at] = parts[at].in_stages(len(parts[at].lengths) + 1)
    return tuple(start for part in parts for start in part.starts)


@dataclass(frozen=True, slots=True)
class _ItemRun:
    """The items between two required cuts, grouped into stages."""

    items: tuple[int, ...]
    costs: tuple[int, ...]
    lengths: tuple[int, ...]  # length of each stage, in items

    @classmethod
    def of(cls, start: int, stop: int, costs: Sequence[int], nodes: NodeSequence) -> _ItemRun:
        items = tuple(place for place in nodes.items() if start <= place < stop)
        sums = tuple(sum(costs[one:two]) for one, two in pairwise([*items, stop]))
        return cls(items, sums, (len(items),))

    def in_stages(self, number: int) -> _ItemRun:
        return replace(self, lengths=partition_integers(self.costs, number))

    @property
    def can_be_cut(self) -> bool:
        return len(self.lengths) < len(self.items)

    @property
    def bottleneck(self) -> int:
        ends = accumulate(self.lengths, initial=0)
        return max(sum(self.costs[start:stop]) for start, stop in pairwise(ends))

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(self.items[first] for first in accumulate(self.lengths[:-1], initial=0))


# -- Cuts a graph like another one: each node goes to the stage that has its parameters, if possible -------------------


def cut_least_misplaced(misplaced: Sequence[Sequence[float]], forbidden: Mapping[int, str]) -> tuple[int, ...]:
    """Finds starts of stages with the least sum of `misplaced[place][stage]`, exactly, by dynamic programming.

    Args:
        misplaced: for each place, the cost of its node in each stage.
        forbidden: place -> reason why no cut is allowed before it.

    Returns:
        The place of the first node of each stage; every stage has at least one node. Ties go to the earlier cut.

    Raises:
        PartitionError: there are fewer places for cuts than needed.
    """
    stages = len(misplaced[0]) if misplaced else 0
    infinite = float("inf")
    # best[j]: least cost of the places so far, with the last one in stage j, and its starts
    best: list[tuple[float, tuple[int, ...]]] = [(infinite, ())] * stages
    for place, costs in enumerate(misplaced):
        before = best
        best = []
        for j in range(stages):
            stay = before[j]
            if place == 0:
                enter: tuple[float, tuple[int, ...]] = (0.0, (0,)) if j == 0 else (infinite, ())
            elif j > 0 and place not in forbidden and before[j - 1][0] < infinite:
                enter = (before[j - 1][0], (*before[j - 1][1], place))
            else:
                enter = (infinite, ())
            cost, starts = min(stay, enter)
            best.append((cost + costs[j], starts))
    if not best or best[-1][0] == infinite:
        raise PartitionError(
            f"the graph has {len(misplaced)} nodes, and fewer than {stages} blocks of them can be separated; "
            "use fewer devices"
        )
    return best[-1][1]
