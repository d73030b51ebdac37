"""Two plans compared: what moved between stages, and what that does to seconds, bytes, memory and the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from fxpipe.plans import Plan

Value: TypeAlias = str | int | float | None


@dataclass(frozen=True, slots=True)
class Change:
    """A figure or a choice, before and after."""

    name: str
    before: Value
    after: Value

    @property
    def is_same(self) -> bool:
        return self.before == self.after


@dataclass(frozen=True, slots=True)
class Moved:
    """Nodes that one plan has in one stage and the other in another, in the order in which they run."""

    source: int
    target: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageChange:
    """One stage; the figures of a plan that has no such stage are None."""

    stage: int
    figures: tuple[Change, ...]  # nodes, forward_seconds, backward_seconds, parameter_bytes, memory_bytes, sent_bytes


@dataclass(frozen=True, slots=True)
class Difference:
    """From a plan to another."""

    choices: tuple[Change, ...]  # that differ: schedule, chunks, checkpoint ...
    is_one_graph: bool
    moved: tuple[Moved, ...]
    gone: tuple[str, ...]  # nodes that only the first plan has
    new: tuple[str, ...]  # nodes that only the second one has
    stages: tuple[StageChange, ...]
    totals: tuple[Change, ...]  # step_seconds, bubble, peak_bytes, parameter_bytes, portal_bytes

    @property
    def is_nothing(self) -> bool:
        changes = [*self.totals, *(figure for stage in self.stages for figure in stage.figures)]
        is_still = not (self.choices or self.moved or self.gone or self.new)
        return is_still and self.is_one_graph and all(change.is_same for change in changes)


def difference(before: Plan, after: Plan) -> Difference:
    """What it takes to come from one plan to the other."""
    home, now = _homes(before), _homes(after)
    return Difference(
        choices=tuple(change for change in _choices(before, after) if not change.is_same),
        is_one_graph=before.fingerprint == after.fingerprint,
        moved=tuple(_moves(home, now)),
        gone=tuple(name for name in home if name not in now),
        new=tuple(name for name in now if name not in home),
        stages=tuple(_stage(before, after, j) for j in range(max(len(before.stages), len(after.stages)))),
        totals=_totals(before, after),
    )


def _homes(plan: Plan) -> dict[str, int]:
    """For each node its stage."""
    return {name: stage.index for stage in plan.stages for name in stage.nodes}


def _moves(home: dict[str, int], now: dict[str, int]) -> Iterator[Moved]:
    both = [(home[name], now[name], name) for name in now if name in home and home[name] != now[name]]
    for source, target in Counter((source, target) for source, target, _ in both):
        yield Moved(source, target, tuple(name for a, b, name in both if (a, b) == (source, target)))


def _choices(before: Plan, after: Plan) -> Iterator[Change]:
    for name in ("schedule", "chunks", "micro_batch", "balance", "tracer", "estimated_for"):
        yield Change(name, getattr(before, name), getattr(after, name))
    yield Change("checkpoint", ",".join(_modes(before)), ",".join(_modes(after)))
    yield Change("stages", len(before.stages), len(after.stages))
    yield Change("devices", ",".join(before.workers), ",".join(after.workers))
    yield Change("placement", ",".join(map(str, before.placement)), ",".join(map(str, after.placement)))


def _modes(plan: Plan) -> tuple[str, ...]:
    """One mode, or one for each stage where they differ."""
    return plan.modes[:1] if len({*plan.modes}) == 1 else plan.modes


def _stage(before: Plan, after: Plan, j: int) -> StageChange:
    one, other = _figures(before, j), _figures(after, j)
    return StageChange(j, tuple(Change(name, one.get(name), other.get(name)) for name in one or other))


def _figures(plan: Plan, j: int) -> dict[str, Value]:
    if j >= len(plan.stages):
        return {}
    stage = plan.stages[j]
    return {
        "nodes": len(stage.nodes),
        "forward_seconds": stage.forward_seconds,
        "backward_seconds": stage.backward_seconds,
        "parameter_bytes": stage.parameter_bytes,
        "memory_bytes": int(plan.memory(j, b=plan.micro_batch)),
        "sent_bytes": stage.sent_bytes,
    }


def _totals(before: Plan, after: Plan) -> tuple[Change, ...]:
    one, other = _total(before), _total(after)
    return tuple(Change(name, one[name], other[name]) for name in one)


def _total(plan: Plan) -> dict[str, Value]:
    import fxpipe
    from fxpipe.inspect.tables.comparing import run_of

    run = run_of(fxpipe.simulate(plan), plan)
    return {
        "step_seconds": run.step_seconds,
        "bubble": run.bubble,
        "peak_bytes": run.peak_bytes,
        "parameter_bytes": sum(stage.parameter_bytes for stage in plan.stages),
        "portal_bytes": sum(portal.bytes for portal in plan.portals),
    }
