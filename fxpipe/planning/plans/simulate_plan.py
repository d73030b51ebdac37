"""`fxpipe.simulate`: simulates a plan, also with another schedule, more micro-batches, or other hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fxpipe.cluster import MESHES, parse_mesh, replica_batch
from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.hardware import Hardware, check_device_count, cluster_of, parse_hardware
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.figures import simulate_step
from fxpipe.planning.plans.retarget import place_plan, resize_plan, retarget_plan
from fxpipe.scheduling import SCHEDULES, Schedule, ScheduleLike, make_schedule
from fxpipe.scheduling.factory import as_schedule_like, schedule_text
from fxpipe.scheduling.streams import is_stream
from fxpipe.simulation.simulation_result import Simulation
from fxpipe.utils.batch_split import largest_micro_batch
from fxpipe.utils.units import parse_count, with_article


def simulate(
    plan: Plan,
    *,
    schedule: ScheduleLike | None = None,
    chunks: int | None = None,
    checkpoint: str | Sequence[str] | None = None,
    batch: int | None = None,
    hardware: str | Hardware | None = None,
    data_parallel: int | None = None,
    mesh: Sequence[str] | None = None,
    overlaps: bool | None = None,
    processes: bool | None = None,
    updates: bool | None = None,
    **sizes: int,
) -> Simulation:
    """Simulates a step of a plan: its time, bubbles and memory by device. Runs nothing and needs no model.

        print(fxpipe.simulate(plan))                        # a timeline, bubbles and memory of each device
        fxpipe.simulate(plan, schedule="zero_bubble", chunks=32).step_seconds
        fxpipe.simulate(plan, hardware="h100").fits         # does it fit into their memory, device by device
        fxpipe.simulate(plan, s=512)                        # with another dynamic size
        fxpipe.simulate(plan, data_parallel=4, batch=512)   # four replicas, each with a quarter of the mini-batch

    The plan keeps its stages and their devices. For other micro-batches, checkpoint modes or hardware another cut may
    be better: `fxpipe.plan` finds it.

    Args:
        plan: made for a model, or loaded from a file. It provides the defaults of the arguments below.
        schedule: a name or a custom schedule (see `fxpipe.scheduling`); "inference" too.
        chunks: micro-batches of a step; at most the number of samples.
        checkpoint: "never", "always" or "except_last", or one of these for each stage.
        batch: samples of the mini-batch, of all replicas.
        hardware: the hardware for which seconds, links and memory are estimated, as for `fxpipe.plan`.
        data_parallel, mesh: the number of replicas that share the mini-batch, and their order, as for `fxpipe.plan`.
            One replica is simulated, and the reduction of gradients over all.
        overlaps: transfers overlap with computation; otherwise the receiving device copies before it computes. Default:
            as a pipe runs: True over processes, False within one.
        processes: each device has its own process, so that none waits for the Python of others. Stages then send values
            in packets to the next stage, which relays values for later stages (`Plan.packets`). Default: as planned;
            True over a DeviceMesh, with replicas, and with devices in several nodes.
        updates: each device updates the weights of its stages after their last backward, while others still run, as
            with `fxpipe.optim.StageOptimizer(overlap=True)`. An update takes the time to move weights, gradients and
            optimizer state, if the hardware is known. Not over processes. Default: the update follows the step. In a
            stream each mini-batch is always updated; with updates=False the update takes no time.
        sizes: dynamic sizes, by name.

    With schedule="pipedream" or "pipedream_2bw" mini-batches stream through the stages. `step_seconds`, `busy`,
    `bubble` and `sent` are for a mini-batch in the steady state, with its update; `steady` has further figures, and
    `seconds` is the time of the whole stream. A step of such a pipe with a flush is a step of schedule="1f1b".

    Returns:
        The simulation. `step_seconds` is the time of forward and backward of the mini-batch with all transfers; the
        optimizer's update follows and takes `update_seconds`, if the hardware is known. All micro-batches take as long
        as the largest one. With replicas `step_seconds` includes the reductions that remain after the last action,
        `exposed_reduction_seconds`; `traffic` reports the bytes sent within nodes and between them.

    Raises:
        ArgumentError: an argument is invalid, or the schedule needs another placement of the stages.
        ArgumentTypeError: an argument has the wrong type.
        ScheduleError: a custom schedule cannot run.
    """
    if batch is not None and isinstance(plan, Plan):
        batch = replica_batch(parse_count("batch", batch, "a whole number of samples"), _replicas(plan, data_parallel))
    variant = vary_plan(
        plan,
        schedule=schedule,
        chunks=chunks,
        checkpoint=checkpoint,
        batch=batch,
        hardware=hardware,
        data_parallel=data_parallel,
        mesh=mesh,
        processes=processes,
        sizes=sizes,
    )
    if updates is not None and not isinstance(updates, bool):
        raise ArgumentTypeError(f"updates={updates!r}: expected True or False")
    if updates and variant.turns and not is_stream(variant.schedule):
        raise ArgumentError(
            "updates=True with replicas that take turns: of a step the simulation does not know that an update waits "
            "for all of them; leave updates out, `update_seconds` tells what they take after it"
        )
    if updates and variant.is_over_processes and not is_stream(variant.schedule):
        raise ArgumentError(
            "updates=True over processes: there a step is settled by all ranks when it has ended, and updates come "
            "after it, as `update_seconds` tells; leave updates out, or give processes=False"
        )
    return simulate_step(variant, overlaps, updates)


def vary_plan(
    plan: Plan,
    *,
    schedule: ScheduleLike | None = None,
    chunks: int | None = None,
    checkpoint: str | Sequence[str] | None = None,
    batch: int | None = None,
    hardware: str | Hardware | None = None,
    data_parallel: int | None = None,
    mesh: Sequence[str] | None = None,
    processes: bool | None = None,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> Plan:
    """Returns the plan with the given changes and updated figures, as for `simulate`; `batch` is for one replica."""
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(
            f"plan is {with_article(plan)}; expected a fxpipe.Plan, as fxpipe.plan(...), pipe.plan and "
            "fxpipe.Plan.load(path) give it"
        )
    data = _replicas(plan, data_parallel)
    if plan.batch is not None and data != plan.data_parallel:
        plan = replace(plan, batch=replica_batch(plan.batch * plan.data_parallel, data))
    order, count = as_schedule_like(plan.schedule if schedule is None else schedule), plan.chunks
    if chunks is not None:
        count = parse_count("chunks", chunks, "a whole number of micro-batches")
    elif order == "pipedream" and plan.schedule != order:
        count = 1  # as in `fxpipe.pipeline`
    elif schedule is not None and isinstance(order, Schedule):
        count = order.micro_batches
    modes: Any = plan.checkpoint if checkpoint is None else checkpoint
    if isinstance(modes, Sequence) and not isinstance(modes, str):
        modes = tuple(modes)
    samples = plan.batch
    if batch is not None:
        samples = parse_count("batch", batch, "a whole number of samples")
    elif samples is None and count != plan.chunks:
        samples = plan.micro_batch * plan.chunks
    m = count if samples is None else min(count, samples)
    _check_schedule(plan, order, m, modes)
    size = plan.micro_batch if samples is None else largest_micro_batch(samples, count)
    variant = resize_plan(plan, size, modes, plan.check_sizes(sizes))
    text = schedule_text(order, m, plan.placement)
    variant = replace(variant, schedule=text, chunks=count, batch=samples if samples else plan.batch)
    variant = _on_devices(variant, None if hardware is None else parse_hardware(hardware), data, mesh)
    if processes is None:
        return variant
    if not isinstance(processes, bool):
        raise ArgumentTypeError(f"processes={processes!r}: expected True or False")
    variant = replace(variant, processes=processes)
    if variant.is_over_processes and not processes:
        raise ArgumentError(
            "processes=False: devices in several nodes, and those of several replicas, are in processes of their own; "
            "leave processes out"
        )
    return variant


def _replicas(plan: Plan, data_parallel: int | None) -> int:
    return plan.data_parallel if data_parallel is None else parse_count("data_parallel", data_parallel)


def _on_devices(plan: Plan, hardware: Hardware | None, data: int, mesh: Sequence[str] | None) -> Plan:
    """Returns the plan with its devices and replicas on this hardware; None: on the same devices."""
    if plan.turns:
        if hardware is not None or mesh is not None or data != 1:
            raise ArgumentError(
                f"the plan's stages have {'-'.join(map(str, plan.replicas))} replicas, which were chosen for its "
                "devices: plan again for others, fxpipe.plan(model, ..., balance='pipedream'), or with data_parallel"
            )
        return plan
    order = plan.cluster.mesh if mesh is None and plan.cluster is not None else parse_mesh(mesh or MESHES[0])
    if hardware is not None:
        check_device_count(hardware, len(plan.workers), data)
        return retarget_plan(plan, hardware, cluster_of(hardware, len(plan.workers), data, order))
    if plan.cluster is None:
        check_device_count(None, len(plan.workers), data)
        return plan
    cluster = replace(plan.cluster, data=data, mesh=order)
    return plan if cluster == plan.cluster else place_plan(plan, cluster)


def _check_schedule(plan: Plan, order: ScheduleLike, m: int, modes: str | tuple[str, ...]) -> None:
    """Raises an error with a remedy if the schedule does not support the plan's placement."""
    n = len(plan.stages)
    try:
        make_schedule(order, n, m, modes, plan.placement)
    except ArgumentError as error:
        if isinstance(order, str) and SCHEDULES[order].has_fixed_placement:
            try:
                make_schedule(order, n, 1, placement=plan.placement)
            except ArgumentError:
                raise ArgumentError(
                    f"schedule={order!r} cannot run over this plan, whose {n} stages are on devices {plan.placement}: "
                    "it needs other stages on other devices; plan for it: "
                    f"fxpipe.plan(model, ..., schedule={order!r})"
                ) from error
        raise
