"""The passes that look at what was found, and take little: decide and rewrite. What comes of them can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from fxpipe.errors import ArgumentError
from fxpipe.plans import Plan

if TYPE_CHECKING:
    from fxpipe.deciding.outcomes import Cut
    from fxpipe.planning.studying import Studied
    from fxpipe.rewriting import Program
    from fxpipe.settings import Settings
    from fxpipe.tracing import Traced


@dataclass(frozen=True, slots=True)
class Prepared:
    """A graph that is ready to run, and the plan that it follows."""

    plan: Plan
    traced: Traced
    program: Program
    settings: Settings  # with all that was left to planning
    is_reordered: bool


def planned(studied: Studied, settings: Settings) -> Prepared:
    """Decides and rewrites: a plan of what was studied, for workers of which the study holds."""
    from fxpipe.deciding.cases import is_by_hand
    from fxpipe.deciding.cuts import decide

    orders = studied.orders[:1] if is_by_hand(studied.traced, settings) else studied.orders
    cut = decide(orders, studied.profiles_for(settings), studied.batch, settings)
    return prepared(cut, studied.fingerprint, studied.batch, settings)


def prepared(cut: Cut, fingerprint: str, batch: int, settings: Settings) -> Prepared:
    """The stages of a cut, and the plan that describes them."""
    from fxpipe.deciding.describing import copies_of, describe
    from fxpipe.rewriting import split

    traced = cut.traced
    settings = replace(cut.settings, checkpoint=_checkpoint(settings.checkpoint, cut.recompute))
    deferred = settings.deferred_batch_norm
    program = split(traced, cut.starts, settings.devices, deferred_batch_norm=deferred)
    copies = copies_of(cut, program, settings.largest_micro_batch(batch))
    if any(copies):
        program = split(traced, cut.starts, settings.devices, copies, deferred)
    plan = describe(cut, program, copies, batch, settings)
    plan = replace(plan, fingerprint=fingerprint)
    return Prepared(plan, traced, program, settings, traced.fingerprint() != fingerprint)


def _checkpoint(asked: str | tuple[str, ...], recompute: Sequence[bool]) -> str | tuple[str, ...]:
    """What was left to planning, decided."""
    if asked != "auto":
        return asked
    if len({*recompute}) == 1:
        return "always" if recompute[0] else "never"
    return tuple("always" if again else "never" for again in recompute)


def as_planned(traced: Traced, given: Plan, batch: int, settings: Settings) -> Prepared:
    """The stages of a plan. Its figures follow the micro-batches; they stay those of the devices it was made for."""
    from fxpipe.plans.resizing import resized
    from fxpipe.rewriting import split
    from fxpipe.rewriting.ordering import in_order
    from fxpipe.scheduling import schedule_text

    by_name = {node.name: node for node in traced.nodes}
    names = [name for stage in given.stages for name in stage.nodes]
    if sorted(names) != sorted(by_name) or not all(stage.nodes for stage in given.stages):
        raise ArgumentError("plan does not have the nodes of the graph that its fingerprint names: it is damaged")
    reordered = in_order(traced, [by_name[name] for name in names])
    starts = tuple(accumulate((len(stage.nodes) for stage in given.stages[:-1]), initial=0))
    program = split(
        reordered, starts, settings.devices, [stage.copies for stage in given.stages], settings.deferred_batch_norm
    )
    stages = tuple(
        replace(stage, device=str(device), code=made.code)
        for stage, device, made in zip(given.stages, settings.devices, program.stages, strict=True)
    )
    plan = replace(
        resized(replace(given, stages=stages), settings.largest_micro_batch(batch), settings.checkpoint),
        devices=tuple(map(str, settings.devices)),
        schedule=schedule_text(settings.schedule, settings.chunks, settings.placement),
        chunks=settings.chunks,
        placement=settings.placement,
        batch=batch,
    )
    return Prepared(plan, reordered, program, settings, names != [node.name for node in traced.nodes])
