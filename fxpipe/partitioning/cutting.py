"""Cuts the nodes of a graph into stages: by costs, or by hand where the user says so.

Nodes are known by their *place*, 0 to n - 1, in the order in which they run. A cut stands *before* a place. Where cuts
are forbidden, the nodes on both sides cannot be separated; a run of nodes that hang together so is an *item*.

    place      0   1   2   3   4   5          forbidden={1: "...", 4: "..."}
    cost       1   2   1   5   0   1
    items     [1   2] [1] [5   0] [1]         sums 3, 1, 5, 1
    stages    [        ] [          ]         sums 4, 6, printed as

    block: 2 stages, largest cost 6
      stage 0: places 0-2, cost 4, share 40.0%
      stage 1: places 3-, cost 6, share 60.0%
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from fxpipe.errors import ArgumentError, PartitionError
from fxpipe.partitioning.block import exact_integers, partition_integers
from fxpipe.partitioning.manual_cuts import NodeSequence, cuts_by_names, is_by_names, starts_by_counts
from fxpipe.utils.units import parse_count


@dataclass(frozen=True, slots=True)
class Partition:
    """The stages into which the nodes of a graph are cut. Prints a line for each."""

    starts: tuple[int, ...]  # the place of the first node of each stage; starts[0] == 0
    costs: tuple[float, ...]  # of each stage, in the unit of the nodes' costs
    balance: str  # how it was cut: "block", or by hand: "counts" or "names"

    @property
    def bottleneck(self) -> float:
        """The largest cost of a stage."""
        return max(self.costs)

    def __str__(self) -> str:
        head = f"{self.balance}: {len(self.starts)} stages, largest cost {self.bottleneck:.4g}"
        texts = [(f"cost {cost:.4g}", "") for cost in self.costs]
        return "\n".join([head, *stage_lines(self.starts, self.costs, texts)])


def stage_lines(starts: Sequence[int], costs: Sequence[float], texts: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A line for each stage of a cut: its places, its cost in words, its share of all costs, and what else is said.

    Args:
        starts: the place of the first node of each stage.
        costs: of each stage.
        texts: for each stage its cost in words, and what stands behind its share.
    """
    total = math.fsum(costs)
    stops = [*(str(start - 1) for start in starts[1:]), ""]  # how many nodes there are is not known here
    for j, (start, stop, cost, (words, rest)) in enumerate(zip(starts, stops, costs, texts, strict=True)):
        share = cost / total if total else 0.0
        yield f"  stage {j}: places {start}-{stop}, {words}, share {share:.1%}{rest}"


def partition(
    costs: Sequence[float],
    stages: int,
    *,
    balance: str | Sequence[int] | Sequence[str] = "block",
    forbidden: Mapping[int, str] | None = None,
    names: Sequence[str] = (),
    modules: Sequence[str] = (),
) -> Partition:
    """Cuts nodes with these costs into stages of at least one node each.

        >>> print(partition([3.0, 1.0, 2.0, 2.0], 2))
        block: 2 stages, largest cost 4
          stage 0: places 0-1, cost 4, share 50.0%
          stage 1: places 2-, cost 4, share 50.0%

    | balance           | stages                                                                                       |
    |-------------------|----------------------------------------------------------------------------------------------|
    | `"block"`         | with the least bottleneck, any two apart by at most the largest item; if in doubt, use this  |
    | `[2, 2]`          | of these numbers of nodes                                                                    |
    | `["encoder"]`     | one ends behind the last node of this module (or this node); costs cut the rest              |

    Args:
        costs: of each node, finite and >= 0, in any one unit (seconds, bytes).
        stages: how many to make.
        balance: see the table.
        forbidden: place -> why no cut may stand before it; 1 <= place < len(costs).
        names: of the nodes; needed to cut by them, and for readable errors.
        modules: the dotted path of each node's module; needed to cut by them.

    Raises:
        ArgumentError, ArgumentTypeError: an argument cannot be used.
        PartitionError: these nodes cannot be cut as asked.
    """
    stages = parse_count("stages", stages)
    nodes = NodeSequence(tuple(costs), tuple(names), tuple(modules), forbidden or {})
    if stages > len(nodes.items()):
        raise nodes.too_many_stages_error(stages)
    if isinstance(balance, str):
        if balance != "block":
            raise ArgumentError(_unknown_balance(balance, nodes))
        kind, starts = "block", cut_by_block(nodes, stages)
    elif is_by_names(balance, stages):
        kind, starts = "names", cut_by_block(nodes, stages, cuts_by_names(balance, stages, nodes))
    else:
        kind, starts = "counts", starts_by_counts(balance, stages, nodes)
    sums = (math.fsum(nodes.costs[start:stop]) for start, stop in pairwise([*starts, len(nodes.costs)]))
    return Partition(starts, tuple(sums), kind)


def cut_by_block(nodes: NodeSequence, stages: int, required: Sequence[int] = ()) -> tuple[int, ...]:
    """Finds the starts of stages: at required places, and elsewhere so that the largest cost of a stage is least.

    Between required cuts each part is cut by itself. A stage more makes no part's largest one larger, so to give one at
    a time to the part that has the largest leads to the least bottleneck.
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
    """The items between two required cuts, in so many stages."""

    items: tuple[int, ...]  # the places at which they begin
    costs: tuple[int, ...]
    lengths: tuple[int, ...]  # of the stages, in items

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


def _unknown_balance(balance: str, nodes: NodeSequence) -> str:
    if balance in nodes.names or balance in nodes.modules:
        return f"balance={balance!r} names a node or a module: to end a stage behind it, write balance=[{balance!r}]"
    return (
        f'balance={balance!r} is unknown; there is "block". To cut by hand, give a list: the number of nodes of each '
        "stage, or the names of the nodes or modules after which a stage ends"
    )


# -- Cuts a graph like another one: each node should go to the stage where its parameters are ------------------------


def cut_least_misplaced(misplaced: Sequence[Sequence[float]], forbidden: Mapping[int, str]) -> tuple[int, ...]:
    """Starts of stages with the least sum of `misplaced[place][stage]`, exactly, by dynamic programming.

    Args:
        misplaced: for each place, what it costs to put its node into each of the stages.
        forbidden: place -> why no cut may stand before it.

    Returns:
        The place of the first node of each stage; every stage has at least one node. Ties go to the earlier cut.

    Raises:
        PartitionError: there are fewer places for cuts than needed.
    """
    stages = len(misplaced[0]) if misplaced else 0
    infinite = float("inf")
    # best[j]: least cost of the places so far, the last of them in stage j; and the starts that lead there
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
