"""From costs to a cut: in which order nodes run, where stages begin, where they run, and which of them recompute.

What the user says by hand becomes conditions on the cut: places where one must stand, and the first and the last stage
that may have a node. What is left free is for the solver. Where there is a choice that no solver makes, several cuts
are made and compared: the order of the graph (as traced, or with side branches next to their use), the stages that
pins allow, and stages in parts of which only some recompute (`fxpipe.partitioning.parts`). The simulator has the last
word; where it says the same, the traced order and fewer stages win.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fxpipe.deciding.chains import chain_of
from fxpipe.deciding.sharing import sharing
from fxpipe.deciding.sites import kinds_left, pools_of, sites_of
from fxpipe.demands import demands_of
from fxpipe.errors import ArgumentError, MemoryLimitError, PartitionError
from fxpipe.partitioning import cut_by_block, optimal_partition, stage_loads
from fxpipe.partitioning.by_hand import cuts_by_names, is_by_names, starts_by_counts
from fxpipe.partitioning.chain import Chain, Site
from fxpipe.partitioning.loads import StageLoad, sending_seconds
from fxpipe.partitioning.nodes import Nodes
from fxpipe.partitioning.parts import Part, in_parts
from fxpipe.partitioning.pins import Pinned, pinned
from fxpipe.partitioning.shortage import Trial, recomputing
from fxpipe.plans import Bottleneck
from fxpipe.profiling import Profile
from fxpipe.rewriting import forbidden_cuts
from fxpipe.scheduling import SCHEDULES, is_searched, make_schedule
from fxpipe.scheduling.neighbours import neighbours
from fxpipe.settings import Settings
from fxpipe.simulation import Simulation, StageCost, Transfer, simulate_schedule, transfers_of
from fxpipe.tracing import Traced

MOST_DEVICES = 8  # times those that are given, of which one tries whether the model would fit
WORTH_A_STAGE = 0.01  # of a step: by less, recomputing only a part of a stage does not pay for one stage more
ROUNDS = 4  # in which stages that share a device are balanced against each other


@dataclass(frozen=True, slots=True)
class Cut:
    """What was decided."""

    traced: Traced  # in the order in which its nodes will run
    starts: tuple[int, ...]  # the place of the first node of each stage
    settings: Settings  # with the placement of the stages
    sites: tuple[Site, ...]
    loads: tuple[StageLoad, ...]
    balance: str  # "block", "optimal", "by hand"
    bottlenecks: tuple[Bottleneck, ...]  # by the ways of balancing that were compared
    transfers: tuple[Transfer, ...]
    simulation: Simulation
    profiles: tuple[Profile, ...]  # one for each kind of device that has a stage

    @property
    def recompute(self) -> tuple[bool, ...]:
        return tuple(load.recompute for load in self.loads)


def decide(
    orders: Sequence[Traced], profiles: Sequence[Profile], batch: int, settings: Settings, *, explains: bool = True
) -> Cut:
    """The best cut of a graph.

    Args:
        orders: the graph in the orders to be compared; the first one wins a tie.
        profiles: of its nodes, one for each kind of device.
        batch: samples of the mini-batch.
        explains: look for what would fit where nothing does, which takes longer than to find that nothing does.

    Raises:
        PartitionError: it cannot be cut as asked; a `MemoryLimitError` where it does not fit.
    """
    found, failures = list[Cut](), list[PartitionError]()
    samples = settings.largest_micro_batch(batch)
    for traced in orders:
        chain = chain_of(traced, profiles, samples, forbidden_cuts(traced))
        nodes = _nodes(traced, chain)
        for way in _with_modes(_ways(settings, nodes), settings):
            try:
                case = _case(way, traced, chain, nodes, settings, profiles, batch)
                found += _cuts_of(case, explains)
            except PartitionError as error:
                failures.append(error)
    if not found:
        raise _most_helpful(failures)
    return min(found, key=lambda cut: (cut.simulation.step_seconds, sum(way.bytes for way in cut.transfers)))


def is_by_hand(traced: Traced, settings: Settings) -> bool:
    """Does the user say where to cut? Then nodes stay in the order in which forward runs them."""
    return bool(settings.pins or traced.marks) or not isinstance(settings.balance, str)


def _most_helpful(failures: Sequence[PartitionError]) -> PartitionError:
    """Of the ways to satisfy pins the last one has the most stages, and so comes nearest to fitting."""
    return next((error for error in reversed(failures) if isinstance(error, MemoryLimitError)), failures[0])


def _nodes(traced: Traced, chain: Chain) -> Nodes:
    return Nodes(
        _costs(chain),
        tuple(node.name for node in traced.nodes),
        tuple(node.meta["module"] for node in traced.nodes),
        chain.forbidden,
    )


def _ways(settings: Settings, nodes: Nodes) -> tuple[Pinned, ...]:
    if not settings.pins:
        return (Pinned(settings.placement, (), ()),)
    return _for_schedule(pinned(settings.pins, settings.placement, nodes), settings)


def _for_schedule(ways: Sequence[Pinned], settings: Settings) -> tuple[Pinned, ...]:
    """Those ways of pins in which stages are where the schedule can have them."""
    found, failures = list[Pinned](), list[ArgumentError]()
    for way in ways:
        placement = _placed(settings, way.placement).placement
        try:
            make_schedule(settings.schedule, len(placement), settings.chunks, placement=placement)
            found.append(way)
        except ArgumentError as error:
            failures.append(error)
    if not found:
        raise ArgumentError(f"with these pins {failures[0]}") from None
    return tuple(found)


def _case(
    way: Pinned,
    traced: Traced,
    chain: Chain,
    nodes: Nodes,
    settings: Settings,
    profiles: Sequence[Profile],
    batch: int,
) -> _Case:
    required = _required(traced, nodes, settings, len(way.placement))
    placed = _placed(settings, way.placement)
    kinds = kinds_left(settings, placed)
    bounded = replace(
        chain,
        forward=tuple(chain.forward[kind] for kind in kinds),
        backward=tuple(chain.backward[kind] for kind in kinds),
        low=way.low,
        high=way.high,
        required=required,
    )
    return _Case(traced, bounded, nodes, placed, tuple(profiles[kind] for kind in kinds), batch)


def _costs(chain: Chain) -> tuple[float, ...]:
    return tuple(map(sum, zip(chain.forward[0], chain.backward[0], strict=True)))


def _with_modes(ways: Sequence[Pinned], settings: Settings) -> Sequence[Pinned]:
    """Those ways of pins that have as many stages as there are checkpoint modes."""
    if isinstance(settings.checkpoint, str):
        return ways
    found = [way for way in ways if len(way.placement) == len(settings.checkpoint)]
    if not found:
        counts = " or ".join(str(n) for n in sorted({len(way.placement) for way in ways}))
        raise ArgumentError(
            f"checkpoint has {len(settings.checkpoint)} modes, but with these pins there are {counts} stages: give one "
            "for each, or one for all"
        )
    return found


def _required(traced: Traced, nodes: Nodes, settings: Settings, stages: int) -> tuple[int, ...]:
    """The places at which the user wants a stage to begin."""
    if stages > len(nodes.items()):
        each = (
            f" (the product of {len(settings.workers)} devices and stages_per_device={stages // len(settings.workers)})"
        )
        raise PartitionError(nodes.why_not_so_many(stages) + (each if stages > len(settings.workers) else ""))
    found = set[int]()
    if not isinstance(settings.balance, str):
        by_names = is_by_names(settings.balance, stages)
        found.update((cuts_by_names if by_names else starts_by_counts)(settings.balance, stages, nodes))
    found.update(traced.marked)
    return tuple(sorted(_possible(found - {0, len(nodes.costs)}, traced, stages, nodes)))


def _possible(places: set[int], traced: Traced, stages: int, nodes: Nodes) -> set[int]:
    for mark, place in zip(traced.marks, traced.marked, strict=True):
        if place in nodes.forbidden:
            raise PartitionError(f"fxpipe.cut() at {mark}: {nodes.why_no_cut(place)}")
    if len(places) > stages - 1:
        marks = f" ({len(traced.marks)} by fxpipe.cut())" if traced.marks else ""
        raise PartitionError(
            f"{len(places)} cuts are asked for{marks}, but {stages} stages have {stages - 1} between them; use more "
            "devices, stages_per_device, or fewer cuts"
        )
    return places


def _placed(settings: Settings, placement: Sequence[int]) -> Settings:
    """With these stages, and no worker that has none."""
    used = sorted(set(placement))
    workers = tuple(settings.workers[k] for k in used)
    limits = settings.memory_limits
    return replace(
        settings,
        workers=workers,
        placement=tuple(map(used.index, placement)),
        memory_limits=None if limits is None else tuple(limits[k] for k in used),
    )


@dataclass(frozen=True, slots=True)
class _Case:
    """One graph with all conditions, and stages on their devices."""

    traced: Traced
    chain: Chain
    nodes: Nodes
    settings: Settings
    profiles: tuple[Profile, ...]
    batch: int  # samples of the mini-batch

    @property
    def sites(self) -> tuple[Site, ...]:
        return sites_of(self.settings, self.batch)


def _cuts_of(case: _Case, explains: bool) -> Iterator[Cut]:
    """Usually one; several, where stages share devices, which no solver weighs against each other."""
    chain, sites, asked = case.chain, case.sites, case.settings.balance
    by_hand = not isinstance(asked, str)
    only_time = all(site.memory is None and site.link is None and site.kind == 0 for site in sites)
    block = None if chain.low else cut_by_block(case.nodes, len(sites), chain.required)
    if asked == "block" and block is None:
        raise PartitionError("balance='block' cannot heed pins; leave balance out, or write 'optimal'")
    compared = () if block is None else (_bottleneck_of_block(chain, sites, block),)
    remedies = _remedies(case) if explains else []
    if block is not None and (by_hand or asked == "block" or (asked == "auto" and only_time)):
        chain = replace(chain, required=block[1:])  # what remains: do stages fit, and which of them recompute
        balance = "by hand" if by_hand else "block"
    else:
        balance = "optimal"
    for starts, recompute, shared in _solved(chain, sites, case.settings, case.nodes.names, remedies):
        found = _cut(case, starts, recompute, shared, balance, compared)
        yield found
        if _may_be_in_parts(case) and any(site.may_recompute for site in shared):
            is_free = balance == "optimal" and not (chain.required or chain.low)
            below = (1 - WORTH_A_STAGE) * max(load.seconds for load in found.loads)
            for parts in in_parts(chain, shared, starts, recompute, below if is_free else None):
                other = _in_parts(case, parts, shared, balance, compared)
                if other.simulation.step_seconds <= (1 - WORTH_A_STAGE) * found.simulation.step_seconds:
                    yield other


def _cut(
    case: _Case,
    starts: tuple[int, ...],
    recompute: Sequence[bool],
    sites: Sequence[Site],
    balance: str,
    compared: tuple[Bottleneck, ...],
) -> Cut:
    loads = stage_loads(case.chain, sites, starts, recompute)
    optimal = (Bottleneck("optimal", _bottleneck(loads, case.settings)),) if balance == "optimal" else ()
    transfers = tuple(_transfers(case.chain, sites, starts))
    simulation = _simulated(case, starts, loads, transfers)
    bottlenecks = (*compared, *optimal)
    profiles, settings = case.profiles, case.settings
    return Cut(
        case.traced, starts, settings, tuple(sites), loads, balance, bottlenecks, transfers, simulation, profiles
    )


def _bottleneck(loads: Sequence[StageLoad], settings: Settings) -> float:
    """Of the slowest stage; parts of a stage on its device are one."""
    groups = neighbours(settings.placement)
    if len(groups) > len(settings.workers):
        return max(load.seconds for load in loads)
    return max(math.fsum(loads[j].seconds for j in group) for group in groups)


def _may_be_in_parts(case: _Case) -> bool:
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
    case: _Case, parts: Sequence[Part], sites: Sequence[Site], balance: str, compared: tuple[Bottleneck, ...]
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
    return _cut(shared, starts, recompute, own, balance, compared)


def _bottleneck_of_block(chain: Chain, sites: Sequence[Site], starts: Sequence[int]) -> Bottleneck:
    loads = stage_loads(chain, sites, starts, [site.must_recompute for site in sites])
    fits = all(site.memory is None or load.memory <= site.memory for load, site in zip(loads, sites, strict=True))
    return Bottleneck("block", max(load.seconds for load in loads), fits)


def _solved(
    chain: Chain,
    sites: Sequence[Site],
    settings: Settings,
    names: Sequence[str],
    remedies: Sequence[Iterable[Trial]],
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
            solve=partial(optimal_partition, weighed),
            explain=partial(optimal_partition, weighed, names=names, remedies=remedies),
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


# -- what would fit --------------------------------------------------------------------------------------------------


def _remedies(case: _Case) -> list[Iterable[Trial]]:
    """What is tried where nothing fits into memory."""
    settings = case.settings
    found: list[Iterable[Trial]] = [recomputing(_as_asked(case, case.chain, case.settings), case.sites)]
    if settings.balance == "block":
        found.insert(0, [Trial("use balance='optimal'", case.chain, case.sites)])
    if not isinstance(settings.schedule, str):
        return found  # it is for these sizes
    if not (settings.pins or case.chain.required or len(settings.placement) > len(settings.workers)):
        found.append(_more_devices(case))
    found.append(_smaller_micro_batches(case))
    return found


def _as_asked(case: _Case, chain: Chain, settings: Settings) -> Chain:
    """With the cuts of `balance="block"`, if that is what was asked for."""
    if settings.balance != "block":
        return chain
    nodes = replace(case.nodes, costs=_costs(chain))
    return replace(chain, required=cut_by_block(nodes, len(settings.placement), case.chain.required)[1:])


def _more_devices(case: _Case) -> Iterator[Trial]:
    count = len(case.settings.workers)
    for more in range(count + 1, min(MOST_DEVICES * count, len(case.nodes.items())) + 1):
        settings = _on_more(case.settings, more)
        yield Trial(f"use {more} devices", _as_asked(case, case.chain, settings), sites_of(settings, case.batch))


def _on_more(settings: Settings, count: int) -> Settings:
    """With so many devices, the further ones like the last one."""
    workers, limits = settings.workers, settings.memory_limits
    more = count - len(workers)
    return replace(
        settings,
        workers=(*workers, *workers[-1:] * more),
        placement=tuple(range(count)),
        checkpoint=settings.checkpoint if isinstance(settings.checkpoint, str) else "auto",
        memory_limits=None if limits is None else (*limits, *limits[-1:] * more),
    )


def _smaller_micro_batches(case: _Case) -> Iterator[Trial]:
    """Half the micro-batch, a quarter, and so on."""
    settings, batch = case.settings, case.batch
    while settings.largest_micro_batch(batch) > 1:
        settings = replace(settings, chunks=2 * settings.chunks)
        samples = settings.largest_micro_batch(batch)
        smaller = chain_of(case.traced, case.profiles, samples, case.chain.forbidden)
        bounded = replace(smaller, low=case.chain.low, high=case.chain.high, required=case.chain.required)
        words = f"use chunks={settings.chunks} (micro-batches of {samples})"
        yield Trial(words, _as_asked(case, bounded, settings), sites_of(settings, batch))


# -- what it comes to ------------------------------------------------------------------------------------------------


def _transfers(chain: Chain, sites: Sequence[Site], starts: Sequence[int]) -> Iterator[Transfer]:
    """One for each pair of stages and direction, of all values together."""

    def stage_of(place: int) -> int:
        return min(bisect_right(starts, place), len(sites)) - 1

    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for flow in chain.flows:
        if flow.maker < 0:
            continue
        maker = stage_of(flow.maker)
        users = {stage_of(place) for place in flow.users} - {maker}
        for one in transfers_of(maker, users, flow.bytes, returns=flow.returns):
            seconds = sending_seconds(flow, sites[max(one.source, one.target)].link)
            found.setdefault((one.source, one.target), []).append((flow.bytes, seconds))
    for (source, target), parts in sorted(found.items()):
        size, seconds = (math.fsum(column) for column in zip(*parts, strict=True))
        yield Transfer(source, target, size, seconds)


def _simulated(
    case: _Case, starts: Sequence[int], loads: Sequence[StageLoad], transfers: Sequence[Transfer]
) -> Simulation:
    checkpoint = tuple("always" if load.recompute else "never" for load in loads)
    settings = case.settings
    m = settings.micro_batches(case.batch)
    weights = _weight_seconds(case, starts)
    costs = [
        StageCost(load.forward_seconds, load.backward_seconds, weight=min(weight, load.backward_seconds))
        for load, weight in zip(loads, weights, strict=True)
    ]
    demands = demands_of(costs, transfers, checkpoint) if is_searched(settings.schedule) else None
    schedule = make_schedule(settings.schedule, len(loads), m, checkpoint, settings.placement, demands)
    return simulate_schedule(schedule, costs, transfers, overlaps=any(site.overlaps for site in case.sites))


def _weight_seconds(case: _Case, starts: Sequence[int]) -> list[float]:
    """For each stage, how much of its backward makes gradients of parameters."""
    found, samples = [], case.settings.largest_micro_batch(case.batch)
    for site, start, end in zip(case.sites, starts, [*starts[1:], len(case.chain)], strict=True):
        cost_of = {cost.name: cost for cost in case.profiles[site.kind].nodes}
        found.append(math.fsum(cost_of[name].weight.at(samples) for name in case.nodes.names[start:end]))
    return found
