"""The plans that a tuner simulates: each cut is made once, and serves every candidate that may have it.

A cut hangs on where stages are, on the size of micro-batches, and on whether stages recompute. On the schedule it hangs
only by what stages hold at once, so only where that does not fit into memory is it cut anew for each. Two sizes that
lead to the same cut share its plan: of a plan all figures follow for any size (`fxpipe.resizing`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fxpipe.deciding import Cut, decide, is_by_hand
from fxpipe.errors import ArgumentError
from fxpipe.placing import placed
from fxpipe.planning import Prepared, Studied, prepared
from fxpipe.plans import Plan
from fxpipe.resizing import resized
from fxpipe.scheduling import ScheduleLike, make_schedule, schedule_text
from fxpipe.settings import Settings
from fxpipe.tracing.checking.check import is_same_graph
from fxpipe.tuning.candidates import Candidate
from fxpipe.tuning.simulating import ideal_seconds


class Plans(Protocol):
    """Where the plans of candidates come from."""

    def plan(self, candidate: Candidate, mode: str) -> Plan:
        """Cut for stages that recompute so, as if memory had no limit.

        Raises:
            FxpipeError: there is no such plan.
        """

    def within_limits(self, candidate: Candidate, mode: str) -> Plan | None:
        """Cut so that it fits; "auto" leaves to planning what is recomputed. None where cuts cannot be moved.

        Raises:
            FxpipeError: there is no such plan.
        """

    def bound(self, candidate: Candidate) -> float:
        """Seconds that no step of the candidate can undercut: all work, shared out evenly; one micro-batch on its way
        through all stages, there and back."""

    def ideal(self, candidate: Candidate) -> float:
        """Seconds of a step with stages that are equally long, and send nothing."""


@dataclass(slots=True)
class OfModel:
    """Plans of a model that was studied."""

    studied: Studied
    settings: Settings  # all but what candidates are about
    _cuts: dict[tuple[object, ...], Prepared] = field(default_factory=dict)  # by all that the cut hangs on
    _same: dict[tuple[object, ...], Prepared] = field(default_factory=dict)  # by what the cut is
    _seconds: dict[int, tuple[float, float, float]] = field(default_factory=dict)  # by samples

    def plan(self, candidate: Candidate, mode: str) -> Plan:
        settings = self._settings(candidate)
        if isinstance(settings.checkpoint, str):
            # All but the last micro-batch are recomputed: stages are balanced for these.
            settings = replace(settings, checkpoint="never" if mode == "never" else "always")
        found = self._prepared(replace(settings, memory_limits=(None,) * len(settings.workers)))
        modes = found.plan.checkpoint if isinstance(self.settings.checkpoint, tuple) else mode
        return variant(found.plan, candidate.schedule, candidate.chunks, self.studied.batch, modes)

    def within_limits(self, candidate: Candidate, mode: str) -> Plan | None:
        settings = self._settings(candidate)
        if isinstance(settings.checkpoint, str):
            settings = replace(settings, checkpoint=mode)
        found = self._prepared(settings)
        modes = found.plan.checkpoint if mode == "auto" else mode
        return variant(found.plan, candidate.schedule, candidate.chunks, self.studied.batch, modes)

    def bound(self, candidate: Candidate) -> float:
        m = min(candidate.chunks, self.studied.batch)
        forward, backward, weight = self._least_seconds(-(-self.studied.batch // m))
        even = m * (forward + backward) / len(self.settings.workers)
        return max(even, forward + backward - weight) * (1 - 1e-9)  # sums are rounded

    def ideal(self, candidate: Candidate) -> float:
        m = min(candidate.chunks, self.studied.batch)
        placement = placed(len(self.settings.workers), candidate.stages_per_device, candidate.schedule, m, None)
        schedule = make_schedule(candidate.schedule, len(placement), m, placement=placement)
        return ideal_seconds(schedule, *self._least_seconds(-(-self.studied.batch // m)))

    def prepared(self, plan: Plan) -> Prepared:
        """What runs a plan that came from here."""
        nodes = [stage.nodes for stage in plan.stages]
        found = next(
            one
            for one in self._same.values()
            if one.plan.placement == plan.placement and [stage.nodes for stage in one.plan.stages] == nodes
        )
        schedule = next((c for c in (self.settings.schedule,) if not isinstance(c, str)), plan.schedule)
        settings = replace(found.settings, schedule=schedule, chunks=plan.chunks, checkpoint=plan.checkpoint)
        return replace(found, plan=plan, settings=settings)

    def _settings(self, candidate: Candidate) -> Settings:
        settings = self.settings
        samples = -(-self.studied.batch // min(candidate.chunks, self.studied.batch))
        for size in {samples, self.studied.batch // min(candidate.chunks, self.studied.batch)}:
            if not is_same_graph(self.studied.traced, size):
                raise ArgumentError(f"micro-batches of {size} run another graph")
        each = candidate.stages_per_device
        placement = placed(len(settings.workers), each, candidate.schedule, candidate.chunks, None)
        return replace(settings, schedule=candidate.schedule, chunks=candidate.chunks, placement=placement)

    def _prepared(self, settings: Settings) -> Prepared:
        """The cut for such settings, of which the schedule matters only where memory is limited."""
        studied = self.studied
        is_limited = any(limit is not None for limit in settings.memory_limits or (1,))
        of_schedule = settings.schedule if is_limited or settings.pins else None
        samples = settings.largest_micro_batch(studied.batch)
        key = (settings.placement, samples, settings.checkpoint, of_schedule, is_limited)
        if key not in self._cuts:
            orders = studied.orders[:1] if is_by_hand(studied.traced, settings) else studied.orders
            cut = decide(orders, studied.profiles_for(settings), studied.batch, settings, explains=False)
            self._cuts[key] = self._of_cut(cut, settings)
        return self._cuts[key]

    def _of_cut(self, cut: Cut, settings: Settings) -> Prepared:
        key = (id(cut.traced), cut.starts, cut.settings.placement, cut.recompute)
        if key not in self._same:
            self._same[key] = prepared(cut, self.studied.fingerprint, self.studied.batch, settings)
        return self._same[key]

    def _least_seconds(self, samples: int) -> tuple[float, float, float]:
        """Of all nodes, each on the fastest device for it: forward, backward, and the part of weights of that."""
        if samples not in self._seconds:
            rows = list(zip(*(profile.nodes for profile in self.studied.profiles_for(self.settings)), strict=True))
            fastest = [min(row, key=lambda cost: (cost.forward + cost.backward).at(samples)) for row in rows]
            self._seconds[samples] = (
                math.fsum(cost.forward.at(samples) for cost in fastest),
                math.fsum(cost.backward.at(samples) for cost in fastest),
                math.fsum(cost.weight.at(samples) for cost in fastest),
            )
        return self._seconds[samples]


@dataclass(frozen=True, slots=True)
class OfPlan:
    """Variants of a plan whose stages stay where they are."""

    given: Plan
    batch: int

    def plan(self, candidate: Candidate, mode: str) -> Plan:
        return variant(self.given, candidate.schedule, candidate.chunks, self.batch, mode)

    def within_limits(self, candidate: Candidate, mode: str) -> Plan | None:
        return None

    def bound(self, candidate: Candidate) -> float:
        return 0.0  # it costs no more to simulate it

    def ideal(self, candidate: Candidate) -> float:
        return 0.0


def variant(
    plan: Plan, schedule: ScheduleLike, chunks: int, batch: int, checkpoint: str | tuple[str, ...] | None = None
) -> Plan:
    """The same stages with another schedule, other micro-batches, other modes."""
    samples = -(-batch // min(chunks, batch))
    made = resized(plan, samples, checkpoint)
    return replace(made, schedule=schedule_text(schedule, chunks, plan.placement), chunks=chunks, batch=batch)


def with_limits(plan: Plan, limits: Sequence[float | None]) -> Plan:
    """The plan with what each stage may take of the memory of its device; several share it by what they need."""
    needs = [float(plan.memory(stage.index, plan.micro_batch)) for stage in plan.stages]
    stages = []
    for stage, need, k in zip(plan.stages, needs, plan.placement, strict=True):
        whole = limits[k]
        together = math.fsum(other for other, place in zip(needs, plan.placement, strict=True) if place == k)
        share = 1.0 if plan.placement.count(k) == 1 or not together else need / together
        stages.append(replace(stage, memory_limit=None if whole is None else int(whole * share)))
    return replace(plan, stages=tuple(stages))


def limits_of(plan: Plan) -> list[float | None]:
    """For each worker what its stages may take."""
    found: list[float | None] = []
    for k in range(len(plan.workers)):
        limits = [stage.memory_limit for stage, place in zip(plan.stages, plan.placement, strict=True) if place == k]
        known = [limit for limit in limits if limit is not None]
        found.append(math.fsum(known) if len(known) == len(limits) else None)
    return found
