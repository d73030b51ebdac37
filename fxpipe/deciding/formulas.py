"""What stages hold and compute, as polynomials in the micro-batch size: one plan answers for every `b`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import sympy

from fxpipe.deciding.chains import chain_of
from fxpipe.partitioning import stage_loads
from fxpipe.plans import StageBytes
from fxpipe.polynomials import Polynomial, polynomial
from fxpipe.profiling.coefficients import coefficients
from fxpipe.profiling.formulas import fitted

if TYPE_CHECKING:
    from fxpipe.deciding.cuts import Cut
    from fxpipe.profiling import Profile

SIZES = (1, 2, 3, 4)  # at which the stages are looked at, beside that of the plan


def stage_bytes(cut: Cut, profiles: Sequence[Profile], samples: int) -> list[StageBytes]:
    """For each stage; `samples` are those of the planned micro-batch, for which the figures are exact."""
    sizes = sorted({*SIZES, samples})
    chains = (chain_of(cut.traced, profiles, size, {}) for size in sizes)
    loads = [stage_loads(chain, cut.sites, cut.starts, cut.recompute) for chain in chains]

    def through(figure: str, stage: int) -> Polynomial:
        counted = tuple((size, int(attrgetter(figure)(of[stage]))) for size, of in zip(sizes, loads, strict=True))
        batch = cut.traced.batch
        return polynomial(coefficients(fitted(counted, samples, batch), batch))

    return [
        StageBytes(through("received_bytes", j), through("held_bytes", j), through("working_bytes", j))
        for j in range(len(cut.starts))
    ]


def flops(profile: Profile, names: Collection[str]) -> Polynomial:
    """Of these nodes, forward and backward."""
    total = sympy.Add(*(cost.flops + cost.backward_flops for cost in profile.nodes if cost.name in names))
    return polynomial(coefficients(total, profile.batch))
