"""What a cut comes to: loads, what is sent, and the step as it is simulated."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxpipe.deciding.cases import Case
from fxpipe.demands import demands_of
from fxpipe.partitioning import stage_loads
from fxpipe.partitioning.chain import Chain, Site
from fxpipe.partitioning.loads import StageLoad, sending_seconds
from fxpipe.plans import Bottleneck
from fxpipe.profiling import Profile
from fxpipe.scheduling import is_searched, make_schedule
from fxpipe.scheduling.neighbours import neighbours
from fxpipe.settings import Settings
from fxpipe.simulation import Simulation, StageCost, Transfer, simulate_schedule, transfers_of
from fxpipe.tracing import Traced


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


def cut_of(
    case: Case,
    starts: tuple[int, ...],
    recompute: Sequence[bool],
    sites: Sequence[Site],
    balance: str,
    compared: tuple[Bottleneck, ...],
) -> Cut:
    """The cut of a case at these places; `compared` are ways of balancing that it was chosen before."""
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
    case: Case, starts: Sequence[int], loads: Sequence[StageLoad], transfers: Sequence[Transfer]
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


def _weight_seconds(case: Case, starts: Sequence[int]) -> list[float]:
    """For each stage, how much of its backward makes gradients of parameters."""
    found, samples = [], case.settings.largest_micro_batch(case.batch)
    for site, start, end in zip(case.sites, starts, [*starts[1:], len(case.chain)], strict=True):
        cost_of = {cost.name: cost for cost in case.profiles[site.kind].nodes}
        found.append(math.fsum(cost_of[name].weight.at(samples) for name in case.nodes.names[start:end]))
    return found
