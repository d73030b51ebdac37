"""A plan on other hardware than it was made for: the same stages, with the seconds, links and memory they have there.

The plan knows the operations of its stages as formulas, so that what was measured on one machine is reckoned for
another as `fxpipe.plan(..., hardware=...)` does it. The cut stays: on other hardware another one may be better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from fxpipe.errors import ArgumentError
from fxpipe.hardware import Hardware, link_between, shared_between
from fxpipe.partitioning.chain import Link
from fxpipe.plans import Plan, Sending, StagePlan, StageSeconds
from fxpipe.plans.action_costs import action_seconds


def on_hardware(plan: Plan, hardware: Hardware) -> Plan:
    """The plan with the figures of this hardware. Which node is the heaviest there is not known.

    Raises:
        ArgumentError: the plan does not know its operations.
    """
    if not plan.operations:
        raise ArgumentError(
            f"hardware={hardware.name!r}: the plan does not know which operations its stages run, for the model was "
            "profiled on values only (or the plan was made by hand); give hardware to fxpipe.plan"
        )
    workers = [f"cuda:{k}" if hardware.within is not None else "cpu" for k in range(max(plan.placement) + 1)]
    devices = tuple(workers[k] for k in plan.placement)
    return replace(
        plan,
        stages=tuple(_stage(plan, stage, devices[stage.index], hardware) for stage in plan.stages),
        devices=devices,
        sendings=tuple(_sending(plan, way, hardware) for way in plan.sendings),
        estimated_for=hardware.name,
        bottlenecks=(),
        heaviest=None,
    )


def on_link(way: Sending, link: Link | None) -> Sending:
    """With the seconds that it takes over this link; None: it is handed over."""
    if link is None:
        return replace(way, seconds=0.0, fixed_seconds=0.0)
    fixed = way.values * link.latency
    return replace(way, seconds=fixed + way.bytes / link.bytes_per_second, fixed_seconds=fixed)


def _stage(plan: Plan, stage: StagePlan, device: str, hardware: Hardware) -> StagePlan:
    b, worker = plan.micro_batch, plan.placement[stage.index]
    here, twice = (_seconds(plan, stage, hardware, size) for size in (b, 2 * b))
    return replace(
        stage,
        device=device,
        forward_seconds=here.forward,
        backward_seconds=here.backward,
        weight_seconds=here.weight,
        memory_limit=hardware.usable_memory // plan.placement.count(worker),
        fixed=StageSeconds(
            *(
                max(0.0, 2 * getattr(here, kind) - getattr(twice, kind))  # the line through both
                for kind in ("forward", "backward", "weight")
            )
        ),
        action_seconds=action_seconds(device),
        update_seconds=hardware.update_seconds(stage.gradient_bytes, stage.state_bytes - stage.gradient_bytes),
    )


def _seconds(plan: Plan, stage: StagePlan, hardware: Hardware, b: int) -> StageSeconds:
    def total(counted: Iterable[tuple[int, int]]) -> float:
        return math.fsum(times * plan.operations[k].seconds(hardware, b) for k, times in counted)

    work = stage.work
    backward = total(work.backward)
    weight = max(0.0, backward - total(work.to_inputs))
    return StageSeconds(total(work.forward), backward, weight)


def _sending(plan: Plan, way: Sending, hardware: Hardware) -> Sending:
    one, other = plan.placement[way.source], plan.placement[way.target]
    link = link_between(hardware, one, other)
    return on_link(replace(way, over=shared_between(hardware, one, other)), link)
