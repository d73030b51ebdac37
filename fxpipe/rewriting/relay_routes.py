"""Routes of values and gradients between ranks: the cuts that each crosses.

Only neighbouring stages send to each other, since nothing else is safe on every backend and in every schedule. A value
for a later stage is *relayed* in the packets of the stages in between. A rank keeps received values for all of its
stages. So a value starts from the latest stage whose rank has it. A gradient waits on each rank for the rank's earliest
stage, whose packet takes it, until it is on its target rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpipe.rewriting.program import ValueKey

GradientKey = tuple[int, str, int]  # the value, and the target stage of its gradient


@dataclass(frozen=True, slots=True)
class RelayRoutes:
    """For each cut j | j + 1 the values sent down and the gradients sent up, in the order of the packet."""

    placement: tuple[int, ...]  # by stage: its rank
    down: tuple[tuple[ValueKey, ...], ...]
    up: tuple[tuple[GradientKey, ...], ...]

    def rank(self, stage: int) -> int:
        """Returns the rank of a stage. Inputs are on the rank of the first stage, the loss on the rank of the last."""
        return self.placement[min(max(stage, 0), len(self.placement) - 1)]

    def is_here(self, stage: int, rank: int) -> bool:
        return self.rank(stage) == rank

    def crosses(self, cut: int) -> bool:
        """Returns whether the stages on both sides of a cut are on different ranks."""
        return self.placement[cut] != self.placement[cut + 1]


def relay_routes(value_users: Mapping[ValueKey, Sequence[int]], placement: Sequence[int]) -> RelayRoutes:
    """Computes the routes of a program on these ranks, from the result of `rewriting.program.value_users`."""
    n = len(placement)
    empty = RelayRoutes(tuple(placement), (), ())
    down: list[list[ValueKey]] = [[] for _ in placement]
    up: list[list[GradientKey]] = [[] for _ in placement]
    for (source, name), users in sorted(value_users.items()):
        first = {empty.rank(source): max(source, 0)}  # rank -> its first stage with the value
        for user in sorted(min(user, n - 1) for user in users):
            while placement[user] not in first:
                at = max(j for j in range(user) if first.get(placement[j], n) <= j)
                down[at].append((source, name))
                first[placement[at + 1]] = at + 1
        for user in users:
            target = max((other for other in users if other < user), default=source)
            lowest, at = max(target, 0), min(user, n - 1)
            while placement[at] != empty.rank(target):
                at = min(j for j in range(lowest, at + 1) if placement[j] == placement[at])
                up[at - 1].append((source, name, target))
                at -= 1
    return RelayRoutes(tuple(placement), tuple(map(tuple, down)), tuple(map(tuple, up)))
