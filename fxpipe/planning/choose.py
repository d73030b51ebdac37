"""From costs to a cut: the starts and devices of stages, and the stages that recompute.

The problem has the user's constraints, from `balance`, `fxpipe.cut()` and pins; the solver decides the rest. Where no
solver decides, several cuts are simulated and compared: placements that pins allow, stages that share devices, and
stages that recompute only a part. On a tie, fewer stages win.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from fxpipe.errors import ArgumentError, MemoryLimitError, PartitionError
from fxpipe.partitioning.chain import Chain, StageLoad, StageSite, sending_seconds, stage_loads
from fxpipe.partitioning.manual_cuts import (
    NodeSequence,
    PinnedPlacement,
    cut_by_block,
    cuts_by_names,
    enclosing_paths,
    is_by_names,
    placements_for_pins,
    starts_by_counts,
)
from fxpipe.partitioning.optimal import OptimalCut, RemedyTrial, optimal_partition, recompute_trials
from fxpipe.partitioning.partial_recompute import StagePart, partial_recompute_cuts
from fxpipe.planning.cost_model import chain_of, largest_lengths, remaining_kinds, stage_devices_of
from fxpipe.planning.options.parse import place_stages
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.plans.data import Bottleneck
from fxpipe.planning.plans.retarget import MESSAGE_SECONDS, action_seconds, interpreter_has_lock, reckon_host
from fxpipe.planning.replication import pipedream_starts
from fxpipe.profiling import Profile
from fxpipe.rewriting.cut_points import forbidden_cuts
from fxpipe.scheduling import SCHEDULES, make_schedule
from fxpipe.scheduling.row_transforms import neighbour_groups
from fxpipe.scheduling.streams import is_stream
from fxpipe.simulation import Simulation, StageCost, Transfer, simulate_schedule, simulate_stream, transfers_of
from fxpipe.tracing import Traced
from fxpipe.tracing.node_info import info
from fxpipe.utils.units import count_text


@dataclass(frozen=True, slots=True)
class CutProblem:
    """A cut problem: one graph with all constraints, and stages on their devices."""

    traced: Traced
    chain: Chain
    nodes: NodeSequence
    settings: Settings
    profiles: tuple[Profile, ...]
    batch: int  # samples of the mini-batch

    @property
    def sites(self) -> tuple[StageSite, ...]:
        return stage_devices_of(self.settings, self.batch)


def _node_sequence(traced: Traced, chain: Chain) -> NodeSequence:
    modules = tuple(info(node).module for node in traced.nodes)
    busy = enclosing_paths(modules)
    paths = [path for path, _ in traced.model.named_modules() if path and path not in busy]
    inside = {path: whole for path in paths for whole in traced.whole if path.startswith(f"{whole}.")}
    empty = {path: traced.ends.get(path) for path in paths if path not in inside}
    names = tuple(node.name for node in traced.nodes)
    return NodeSequence(node_costs_of(chain), names, modules, chain.forbidden_cuts, empty, inside)


def node_costs_of(chain: Chain) -> tuple[float, ...]:
    return tuple(map(sum, zip(chain.forward[0], chain.backward[0], strict=True)))


def _fitting_placements(settings: Settings, nodes: NodeSequence) -> Sequence[PinnedPlacement]:
    """Returns the placements that pins allow, the schedule supports, and the checkpoint modes are for."""
    fitting, failures = list[PinnedPlacement](), list[ArgumentError]()
    if not settings.pins:
        fitting.append(PinnedPlacement(settings.placement, (), ()))
    for way in placements_for_pins(settings.pins, settings.placement, nodes) if settings.pins else ():
        placement = _with_placement(settings, way.placement).placement
        try:
            make_schedule(settings.schedule, len(placement), settings.chunks, placement=placement)
            fitting.append(way)
        except ArgumentError as error:
            failures.append(error)
    if not fitting:
        raise ArgumentError(f"with these pins {failures[0]}") from None
    if isinstance(settings.checkpoint, str):
        return fitting
    counts = " or ".join(str(n) for n in sorted({len(way.placement) for way in fitting}))
    fitting = [way for way in fitting if len(way.placement) == len(settings.checkpoint)]
    if not fitting:
        raise ArgumentError(
            f"checkpoint has {len(settings.checkpoint)} modes, but with these pins there are {counts} stages: give one "
            "for each, or one for all"
        )
    return fitting


def _cut_problem(
    way: PinnedPlacement,
    traced: Traced,
    chain: Chain,
    nodes: NodeSequence,
    settings: Settings,
    profiles: Sequence[Profile],
    batch: int,
) -> CutProblem:
    required = _required_starts(traced, nodes, settings, len(way.placement))
    placed = _with_placement(settings, way.placement)
    kinds = remaining_kinds(settings, placed)
    # Over processes, each with adjacent stages, values go only to neighbors. A process with several runs of stages
    # keeps what it received: then the number of transfers depends on all cuts.
    are_adjacent = len(neighbour_groups(placed.placement)) == len({*placed.placement})
    bounded = replace(
        chain,
        forward=tuple(chain.forward[kind] for kind in kinds),
        backward=tuple(chain.backward[kind] for kind in kinds),
        loss=tuple(chain.loss[kind] for kind in kinds) if chain.loss else (),
        first_stages=way.first_stages,
        last_stages=way.last_stages,
        required_cuts=required,
        is_relayed=placed.is_over_processes and are_adjacent,
    )
    return CutProblem(traced, bounded, nodes, placed, tuple(profiles[kind] for kind in kinds), batch)


def _required_starts(traced: Traced, nodes: NodeSequence, settings: Settings, stages: int) -> tuple[int, ...]:
    devices, most = len(settings.workers), len(nodes.items())
    if stages > most:
        each, advice = stages // devices, ""
        if each > 1:
            less = [f"stages_per_device={most // devices}"] if devices <= most else []
            less += [count_text(most // each, "device")] if each <= most else []
            advice = f"{' or '.join(less) or 'less of both'}, not {devices} devices with {each} stages each"
        raise nodes.too_many_stages_error(stages, advice)
    starts = set[int]()
    if not isinstance(settings.balance, str):
        by_names = is_by_names(settings.balance, stages)
        starts.update((cuts_by_names if by_names else starts_by_counts)(settings.balance, nodes))
    starts.update(traced.cut_mark_places)
    starts -= {0, len(nodes.costs)}
    for mark, place in zip(traced.marks, traced.cut_mark_places, strict=True):
        if place in nodes.forbidden_cuts:
            raise PartitionError(f"fxpipe.cut() at {mark}: {nodes.forbidden_cut_message(place)}")
    if len(starts) > stages - 1:
        marks = f" ({len(traced.marks)} by fxpipe.cut())" if traced.marks else ""
        raise PartitionError(
            f"{len(starts)} cuts are asked for{marks}, but {stages} stages have {stages - 1} between them; use more "
            "devices, stages_per_device, or fewer cuts"
        )
    return tuple(sorted(starts))


def _with_placement(settings: Settings, placement: Sequence[int]) -> Settings:
    """Places the stages, and drops workers without stages."""
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
class Cut:
    """The chosen cut, with its costs and its simulated step."""

    traced: Traced  # in execution order
    starts: tuple[int, ...]  # the place of the first node of each stage
    settings: Settings  # with the placement of the stages
    sites: tuple[StageSite, ...]
    loads: tuple[StageLoad, ...]
    costs: tuple[StageCost, ...]  # as simulated, with weights and host
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
    if balance in ("optimal", "pipedream"):
        compared = (*compared, Bottleneck(balance, _bottleneck(loads, problem)))
    costs = tuple(_stage_costs(problem, starts, loads))
    transfers = tuple(_cut_transfers(problem.chain, sites, starts))
    simulation = _simulate_cut(problem, costs, recompute, transfers)
    own = problem.traced, starts, problem.settings, tuple(sites), loads, costs
    return Cut(*own, balance, compared, transfers, simulation, problem.profiles)


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


def _stage_costs(problem: CutProblem, starts: Sequence[int], loads: Sequence[StageLoad]) -> Iterator[StageCost]:
    """Yields the costs of stages with the gradients of weights, and the host time of actions."""
    settings, n = problem.settings, len(problem.chain)
    samples = settings.largest_micro_batch(problem.batch)
    by_kind = [{cost.name: cost for cost in profile.nodes} for profile in problem.profiles]
    parts = zip(loads, problem.sites, settings.placement, pairwise([*starts, n]), strict=True)
    for load, site, k, (start, end) in parts:
        device, cost, loss = settings.figure_devices[k], load.cost, problem.profiles[site.kind].loss
        nodes = [by_kind[site.kind][name] for name in problem.nodes.names[start:end]]
        works = [node.work for node in nodes if node.work is not None]
        of_loss = loss.work if end == n and loss is not None else None
        counts = [(len(one.forward), len(one.backward), len(one.to_inputs)) for one in works]
        ahead, back, to_inputs = map(sum, zip(*counts, strict=True)) if counts else (0, 0, 0)
        work = ahead, back, to_inputs, 0 if of_loss is None else len(of_loss.forward) + len(of_loss.backward)
        weight = min(math.fsum(node.weight.at(samples) for node in nodes), cost.backward)  # both are rounded sums
        host = reckon_host(device, len(nodes), work, cost.forward)
        yield replace(cost, weight=weight, action=action_seconds(device), host=host)


def _simulate_cut(
    problem: CutProblem, costs: Sequence[StageCost], recompute: Sequence[bool], transfers: Sequence[Transfer]
) -> Simulation:
    """Simulates a step of a cut with its host, as for a plan: each stage has further actions, which Python queues."""
    modes = tuple("always" if again else "never" for again in recompute)
    settings, m = problem.settings, problem.settings.micro_batches(problem.batch)
    how = {"overlaps": False, "one_interpreter": interpreter_has_lock()}
    if problem.chain.is_relayed:  # over processes, where the host waits for its device to pass values
        how = {"overlaps": True, "one_interpreter": False}
        costs = [replace(cost, host=cost.host and replace(cost.host, runs_ahead=False)) for cost in costs]
    if is_stream(settings.schedule):
        replicas, name = settings.stage_replicas, str(settings.schedule)
        how["is_joint"] = settings.is_joint
        return simulate_stream(name, costs, transfers, micro_batches=m, modes=modes, replicas=replicas, **how)
    schedule = make_schedule(settings.schedule, len(costs), m, modes, settings.placement, settings.replicas)
    return simulate_schedule(schedule, costs, transfers, **how)


MAX_DEVICES_FACTOR = 8  # a remedy tries up to this many times the given number of devices


def memory_advice(problem: CutProblem) -> list[Iterable[RemedyTrial]]:
    settings = problem.settings
    chain = _with_asked_balance(problem, problem.chain, settings)
    trials: list[Iterable[RemedyTrial]] = [recompute_trials(chain, problem.sites)]
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
    settings = problem.settings
    workers, limits, hardware = settings.workers, settings.memory_limits, settings.hardware
    each = len(settings.placement) // len(workers)
    most = min(MAX_DEVICES_FACTOR * len(workers), len(problem.nodes.items()) // each)
    if hardware is not None and hardware.most_devices is not None:
        most = min(most, hardware.most_devices)
    for count in range(len(workers) + 1, most + 1):
        more = count - len(workers)
        larger = replace(
            settings,
            workers=(*workers, *workers[-1:] * more),
            placement=place_stages(count, each, settings.schedule, settings.chunks, None),
            checkpoint=settings.checkpoint if isinstance(settings.checkpoint, str) else "auto",
            memory_limits=None if limits is None else (*limits, *limits[-1:] * more),
        )
        yield _with_settings(problem, larger, f"use {count} devices")


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
    samples, chain = settings.largest_micro_batch(problem.batch), problem.chain
    if samples != problem.settings.largest_micro_batch(problem.batch):
        chain = replace(
            chain_of(problem.traced, problem.profiles, samples, chain.forbidden_cuts),
            first_stages=chain.first_stages,
            last_stages=chain.last_stages,
            required_cuts=chain.required_cuts,
            is_relayed=chain.is_relayed,
        )
    sites = stage_devices_of(settings, problem.batch)
    return RemedyTrial(words, _with_asked_balance(problem, chain, settings), sites)


SHARING_ROUNDS = 3  # in the first, each stage may use all of the memory; six found no more of 55 plans

CutSolver = Callable[[Sequence[StageSite]], OptimalCut]


def share_memory(
    sites: Sequence[StageSite], pools: Sequence[int], solve: CutSolver, explain: CutSolver
) -> tuple[OptimalCut, tuple[StageSite, ...]]:
    """Finds a cut that fits into memory, and the share of memory of each stage; stages of one of `pools` share it."""
    # Even shares suffice for most cuts. Otherwise each stage may first use all of the memory, then, in each round, its
    # share of it by what the stages of the last cut need, until the stages fit together. Without this, 8 of 55 plans
    # within a limit (BERT, GPT, CLIP, U-Net with two stages on a device) would be refused. `explain` raises.
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
    """Returns the best cut of a graph for mini-batches of `batch` samples, or raises a `PartitionError`."""
    # `explains`: explain why nothing fits and name remedies, which takes longer than the search.
    cuts, failures = list[Cut](), list[PartitionError]()
    chain = chain_of(traced, profiles, settings.largest_micro_batch(batch), forbidden_cuts(traced))
    nodes = _node_sequence(traced, chain)
    for way in _fitting_placements(settings, nodes):
        try:
            problem = _cut_problem(way, traced, chain, nodes, settings, profiles, batch)
            cuts += _candidate_cuts(problem, explains)
        except PartitionError as error:
            failures.append(error)
    if not cuts:
        # The last placement for pins has the most stages, so it is the closest to fitting into memory.
        worst = next((one for one in reversed(failures) if isinstance(one, MemoryLimitError)), failures[0])
        largest = largest_lengths(traced, profiles[0])
        if isinstance(worst, MemoryLimitError) and largest != profiles[0].lengths:
            sizes = ", ".join(f"{symbol.name}={size}" for symbol, size in largest)
            words = f"Memory is asked at {sizes}, the largest that dynamic_shapes announces."
            raise MemoryLimitError(f"{worst}\n{words}", f"{worst.brief} {words}", worst.over)
        raise worst
    return min(cuts, key=lambda cut: (cut.simulation.step_seconds, sum(way.bytes for way in cut.transfers)))


def _candidate_cuts(problem: CutProblem, explains: bool) -> Iterator[Cut]:
    """Yields one cut; several if stages share devices, because no solver balances them against each other."""
    chain, sites, asked = problem.chain, problem.sites, problem.settings.balance
    by_hand = not isinstance(asked, str)
    only_time = all(site.memory is None and site.link is None and site.kind == 0 for site in sites)
    block = None if chain.first_stages else cut_by_block(problem.nodes, len(sites), chain.required_cuts)
    if asked == "block" and block is None:
        raise PartitionError("balance='block' cannot heed pins; leave balance out, or write 'optimal'")
    compared: tuple[Bottleneck, ...] = ()
    if block is not None and not problem.settings.replicas:  # block costs are not for replicas
        loads = stage_loads(chain, sites, block, [site.must_recompute for site in sites])
        fits = all(site.memory is None or load.memory <= site.memory for load, site in zip(loads, sites, strict=True))
        compared = (Bottleneck("block", max(load.seconds for load in loads), fits),)
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
    settings, traced = problem.settings, problem.traced
    may_split = settings.checkpoint == "auto" and not by_hand and asked != "pipedream" and not traced.marks
    may_split = may_split and len({*settings.placement}) == len(settings.placement)
    may_split = (
        may_split and isinstance(settings.schedule, str) and not SCHEDULES[settings.schedule].has_fixed_placement
    )
    for starts, recompute, shared in _solutions(chain, sites, problem.settings, solve, explain):
        cut = cut_of(problem, starts, recompute, shared, balance, compared)
        yield cut
        if may_split and any(site.may_recompute for site in shared):
            is_free = balance == "optimal" and not (chain.required_cuts or chain.first_stages)
            below = most * max(load.seconds for load in cut.loads)
            for parts in partial_recompute_cuts(chain, shared, starts, recompute, below if is_free else None):
                other = _cut_with_split_stages(problem, parts, shared, balance, compared)
                if other.simulation.step_seconds <= most * cut.simulation.step_seconds:
                    yield other


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


def _solutions(
    chain: Chain,
    sites: Sequence[StageSite],
    settings: Settings,
    solve: Callable[[Chain, Sequence[StageSite]], OptimalCut],
    explain: Callable[[Chain, Sequence[StageSite]], OptimalCut],
) -> Iterator[tuple[tuple[int, ...], tuple[bool, ...], Sequence[StageSite]]]:
    """Yields starts, recomputation and sites; each round weights stages by the last time of their whole device."""
    # The rounds shorten 11 of 79 plans (BERT, GPT, CLIP, U-Net with two stages on a device) by 1 to 8 %; two rounds
    # would shorten 8 of them as much.
    placement = pools = settings.placement
    if settings.memory_limits is None and settings.hardware is None:  # memory is of devices, which workers may share
        pools = tuple(settings.workers.index(device) for device in settings.devices)
    shares = [float(placement.count(k)) for k in placement]
    for _ in range(BALANCING_ROUNDS if max(shares) > 1 else 1):
        weighed, kinds = _weighted_chain(chain, sites, shares)
        cut, shared = share_memory(kinds, pools, partial(solve, weighed), partial(explain, weighed))
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
