"""Figures derived from a plan. All micro-batches take as long as the largest one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from fxpipe.planning.plans.data import HeaviestNode, PlanData, Portal, StagePlan
from fxpipe.planning.plans.retarget import interpreter_has_lock
from fxpipe.scheduling.row_transforms import with_updates
from fxpipe.scheduling.streams import is_stream
from fxpipe.simulation import Simulation, simulate_schedule, simulate_stream

LEAST_LIMITING_SHARE = 0.75  # share of the slowest stage's seconds from which a node limits the balance


@dataclass(frozen=True, slots=True)
class StageFigures:
    stage: StagePlan
    rows: tuple[int, ...]  # indices of its devices
    devices: tuple[str, ...]  # names of its devices
    mode: str  # checkpoint mode
    in_flight: int  # maximum number of micro-batches whose forward has run and whose backward has not
    flops: float  # for one micro-batch, forward and backward
    is_slowest: bool
    portals_in: tuple[Portal, ...]
    portals_out: tuple[Portal, ...]
    memory_bytes: int  # peak; see `Plan.memory`


@dataclass(frozen=True, slots=True)
class PlanFigures:
    stages: tuple[StageFigures, ...]
    slowest_to_mean: float  # forward and backward seconds of the slowest device, divided by the mean over devices
    simulation: Simulation  # a step, or a stream if the schedule streams
    sizes: Mapping[str, int]  # dynamic sizes, by name
    step_seconds: float
    slowest: int  # index of the stage
    shares: tuple[float, ...]  # by stage, its share of the total seconds, 0 to 1
    memory_bytes: int  # largest memory of a stage
    fullest: int  # index of the stage with the largest memory
    over_bytes: int | None  # largest excess of a stage over its limit; None: no limit is known


def simulate_step(plan: PlanData, overlaps: bool | None = None, updates: bool | None = None) -> Simulation:
    """Simulates a step of the plan as it will run, or a stream if its schedule is one."""
    # Within a process the receiving device copies before it computes. Between processes packets overlap with
    # computation, but packing and unpacking take time at both ends. `updates`: at the ends of rows, as in streams.
    is_over, (costs, transfers) = plan.is_over_processes, plan.costs()
    overlaps, shares = is_over if overlaps is None else overlaps, not is_over and interpreter_has_lock()
    if is_stream(plan.schedule):
        simulation = simulate_stream(
            plan.schedule,
            [replace(cost, update=0.0) for cost in costs] if updates is False else costs,
            transfers,
            micro_batches=plan.micro_batches,
            modes=plan.modes,
            overlaps=overlaps,
            one_interpreter=shares,
            replicas=plan.stage_turns,
            is_joint=plan.is_joint,
        )
    else:
        schedule = with_updates(plan.as_schedule()) if updates else plan.as_schedule()
        simulation = simulate_schedule(schedule, costs, transfers, overlaps=overlaps, one_interpreter=shares)
    return replace(
        simulation,
        devices=plan.row_devices,
        samples=None if plan.batch is None else plan.batch * plan.data_parallel,
        cluster=plan.cluster,
        limits=plan.memory_limits,
    )


def plan_figures(plan: PlanData) -> PlanFigures:
    """Computes the balance, step time and memory of a plan at its current sizes."""
    simulation, seconds = simulate_step(plan), [stage.seconds for stage in plan.stages]
    stages = tuple(
        StageFigures(
            stage,
            rows,
            tuple(dict.fromkeys(plan.row_devices[row] for row in rows)),
            mode,
            plan.in_flight(stage.index),
            float(stage.flops.at(plan.here)),
            stage.seconds == max(seconds),
            portals_in=tuple(portal for portal in plan.portals if portal.target == stage.index),
            portals_out=tuple(portal for portal in plan.portals if portal.source == stage.index),
            memory_bytes=int(plan.memory(stage.index, b=plan.micro_batch)),
        )
        for stage, rows, mode in zip(plan.stages, plan.stage_rows, plan.modes, strict=True)
    )
    by_device = [0.0] * len(plan.row_devices)
    for stage, rows in zip(plan.stages, plan.stage_rows, strict=True):
        for device in rows:
            by_device[device] += stage.seconds / len(rows)
    memory = [own.memory_bytes for own in stages]
    limits = [stage.memory_limit for stage in plan.stages]
    over = [own - limit for own, limit in zip(memory, limits, strict=True) if limit is not None]
    return PlanFigures(
        stages,
        max(by_device) / fmean(by_device) if any(by_device) else 1.0,
        simulation,
        {one.name: one.size for one in plan.sizes},
        simulation.step_seconds,
        seconds.index(max(seconds)),
        tuple(one / (sum(seconds) or 1.0) for one in seconds),
        max(memory),
        memory.index(max(memory)),
        max(0, *over) if over else None,
    )


def limiting_node(plan: PlanData) -> HeaviestNode | None:
    """Returns the heaviest node if it takes nearly all the time of the slowest stage: more stages would not help."""
    node, slowest = plan.heaviest, max(stage.seconds for stage in plan.stages)
    if node is None or not plan.stages[node.stage].seconds:
        return None
    return node if 0 < LEAST_LIMITING_SHARE * slowest <= node.seconds else None
