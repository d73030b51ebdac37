"""The candidates of a tuner, as plain data: schedules, stages on a device, numbers of micro-batches.

Numbers of micro-batches are powers of two up to the samples of the mini-batch, or nearby divisors of the mini-batch.

>>> chunks_for_batch(32, most=64)
(1, 2, 4, 8, 16, 32)
>>> chunks_for_batch(120, most=40)
(1, 2, 4, 8, 15, 30)

A cut depends on the placement of stages, the size of micro-batches and recomputation, and on the schedule only if
memory is limited. So each cut is computed once for all candidates that can use it.

**The search** tries the most promising candidates first, until no remaining candidate can be faster. A candidate is
simulated on the cut for its placement and size of micro-batches, without recomputation. If it does not fit into memory,
it is planned within the limit: cuts move, and some stages recompute. Only if all stages must recompute, or nothing
fits, two more modes are tried: recompute everything, or all but the last micro-batch.

Cutting a graph takes a hundred times as long as simulating a schedule. So a candidate is cut only if its lower bounds
are below the best steps so far: all work shared evenly, and its schedule with the most even stages that send nothing (a
heuristic bound: uneven stages may suit a schedule).

`prepare_best` chooses the options left to planning (`chunks="auto"`, `schedule="auto"`). The graph is compared with the
model again for other than the usual micro-batches; if they differ, or the model rejects the size, the next best
candidate is tried. If none fits into memory, planning continues with the usual values, and reports the shortage.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from typing import Any, TypeAlias

from fxpipe.cluster import MESHES
from fxpipe.errors import ArgumentError, PartitionError, ScheduleError
from fxpipe.partitioning.block import block_partition
from fxpipe.planning import passes
from fxpipe.planning.cost_model import planned_workers
from fxpipe.planning.options.parse import COMPARED_SCHEDULES, place_stages
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.retarget import action_seconds, resize_plan
from fxpipe.planning.plans.simulate_plan import simulate, vary_plan
from fxpipe.scheduling import SCHEDULES, Schedule, ScheduleLike, make_schedule, micro_batches_in_flight
from fxpipe.scheduling.factory import check_placement
from fxpipe.scheduling.streams import is_stream
from fxpipe.simulation import Simulation, StageCost, simulate_schedule, simulate_stream
from fxpipe.tracing import Traced
from fxpipe.tracing.node_info import bytes_at
from fxpipe.tracing.tensors import tensor_bytes
from fxpipe.utils.batch_split import largest_micro_batch, micro_batch_sizes
from fxpipe.utils.progress import ignore_progress, progress
from fxpipe.utils.text_table import show_as_printed
from fxpipe.utils.units import count_text, human_bytes, size_at_least

NEAR_POWER = 2**0.5  # numbers within this factor of a power of two are near it
MAX_CHUNKS_PER_WORKER = 32  # micro-batches for each worker: with more there is nearly no bubble left
TRIED_STAGES_PER_DEVICE = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate: all options that are set before stages are cut, except recomputation."""

    schedule: ScheduleLike  # a name, or a user's table or function
    chunks: int  # micro-batches per replica
    stages_per_device: int
    data_parallel: int = 1
    mesh: tuple[str, str] = MESHES[0]


def candidates_of_model(
    schedules: Sequence[ScheduleLike], chunks: Iterable[int], stages_per_device: Sequence[int]
) -> Iterator[Candidate]:
    """Yields the candidates of a model: all combinations that each schedule supports."""
    for schedule, each, count in product(schedules, stages_per_device, chunks):
        if not isinstance(schedule, str) or SCHEDULES[schedule].takes(each):
            yield Candidate(schedule, count, each)


def candidates_of_plan(plan: Plan, schedules: Sequence[str], chunks: Sequence[int]) -> Iterator[Candidate]:
    """Yields the candidates of a plan: all combinations that its placement supports."""
    each = max(map(plan.placement.count, plan.placement))
    for schedule in schedules:
        with contextlib.suppress(ArgumentError):
            check_placement(schedule, plan.placement)
            yield from (Candidate(schedule, count, each) for count in chunks)


def chunks_for_batch(batch: int, most: int) -> tuple[int, ...]:
    """Returns numbers of micro-batches for mini-batches of `batch` samples, at most `most`."""
    divisors = [d for d in range(1, batch + 1) if batch % d == 0]
    counts = []
    for power in (2**k for k in range(batch.bit_length())):
        near = [d for d in divisors if power / NEAR_POWER < d < power * NEAR_POWER]
        counts.append(min(((abs(d - power), d) for d in near), default=(0, power))[1])
    counts.append(batch)
    return tuple(count for count in dict.fromkeys(counts) if count <= max(1, most))


CheckpointMode: TypeAlias = "str | tuple[str, ...]"  # for all stages, or one for each


@dataclass
class ModelPlans:
    """Plans of a profiled model, for candidates of one replica."""

    profiled: passes.ProfiledModel
    settings: Settings  # everything that does not differ between candidates
    reckons_recompute: bool = False  # `bound_without_sending` includes the recomputation that memory requires
    _cuts: dict[tuple[object, ...], passes.PreparedGraph] = field(default_factory=dict)  # by the inputs of the cut
    _same: dict[tuple[object, ...], passes.PreparedGraph] = field(default_factory=dict)  # by the cut itself
    _nodes: dict[int, list[StageCost]] = field(default_factory=dict)  # by samples

    @property
    def devices(self) -> int:
        return len(self.settings.workers)

    @property
    def batch(self) -> int:
        return self.profiled.batch

    def plan(self, candidate: Candidate, mode: CheckpointMode, is_limited: bool = False) -> Plan:
        """Returns the plan for stages with this checkpoint mode, or raises a FxpipeError."""
        # It ignores memory limits, or with `is_limited` fits; then mode "auto" chooses the modes.
        settings = self._settings(candidate)
        has_modes = not isinstance(settings.checkpoint, str)
        if not is_limited:
            settings = replace(settings, memory_limits=(None,) * len(settings.workers))
        if not has_modes:  # if all but the last micro-batch are recomputed, stages are balanced for these
            settings = replace(settings, checkpoint=mode if is_limited or mode == "never" else "always")
        graph = self._prepared(settings)
        modes = graph.plan.checkpoint if has_modes or mode == "auto" else mode
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
        settings, batch = self.settings, self.profiled.batch
        if settings.replicas:
            return 0.0
        m = min(candidate.chunks, batch)
        placement = self._settings(candidate).placement
        nodes = self._fastest(largest_micro_batch(batch, m))
        lengths = block_partition([cost.forward + cost.backward for cost in nodes], len(placement))
        starting = min(map(action_seconds, settings.figure_devices))
        schedule = make_schedule(candidate.schedule, len(placement), m, placement=placement)
        again = self._recomputed_share(schedule, largest_micro_batch(batch, m))
        gradient_bytes = sum(size for size, is_trained in self._parameters if is_trained) // len(placement)
        stages = []
        for k, length, end in zip(placement, lengths, accumulate(lengths), strict=True):
            own = nodes[end - length : end]
            forward, backward = math.fsum(cost.forward for cost in own), math.fsum(cost.backward for cost in own)
            weight = min(backward, math.fsum(cost.weight or 0.0 for cost in own))  # sums are rounded
            stage = StageCost(forward, backward + again * forward, weight=weight, action=starting)
            if settings.cluster is not None:
                seconds, buckets = settings.cluster.reduction(k, gradient_bytes)
                stage = replace(stage, reduction=seconds, reduction_buckets=buckets)
            stages.append(stage)
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
        spare = sum(limit or 0.0 for limit in limits) - self._lasting_bytes()
        return min(1.0, max(0.0, 1 - spare / kept))

    def prepared(self, plan: Plan) -> passes.PreparedGraph:
        nodes = [stage.nodes for stage in plan.stages]
        graph = next(
            one
            for one in self._same.values()
            if one.plan.placement == plan.placement and [stage.nodes for stage in one.plan.stages] == nodes
        )
        schedule = next((c for c in (self.settings.schedule,) if not isinstance(c, str)), plan.schedule)
        settings = replace(graph.settings, schedule=schedule, chunks=plan.chunks, checkpoint=plan.checkpoint)
        return replace(graph, plan=plan, settings=settings)

    @functools.cached_property
    def _parameters(self) -> list[tuple[int, bool]]:
        """Bytes of each parameter, and is it trained."""
        return [(tensor_bytes(one), one.requires_grad) for one in self.profiled.traced.model.parameters()]

    def _lasting_bytes(self) -> float:
        """Computes the bytes of parameters, gradients and optimizer state."""
        state = 1 + self.settings.optimizer_state
        return sum(size * (1 + state if is_trained else 1) for size, is_trained in self._parameters)

    def lasting_shortage(self) -> str:
        """Describes a replica's shortage of memory for what lasts; empty if it fits."""
        limits = [worker.memory for worker in planned_workers(self.settings)]
        lasting, together = self._lasting_bytes(), sum(limit or 0.0 for limit in limits)
        if None in limits or lasting <= together:
            return ""
        return (
            f"parameters, gradients and optimizer state take {human_bytes(lasting)}, and the "
            f"{count_text(len(limits), 'device')} of a replica have {human_bytes(together)}"
        )

    def _settings(self, candidate: Candidate) -> Settings:
        for size in micro_batch_sizes(self.profiled.batch, candidate.chunks):
            if not self.profiled.traced.holds_at(size):
                raise ArgumentError(f"micro-batches of {size} run another graph")
        workers, each, nodes = len(self.settings.workers), candidate.stages_per_device, len(self.profiled.traced.nodes)
        if workers * each > nodes:
            raise ArgumentError(f"{workers * each} stages need as many nodes, and the graph has {nodes}")
        placement = place_stages(workers, each, candidate.schedule, candidate.chunks, None)
        return replace(self.settings, schedule=candidate.schedule, chunks=candidate.chunks, placement=placement)

    def _prepared(self, settings: Settings) -> passes.PreparedGraph:
        # A cut depends on the schedule only if memory is limited or there are pins.
        batch, is_limited = self.profiled.batch, any(limit is not None for limit in settings.memory_limits or (1,))
        of_schedule = settings.schedule if is_limited or settings.pins else None
        samples = settings.largest_micro_batch(batch)
        key = (settings.placement, samples, settings.checkpoint, of_schedule, is_limited)
        if key not in self._cuts:
            cut = passes.cut_profiled(self.profiled, settings, explains=False)
            same = (cut.starts, cut.settings.placement, cut.recompute)
            if same not in self._same:
                self._same[same] = passes.prepare_cut(cut, batch, settings)
            self._cuts[key] = self._same[same]
        return self._cuts[key]

    def _fastest(self, samples: int) -> list[StageCost]:
        """Returns the costs of nodes for micro-batches of `samples` samples, each on the fastest device for it."""
        if samples not in self._nodes:
            rows = zip(*(profile.nodes for profile in self.profiled.profiles_for(self.settings)), strict=True)
            fastest = (min(row, key=lambda cost: (cost.forward + cost.backward).at(samples)) for row in rows)
            seconds = ((one.forward.at(samples), one.backward.at(samples), one.weight.at(samples)) for one in fastest)
            self._nodes[samples] = [StageCost(ahead, back, weight=weight) for ahead, back, weight in seconds]
        return self._nodes[samples]


@dataclass(frozen=True, slots=True)
class PlanVariants:
    """Variants of a plan that keep its stages, so they have no bounds and no cuts within limits; see `ModelPlans`."""

    base: Plan
    batch: int

    @property
    def devices(self) -> int:
        return len(self.base.workers)

    def plan(self, candidate: Candidate, mode: CheckpointMode) -> Plan:
        return _variant(self.base, candidate, self.batch, mode)


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


SAME_STEP_TOLERANCE = 0.001  # steps that differ by less are equal; then less memory is better


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """The result of a candidate: the figures of its step. Without a plan it was not cut; `why` has the reason."""

    schedule: str  # a name, or a user's table as text
    chunks: int
    stages_per_device: int
    checkpoint: str | tuple[str, ...] = "never"  # one mode, or one for each stage
    plan: Plan | None = None
    step_seconds: float = 0.0  # simulated; a lower bound if the candidate was not cut
    memory: tuple[float, ...] = ()  # bytes: the simulated peak of each device
    lacks: float = 0.0  # the largest excess of a device over its memory limit, in bytes
    why: str = ""
    others: Mapping[str, Any] = field(default_factory=dict)  # further arguments for `fxpipe.pipeline`
    data_parallel: int = 1  # number of replicas, which share the devices and the mini-batch
    mesh: tuple[str, str] = MESHES[0]  # the order of replicas; see `fxpipe.cluster`

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.lacks <= 0

    @property
    def peak(self) -> float:
        """The largest peak memory of a device, in bytes."""
        return max(self.memory, default=0.0)

    @property
    def simulation(self) -> Simulation:
        """The simulation of its plan: the times of actions and the memory of devices; computed at each access."""
        if self.plan is None:
            raise ValueError(f"this candidate was not cut: {self.why}")
        return simulate(self.plan)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for `fxpipe.pipeline`: the plan, and options that a plan does not include."""
        return {"plan": self.plan, "schedule": self.schedule, **self.others}

    def __str__(self) -> str:
        replicas = f", data_parallel={self.data_parallel}, mesh={self.mesh}" if self.data_parallel > 1 else ""
        return (
            f"schedule={self.schedule!r}, chunks={self.chunks}, checkpoint={self.checkpoint!r}, "
            f"stages_per_device={self.stages_per_device}{replicas}"
        )


@dataclass(frozen=True, slots=True)
class Tuning:
    """The candidates of `fxpipe.tune`, and the best one. `print` shows them as a table."""

    best: CandidateResult
    rows: tuple[CandidateResult, ...]  # a row for each candidate: fitting ones first, by the seconds of a step
    batch: int  # samples of the mini-batch, of all replicas
    devices: tuple[str, ...]  # by worker, of one replica
    estimated_for: str = ""  # the hardware for which the seconds were estimated; empty if they were measured

    def __str__(self) -> str:
        from fxpipe.inspect.plan_text import tuning_text

        return tuning_text(self)

    _repr_pretty_ = show_as_printed

    def _repr_html_(self) -> str:
        from fxpipe.inspect.plan_text import tuning_html

        return tuning_html(self)


def rank_fitting(rows: Iterable[CandidateResult]) -> list[CandidateResult]:
    """Ranks rows that fit: the shortest step first, of equal ones the least memory."""
    fitting = [row for row in rows if row.fits]
    least = min((row.step_seconds for row in fitting), default=0.0)

    def order(row: CandidateResult) -> tuple[float, ...]:
        is_least = row.step_seconds <= (1 + SAME_STEP_TOLERANCE) * least
        return (0.0 if is_least else row.step_seconds, row.peak, row.chunks, row.stages_per_device, row.step_seconds)

    return sorted(fitting, key=order)


def order_for_table(rows: Iterable[CandidateResult]) -> tuple[CandidateResult, ...]:
    """Sorts rows for the table: fitting, too slow to cut, too large for memory, impossible."""

    def order(row: CandidateResult) -> tuple[float, ...]:
        kind = (0 if row.fits else 2) if row.plan is not None else (1 if row.step_seconds else 3)
        return (kind, row.lacks, row.step_seconds, row.peak, row.chunks)

    return tuple(sorted(rows, key=order))


# Candidates whose first bound exceeds the best second bound by this factor skip the simulation of the second bound.
PROMISING_FACTOR = 1.5
EVEN_STAGES_SHARE = 0.98  # share of the step without sending that is a bound: uneven stages save no more
IMPOSSIBLE = (ArgumentError, PartitionError, ScheduleError)
NO_SHORTER = "no step of it can be as short as those of the best"
MemoryLimits = Sequence[float | None]  # bytes by worker, of the longest pipeline to try; None: no limit


def search_candidates(
    candidates: Iterable[Candidate],
    plans_of: Callable[[Candidate], PlanSource],
    limits: MemoryLimits,
    *,
    modes: Sequence[CheckpointMode] | None = None,
    others: Mapping[str, Any] | None = None,
    wanted: int = 1,
    least_gain: float = 0.0,
    step: Callable[[], object] = ignore_progress,
) -> tuple[CandidateResult, ...]:
    """Returns a row for each candidate and mode of recomputation; `modes` None: the least that memory requires."""
    # The `wanted` best are found with certainty. A candidate is cut only if it may gain at least `least_gain`.
    rows: list[CandidateResult] = []
    hoped = math.inf
    steps: list[float] = []  # the `wanted` best steps that fit
    waiting: list[tuple[float, int, Candidate]] = []
    bounds = list[tuple[float, int, Candidate]]()
    for number, candidate in enumerate(candidates):
        plans = plans_of(candidate)  # of a plan a bound costs no less than a simulation
        bounds.append((plans.bound(candidate) if isinstance(plans, ModelPlans) else 0.0, number, candidate))
    for bound, number, candidate in sorted(bounds, key=lambda one: one[:2]):
        plans = plans_of(candidate)
        if bound <= PROMISING_FACTOR * hoped:
            if isinstance(plans, ModelPlans):
                with contextlib.suppress(*IMPOSSIBLE):  # reported when it is cut
                    bound = max(bound, EVEN_STAGES_SHARE * plans.bound_without_sending(candidate))
            hoped = min(hoped, bound)
        waiting.append((bound, number, candidate))
    for bound, _, candidate in sorted(waiting, key=lambda one: one[:2]):
        best = steps[-1] if len(steps) == wanted else math.inf
        if bound > (1 + SAME_STEP_TOLERANCE - least_gain) * best:
            rows.append(_skipped_candidate(candidate, NO_SHORTER, bound))
        else:
            results = list(_try_candidate(candidate, plans_of(candidate), limits, modes, others or {}, best))
            rows += results
            steps = sorted([*steps, *(row.step_seconds for row in results if row.fits)])[:wanted]
        step()
    return tuple(rows)


def _try_candidate(
    candidate: Candidate,
    plans: PlanSource,
    limits: MemoryLimits,
    modes: Sequence[CheckpointMode] | None,
    others: Mapping[str, Any],
    best: float,
) -> Iterator[CandidateResult]:
    def within_limits(mode: CheckpointMode) -> Iterator[CandidateResult]:
        with contextlib.suppress(*IMPOSSIBLE):  # earlier rows report the missing memory
            if isinstance(plans, ModelPlans):
                yield _simulate_candidate(candidate, plans.plan(candidate, mode, is_limited=True), limits, others)

    try:
        if modes is not None:
            for mode in modes:
                row = _simulate_candidate(candidate, plans.plan(candidate, mode), limits, others)
                yield row
                if not row.fits:
                    yield from within_limits(mode)
            return
        row = _simulate_candidate(candidate, plans.plan(candidate, "never"), limits, others)
        yield row
        if row.fits or row.step_seconds > (1 + SAME_STEP_TOLERANCE) * best:
            return  # recomputation and memory limits only make it slower
        results = list(within_limits("auto"))
        yield from results
        if any(row.fits and row.checkpoint != "always" for row in results):
            return  # a stage recomputes only if it must
        for mode in ("except_last", "always"):
            yield _simulate_candidate(candidate, plans.plan(candidate, mode), limits, others)
    except IMPOSSIBLE as error:
        yield _skipped_candidate(candidate, str(error).partition("\n")[0])


def _simulate_candidate(
    candidate: Candidate, plan: Plan, limits: MemoryLimits, others: Mapping[str, Any]
) -> CandidateResult:
    simulation = simulate(plan, updates=False)  # for a schedule that is not a stream, the update follows the step
    # Memory limits apply to the largest sizes.
    largest = resize_plan(plan, plan.micro_batch, sizes={one.name: one.largest for one in plan.sizes})
    memory = tuple(held.peak for held in (simulation if largest is plan else simulate(largest)).memory)
    turns = plan.turns or (1,) * len(memory)
    own = [limit for limit, count in zip(limits, turns, strict=False) for _ in range(count)]  # one for each row
    lacks = [peak - limit for peak, limit in zip(memory, own, strict=True) if limit is not None]
    return replace(
        _skipped_candidate(candidate, "", simulation.step_seconds),
        schedule=plan.schedule,
        checkpoint=plan.checkpoint,
        plan=plan,
        memory=memory,
        lacks=max((0.0, *lacks)),
        others=others,
    )


def _skipped_candidate(candidate: Candidate, why: str, seconds: float = 0.0) -> CandidateResult:
    schedule = candidate.schedule
    return CandidateResult(
        schedule if isinstance(schedule, str) else getattr(schedule, "__name__", None) or str(schedule),
        candidate.chunks,
        candidate.stages_per_device,
        why=why,
        step_seconds=seconds,
        data_parallel=candidate.data_parallel,
        mesh=candidate.mesh,
    )


def shortage_message(rows: Sequence[CandidateResult], limits: MemoryLimits) -> str:
    """Describes the candidate with the least excess, and the memory that it needs."""
    tried = [row for row in rows if row.plan is not None]
    nearest = min(tried, key=lambda row: (row.lacks, row.step_seconds))
    limits = limits[: len(nearest.memory)]
    over = [
        f"device {k} {human_bytes(peak)} of {human_bytes(limit)}"
        for k, (peak, limit) in enumerate(zip(nearest.memory, limits, strict=True))
        if limit is not None and peak > limit
    ]
    needed = [None if limit is None else max(limit, peak) for peak, limit in zip(nearest.memory, limits, strict=True)]
    enough = "[" + ", ".join("None" if need is None else repr(size_at_least(need)) for need in needed) + "]"
    if len({*limits}) == 1:
        enough = repr(size_at_least(max(nearest.memory)))
    return (
        f"none of the {len(tried)} ways to train that were tried fits into memory. The one that lacks least is "
        f"{nearest}, which needs on {', '.join(over)}: memory_limit={enough} would do, "
        "or more devices, smaller mini-batches (batch_size), an optimizer that keeps less (optimizer_state)"
    )


def prepare_best(
    profiled: passes.ProfiledModel, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> passes.PreparedGraph:
    """Plans the model; the tuner chooses the options in `settings.left`."""
    usual, left, batch = replace(settings, left=frozenset()), settings.left, profiled.batch
    plans, limits = ModelPlans(profiled, usual), [worker.memory for worker in planned_workers(usual)]
    each = len(settings.placement) // len(settings.workers)
    candidates = list(
        candidates_of_model(
            COMPARED_SCHEDULES if "schedule" in left else (settings.schedule,),
            _chunks_to_try(batch, settings) if "chunks" in left else (settings.chunks,),
            TRIED_STAGES_PER_DEVICE if "stages_per_device" in left else (each,),
        )
    )
    modes = (settings.checkpoint,) if isinstance(settings.checkpoint, str) else ("never",)  # modes are in settings
    with progress("tuning", len(candidates), "candidates") as step:
        rows = search_candidates(
            candidates, lambda _: plans, limits, modes=None if modes == ("auto",) else modes, step=step
        )
    for row in rank_fitting(rows):
        assert row.plan is not None
        ready = plans.prepared(row.plan)
        ready = replace(ready, plan=with_memory_limits(row.plan, limits))
        are_usual = ready.settings.micro_batches(batch) == usual.micro_batches(batch)
        if not are_usual and not passes.holds_for_chunks(profiled.traced, batch, args, kwargs, row.chunks, settings):
            continue
        if "chunks" in left and batch <= ready.settings.chunks and batch < usual.chunks:
            # Each micro-batch has one sample already; larger mini-batches may use the usual number.
            settings = replace(ready.settings, chunks=usual.chunks)
            return replace(ready, settings=settings, plan=replace(ready.plan, chunks=usual.chunks))
        return ready
    return passes.prepare_profiled(profiled, usual)


def _chunks_to_try(batch: int, settings: Settings) -> Iterator[int]:
    workers = len(settings.workers)
    for count in chunks_for_batch(batch, MAX_CHUNKS_PER_WORKER * len(settings.row_devices)):
        if callable(settings.schedule):
            try:
                place_stages(workers, len(settings.placement) // workers, settings.schedule, count, None)
            except Exception:
                continue  # the function has no rows for this number
        yield count


def with_best_chunks(
    plan: Plan, traced: Traced, batch: int, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> Plan:
    """Returns the plan with the best number of micro-batches for `batch` samples; unchanged if none is possible."""
    each = max(map(plan.placement.count, plan.placement))
    ways = [Candidate(settings.schedule, count, each) for count in _chunks_to_try(batch, settings)]
    plans = PlanVariants(plan, batch)
    rows = search_candidates(ways, lambda _: plans, memory_limits_of(plan), modes=(settings.checkpoint,))
    for row in rank_fitting(rows):
        assert row.plan is not None
        if passes.holds_for_chunks(traced, batch, args, kwargs, row.chunks, settings):
            return row.plan
    return plan


def with_best_schedule(plan: Plan, settings: Settings) -> Settings:
    """Sets the best schedule for the stages of a plan; the usual schedule if none fits into memory."""
    batch = plan.batch or settings.chunks * plan.micro_batch
    modes = None if settings.checkpoint == "auto" else (settings.checkpoint,)
    candidates, plans = candidates_of_plan(plan, COMPARED_SCHEDULES, (settings.chunks,)), PlanVariants(plan, batch)
    rows = search_candidates(candidates, lambda _: plans, memory_limits_of(plan), modes=modes)
    best = next((row.schedule for row in rank_fitting(rows)), settings.schedule)
    return replace(settings, schedule=best, left=frozenset())
