"""What a cut needs to know of the nodes of a graph, and how to speak of them in errors."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fxpipe.errors import ArgumentError
from fxpipe.partitioning.block import check_cost


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes in the order in which they run; a node's index here is its *place*. Checked when made."""

    costs: tuple[float, ...]
    names: tuple[str, ...]  # one for each node, or none
    modules: tuple[str, ...]  # the dotted path of each node's module, or none
    forbidden: Mapping[int, str]  # place -> why no cut may stand before it
    empty: Mapping[str, int | None] = field(default_factory=dict)  # module without nodes -> place before which it ends
    inside: Mapping[str, str] = field(default_factory=dict)  # module -> the one around it that is a node

    def __post_init__(self) -> None:
        n = len(self.costs)
        for given, what in ((self.names, "names"), (self.modules, "modules")):
            if len(given) not in (0, n):
                raise ArgumentError(f"{len(given)} {what} for {n} costs: give one for each node, or none")
        for place in self.forbidden:
            if not 1 <= place < n:
                raise ArgumentError(f"forbidden place {place}: a cut can stand before places 1 to {n - 1} only")
        for place, cost in enumerate(self.costs):
            check_cost(cost, f"the cost of {self.label(place)}")
        if not _sum_is_finite(self.costs):
            raise ArgumentError("the costs sum to more than a float can hold: give them in a larger unit")

    def label(self, place: int) -> str:
        return f"node {self.names[place]!r} (place {place})" if self.names else f"the node at place {place}"

    def items(self) -> list[int]:
        """The place at which each indivisible run of nodes begins."""
        return [place for place in range(len(self.costs)) if place not in self.forbidden]

    def why_not_so_many(self, stages: int, remedy: str = "") -> str:
        """Why there cannot be that many stages, and how many there can be; or another remedy."""
        n, possible = len(self.costs), len(self.items())
        if n == 0:
            return f"stages={stages}, but there are no nodes to cut"
        text = f"stages={stages}, but the {n} nodes can be cut into {possible} at most"
        if self.forbidden:
            first = min(self.forbidden)
            stuck = len(self.forbidden.keys() | {place - 1 for place in self.forbidden})
            text += (
                f": {stuck} of the nodes cannot be separated from a neighbour, first {self.label(first)} from the one "
                f"before it: {self.forbidden[first]}"
            )
        return f"{text}. Use {remedy or f'stages={possible} or fewer'}"

    def why_no_cut(self, place: int) -> str:
        """Why no cut can stand before a forbidden place, and which places next to it are allowed."""
        allowed = self.items()[1:]  # the first item begins without a cut
        after = bisect_left(allowed, place)
        nearest = " or ".join(map(self.label, allowed[max(after - 1, 0) : after + 1]))
        remedy = f"the nearest allowed: before {nearest}" if nearest else "no cut is allowed anywhere"
        return f"no cut can stand before {self.label(place)}: {self.forbidden[place]}; {remedy}"


def _sum_is_finite(costs: Sequence[float]) -> bool:
    try:
        math.fsum(costs)
    except OverflowError:  # of the sum, or of an int on its way to float
        return False
    return True
