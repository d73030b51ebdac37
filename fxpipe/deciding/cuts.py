"""From costs to a cut: in which order nodes run, where stages begin, where they run, and which of them recompute.

What was asked for by hand is in the case (`cases.py`); what is left free is for the solver. Where there is a choice
that no solver makes, several cuts are made and compared: the order of the graph (as traced, or with side branches next
to their use), the stages that pins allow, and stages in parts of which only some recompute
(`fxpipe.partitioning.parts`). The simulator has the last word (`outcomes.py`); where it says the same, the traced order
and fewer stages win.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from fxpipe.deciding.cases import Case, cases_of
from fxpipe.deciding.outcomes import Cut, cut_of
from fxpipe.deciding.remedies import remedies
from fxpipe.deciding.sharing import sharing
from fxpipe.deciding.sites import pools_of
from fxpipe.errors import MemoryLimitError, PartitionError
from fxpipe.partitioning import Optimal, cut_by_block, optimal_partition, stage_loads
from fxpipe.partitioning.chain import Chain, Site
from fxpipe.partitioning.parts import Part, in_parts
from fxpipe.plans import Bottleneck
from fxpipe.profiling import Profile
from fxpipe.scheduling import SCHEDULES
from fxpipe.settings import Settings
from fxpipe.tracing import Traced

WORTH_A_STAGE = 0.01  # of a step: by less, recomputing only a part of a stage does not pay for one stage more
ROUNDS = 4  # in which stages that share a device are balanced against each other


def decide(
    orders: Sequence[Traced], profiles: Sequence[Profile], batch: int, settings: Settings, *, explains: bool = True
) -> Cut:
    """The best cut of a graph.

    Args:
        orders: the graph in the orders to be compared; the first one wins a tie.
        profiles: of its nodes, one for each kind of device.
        batch: samples of the mini-batch.
        explains: say why where nothing fits, and what would, which takes longer than to find that nothing does.

    Raises:
        PartitionError: it cannot be cut as asked; a `MemoryLimitError` where it does not fit.
    """
    found, failures = list[Cut](), list[PartitionError]()
    for traced in orders:
        for make_case in cases_of(traced, profiles, batch, settings):
            try:
                found += _cuts_of(make_case(), explains)
            except PartitionError as error:
                failures.append(error)
    if not found:
        raise _most_helpful(failures)
    return min(found, key=lambda cut: (cut.simulation.step_seconds, sum(way.bytes for way in cut.transfers)))


def _most_helpful(failures: Sequence[PartitionError]) -> PartitionError:
    """Of the ways to satisfy pins the last one has the most stages, and so comes nearest to fitting."""
    return next((error for error in reversed(failures) if isinstance(error, MemoryLimitError)), failures[0])


def _cuts_of(case: Case, explains: bool) -> Iterator[Cut]:
    """Usually one; several, where stages share devices, which no solver weighs against each other."""
    chain, sites, asked = case.chain, case.sites, case.settings.balance
    by_hand = not isinstance(asked, str)
    only_time = all(site.memory is None and site.link is None and site.kind == 0 for site in sites)
    block = None if chain.low else cut_by_block(case.nodes, len(sites), chain.required)
    if asked == "block" and block is None:
        raise PartitionError("balance='block' cannot heed pins; leave balance out, or write 'optimal'")
    compared = () if block is None else (_bottleneck_of_block(chain, sites, block),)
    if block is not None and (by_hand or asked == "block" or (asked == "auto" and only_time)):
        chain = replace(chain, required=block[1:])  # what remains: do stages fit, and which of them recompute
        balance = "by hand" if by_hand else "block"
    else:
        balance = "optimal"
    solve = partial(optimal_partition, explains=False)
    explain = partial(optimal_partition, names=case.nodes.names, remedies=remedies(case)) if explains else solve
    for starts, recompute, shared in _solved(chain, sites, case.settings, solve, explain):
        found = cut_of(case, starts, recompute, shared, balance, compared)
        yield found
        if _may_be_in_parts(case) and any(site.may_recompute for site in shared):
            is_free = balance == "optimal" and not (chain.required or chain.low)
            below = (1 - WORTH_A_STAGE) * max(load.seconds for load in found.loads)
            for parts in in_parts(chain, shared, starts, recompute, below if is_free else None):
                other = _in_parts(case, parts, shared, balance, compared)
                if other.simulation.step_seconds <= (1 - WORTH_A_STAGE) * found.simulation.step_seconds:
                    yield other


def _may_be_in_parts(case: Case) -> bool:
    """Are checkpoint modes and the number of stages left to planning, and does the schedule go with any?"""
    settings = case.settings
    return (
        settings.checkpoint == "auto"
        and isinstance(settings.schedule, str)
        and not SCHEDULES[settings.schedule].is_bound
        and isinstance(settings.balance, str)
        and not case.traced.marks
        and len({*settings.placement}) == len(settings.placement)
    )


def _in_parts(
    case: Case, parts: Sequence[Part], sites: Sequence[Site], balance: str, compared: tuple[Bottleneck, ...]
) -> Cut:
    """The cut in which some stages are in parts, which share the memory of the stage."""
    placement = tuple(case.settings.placement[part.stage] for part in parts)
    shared = replace(case, settings=replace(case.settings, placement=placement))
    starts, recompute = tuple(part.start for part in parts), [part.recompute for part in parts]
    needs = [load.memory for load in stage_loads(case.chain, shared.sites, starts, recompute)]
    own = []
    for part, need, site in zip(parts, needs, shared.sites, strict=True):
        whole = sites[part.stage].memory
        together = [n for n, other in zip(needs, parts, strict=True) if other.stage == part.stage]
        spare = None if whole is None else (whole - math.fsum(together)) / len(together)
        own.append(replace(site, memory=None if spare is None else need + spare))
    return cut_of(shared, starts, recompute, own, balance, compared)


def _bottleneck_of_block(chain: Chain, sites: Sequence[Site], starts: Sequence[int]) -> Bottleneck:
    loads = stage_loads(chain, sites, starts, [site.must_recompute for site in sites])
    fits = all(site.memory is None or load.memory <= site.memory for load, site in zip(loads, sites, strict=True))
    return Bottleneck("block", max(load.seconds for load in loads), fits)


def _solved(
    chain: Chain,
    sites: Sequence[Site],
    settings: Settings,
    solve: Callable[[Chain, Sequence[Site]], Optimal],
    explain: Callable[[Chain, Sequence[Site]], Optimal],
) -> Iterator[tuple[tuple[int, ...], tuple[bool, ...], Sequence[Site]]]:
    """Starts, recomputing stages, and sites with their shares of memory.

    Stages on one device are weighed by what all of them took the time before.
    """
    placement = settings.placement
    shares = [float(placement.count(k)) for k in placement]
    for _ in range(ROUNDS if max(shares) > 1 else 1):
        weighed, kinds = _weighed(chain, sites, shares)
        found, shared = sharing(
            kinds,
            pools_of(settings),
            solve=partial(solve, weighed),
            explain=partial(explain, weighed),
        )
        own = [replace(site, memory=share.memory) for site, share in zip(sites, shared, strict=True)]
        yield found.starts, found.recompute, own
        loads = stage_loads(chain, own, found.starts, found.recompute)
        totals = [sum(load.seconds for load, k in zip(loads, placement, strict=True) if k == own) for own in placement]
        shares = [total / load.seconds if load.seconds else 1.0 for total, load in zip(totals, loads, strict=True)]


def _weighed(chain: Chain, sites: Sequence[Site], shares: Sequence[float]) -> tuple[Chain, list[Site]]:
    """A chain in which a stage takes as long as all stages on its device together."""
    if max(shares) == 1.0:
        return chain, list(sites)
    kinds = dict.fromkeys((site.kind, share) for site, share in zip(sites, shares, strict=True))
    rows = [
        [tuple(share * seconds for seconds in row[kind]) for kind, share in kinds]
        for row in (chain.forward, chain.backward)
    ]
    number = {kind: place for place, kind in enumerate(kinds)}
    weighed = [replace(site, kind=number[site.kind, share]) for site, share in zip(sites, shares, strict=True)]
    return replace(chain, forward=tuple(rows[0]), backward=tuple(rows[1])), weighed
