"""Cuts a graph like another one: each node should go to the stage where its parameters are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxpipe.errors import PartitionError


def follow(misplaced: Sequence[Sequence[float]], forbidden: Mapping[int, str]) -> tuple[int, ...]:
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
