"""The figures of a plan for micro-batches of another size than it was made for: a plan knows them all by itself.

Bytes follow exactly, by the plan's formulas. Seconds follow by what the plan knows of them, a part that is the same for
every size and a part that grows with it. Which cuts were compared is forgotten, for it was for the other size.
"""

from __future__ import annotations

from dataclasses import replace

from fxpipe.plans import HeavyNode, Plan, Sending, StagePlan


def resized(plan: Plan, samples: int, checkpoint: str | tuple[str, ...] | None = None) -> Plan:
    """The plan with the figures of micro-batches of so many samples at most, and with these checkpoint modes."""
    if samples == plan.micro_batch and checkpoint in (None, plan.checkpoint):
        return plan
    plan = plan if checkpoint is None else replace(plan, checkpoint=checkpoint)
    times = samples / plan.micro_batch
    return replace(
        plan,
        stages=tuple(_stage(stage, samples, times, plan.recomputes(stage.index)) for stage in plan.stages),
        portals=tuple(replace(portal, bytes=portal.size(samples)) for portal in plan.portals),
        micro_batch=samples,
        bottlenecks=(),
        sendings=tuple(_sending(way, samples) for way in plan.sendings),
        heaviest=None if plan.heaviest is None else _node(plan.heaviest, times),
    )


def _stage(stage: StagePlan, samples: int, times: float, recomputes: bool) -> StagePlan:
    backward = _grown(stage.backward_seconds, stage.fixed.backward, times)
    return replace(
        stage,
        forward_seconds=_grown(stage.forward_seconds, stage.fixed.forward, times),
        backward_seconds=backward,
        weight_seconds=min(backward, _grown(stage.weight_seconds, stage.fixed.weight, times)),  # rounded, a part still
        activation_bytes=stage.bytes.kept(recomputes)(samples) + stage.bytes.held(samples),
        sent_bytes=stage.sent(samples),
    )


def _sending(way: Sending, samples: int) -> Sending:
    """With the seconds that so many bytes take on the way that the plan knew."""
    size = way.size(samples)
    times = size / way.bytes if way.bytes else 1.0
    return replace(way, bytes=size, seconds=_grown(way.seconds, way.fixed_seconds, times))


def _node(node: HeavyNode, times: float) -> HeavyNode:
    return replace(node, seconds=_grown(node.seconds, node.fixed_seconds, times))


def _grown(seconds: float, fixed: float, times: float) -> float:
    return fixed + (seconds - fixed) * times
