"""The plans that a tuner simulates: each cut is made once, and serves every candidate that may have it.

A cut hangs on where stages are, on the size of micro-batches, and on whether stages recompute. On the schedule it hangs
only by what stages hold at once, so only where that does not fit into memory is it cut anew for each. Two sizes that
lead to the same cut share its plan: of a plan all figures follow for any size (`fxpipe.resizing`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Protocol

from fxpipe.deciding import Cut, decide, is_by_hand
from fxpipe.errors import ArgumentError
from fxpipe.placing import placed
from fxpipe.planning import Prepared, Studied, prepared
from fxpipe.plans import Plan
from fxpipe.resizing import resized
from fxpipe.scheduling import ScheduleLike, schedule_text
from fxpipe.settings import Settings
from fxpipe.tracing.checking.check import is_same_graph
from fxpipe.tuning.candidates import Candidate


class Plans(Protocol):
    """Where the plans of candidates come from."""

    def plan(self, candidate: Candidate, recomputes: bool) -> Plan:
        """Cut for stages that all recompute, or none, as if memory had no limit.

        Raises:
            FxpipeError: there is no such plan.
        """

    def within_limits(self, candidate: Candidate) -> Plan | None:
        """Cut so that it fits, with what is recomputed left to planning; None where cuts cannot be moved.

        Raises:
            FxpipeError: there is no such plan.
        """

    def bound(self, candidate: Candidate) -> float:
        """Seconds that no step of the candidate can undercut; known before there is a plan."""


@dataclass(slots=True)
class OfModel:
    """Plans of a model that was studied."""

    studied: Studied
    settings: Settings  # all but what candidates are about
    _cuts: dict[tuple[object, ...], Prepared] = field(default_factory=dict)  # by all that the cut hangs on
    _same: dict[tuple[object, ...], Prepared] = field(default_factory=dict)  # by what the cut is
    _seconds: dict[int, tuple[float, float]] = field(default_factory=dict)  # by samples

    def plan(self, candidate: Candidate, recomputes: bool) -> Plan:
        return self._plan(self._unlimited(candidate, recomputes), candidate)

    def within_limits(self, candidate: Candidate) -> Plan | None:
        found = self._prepared(replace(self._settings(candidate), checkpoint="auto"))
        return self._plan(found, candidate)

    def bound(self, candidate: Candidate) -> float:
        """All work, shared out evenly; and one micro-batch on its way through all stages, there and back."""
        settings, batch = self.settings, self.studied.batch
        m = min(candidate.chunks, batch)
        total, without_weights = self._least_seconds(-(-batch // m))
        return max(m * total / len(settings.workers), without_weights) * (1 - 1e-9)  # sums are rounded

    def prepared(self, plan: Plan) -> Prepared:
        """What runs a plan that came from here."""
        for found in self._same.values():
            if [stage.nodes for stage in found.plan.stages] == [stage.nodes for stage in plan.stages]:
                settings = replace(found.settings, chunks=plan.chunks, checkpoint=plan.checkpoint)
                return replace(found, plan=plan, settings=settings)
        raise AssertionError("the plan was not made here")

    def _unlimited(self, candidate: Candidate, recomputes: bool) -> Prepared:
        settings = self._settings(candidate)
        return self._prepared(
            replace(
                settings,
                checkpoint="always" if recomputes else "never",
                memory_limits=(None,) * len(settings.workers),
            )
        )

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

    def _plan(self, found: Prepared, candidate: Candidate) -> Plan:
        return variant(found.plan, candidate.schedule, candidate.chunks, self.studied.batch)

    def _least_seconds(self, samples: int) -> tuple[float, float]:
        """Of all nodes, each on the device that is fastest for it: with all of backward, and without that of weights."""
        if samples not in self._seconds:
            rows = list(zip(*(profile.nodes for profile in self.studied.profiles_for(self.settings)), strict=True))
            total = math.fsum(min((c.forward + c.backward).at(samples) for c in row) for row in rows)
            weight = math.fsum(max(c.weight.at(samples) for c in row) for row in rows)
            self._seconds[samples] = (total, total - weight)
        return self._seconds[samples]


@dataclass(frozen=True, slots=True)
class OfPlan:
    """Variants of a plan whose stages stay where they are."""

    given: Plan
    batch: int

    def plan(self, candidate: Candidate, recomputes: bool) -> Plan:
        mode = "always" if recomputes else "never"
        return variant(self.given, candidate.schedule, candidate.chunks, self.batch, mode)

    def within_limits(self, candidate: Candidate) -> Plan | None:
        return None

    def bound(self, candidate: Candidate) -> float:
        return 0.0  # it costs no more to simulate it


def variant(
    plan: Plan, schedule: ScheduleLike, chunks: int, batch: int, checkpoint: str | tuple[str, ...] | None = None
) -> Plan:
    """The same stages with another schedule, other micro-batches, other modes."""
    samples = -(-batch // min(chunks, batch))
    made = resized(plan, samples, checkpoint)
    return replace(made, schedule=schedule_text(schedule, chunks, plan.placement), chunks=chunks, batch=batch)
