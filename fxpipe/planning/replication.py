"""Stages with replicas, chosen as in PipeDream (`balance="pipedream"`), for a mini-batch of all replicas.

`choose_replicas` chooses the replicas of each stage for layers of nodes (`fxpipe.partitioning.pipedream`): over the
levels of the paper, and with all devices on one level that is as slow as the network. The better result is planned:
equal numbers, in processes, as `data_parallel` replicas of a pipeline over a mesh; otherwise, for example 15-1, and for
streams, as stages whose replicas take micro-batches in turn, in one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TypeAlias

from fxpipe.cluster import MESHES
from fxpipe.errors import ArgumentError, PartitionError
from fxpipe.hardware import Hardware, cluster_of
from fxpipe.partitioning import pipedream
from fxpipe.partitioning.chain import Chain
from fxpipe.planning.cost_model import chain_of, planned_workers, worker_link
from fxpipe.planning.options.parse import CHUNKS_PER_WORKER
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.plans.retarget import LOOPBACK
from fxpipe.profiling import Profile
from fxpipe.rewriting.cut_points import forbidden_cuts
from fxpipe.scheduling.streams import is_stream
from fxpipe.tracing import Traced

NO_PINS = "balance='pipedream' cannot heed pins; leave balance out, or write 'optimal'"
ONE_STAGE_EACH = (
    "balance='pipedream' puts one stage on a device: leave stages_per_device out, and take a schedule with one, as "
    "'1f1b', or write balance='optimal'"
)


# Of nodes, for a mini-batch of all replicas: for each kind of device the seconds, forward and backward; half of the
# bytes sent across the cut after each node, forward and backward; the bytes of trained parameters.
_NodeFigures: TypeAlias = tuple[list[list[float]], list[float], list[float]]


def _node_figures(chain: Chain, micro_batches: int) -> _NodeFigures:
    """Computes the costs of a chain, which is for one of `micro_batches` micro-batches."""
    n = len(chain)
    changes, weights = [0.0] * (n + 1), [0.0] * n
    for flow in chain.flows:
        last = max((user for user in flow.users if user < n), default=-1)
        if 0 <= flow.maker < last:
            size = flow.bytes * (1.0 if flow.returns else 0.5) * micro_batches
            changes[flow.maker] += size
            changes[last] -= size
    for use in chain.weights:
        weights[use.users[0]] += use.bytes if use.is_trained else 0.0
    rows = zip(chain.forward, chain.backward, strict=True)
    times = [[micro_batches * (f + b) for f, b in zip(*row, strict=True)] for row in rows]
    return times, [max(0.0, size) for size in accumulate(changes[:n])], weights


def pipedream_starts(chain: Chain, settings: Settings, batch: int) -> tuple[int, ...]:
    """Finds the first node of each stage, for the replicas in the settings, or raises a `PartitionError`."""
    if chain.first_stages:
        raise PartitionError(NO_PINS)
    if sorted(settings.placement) != list(range(len(settings.placement))):
        raise PartitionError(ONE_STAGE_EACH)
    figures = _node_figures(chain, settings.micro_batches(batch) * settings.data_parallel * settings.ranks_per_stage)
    bounds = _bounds(figures, chain, settings)
    if bounds is None:
        raise PartitionError(
            f"the graph cannot be cut into {len(settings.placement)} stages that begin where fxpipe.cut() stands; use "
            "fewer devices"
        )
    return bounds[0]


def _bounds(figures: _NodeFigures, chain: Chain, settings: Settings) -> tuple[tuple[int, ...], float] | None:
    """Finds the first node of each stage, and the seconds of the slowest; None if there are no such stages."""
    workers, cluster, of_stages = planned_workers(settings), settings.cluster, list[pipedream.StageWorkers]()
    shares = settings.data_parallel * settings.ranks_per_stage  # replicas with a mini-batch and a link of their own
    if cluster is not None and settings.ranks_per_stage > 1:
        cluster = replace(cluster, data=shares)
    for j, k in enumerate(settings.placement):
        link = worker_link(settings, settings.placement[j - 1], k) if j else None
        if link is None and j and settings.is_over_processes:
            link = LOOPBACK
        reduces = math.inf  # unknown
        if cluster is not None:
            reduces = cluster.group(k).bytes_per_second
        elif settings.is_over_processes and settings.workers[k].type == "cpu":
            reduces = LOOPBACK.bytes_per_second
        receives = math.inf if link is None else link.bytes_per_second * shares
        count = cluster.count(k) if cluster is not None else shares
        of_stages.append(pipedream.StageWorkers(count, workers[k].kind, reduces, receives))
    forbidden = sorted(chain.forbidden_cuts)
    return pipedream.bounds_for_replicas(*figures, of_stages, forbidden=forbidden, required=chain.required_cuts)


def choose_replicas(traced: Traced, profile: Profile, batch: int, settings: Settings) -> Settings:
    """Chooses the replicas of each stage, for the mini-batch of all; returns the settings of one pipeline."""
    known = "say how many replicas each stage has (data_parallel=1, say)"
    if settings.pins:
        raise ArgumentError(NO_PINS)
    if settings.placement != tuple(range(len(settings.workers))):
        raise ArgumentError(ONE_STAGE_EACH)
    if not isinstance(settings.schedule, str):
        raise ArgumentError(
            "balance='pipedream' chooses the number of stages, and this schedule is an order for stages that are "
            f"known: take one by name, as '1f1b', or {known}"
        )
    if not isinstance(settings.checkpoint, str):
        raise ArgumentError(
            f"checkpoint={list(settings.checkpoint)!r} has a mode for each stage, and balance='pipedream' chooses how "
            f"many there are: give one mode for all, or {known}"
        )
    if len({*(settings.memory_limits or ())}) > 1:
        raise ArgumentError(
            "memory_limit differs from device to device, and balance='pipedream' chooses how many a stage has: give "
            f"one for all, or {known}"
        )
    usual, hardware = replace(settings, chooses_replicas=False), settings.hardware
    assert hardware is not None  # `make_settings` requires hardware for this choice
    chain = chain_of(traced, [profile], settings.largest_micro_batch(batch), forbidden_cuts(traced))
    marked = {*traced.cut_mark_places} - {0, len(chain), *chain.forbidden_cuts}
    chain = replace(chain, required_cuts=tuple(sorted(marked)))
    figures = _node_figures(chain, settings.micro_batches(batch))
    best: tuple[float, Settings] | None = None
    for replicas in dict.fromkeys(_partitions(figures, chain, hardware, len(settings.workers))):
        for trial in _with_replicas(usual, replicas, traced, batch):
            bounds = _bounds(figures, chain, trial)
            if bounds is not None and (best is None or bounds[1] < best[0]):
                best = bounds[1], trial
    if best is None:
        raise PartitionError("the graph cannot be cut into stages that begin where fxpipe.cut() stands")
    return best[1]


def bandwidth_levels(hardware: Hardware, devices: int) -> tuple[pipedream.BandwidthLevel, ...]:
    """Returns the levels of bandwidth over `devices` devices, the lowest first: within nodes and between nodes.

    If the last node is not full, the lower level is the largest group that divides every node.

    >>> from fxpipe.hardware import HARDWARE
    >>> [level.workers for level in bandwidth_levels(HARDWARE["h100"], 32)]
    [8, 4]
    """
    cluster = cluster_of(hardware, devices)
    within = math.inf if hardware.within is None else hardware.within.bytes_per_second
    if cluster.nodes == 1 or hardware.between is None:
        return (pipedream.BandwidthLevel(devices, within),)
    group = math.gcd(devices, hardware.devices_per_node)
    share = cluster.adapters_per_node * group / cluster.devices_per_node  # adapters of a node for one group
    between = pipedream.BandwidthLevel(devices // group, hardware.between.bytes_per_second * share)
    return (between,) if group == 1 else (pipedream.BandwidthLevel(group, within), between)


def _partitions(figures: _NodeFigures, chain: Chain, hardware: Hardware, devices: int) -> Iterator[tuple[int, ...]]:
    """Yields the replicas of the best stages over several levels, and over a single level."""
    (times, *_), activations, weights = figures
    starts = pipedream.group_into_layers(times, weights, sorted(chain.forbidden_cuts), chain.required_cuts)
    ends = list(pairwise([*starts, len(times)]))
    layers = (
        [math.fsum(times[start:stop]) for start, stop in ends],
        [activations[stop - 1] for _, stop in ends],
        [math.fsum(weights[start:stop]) for start, stop in ends],
    )
    required = [starts.index(place) for place in chain.required_cuts]
    levels, cluster = bandwidth_levels(hardware, devices), cluster_of(hardware, devices)
    yield pipedream.pipedream_partition(*layers, levels, required=required).replicas
    if len(levels) > 1:  # all devices as far apart as any two, each with an even share of its node's adapters
        rates = [link.bytes_per_second for link in (hardware.within, hardware.between) if link is not None]
        if hardware.between is not None:
            share = min(1.0, cluster.adapters_per_node / cluster.devices_per_node)
            rates.append(hardware.between.bytes_per_second * share)
        one_level = [pipedream.BandwidthLevel(devices, min(rates, default=math.inf))]
        yield pipedream.pipedream_partition(*layers, one_level, required=required).replicas


def _with_replicas(settings: Settings, replicas: tuple[int, ...], traced: Traced, batch: int) -> Iterator[Settings]:
    """Yields the settings of stages with these replicas, for each possible order."""
    n, most = len(replicas), max(replicas)
    limits = settings.memory_limits
    staged = replace(
        settings,
        placement=tuple(range(n)),
        memory_limits=None if limits is None else limits[:n],
        chunks=CHUNKS_PER_WORKER * n if "chunks" in settings.left else settings.chunks,
    )
    share, rest = divmod(batch, most)
    in_turn = settings.runs_here or is_stream(settings.schedule)  # with a stream, replicas take mini-batches in turn
    if most == 1 or (min(replicas) == most and not rest and not in_turn and traced.holds_at(share)):
        pipe = replace(staged, workers=settings.workers[:n], data_parallel=most)
        is_free = settings.mesh == MESHES[0] and most > 1 and n > 1
        for mesh in MESHES if is_free else (settings.mesh,):
            yield replace(pipe, mesh=mesh)
    else:
        ends = [0, *accumulate(replicas)]
        devices = tuple(settings.workers[first:end] for first, end in pairwise(ends))
        chunks = CHUNKS_PER_WORKER * sum(replicas) if "chunks" in settings.left else settings.chunks
        workers = tuple(own[0] for own in devices)
        yield replace(staged, workers=workers, replica_workers=devices, chunks=chunks)
