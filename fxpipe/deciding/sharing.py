"""Memory that several stages share: they are on one worker, or on workers that share a device.

No solver weighs stages against each other: each has a limit of its own. So the memory is shared out first, evenly; if
nothing fits so, by what the stages come to. Each begins with all of it, as if it were alone; a cut that then fits
together is taken. Else the next shares are in proportion to what the stages need, and one with a smaller share moves
its ends or recomputes. What fits together only with shares that none of these rounds comes by is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from fxpipe.errors import MemoryLimitError
from fxpipe.partitioning.chain import Site
from fxpipe.partitioning.optimal import Optimal

ROUNDS = 6  # the first one alone knows of no other stage

Solve = Callable[[Sequence[Site]], Optimal]


def sharing(
    sites: Sequence[Site], pools: Sequence[int], solve: Solve, explain: Solve
) -> tuple[Optimal, tuple[Site, ...]]:
    """A cut that fits into memory, and its sites, whose memory comes to what there is.

    Args:
        sites: for each stage, with an even share of the memory.
        pools: for each stage which memory is its; stages with one number share it.
        solve: the cut for such sites.
        explain: the same; its error says what would fit.

    Raises:
        MemoryLimitError: of `explain`, with even shares.
        PartitionError: there is no such cut at all.
    """
    shared = [pools.count(pool) > 1 and site.memory is not None for pool, site in zip(pools, sites, strict=True)]
    if not any(shared):
        return explain(sites), tuple(sites)
    try:
        return solve(sites), tuple(sites)
    except MemoryLimitError:
        found = _by_needs(sites, pools, solve)
    if found is not None:
        return found
    try:
        return explain(sites), tuple(sites)
    except MemoryLimitError as error:
        why = "stages on one device share its memory, here as even parts of it:"
        raise MemoryLimitError(f"{why}\n{error}", f"{why} {error.brief}", error.over) from None


def _by_needs(sites: Sequence[Site], pools: Sequence[int], solve: Solve) -> tuple[Optimal, tuple[Site, ...]] | None:
    wholes = _sums([site.memory for site in sites], pools)
    tried = _with(sites, wholes)
    for _ in range(ROUNDS):
        try:
            found = solve(tried)
        except MemoryLimitError:
            return None
        needs: list[float | None] = [load.memory for load in found.loads]
        sums = _sums(needs, pools)
        shares = [
            None if whole is None or need is None or not together else whole * need / together
            for whole, need, together in zip(wholes, needs, sums, strict=True)
        ]
        tried = _with(sites, shares)
        if all(whole is None or (s or 0.0) <= whole for whole, s in zip(wholes, sums, strict=True)):
            return found, tried
    return None


def _sums(figures: Sequence[float | None], pools: Sequence[int]) -> list[float | None]:
    """For each stage the sum over all that share with it; None where there is no limit."""
    found = {pool: math.fsum(f or 0.0 for f, p in zip(figures, pools, strict=True) if p == pool) for pool in pools}
    return [None if own is None else found[pool] for own, pool in zip(figures, pools, strict=True)]


def _with(sites: Sequence[Site], memory: Sequence[float | None]) -> tuple[Site, ...]:
    return tuple(replace(site, memory=limit) for site, limit in zip(sites, memory, strict=True))
