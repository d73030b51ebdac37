"""The plans that a tuner simulates: each cut is computed once and shared by all candidates that can use it.

`ReplicaOptions` has the numbers and orders of replicas to try.

A cut depends on the placement of stages, the size of micro-batches and recomputation, and on the schedule only if
memory is limited. Two sizes with the same cut share its plan, which has figures for any size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from fxpipe.cluster import MESHES, parse_mesh
from fxpipe.errors import ArgumentError, MemoryLimitError
from fxpipe.hardware import planned_devices
from fxpipe.partitioning import block_partition
from fxpipe.planning.choose import Cut
from fxpipe.planning.cost_model import planned_workers
from fxpipe.planning.options.parse import Devices, parse_devices, parse_hardware_option
from fxpipe.planning.options.pipeline_options import Settings, make_settings
from fxpipe.planning.options.stage_placement import place_stages
from fxpipe.planning.passes import PreparedGraph, ProfiledModel, batch_of_replica, cut_profiled, prepare_cut
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.retarget import action_seconds
from fxpipe.planning.plans.simulate_plan import vary_plan
from fxpipe.planning.tuning.candidates import Candidate
from fxpipe.scheduling import Schedule, is_stream, make_schedule, micro_batches_in_flight
from fxpipe.simulation import StageCost, simulate_schedule, simulate_stream
from fxpipe.tracing.node_info import bytes_at
from fxpipe.tracing.tensors import tensor_bytes
from fxpipe.utils.batch_split import largest_micro_batch, micro_batch_sizes
from fxpipe.utils.units import count_text, human_bytes, parse_count

CheckpointMode: TypeAlias = "str | tuple[str, ...]"  # for all stages, or one for each


@dataclass
class ModelPlans:
    """Plans of a profiled model, for candidates of one replica."""

    profiled: ProfiledModel
    settings: Settings  # everything that does not differ between candidates
    reckons_recompute: bool = False  # `bound_without_sending` includes the recomputation that memory requires
    _cuts: dict[tuple[object, ...], PreparedGraph] = field(default_factory=dict)  # by the inputs of the cut
    _same: dict[tuple[object, ...], PreparedGraph] = field(default_factory=dict)  # by the cut itself
    _nodes: dict[int, list[StageCost]] = field(default_factory=dict)  # by samples

    @property
    def devices(self) -> int:
        return len(self.settings.workers)

    @property
    def batch(self) -> int:
        return self.profiled.batch

    def plan(self, candidate: Candidate, mode: CheckpointMode) -> Plan:
        """Returns the plan for stages with this checkpoint mode, ignoring memory limits, or raises a FxpipeError."""
        graph = self._prepared(self._unlimited(candidate, mode))
        modes = graph.plan.checkpoint if isinstance(self.settings.checkpoint, tuple) else mode
        return _variant(graph.plan, candidate, self.profiled.batch, modes)

    def within_limits(self, candidate: Candidate, mode: CheckpointMode) -> Plan | None:
        """Returns a plan that fits, or raises a FxpipeError; None if cuts cannot be moved. "auto" chooses modes."""
        settings = self._settings(candidate)
        if isinstance(settings.checkpoint, str):
            settings = replace(settings, checkpoint=mode)
        graph = self._prepared(settings)
        modes = graph.plan.checkpoint if mode == "auto" or isinstance(self.settings.checkpoint, tuple) else mode
        return _variant(graph.plan, candidate, self.profiled.batch, modes)

    def bound(self, candidate: Candidate) -> float:
        """Computes a lower bound on the seconds of a step: all work shared evenly, or one micro-batch in all stages."""
        if self.settings.replicas:
            return 0.0  # no bound: each replica has only a part of the micro-batches
        m = min(candidate.chunks, self.profiled.batch)
        nodes = self._fastest(largest_micro_batch(self.profiled.batch, m))
        total = math.fsum(cost.forward + cost.backward for cost in nodes)
        even = m * total / len(self.settings.workers)
        if is_stream(candidate.schedule):  # mini-batches overlap, so no step waits for a micro-batch to pass all stages
            return even * (1 - 1e-9)
        return max(even, total - math.fsum(cost.weight or 0.0 for cost in nodes)) * (1 - 1e-9)  # sums are rounded

    def bound_without_sending(self, candidate: Candidate) -> float:
        """Computes the seconds of a step with the most even stages, no transfers, and the least recomputation."""
        if self.settings.replicas:
            return 0.0
        m = min(candidate.chunks, self.profiled.batch)
        placement = self._placement(candidate)
        nodes = self._fastest(largest_micro_batch(self.profiled.batch, m))
        lengths = block_partition([cost.forward + cost.backward for cost in nodes], len(placement))
        ends = accumulate(lengths)
        starting = min(map(action_seconds, self.settings.figure_devices))
        stages = [
            _stage_of_nodes(nodes[end - length : end], starting) for end, length in zip(ends, lengths, strict=True)
        ]
        stages = [
            _with_reduction(stage, self.settings, k, self._gradient_bytes // len(placement))
            for stage, k in zip(stages, placement, strict=True)
        ]
        schedule = make_schedule(candidate.schedule, len(placement), m, placement=placement)
        again = self._recomputed_share(schedule, largest_micro_batch(self.profiled.batch, m))
        stages = [replace(stage, backward=stage.backward + again * stage.forward) for stage in stages]
        if is_stream(candidate.schedule):
            return simulate_stream(schedule.name, stages, micro_batches=m).step_seconds
        return simulate_schedule(schedule, stages).step_seconds

    def _recomputed_share(self, schedule: Schedule, samples: int) -> float:
        """Estimates the share of stages that must recompute, if saved memory is as even as the stages' seconds."""
        if not self.reckons_recompute or self.settings.checkpoint == "never":
            return 0.0
        limits = [worker.memory for worker in planned_workers(self.settings)]
        traced, profile = self.profiled.traced, self.profiled.profiles[0]
        saved = sum(bytes_at(one.bytes, traced.batch, samples, profile.lengths) for one in profile.saved)
        flights = micro_batches_in_flight(schedule)
        kept = saved * sum(flights) / len(flights)
        if None in limits or not kept:
            return 0.0
        spare = sum(limit or 0.0 for limit in limits) - self._parameter_bytes
        spare -= self._gradient_bytes * (1 + self.settings.optimizer_state)
        return min(1.0, max(0.0, 1 - spare / kept))

    @functools.cached_property
    def _parameter_bytes(self) -> int:
        return sum(tensor_bytes(one) for one in self.profiled.traced.model.parameters())

    @functools.cached_property
    def _gradient_bytes(self) -> int:
        return sum(tensor_bytes(one) for one in self.profiled.traced.model.parameters() if one.requires_grad)

    def prepared(self, plan: Plan) -> PreparedGraph:
        """Returns the prepared graph for a plan of this source."""
        nodes = [stage.nodes for stage in plan.stages]
        graph = next(
            one
            for one in self._same.values()
            if one.plan.placement == plan.placement and [stage.nodes for stage in one.plan.stages] == nodes
        )
        schedule = next((c for c in (self.settings.schedule,) if not isinstance(c, str)), plan.schedule)
        settings = replace(graph.settings, schedule=schedule, chunks=plan.chunks, checkpoint=plan.checkpoint)
        return replace(graph, plan=plan, settings=settings)

    def _settings(self, candidate: Candidate) -> Settings:
        settings = self.settings
        sizes = micro_batch_sizes(self.profiled.batch, candidate.chunks)
        for size in sizes:
            if not self.profiled.traced.holds_at(size):
                raise ArgumentError(f"micro-batches of {size} run another graph")
        placement = self._placement(candidate)
        return replace(settings, schedule=candidate.schedule, chunks=candidate.chunks, placement=placement)

    def _placement(self, candidate: Candidate) -> tuple[int, ...]:
        workers, each, nodes = len(self.settings.workers), candidate.stages_per_device, len(self.profiled.traced.nodes)
        if workers * each > nodes:
            raise ArgumentError(f"{workers * each} stages need as many nodes, and the graph has {nodes}")
        return place_stages(workers, each, candidate.schedule, candidate.chunks, None)

    def _unlimited(self, candidate: Candidate, mode: CheckpointMode) -> Settings:
        settings = self._settings(candidate)
        if isinstance(settings.checkpoint, str):
            # All but the last micro-batch are recomputed: stages are balanced for these.
            settings = replace(settings, checkpoint="never" if mode == "never" else "always")
        return replace(settings, memory_limits=(None,) * len(settings.workers))

    def _key(self, settings: Settings) -> tuple[object, ...]:
        """Returns the inputs of a cut; includes the schedule only if memory is limited or there are pins."""
        is_limited = any(limit is not None for limit in settings.memory_limits or (1,))
        of_schedule = settings.schedule if is_limited or settings.pins else None
        samples = settings.largest_micro_batch(self.profiled.batch)
        return settings.placement, samples, settings.checkpoint, of_schedule, is_limited

    def _prepared(self, settings: Settings) -> PreparedGraph:
        profiled, key = self.profiled, self._key(settings)
        if key not in self._cuts:
            self._cuts[key] = self._of_cut(cut_profiled(profiled, settings, explains=False), settings)
        return self._cuts[key]

    def _of_cut(self, cut: Cut, settings: Settings) -> PreparedGraph:
        key = (cut.starts, cut.settings.placement, cut.recompute)
        if key not in self._same:
            self._same[key] = prepare_cut(cut, self.profiled.batch, settings)
        return self._same[key]

    def _fastest(self, samples: int) -> list[StageCost]:
        """Returns the costs of nodes for micro-batches of `samples` samples, each on the fastest device for it."""
        if samples not in self._nodes:
            rows = zip(*(profile.nodes for profile in self.profiled.profiles_for(self.settings)), strict=True)
            fastest = (min(row, key=lambda cost: (cost.forward + cost.backward).at(samples)) for row in rows)
            self._nodes[samples] = [
                StageCost(cost.forward.at(samples), cost.backward.at(samples), weight=cost.weight.at(samples))
                for cost in fastest
            ]
        return self._nodes[samples]


def _with_reduction(stage: StageCost, settings: Settings, worker: int, gradient_bytes: int) -> StageCost:
    if settings.cluster is None:
        return stage
    seconds, buckets = settings.cluster.reduction(worker, gradient_bytes)
    return replace(stage, reduction=seconds, reduction_buckets=buckets)


def _stage_of_nodes(nodes: Sequence[StageCost], starting: float) -> StageCost:
    backward = math.fsum(cost.backward for cost in nodes)
    weight = min(backward, math.fsum(cost.weight or 0.0 for cost in nodes))  # sums are rounded
    return StageCost(math.fsum(cost.forward for cost in nodes), backward, weight=weight, action=starting)


@dataclass(frozen=True, slots=True)
class PlanVariants:
    """Variants of a plan that keep its stages; see `ModelPlans`."""

    base: Plan
    batch: int

    @property
    def devices(self) -> int:
        return len(self.base.workers)

    def plan(self, candidate: Candidate, mode: CheckpointMode) -> Plan:
        return _variant(self.base, candidate, self.batch, mode)

    def within_limits(self, candidate: Candidate, mode: CheckpointMode) -> Plan | None:
        return None

    def bound(self, candidate: Candidate) -> float:
        return 0.0  # a bound costs no less than a simulation

    def bound_without_sending(self, candidate: Candidate) -> float:
        return 0.0


PlanSource: TypeAlias = ModelPlans | PlanVariants


def _variant(plan: Plan, candidate: Candidate, batch: int, modes: CheckpointMode) -> Plan:
    return vary_plan(plan, schedule=candidate.schedule, chunks=candidate.chunks, checkpoint=modes, batch=batch)


def with_memory_limits(plan: Plan, limits: Sequence[float | None]) -> Plan:
    """Returns the plan with a memory limit for each stage; stages share a device's memory in proportion to need."""
    shared = len({*plan.placement}) < len(plan.placement)
    needs = [float(plan.memory(stage.index, plan.micro_batch)) if shared else 1.0 for stage in plan.stages]
    stages = []
    for stage, need, k in zip(plan.stages, needs, plan.placement, strict=True):
        whole = limits[k]
        together = math.fsum(other for other, place in zip(needs, plan.placement, strict=True) if place == k)
        share = 1.0 if plan.placement.count(k) == 1 or not together else need / together
        stages.append(replace(stage, memory_limit=None if whole is None else int(whole * share)))
    return replace(plan, stages=tuple(stages))


def memory_limits_of(plan: Plan) -> list[float | None]:
    """Returns the memory limit of each worker: the sum over its stages."""
    firsts = {k: rows[0] for k, rows in zip(plan.placement, plan.stage_rows, strict=True)}
    return [plan.memory_limits[firsts[k]] for k in range(len(plan.workers))]


# No cut of a large model is perfectly even, so a candidate must gain at least this share with perfect stages.
LEAST_GAIN_OF_REPLICATION = 0.1
FORWARDS_OF_REPLICA = 2**12  # maximum to simulate if several numbers of replicas are tried; takes a tenth of a second


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """The numbers and orders of replicas to try, and their common options."""

    options: Mapping[str, Any]
    counts: tuple[int, ...]  # ascending: from long pipelines to short ones
    mesh: tuple[str, str] | None  # None: both
    is_auto: bool

    @classmethod
    def of(cls, options: Mapping[str, Any], devices: Devices | None, data_parallel: Any, mesh: Any) -> ReplicaOptions:
        """Parses the arguments of `tune`."""
        hardware = parse_hardware_option(options.get("hardware"))
        if devices is None or isinstance(devices, int):
            count = None if devices is None else parse_count("devices", devices)
            devices = planned_devices(count, hardware)
        is_auto = isinstance(data_parallel, str) and data_parallel == "auto"
        if not is_auto:
            counts = [parse_count("data_parallel", data_parallel, "'auto' or a whole number of replicas")]
        elif hardware is None:
            raise ArgumentError(
                "data_parallel='auto' without hardware: the links between replicas are not known; give hardware, as in "
                "hardware='h100'"
            )
        else:
            workers = len(parse_devices(devices, anywhere=True))
            counts = [count for count in range(1, workers + 1) if workers % count == 0]
        orders = None if mesh is None else parse_mesh(mesh)
        return cls({**options, "devices": devices}, tuple(counts), orders, is_auto)

    def settings_for(self, data: int, mesh: tuple[str, str] = MESHES[0], **others: Any) -> Settings:
        """Returns the settings of one of `data` replicas; `others` replace options."""
        options = {**self.options, "data_parallel": data, "mesh": mesh, **others}
        return make_settings(options, anywhere=options.get("hardware") is not None)

    def plans_of(
        self, profiled: ProfiledModel, memory_at_hand: Mapping[torch.device, int | None]
    ) -> dict[tuple[int, tuple[str, str]], ModelPlans]:
        """Returns the plans of a replica for each number of replicas and each mesh to try.

        Raises:
            ArgumentError: no number of replicas divides the mini-batch; a `MemoryLimitError` if none has enough memory
                for parameters, gradients and optimizer state.
        """
        plans, lacking = dict[tuple[int, tuple[str, str]], ModelPlans](), list[str]()
        for data in self.counts:
            if self.is_auto and (profiled.batch % data or not profiled.traced.holds_at(profiled.batch // data)):
                continue
            batch = batch_of_replica(profiled.traced, profiled.batch, data)
            for mesh in self._meshes(data):
                settings = self.settings_for(data, mesh, chunks=1)  # each candidate sets its chunks
                settings = replace(settings, left=frozenset(), memory_at_hand=memory_at_hand)
                lack = _lasting_shortage(profiled, settings) if self.is_auto else ""
                if lack:
                    lacking.append(lack)
                else:
                    plans[data, mesh] = ModelPlans(replace(profiled, batch=batch), settings, self.is_auto)
        if not plans and lacking:
            raise MemoryLimitError(f"no number of replicas fits into memory: {lacking[0]}")
        if not plans:
            raise ArgumentError(
                f"data_parallel='auto': a mini-batch of {profiled.batch} samples does not divide over any of "
                f"{', '.join(map(str, self.counts))} replicas"
            )
        return plans

    def _meshes(self, data: int) -> tuple[tuple[str, str], ...]:
        """Returns the orders that differ."""
        if self.mesh is not None:
            return (self.mesh,)
        hardware, devices = parse_hardware_option(self.options.get("hardware")), self.options["devices"]
        if hardware is None or devices is None or isinstance(devices, int) or data in (1, len(devices)):
            return MESHES[:1]
        return MESHES if len(devices) > hardware.devices_per_node else MESHES[:1]


def _lasting_shortage(profiled: ProfiledModel, settings: Settings) -> str:
    """Describes a replica's shortage of memory for parameters, gradients and optimizer state; empty if they fit."""
    limits = [worker.memory for worker in planned_workers(settings)]
    if None in limits:
        return ""
    lasting = sum(
        tensor_bytes(parameter) * (2 + settings.optimizer_state if parameter.requires_grad else 1)
        for parameter in profiled.traced.model.parameters()
    )
    together = sum(limit for limit in limits if limit is not None)
    if lasting <= together:
        return ""
    return (
        f"parameters, gradients and optimizer state take {human_bytes(lasting)}, and the "
        f"{count_text(len(limits), 'device')} of a replica have {human_bytes(together)}"
    )
