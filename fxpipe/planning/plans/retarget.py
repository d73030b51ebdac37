"""A plan for other sizes, and for other hardware: the same stages with other figures, from its formulas.

Also here: what the host needs for the actions of a stage, and the links between processes of one machine.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from fxpipe.cluster import MESHES, Cluster, Link
from fxpipe.errors import ArgumentError
from fxpipe.hardware import Hardware, cluster_of, device_names
from fxpipe.planning.plans.data import PlanData, PlannedTransfer, StagePlan, StageSeconds
from fxpipe.scheduling.streams import is_stream
from fxpipe.simulation.costs import HostCost
from fxpipe.utils.polynomial import Polynomial, polynomial_sum

PlanT = TypeVar("PlanT", bound=PlanData)


def resize_plan(
    plan: PlanT,
    samples: int,
    checkpoint: str | tuple[str, ...] | None = None,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> PlanT:
    """Returns the plan for micro-batches of at most `samples` samples, these modes and, by name, dynamic `sizes`."""
    before, after = plan.here, {**plan.here, **sizes, "b": samples}
    if before == after and checkpoint in (None, plan.checkpoint):
        return plan
    plan = plan if checkpoint is None else replace(plan, checkpoint=checkpoint)
    times, heaviest = samples / plan.micro_batch, plan.heaviest

    def new_bytes(formula: Polynomial, known: int) -> int:
        """Computes bytes by the formula; without one (a manual plan) in proportion to samples."""
        return formula.at(after) if formula else math.ceil(known * times)

    def new_seconds(known: float, formula: Polynomial) -> float:
        """Computes seconds by the formula; without one in proportion to samples."""
        return max(0.0, known + float(formula.value(after) - formula.value(before))) if formula else known * times

    def resized(stage: StagePlan) -> StagePlan:
        backward = new_seconds(stage.backward_seconds, stage.formulas.backward)
        kept = stage.bytes.kept(plan.recomputes(stage.index))
        return replace(
            stage,
            forward_seconds=new_seconds(stage.forward_seconds, stage.formulas.forward),
            backward_seconds=backward,
            # Still a part of backward after rounding.
            weight_seconds=min(backward, new_seconds(stage.weight_seconds, stage.formulas.weight)),
            loss_seconds=new_seconds(stage.loss_seconds, stage.formulas.loss),
            activation_bytes=kept.at(after) + stage.bytes.held.at(after),
            sent_bytes=new_bytes(stage.sent, stage.sent_bytes),
        )

    def resized_transfer(way: PlannedTransfer) -> PlannedTransfer:
        size = new_bytes(way.size, way.bytes)
        growing = (way.seconds - way.fixed_seconds) * (size / way.bytes if way.bytes else 1.0)
        return replace(way, bytes=size, seconds=way.fixed_seconds + growing)

    return replace(
        plan,
        stages=tuple(map(resized, plan.stages)),
        portals=tuple(replace(portal, bytes=new_bytes(portal.size, portal.bytes)) for portal in plan.portals),
        micro_batch=samples,
        bottlenecks=(),
        sendings=tuple(map(resized_transfer, plan.sendings)),
        packets=tuple(map(resized_transfer, plan.packets)),
        heaviest=heaviest and replace(heaviest, seconds=new_seconds(heaviest.seconds, heaviest.formula)),
        sizes=tuple(
            replace(one, size=after[one.name], largest=max(one.largest, after[one.name])) for one in plan.sizes
        ),
    )


CALL_SECONDS = 2e-6  # a call of a torch function from Python, for example a view
OPERATION_SECONDS = 4e-6  # additional time of an operation: choose the kernel, allocate outputs, launch
# Overhead of one action of a stage with one small operation: `make bench`, tools/bench/overhead.py.
ACTION_SECONDS = 1e-4

# Overhead of a packet between processes at each end, without the transfer: the sender gathers values, the receiver
# waits and splits the packet. One small tensor takes 0.08 ms, four take 0.13 ms: gloo of torch 2.13, one core.
MESSAGE_SECONDS = 1e-4
# The link between two processes of one machine: gloo over the loopback device, packets of 10 MB, on two cores. Within
# one process no copy is needed.
LOOPBACK = Link(2e9, 5e-5)


def interpreter_has_lock() -> bool:
    """Returns True if this interpreter runs one thread at a time: all but free-threaded ones do (3.13t, 3.14t)."""
    is_enabled = getattr(sys, "_is_gil_enabled", None)
    return is_enabled is None or bool(is_enabled())


def reckon_host(device: str, calls: int, operations: Sequence[int], forward_seconds: float) -> HostCost:
    """Estimates the host time of a stage with this number of calls; the loss belongs to the last stage.

    All workers of a process run in one interpreter. An accelerator computes what its worker has queued, so a step is
    never shorter than the Python time of all stages. On a CPU the Python time of a node is a part of its measured time;
    only the Python part is exclusive.

    The constants are times of torch 2.13 on one core at 2.5 GHz: 1 to 7 microseconds for a call on small tensors,
    including recording for autograd (a view 0.9, a sum 1.4, a linear layer 2.9, GELU 6.1), and 3 to 6 for an operation
    of backward. Two threads in forward take 2.1 times as long as one: torch releases the lock within each call, but
    passing it to another thread takes as long as the call. Two threads in backward take 1.2 times as long: autograd
    queues it in C++. Hence F holds the lock, and backward does not.

    `operations`: counts as in `StageWork`; if unknown, a call is one operation in forward and two in backward.
    `forward_seconds`: of F on the device; on a CPU it includes the Python time.
    """
    ahead, back, to_inputs, loss = operations
    if not ahead:
        ahead, back, to_inputs = calls, 2 * calls, calls
    forward = calls * CALL_SECONDS + (ahead + loss) * OPERATION_SECONDS
    if device.partition(":")[0] == "cpu":
        return HostCost(forward=min(forward, forward_seconds), action=ACTION_SECONDS)
    return HostCost(
        forward, back * OPERATION_SECONDS, max(0, back - to_inputs) * OPERATION_SECONDS, ACTION_SECONDS, runs_ahead=True
    )


def action_seconds(device: str) -> float:
    """Returns the seconds of an action on a device in addition to the operations of its stage.

    Its worker waits at a fence, receives, calls the stage's code or autograd, sends and records: Python code that takes
    the same time for any size. On a GPU it is free while the host is ahead of the device, so it counts only on the CPU.

    >>> action_seconds("cuda:0")
    0.0
    """
    return ACTION_SECONDS if device.partition(":")[0] == "cpu" else 0.0


def retarget_plan(plan: PlanT, hardware: Hardware, cluster: Cluster | None = None) -> PlanT:
    """Returns the plan with the figures of this hardware; its heaviest node is unknown. `cluster` None: no replicas."""
    if not plan.operations:
        raise ArgumentError(
            f"hardware={hardware.name!r}: the plan does not know which operations its stages run, for it was made "
            "by hand; give hardware to fxpipe.plan"
        )
    workers = device_names(hardware, max(plan.placement) + 1)
    devices = tuple(workers[k] for k in plan.placement)
    return replace(
        place_plan(plan, cluster or cluster_of(hardware, len(workers))),
        stages=tuple(_retarget_stage(plan, stage, devices[stage.index], hardware) for stage in plan.stages),
        devices=devices,
        estimated_for=hardware.name,
        bottlenecks=(),
        heaviest=None,
    )


def place_transfer(
    way: PlannedTransfer,
    placement: Sequence[int],
    cluster: Cluster | None,
    link_of: Callable[[int, int], Link | None],
    handed_over: Link | None = None,
) -> PlannedTransfer:
    """Returns the transfer with its link and its seconds. Without a link, values are passed without a copy."""
    # `link_of`: of two workers. `handed_over` is the link to use if values are passed within one process.
    ends, fixed, whole = (placement[way.source], placement[way.target]), 0.0, 0.0
    link = link_of(*ends) or handed_over
    if link is not None:
        fixed = way.values * link.latency
        whole = fixed + way.bytes / link.bytes_per_second
    return replace(way, over=cluster.adapters(*ends) if cluster else (), seconds=whole, fixed_seconds=fixed)


def _retarget_stage(plan: PlanData, stage: StagePlan, device: str, hardware: Hardware) -> StagePlan:
    def total(counted: Iterable[tuple[int, int]], times: int = 1) -> float:
        sizes = plan.here | {"b": times * plan.micro_batch}
        return math.fsum(count * plan.operations[k].seconds(hardware, sizes) for k, count in counted)

    def formula(counted: Sequence[tuple[int, int]]) -> Polynomial:
        here = total(counted)
        if plan.sizes:
            growing = polynomial_sum(plan.operations[k].growing(hardware, plan.here) * count for k, count in counted)
            return growing + Polynomial.in_b(here - float(growing.value(plan.here)))
        fixed = max(0.0, 2 * here - total(counted, 2))  # at zero samples, by the seconds of b and 2b
        return Polynomial.in_b(fixed, (here - fixed) / plan.micro_batch)

    work = stage.work
    forward, backward = total(work.forward), total(work.backward)
    parts = work.forward, work.backward, work.to_inputs, work.loss
    formulas, counts = StageSeconds(*map(formula, parts)), [sum(times for _, times in part) for part in parts]
    return replace(
        stage,
        device=device,
        forward_seconds=forward,
        backward_seconds=backward,
        weight_seconds=max(0.0, backward - total(work.to_inputs)),
        loss_seconds=total(work.loss),
        memory_limit=hardware.usable_memory // plan.placement.count(plan.placement[stage.index]),
        formulas=replace(formulas, weight=formulas.backward + formulas.weight * -1),
        action_seconds=action_seconds(device),
        host=reckon_host(device, len(stage.nodes), counts, forward),
        update_seconds=hardware.update_seconds(stage.gradient_bytes, stage.state_bytes - stage.gradient_bytes),
    )


def place_plan(plan: PlanT, cluster: Cluster) -> PlanT:
    """Returns the plan with its devices, and the devices of its replicas, placed in a cluster."""
    where = plan.placement, cluster, cluster.link
    sendings = tuple(place_transfer(way, *where) for way in plan.sendings)
    packets = tuple(place_transfer(way, *where, LOOPBACK) for way in plan.packets)
    return replace(plan, cluster=cluster, sendings=sendings, packets=packets)


def replicas_in_turn(plan: PlanT, schedule: object) -> PlanT:
    """Returns the plan for one process: replicas take micro-batches, or mini-batches of a stream, in turn."""
    cluster, count = plan.cluster, plan.data_parallel
    if cluster is None or count == 1:
        return plan
    in_turn = replace(cluster, data=1, mesh=MESHES[0], replicas=(count,) * cluster.pipe)
    if is_stream(schedule):
        return place_plan(plan, in_turn)
    batch = None if plan.batch is None else plan.batch * count
    return place_plan(replace(plan, chunks=plan.micro_batches * count, batch=batch), in_turn)
