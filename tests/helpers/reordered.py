"""A model cut at chosen places with its nodes in another order, and with copies: for tests of both."""

import random
from collections.abc import Callable
from typing import Any

from torch import nn

from fxpipe.rewriting import forbidden_cuts, split_into_stages
from fxpipe.rewriting.rematerialize import rematerializable_nodes
from fxpipe.rewriting.reorder import OrderConstraints, with_node_order
from fxpipe.tracing import Traced
from helpers.every_cut import CPU, EveryCut


def shuffled(traced: Traced, seed: int) -> Traced:
    """The graph in one of all the orders that its constraints allow."""
    rng, units = random.Random(seed), OrderConstraints.of_graph(traced)
    missing = [0] * len(units.nodes)
    for later in units.after:
        for unit in later:
            missing[unit] += 1
    ready, order = [unit for unit, count in enumerate(missing) if not count], []
    while ready:
        order.append(ready.pop(rng.randrange(len(ready))))
        for unit in units.after[order[-1]]:
            missing[unit] -= 1
            if not missing[unit]:
                ready.append(unit)
    return with_node_order(traced, [node for unit in order for node in units.nodes[unit]])


class Reordered(EveryCut):
    """`order`: from the traced graph to another. `copied`: the share of nodes that stages compute for themselves."""

    def __init__(
        self, model: nn.Module, *args: Any, order: Callable[[Traced], Traced], copied: float = 0.0, **settings: Any
    ):
        super().__init__(model, *args, **settings)
        self.as_traced, self.traced = self.traced, order(self.traced)
        self.forbidden_cuts, self.copied = forbidden_cuts(self.traced), copied

    def program(self, starts: tuple[int, ...]) -> Any:
        rng = random.Random(sum(starts))
        copies = [[name for name in rematerializable_nodes(self.traced) if rng.random() < self.copied] for _ in starts]
        return split_into_stages(self.traced, starts, [CPU] * len(starts), copies)

    def some_cuts(self, count: int, seed: int = 0) -> list[tuple[int, ...]]:
        """Cuts into 1 to 5 stages."""
        rng = random.Random(seed)
        numbers = [min(k % 5, len(self.allowed)) for k in range(count)]
        return [(0, *sorted(rng.sample(self.allowed, number))) for number in numbers]
