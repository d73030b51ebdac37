"""The constraints of a cut: required and forbidden places, the stages that may have a node, stages on devices.

They follow from `balance`, `fxpipe.cut()` and pins. Each placement that pins allow is a separate problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fxpipe.errors import ArgumentError, PartitionError
from fxpipe.partitioning.chain import Chain, StageSite
from fxpipe.partitioning.manual_cuts import NodeSequence, cuts_by_names, enclosing_paths, is_by_names, starts_by_counts
from fxpipe.partitioning.pins import PinnedPlacement, placements_for_pins
from fxpipe.planning.cost_model import chain_of, remaining_kinds, stage_devices_of
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.profiling import Profile
from fxpipe.rewriting import forbidden_cuts
from fxpipe.scheduling import make_schedule
from fxpipe.scheduling.row_transforms import neighbour_groups
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


def cut_problems(
    traced: Traced, profiles: Sequence[Profile], batch: int, settings: Settings
) -> Iterator[Callable[[], CutProblem]]:
    """Yields, for each placement of stages, a function that creates its cut problem or raises `PartitionError`."""
    chain = chain_of(traced, profiles, settings.largest_micro_batch(batch), forbidden_cuts(traced))
    nodes = _partition_nodes(traced, chain)
    for way in _fitting_checkpoint(_pinned_placements(settings, nodes), settings):
        yield partial(_cut_problem, way, traced, chain, nodes, settings, profiles, batch)


def _partition_nodes(traced: Traced, chain: Chain) -> NodeSequence:
    modules = tuple(info(node).module for node in traced.nodes)
    busy = enclosing_paths(modules)
    paths = [path for path, _ in traced.model.named_modules() if path and path not in busy]
    inside = {path: whole for path in paths for whole in traced.whole if path.startswith(f"{whole}.")}
    ends = traced.ends
    return NodeSequence(
        node_costs_of(chain),
        tuple(node.name for node in traced.nodes),
        modules,
        chain.forbidden_cuts,
        {path: ends.get(path) for path in paths if path not in inside},
        inside,
    )


def node_costs_of(chain: Chain) -> tuple[float, ...]:
    return tuple(map(sum, zip(chain.forward[0], chain.backward[0], strict=True)))


def _pinned_placements(settings: Settings, nodes: NodeSequence) -> tuple[PinnedPlacement, ...]:
    if not settings.pins:
        return (PinnedPlacement(settings.placement, (), ()),)
    return _fitting_schedule(placements_for_pins(settings.pins, settings.placement, nodes), settings)


def _fitting_schedule(ways: Sequence[PinnedPlacement], settings: Settings) -> tuple[PinnedPlacement, ...]:
    """Filters placements for pins: keeps those that the schedule supports."""
    fitting, failures = list[PinnedPlacement](), list[ArgumentError]()
    for way in ways:
        placement = _with_placement(settings, way.placement).placement
        try:
            make_schedule(settings.schedule, len(placement), settings.chunks, placement=placement)
            fitting.append(way)
        except ArgumentError as error:
            failures.append(error)
    if not fitting:
        raise ArgumentError(f"with these pins {failures[0]}") from None
    return tuple(fitting)


def _fitting_checkpoint(ways: Sequence[PinnedPlacement], settings: Settings) -> Sequence[PinnedPlacement]:
    """Filters placements for pins: keeps those with one stage for each checkpoint mode."""
    if isinstance(settings.checkpoint, str):
        return ways
    fitting = [way for way in ways if len(way.placement) == len(settings.checkpoint)]
    if not fitting:
        counts = " or ".join(str(n) for n in sorted({len(way.placement) for way in ways}))
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
    bounded = replace(
        chain,
        forward=tuple(chain.forward[kind] for kind in kinds),
        backward=tuple(chain.backward[kind] for kind in kinds),
        loss=tuple(chain.loss[kind] for kind in kinds) if chain.loss else (),
        first_stages=way.first_stages,
        last_stages=way.last_stages,
        required_cuts=required,
        is_relayed=relays_values(placed),
    )
    return CutProblem(traced, bounded, nodes, placed, tuple(profiles[kind] for kind in kinds), batch)


def relays_values(settings: Settings) -> bool:
    """Returns True if stages send values only to their neighbors: over processes, each with adjacent stages.

    A process with several runs of stages keeps what it received: then the number of transfers depends on all cuts.
    """
    return settings.is_over_processes and len(neighbour_groups(settings.placement)) == len({*settings.placement})


def _required_starts(traced: Traced, nodes: NodeSequence, settings: Settings, stages: int) -> tuple[int, ...]:
    if stages > len(nodes.items()):
        advice = _fewer_stages_advice(stages, len(settings.workers), len(nodes.items()))
        raise nodes.too_many_stages_error(stages, advice)
    starts = set[int]()
    if not isinstance(settings.balance, str):
        by_names = is_by_names(settings.balance, stages)
        starts.update((cuts_by_names if by_names else starts_by_counts)(settings.balance, nodes))
    starts.update(traced.cut_mark_places)
    return tuple(sorted(_check_required(starts - {0, len(nodes.costs)}, traced, stages, nodes)))


def _fewer_stages_advice(stages: int, devices: int, most: int) -> str:
    """Describes alternatives if several stages on each device exceed `most`; otherwise empty."""
    each = stages // devices
    if each == 1:
        return ""
    less = [f"stages_per_device={most // devices}"] if devices <= most else []
    less += [count_text(most // each, "device")] if each <= most else []
    return f"{' or '.join(less) or 'less of both'}, not {devices} devices with {each} stages each"


def _check_required(places: set[int], traced: Traced, stages: int, nodes: NodeSequence) -> set[int]:
    for mark, place in zip(traced.marks, traced.cut_mark_places, strict=True):
        if place in nodes.forbidden_cuts:
            raise PartitionError(f"fxpipe.cut() at {mark}: {nodes.forbidden_cut_message(place)}")
    if len(places) > stages - 1:
        marks = f" ({len(traced.marks)} by fxpipe.cut())" if traced.marks else ""
        raise PartitionError(
            f"{len(places)} cuts are asked for{marks}, but {stages} stages have {stages - 1} between them; use more "
            "devices, stages_per_device, or fewer cuts"
        )
    return places


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
