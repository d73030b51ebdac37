"""The boundaries that each value and each gradient crosses on its way between ranks.

Only neighbouring stages send to each other, since nothing else is safe on every backend and in every schedule. A value
for a later stage is *relayed*: it goes with the packets of the stages between, one cut after the other:

    stage     0          1          2          3
    rank      0          1          2          3
    value     v ───────▶ · ───────▶ · ───────▶ v        cuts 0, 1 and 2, in the packet of each

A rank keeps what it gets for all stages that it has. So a value sets out from the latest stage whose rank has it, and a
gradient waits on its rank for the earliest stage there, whose packet takes it up, until it is on the rank that it is
for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpipe.rewriting.program import ValueKey

GradientKey = tuple[int, str, int]  # the value, and the stage that its gradient is for


@dataclass(frozen=True, slots=True)
class RelayRoutes:
    """For each cut j | j + 1 the values that go down and the gradients that come up, in the order of their packet."""

    placement: tuple[int, ...]  # by stage: its rank
    down: tuple[tuple[ValueKey, ...], ...]
    up: tuple[tuple[GradientKey, ...], ...]

    def rank(self, stage: int) -> int:
        """Returns the rank of a stage. The inputs are with the first stage, the loss is with the last."""
        return self.placement[min(max(stage, 0), len(self.placement) - 1)]

    def is_here(self, stage: int, rank: int) -> bool:
        return self.rank(stage) == rank

    def crosses(self, cut: int) -> bool:
        """Returns whether the stages beside a cut are on different ranks."""
        return self.placement[cut] != self.placement[cut + 1]


def relay_routes(value_users: Mapping[ValueKey, Sequence[int]], placement: Sequence[int]) -> RelayRoutes:
    """Computes the routes of a program whose stages are on these ranks.

    Args:
        value_users: as `rewriting.program.value_users` has them.
    """
    n = len(placement)
    empty = RelayRoutes(tuple(placement), (), ())
    down: list[list[ValueKey]] = [[] for _ in placement]
    up: list[list[GradientKey]] = [[] for _ in placement]
    for (source, name), users in sorted(value_users.items()):
        first = {empty.rank(source): max(source, 0)}  # by rank, the stage since which it has the value
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


def is_relayed_value(routes: RelayRoutes, users: Sequence[int], cut: int) -> bool:
    """Returns whether a value with these users, which crosses a cut, is of no use on the rank behind it."""
    return routes.placement[cut + 1] not in {routes.rank(user) for user in users}


def is_relayed_gradient(routes: RelayRoutes, key: GradientKey, cut: int) -> bool:
    """Returns whether a gradient that crosses a cut is not for the rank before it, which sends it on."""
    return routes.placement[cut] != routes.rank(key[2])
