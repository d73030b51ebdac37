"""From costs to a cut: the starts and devices of stages, and the stages that recompute.

The problem has the user's constraints (`cut_problem.py`); the solver decides the rest. Where no solver decides, several
cuts are simulated and compared: placements that pins allow, stages that share devices, and stages that recompute only a
part. On a tie, fewer stages win.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fxpipe.errors import MemoryLimitError, PartitionError
from fxpipe.partitioning import cut_by_block, optimal_partition, stage_loads
from fxpipe.partitioning.chain import Chain, StageLoad, StageSite, sending_seconds
from fxpipe.partitioning.optimal import OptimalCut, RemedyTrial, recompute_trials
from fxpipe.partitioning.partial_recompute import StagePart, partial_recompute_cuts
from fxpipe.planning.cost_model import chain_of, largest_lengths, memory_pools, stage_devices_of
from fxpipe.planning.cut_problem import CutProblem, cut_problems, node_costs_of
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.options.stage_placement import place_stages
from fxpipe.planning.plans import Bottleneck, StageWork
from fxpipe.planning.plans.host_time import MESSAGE_SECONDS, interpreter_has_lock, reckon_host
from fxpipe.planning.plans.retarget import action_seconds
from fxpipe.planning.replication import pipedream_starts
from fxpipe.profiling import NodeCost, Profile
from fxpipe.scheduling import SCHEDULES, is_stream, make_schedule
from fxpipe.scheduling.row_transforms import neighbour_groups
from fxpipe.simulation import Simulation, StageCost, Transfer, simulate_schedule, simulate_stream, transfers_of
from fxpipe.tracing import Traced

# -- A cut, its costs, and the simulated step --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cut:
    """The chosen cut, with its costs and its simulated step."""

    traced: Traced  # in execution order
    starts: tuple[int, ...]  # the place of the first node of each stage
    settings: Settings  # with the placement of the stages
    sites: tuple[StageSite, ...]
    loads: tuple[StageLoad, ...]
    balance: str  # "block", "optimal", "by hand"
    bottlenecks: tuple[Bottleneck, ...]  # one for each candidate balance
    transfers: tuple[Transfer, ...]
    simulation: Simulation
    profiles: tuple[Profile, ...]  # one for each kind of device that has a stage

    @property
    def recompute(self) -> tuple[bool, ...]:
        return tuple(load.recompute for load in self.loads)


def cut_of(
    problem: CutProblem,
    starts: tuple[int, ...],
    recompute: Sequence[bool],
    sites: Sequence[StageSite],
    balance: str,
    compared: tuple[Bottleneck, ...],
) -> Cut:
    """Returns the cut of a problem at these places; `compared` are the candidate balances."""
    loads = stage_loads(problem.chain, sites, starts, recompute)
    is_solved = balance in ("optimal", "pipedream")
    solved = (Bottleneck(balance, _bottleneck(loads, problem)),) if is_solved else ()
    transfers = tuple(_cut_transfers(problem.chain, sites, starts))
    simulation = _simulate_cut(problem, starts, loads, transfers)
    bottlenecks = (*compared, *solved)
    profiles, settings = problem.profiles, problem.settings
    return Cut(
        problem.traced, starts, settings, tuple(sites), loads, balance, bottlenecks, transfers, simulation, profiles
    )


def _bottleneck(loads: Sequence[StageLoad], problem: CutProblem) -> float:
    """Computes the seconds of the slowest stage; adjacent stages on one device count as one."""
    settings, cluster = problem.settings, problem.settings.cluster
    if settings.replicas and cluster is not None:
        m = settings.micro_batches(problem.batch)
        if is_stream(settings.schedule):  # its other replicas take the next mini-batches
            return max(load.seconds / cluster.count(k) for k, load in enumerate(loads))
        return max(load.seconds / cluster.rate(k, m) for k, load in enumerate(loads))
    groups = neighbour_groups(settings.placement)
    if len(groups) > len(settings.workers):
        return max(load.seconds for load in loads)
    return max(math.fsum(loads[j].seconds for j in group) for group in groups)


def _cut_transfers(chain: Chain, sites: Sequence[StageSite], starts: Sequence[int]) -> Iterator[Transfer]:
    """Yields one transfer for each pair of stages and direction, with all values together."""

    def stage_of(place: int) -> int:
        return min(bisect_right(starts, place), len(sites)) - 1

    parts_by_ends: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for flow in chain.transferred:
        if flow.maker < 0 or not flow.users:
            continue
        maker = stage_of(flow.maker)
        users = {stage_of(place) for place in flow.users} - {maker}
        hops = [(j, {j + 1}) for j in range(maker, max(users, default=maker))] if chain.is_relayed else [(maker, users)]
        ways = (way for j, ends in hops for way in transfers_of(j, ends, flow.bytes, returns=flow.returns))
        for one in ways:
            seconds = sending_seconds(flow, sites[max(one.source, one.target)].link)
            parts_by_ends.setdefault((one.source, one.target), []).append((flow.bytes, seconds))
    for (source, target), parts in sorted(parts_by_ends.items()):
        size, seconds = (math.fsum(column) for column in zip(*parts, strict=True))
        yield Transfer(source, target, size, seconds, handling=MESSAGE_SECONDS if chain.is_relayed else 0.0)


def _simulate_cut(
    problem: CutProblem, starts: Sequence[int], loads: Sequence[StageLoad], transfers: Sequence[Transfer]
) -> Simulation:
    """Simulates a step of a cut with its host, as for a plan: each stage has further actions, which Python queues."""
    checkpoint = tuple("always" if load.recompute else "never" for load in loads)
    settings, has_processes = problem.settings, problem.chain.is_relayed
    m, devices = settings.micro_batches(problem.batch), [settings.figure_devices[k] for k in settings.placement]
    costs = [
        _with_host(load.cost, nodes, device, settings.largest_micro_batch(problem.batch), not has_processes)
        for load, nodes, device in zip(loads, _stage_nodes(problem, starts), devices, strict=True)
    ]
    how = {"overlaps": has_processes, "one_interpreter": interpreter_has_lock() and not has_processes}
    if is_stream(settings.schedule):
        replicas = settings.stage_replicas
        name = str(settings.schedule)
        return simulate_stream(name, costs, transfers, micro_batches=m, modes=checkpoint, replicas=replicas, **how)
    schedule = make_schedule(settings.schedule, len(loads), m, checkpoint, settings.placement, settings.replicas)
    return simulate_schedule(schedule, costs, transfers, **how)


def _stage_nodes(problem: CutProblem, starts: Sequence[int]) -> Iterator[list[NodeCost]]:
    """Yields the costs of the nodes of each stage."""
    for site, start, end in zip(problem.sites, starts, [*starts[1:], len(problem.chain)], strict=True):
        cost_of = {cost.name: cost for cost in problem.profiles[site.kind].nodes}
        yield [cost_of[name] for name in problem.nodes.names[start:end]]


def _with_host(cost: StageCost, nodes: Sequence[NodeCost], device: str, samples: int, runs_ahead: bool) -> StageCost:
    """Adds the gradients of weights, and the host time of the actions of a stage."""
    works = [one.work for one in nodes if one.work is not None]
    work = StageWork(
        ((0, sum(len(one.forward) for one in works)),),
        ((0, sum(len(one.backward) for one in works)),),
        ((0, sum(len(one.to_inputs) for one in works)),),
    )
    host = reckon_host(device, len(nodes), work, cost.forward)
    host = replace(host, runs_ahead=host.runs_ahead and runs_ahead)
    weight = min(math.fsum(one.weight.at(samples) for one in nodes), cost.backward)
    return replace(cost, weight=weight, action=action_seconds(device), host=host)


# -- Memory advice if nothing fits: other cuts, more recomputation, more devices, smaller micro-batches ----------------

MAX_DEVICES_FACTOR = 8  # a remedy tries up to this many times the given number of devices


def memory_advice(problem: CutProblem) -> list[Iterable[RemedyTrial]]:
    settings = problem.settings
    trials: list[Iterable[RemedyTrial]] = [
        recompute_trials(_with_asked_balance(problem, problem.chain, problem.settings), problem.sites)
    ]
    if settings.balance in ("block", "pipedream") and not settings.replicas:
        trials.insert(0, [RemedyTrial("use balance='optimal'", problem.chain, problem.sites)])
    if not isinstance(settings.schedule, str):
        return trials  # a table is for this number of stages and micro-batches
    if is_stream(settings.schedule):
        trials.append(_fewer_versions(problem))
    if not (settings.pins or settings.replicas or problem.chain.required_cuts):
        trials.append(_more_devices(problem))
    trials.append(_smaller_micro_batches(problem))
    return trials


def _with_asked_balance(problem: CutProblem, chain: Chain, settings: Settings) -> Chain:
    """Adds the required cuts of a balance that does not depend on memory, if such a balance is requested."""
    if settings.balance == "pipedream":
        return replace(chain, required_cuts=pipedream_starts(chain, settings, problem.batch)[1:])
    if settings.balance != "block":
        return chain
    nodes = replace(problem.nodes, costs=node_costs_of(chain))
    return replace(chain, required_cuts=cut_by_block(nodes, len(settings.placement), problem.chain.required_cuts)[1:])


def _more_devices(problem: CutProblem) -> Iterator[RemedyTrial]:
    count, hardware = len(problem.settings.workers), problem.settings.hardware
    most = min(MAX_DEVICES_FACTOR * count, len(problem.nodes.items()) // _stages_per_device(problem.settings))
    if hardware is not None and hardware.most_devices is not None:
        most = min(most, hardware.most_devices)
    for more in range(count + 1, most + 1):
        settings = _with_devices(problem.settings, more)
        yield RemedyTrial(
            f"use {more} devices",
            _with_asked_balance(problem, problem.chain, settings),
            stage_devices_of(settings, problem.batch),
        )


def _stages_per_device(settings: Settings) -> int:
    return len(settings.placement) // len(settings.workers)


def _with_devices(settings: Settings, count: int) -> Settings:
    workers, limits = settings.workers, settings.memory_limits
    more = count - len(workers)
    return replace(
        settings,
        workers=(*workers, *workers[-1:] * more),
        placement=place_stages(count, _stages_per_device(settings), settings.schedule, settings.chunks, None),
        checkpoint=settings.checkpoint if isinstance(settings.checkpoint, str) else "auto",
        memory_limits=None if limits is None else (*limits, *limits[-1:] * more),
    )


def _smaller_micro_batches(problem: CutProblem) -> Iterator[RemedyTrial]:
    """Yields half the micro-batch, a quarter, and so on, down to the smallest that the model accepts."""
    settings, batch = problem.settings, problem.batch
    while True:
        larger, settings = settings, replace(settings, chunks=2 * settings.chunks)
        if settings.largest_micro_batch(batch) == larger.largest_micro_batch(batch):
            return
        words = f"use chunks={settings.chunks} (micro-batches of {settings.largest_micro_batch(batch)})"
        yield _with_settings(problem, settings, words)


def _fewer_versions(problem: CutProblem) -> Iterator[RemedyTrial]:
    """Yields schedules with fewer weight versions, with at least one micro-batch for each stage if possible."""
    settings = problem.settings
    chunks = max(settings.chunks, min(len(settings.placement), problem.batch))
    for schedule, versions in (("pipedream_2bw", "at most 2 versions"), ("1f1b", "one version, with a flush")):
        if schedule != settings.schedule:
            words = f"use schedule={schedule!r}, chunks={chunks} ({versions})"
            yield _with_settings(problem, replace(settings, schedule=schedule, chunks=chunks), words)


def _with_settings(problem: CutProblem, settings: Settings, words: str) -> RemedyTrial:
    samples = settings.largest_micro_batch(problem.batch)
    smaller = chain_of(problem.traced, problem.profiles, samples, problem.chain.forbidden_cuts)
    bounded = replace(
        smaller,
        first_stages=problem.chain.first_stages,
        last_stages=problem.chain.last_stages,
        required_cuts=problem.chain.required_cuts,
        is_relayed=problem.chain.is_relayed,
    )
    sites = stage_devices_of(settings, problem.batch)
    return RemedyTrial(words, _with_asked_balance(problem, bounded, settings), sites)


# -- Memory shared by several stages: on one worker, or on workers that share a device -------------------------------

SHARING_ROUNDS = 3  # in the first, each stage may use all of the memory; six found no more of 55 plans

CutSolver = Callable[[Sequence[StageSite]], OptimalCut]


def share_memory(
    sites: Sequence[StageSite], pools: Sequence[int], solve: CutSolver, explain: CutSolver
) -> tuple[OptimalCut, tuple[StageSite, ...]]:
    """Finds a cut that fits into memory, and the share of memory of each stage.

    Even shares suffice for most cuts. Otherwise each stage may first use all of the memory, and then, in each round,
    its share of it by what the stages of the last cut need. The first cut whose stages fit together is accepted.
    Otherwise 8 of 55 plans within a limit (BERT, GPT, CLIP, U-Net with two stages on a device) would be refused.

    Args:
        sites: for each stage, with an even share of the memory.
        pools: for each stage the index of its memory; stages with the same index share it.
        solve: returns the cut for such sites.
        explain: like `solve`, but its error names remedies.

    Raises:
        MemoryLimitError: from `explain`, with even shares.
        PartitionError: no cut is possible, regardless of memory.
    """
    if not any(pools.count(pool) > 1 and site.memory is not None for pool, site in zip(pools, sites, strict=True)):
        return explain(sites), tuple(sites)
    with contextlib.suppress(MemoryLimitError):
        return solve(sites), tuple(sites)
    wholes = _pool_sums([site.memory for site in sites], pools)
    shares = wholes
    with contextlib.suppress(MemoryLimitError):
        for _ in range(SHARING_ROUNDS):
            cut = solve([replace(site, memory=share) for site, share in zip(sites, shares, strict=True)])
            needs = [load.memory for load in cut.loads]
            sums = [together or 0.0 for together in _pool_sums(needs, pools)]
            shares = [
                None if whole is None or not together else whole * need / together
                for whole, need, together in zip(wholes, needs, sums, strict=True)
            ]
            if all(whole is None or together <= whole for whole, together in zip(wholes, sums, strict=True)):
                return cut, tuple(replace(site, memory=share) for site, share in zip(sites, shares, strict=True))
    try:
        return explain(sites), tuple(sites)
    except MemoryLimitError as error:
        why = "stages on one device share its memory, here as even parts of it:"
        raise MemoryLimitError(f"{why}\n{error}", f"{why} {error.brief}", error.over) from None


def _pool_sums(figures: Sequence[float | None], pools: Sequence[int]) -> list[float | None]:
    """Computes for each stage the sum over all stages that share its memory; None if there is no limit."""
    sums = {pool: math.fsum(f or 0.0 for f, p in zip(figures, pools, strict=True) if p == pool) for pool in pools}
    return [None if own is None else sums[pool] for own, pool in zip(figures, pools, strict=True)]


MIN_GAIN_OF_STAGE = 0.01  # share of a step; splitting a stage must gain at least this much
BALANCING_ROUNDS = 4  # rounds of balancing stages that share a device


def choose_cut(
    traced: Traced, profiles: Sequence[Profile], batch: int, settings: Settings, *, explains: bool = True
) -> Cut:
    """Returns the best cut of a graph.

    Args:
        profiles: of the nodes of the graph, one for each kind of device.
        batch: samples of the mini-batch.
        explains: explain why nothing fits and name remedies, which takes longer than the search.

    Raises:
        PartitionError: the requested cut is impossible; a `MemoryLimitError` if it does not fit.
    """
    cuts, failures = list[Cut](), list[PartitionError]()
    for make_problem in cut_problems(traced, profiles, batch, settings):
        try:
            cuts += _candidate_cuts(make_problem(), explains)
        except PartitionError as error:
            failures.append(error)
    if not cuts:
        raise _naming_sizes(_most_helpful(failures), traced, profiles[0])
    return min(cuts, key=lambda cut: (cut.simulation.step_seconds, sum(way.bytes for way in cut.transfers)))


def _most_helpful(failures: Sequence[PartitionError]) -> PartitionError:
    """Returns the error to report: the last placement for pins has the most stages, so it is the closest to fitting."""
    return next((error for error in reversed(failures) if isinstance(error, MemoryLimitError)), failures[0])


def _naming_sizes(error: PartitionError, traced: Traced, profile: Profile) -> PartitionError:
    """Adds the sizes for memory limits to the error if they differ from the planned sizes."""
    largest = largest_lengths(traced, profile)
    if not isinstance(error, MemoryLimitError) or largest == profile.lengths:
        return error
    sizes = ", ".join(f"{symbol.name}={size}" for symbol, size in largest)
    words = f"Memory is asked at {sizes}, the largest that dynamic_shapes announces."
    return MemoryLimitError(f"{error}\n{words}", f"{error.brief} {words}", error.over)


def _candidate_cuts(problem: CutProblem, explains: bool) -> Iterator[Cut]:
    """Yields one cut; several if stages share devices, because no solver balances them against each other."""
    chain, sites, asked = problem.chain, problem.sites, problem.settings.balance
    by_hand = not isinstance(asked, str)
    only_time = all(site.memory is None and site.link is None and site.kind == 0 for site in sites)
    block = None if chain.first_stages else cut_by_block(problem.nodes, len(sites), chain.required_cuts)
    if asked == "block" and block is None:
        raise PartitionError("balance='block' cannot heed pins; leave balance out, or write 'optimal'")
    has_comparison = block is not None and not problem.settings.replicas  # block costs are not for replicas
    compared = (_bottleneck_of_block(chain, sites, block),) if has_comparison and block is not None else ()
    if asked == "pipedream":
        chain = replace(chain, required_cuts=pipedream_starts(chain, problem.settings, problem.batch)[1:])
        balance = "pipedream"
    elif block is not None and (by_hand or asked == "block" or (asked == "auto" and only_time)):
        chain = replace(chain, required_cuts=block[1:])  # still to decide: do stages fit, and which of them recompute
        balance = "by hand" if by_hand else "block"
    else:
        balance = "optimal"
    solve = partial(optimal_partition, explains=False)
    explain = (
        partial(optimal_partition, names=problem.nodes.names, remedies=memory_advice(problem)) if explains else solve
    )
    most = 1 - MIN_GAIN_OF_STAGE  # of the time of unsplit stages
    for starts, recompute, shared in _solutions(chain, sites, problem.settings, solve, explain):
        cut = cut_of(problem, starts, recompute, shared, balance, compared)
        yield cut
        if _may_split_stages(problem) and any(site.may_recompute for site in shared):
            is_free = balance == "optimal" and not (chain.required_cuts or chain.first_stages)
            below = most * max(load.seconds for load in cut.loads)
            for parts in partial_recompute_cuts(chain, shared, starts, recompute, below if is_free else None):
                other = _cut_with_split_stages(problem, parts, shared, balance, compared)
                if other.simulation.step_seconds <= most * cut.simulation.step_seconds:
                    yield other


def _may_split_stages(problem: CutProblem) -> bool:
    """Returns True if planning decides the modes and the number of stages, and the schedule supports any number."""
    settings = problem.settings
    return (
        settings.checkpoint == "auto"
        and isinstance(settings.schedule, str)
        and not SCHEDULES[settings.schedule].has_fixed_placement
        and isinstance(settings.balance, str)
        and settings.balance != "pipedream"
        and not problem.traced.marks
        and len({*settings.placement}) == len(settings.placement)
    )


def _cut_with_split_stages(
    problem: CutProblem,
    parts: Sequence[StagePart],
    sites: Sequence[StageSite],
    balance: str,
    compared: tuple[Bottleneck, ...],
) -> Cut:
    """Returns the cut in which some stages are split into parts, which share the memory of the stage."""
    placement = tuple(problem.settings.placement[part.stage] for part in parts)
    shared = replace(problem, settings=replace(problem.settings, placement=placement))
    starts, recompute = tuple(part.start for part in parts), [part.recompute for part in parts]
    needs = [load.memory for load in stage_loads(problem.chain, shared.sites, starts, recompute)]
    own = []
    for part, need, site in zip(parts, needs, shared.sites, strict=True):
        whole = sites[part.stage].memory
        together = [n for n, other in zip(needs, parts, strict=True) if other.stage == part.stage]
        spare = None if whole is None else (whole - math.fsum(together)) / len(together)
        own.append(replace(site, memory=None if spare is None else need + spare))
    return cut_of(shared, starts, recompute, own, balance, compared)


def _bottleneck_of_block(chain: Chain, sites: Sequence[StageSite], starts: Sequence[int]) -> Bottleneck:
    loads = stage_loads(chain, sites, starts, [site.must_recompute for site in sites])
    fits = all(site.memory is None or load.memory <= site.memory for load, site in zip(loads, sites, strict=True))
    return Bottleneck("block", max(load.seconds for load in loads), fits)


def _solutions(
    chain: Chain,
    sites: Sequence[StageSite],
    settings: Settings,
    solve: Callable[[Chain, Sequence[StageSite]], OptimalCut],
    explain: Callable[[Chain, Sequence[StageSite]], OptimalCut],
) -> Iterator[tuple[tuple[int, ...], tuple[bool, ...], Sequence[StageSite]]]:
    """Yields starts, recomputation and sites; each round weights stages by the last time of their whole device.

    The rounds shorten 11 of 79 plans (BERT, GPT, CLIP, U-Net with two stages on a device) by 1 to 8 %; two rounds would
    shorten 8 of them as much.
    """
    placement = settings.placement
    shares = [float(placement.count(k)) for k in placement]
    for _ in range(BALANCING_ROUNDS if max(shares) > 1 else 1):
        weighed, kinds = _weighted_chain(chain, sites, shares)
        cut, shared = share_memory(
            kinds,
            memory_pools(settings),
            solve=partial(solve, weighed),
            explain=partial(explain, weighed),
        )
        own = [replace(site, memory=share.memory) for site, share in zip(sites, shared, strict=True)]
        yield cut.starts, cut.recompute, own
        loads = stage_loads(chain, own, cut.starts, cut.recompute)
        totals = [sum(load.seconds for load, k in zip(loads, placement, strict=True) if k == own) for own in placement]
        shares = [total / load.seconds if load.seconds else 1.0 for total, load in zip(totals, loads, strict=True)]


def _weighted_chain(chain: Chain, sites: Sequence[StageSite], shares: Sequence[float]) -> tuple[Chain, list[StageSite]]:
    """Returns a chain in which a stage takes as long as all stages on its device together."""
    if max(shares) == 1.0:
        return chain, list(sites)
    kinds = dict.fromkeys((site.kind, share) for site, share in zip(sites, shares, strict=True))
    rows = [
        [tuple(share * seconds for seconds in row[kind]) for kind, share in kinds]
        for row in (chain.forward, chain.backward)
    ]
    number = {kind: place for place, kind in enumerate(kinds)}
    weighed = [replace(site, kind=number[site.kind, share]) for site, share in zip(sites, shares, strict=True)]
    loss = tuple(share * chain.loss[kind] for kind, share in kinds) if chain.loss else ()
    return replace(chain, forward=tuple(rows[0]), backward=tuple(rows[1]), loss=loss), weighed
