"""What stages hold and compute, as polynomials in the micro-batch size: one plan answers for every `b`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import sympy

from fxpipe.deciding.chains import chain_of
from fxpipe.errors import ArgumentError
from fxpipe.partitioning import stage_loads
from fxpipe.partitioning.loads import received_bytes
from fxpipe.plans import StageBytes
from fxpipe.polynomials import Polynomial, polynomial
from fxpipe.profiling.coefficients import coefficients
from fxpipe.profiling.formulas import fitted
from fxpipe.tracing.sizing.shapes import bytes_for, bytes_of

if TYPE_CHECKING:
    from torch import fx

    from fxpipe.deciding.outcomes import Cut
    from fxpipe.partitioning.chain import Chain
    from fxpipe.profiling import Profile

SIZES = (1, 2, 3, 4)  # at which the stages are looked at, beside that of the plan


def stage_bytes(cut: Cut, profiles: Sequence[Profile], samples: int) -> list[StageBytes]:
    """For each stage; `samples` are those of the planned micro-batch, for which the figures are exact."""
    sizes = sorted({*SIZES, samples})
    counted = {size: _counted(cut, chain_of(cut.traced, profiles, size, {})) for size in sizes}
    batch = cut.traced.batch

    def through(stage: int, figure: int) -> Polynomial:
        points = tuple((size, counted[size][stage][figure]) for size in sizes)
        return polynomial(coefficients(fitted(points, samples, batch), batch))

    return [
        StageBytes(*(through(j, figure) for figure in range(len(fields(StageBytes))))) for j in range(len(cut.starts))
    ]


def _counted(cut: Cut, chain: Chain) -> list[tuple[int, ...]]:
    """For each stage the numbers of a `StageBytes`, at one size."""
    loads = stage_loads(chain, cut.sites, cut.starts, cut.recompute)
    return [
        (
            int(came.kept),
            int(load.held_bytes),
            int(load.working_bytes),
            int(came.kept_portals),
            int(came.given - came.kept),
            int(came.given_portals - came.kept_portals),
        )
        for load, came in zip(loads, received_bytes(chain, cut.starts), strict=True)
    ]


def value_bytes(node: fx.Node, batch: sympy.Symbol, samples: int) -> Polynomial:
    """Of what a node returns. `samples` are those of the planned micro-batch, for which it is right in any case.

    A size that hangs on values (nonzero) counts as 0.
    """
    formula = bytes_of(node.meta.get("shapes", ()))
    return _value_bytes(formula.subs(dict.fromkeys(formula.free_symbols - {batch}, 0)), batch, samples)


@functools.lru_cache(maxsize=4096)
def _value_bytes(formula: sympy.Expr, batch: sympy.Symbol, samples: int) -> Polynomial:
    here = bytes_for(formula, batch, samples)
    with contextlib.suppress(ArgumentError):
        found = polynomial(coefficients(formula, batch))
        if found(samples) == here:
            return found
    return polynomial(coefficients(fitted(((samples, here),), samples, batch), batch))


def flops(profile: Profile, names: Collection[str]) -> Polynomial:
    """Of these nodes, forward and backward."""
    total = sympy.Add(*(cost.flops + cost.backward_flops for cost in profile.nodes if cost.name in names))
    return polynomial(coefficients(total, profile.batch))
