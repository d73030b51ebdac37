"""The figures of a plan for micro-batches of another size than it was made for.

Bytes follow exactly: those of stages by their formulas, those of values by the shapes of the graph. Seconds follow by
what the plan knows of them, a part that is the same for every size and a part that grows with it. Which cuts were
compared is forgotten, for it was for the other size.
"""

from __future__ import annotations

from dataclasses import replace

from fxpipe.deciding.describing import sendings, sent_bytes, sizes_of
from fxpipe.plans import Plan, Portal, Sending, StagePlan
from fxpipe.rewriting import Program
from fxpipe.tracing import Traced


def for_micro_batches(plan: Plan, samples: int, traced: Traced, program: Program) -> Plan:
    """The plan with the figures of micro-batches of so many samples at most.

    Args:
        traced: the graph of the plan.
        program: its stages.
    """
    if samples == plan.micro_batch:
        return plan
    times = samples / plan.micro_batch
    sizes = sizes_of(traced, samples)
    before = {(way.source, way.target): way for way in plan.sendings}
    return replace(
        plan,
        stages=tuple(
            replace(_resized(s, samples, times), sent_bytes=sent_bytes(program, s.index, sizes)) for s in plan.stages
        ),
        portals=tuple(Portal(skip.name, skip.source, skip.target, sizes[skip.name]) for skip in program.skips),
        micro_batch=samples,
        bottlenecks=(),
        sendings=tuple(_sent(way, before.get((way.source, way.target))) for way in sendings(traced, program, sizes)),
    )


def _resized(stage: StagePlan, samples: int, times: float) -> StagePlan:
    backward = _grown(stage.backward_seconds, stage.fixed.backward, times)
    return replace(
        stage,
        forward_seconds=_grown(stage.forward_seconds, stage.fixed.forward, times),
        backward_seconds=backward,
        weight_seconds=min(backward, _grown(stage.weight_seconds, stage.fixed.weight, times)),  # rounded, a part still
        activation_bytes=stage.bytes.received(samples) + stage.bytes.held(samples),
    )


def _sent(now: Sending, before: Sending | None) -> Sending:
    """With the seconds that so many bytes take on the way that the plan knew."""
    if before is None or not before.bytes:
        return now
    seconds = _grown(before.seconds, before.fixed_seconds, now.bytes / before.bytes)
    return replace(now, seconds=seconds, fixed_seconds=before.fixed_seconds)


def _grown(seconds: float, fixed: float, times: float) -> float:
    return fixed + (seconds - fixed) * times
