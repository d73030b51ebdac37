"""How the time of a stage is shared out among its nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxpipe.profiling.costs import NodeCost

_DIGITS = 5  # a share is looked at, not computed with; a plan has one for each of thousands of nodes


def shares(costs: Sequence[NodeCost], samples: int) -> tuple[float, ...]:
    """For each node the part of the seconds of all of them, forward and backward; none where nothing takes time."""
    seconds = [(cost.forward + cost.backward).at(samples) for cost in costs]
    total = math.fsum(seconds)
    return tuple(round(part / total, _DIGITS) for part in seconds) if total else ()
