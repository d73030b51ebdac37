"""What a schedule that is searched (`zero_bubble_auto`) is told of the stages: made of what they cost."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.scheduling import Demand
from fxpipe.stage_costs import StageCost, Transfer


def demands_of(
    stages: Sequence[StageCost],
    transfers: Sequence[Transfer] = (),
    modes: Sequence[str] | None = None,
    limits: Sequence[float | None] | None = None,
) -> tuple[Demand, ...]:
    """For each stage, on a device of its own.

    As the runtime does it, a device copies what it receives before it computes; so transfers are a part of F and B.
    Where bytes are not known, a micro-batch counts as one unit of memory. A limit that does not hold a single
    micro-batch is taken for one that does: something has to run, and whether it fits the simulation will say.

    Args:
        stages: their costs.
        transfers: all that goes between them.
        modes: for each its checkpoint mode; "never" if not given.
        limits: for each the bytes that it may take, all that is always there included; None: not known.
    """
    n = len(stages)
    values, gradients = ([0.0] * n for _ in range(2))
    for way in transfers:
        (gradients if way.is_gradient else values)[way.target] += way.seconds
    return tuple(
        _demand(cost, value, gradient, mode, limit)
        for cost, value, gradient, mode, limit in zip(
            stages, values, gradients, modes or ["never"] * n, limits or [None] * n, strict=True
        )
    )


def _demand(cost: StageCost, value: float, gradient: float, mode: str, limit: float | None) -> Demand:
    weight = cost.backward / 2 if cost.weight is None else cost.weight
    given, saved = cost.input_bytes + cost.portal_bytes, cost.saved_bytes
    if not given + saved:
        saved, limit = 1.0, None
    again = 0.0 if mode == "never" else cost.forward if cost.recompute is None else cost.recompute
    if limit is not None:
        of_last = saved if mode == "except_last" else 0.0  # its F keeps what the F of others leave to R
        limit = max(given + saved, limit - cost.static_bytes - cost.working_bytes - of_last)
    return Demand(
        forward=value + cost.forward + cost.action,
        backward=gradient + cost.backward - weight + cost.action,
        weight=weight + cost.action,
        recompute=again + cost.action if mode != "never" else 0.0,
        taken=given + saved if mode == "never" else given,
        retaken=0.0 if mode == "never" else saved,
        limit=limit,
    )
