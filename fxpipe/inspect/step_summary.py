"""Ways to run a step, side by side: how long each takes, what idles, whether it fits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fxpipe.errors import ArgumentError, ScheduleError
from fxpipe.scheduling.actions import ActionKind
from fxpipe.utils.text_table import EMPTY_CELL, bytes_of_limit, text_table, wrap_text
from fxpipe.utils.units import count_text, human_bytes, human_seconds, percent, three_digits

if TYPE_CHECKING:
    from fxpipe.planning.plans import Plan
    from fxpipe.planning.tuning.tuning_result import Tuning
    from fxpipe.simulation import Simulation


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The summary of a simulated step, or of a mini-batch of a stream.

    Memory is that of the device closest to its limit, or furthest over it.
    """

    schedule: str  # a name
    micro_batches: int
    checkpoint: str
    step_seconds: float
    bubble: float  # share of the device time of a step that is idle
    device: int
    peak_bytes: int
    limit_bytes: int | None  # None: none is known

    @property
    def over_bytes(self) -> int:
        """The bytes over the limit; 0 where it fits."""
        return 0 if self.limit_bytes is None else max(0, self.peak_bytes - self.limit_bytes)


def summarize_step(simulation: Simulation, plan: Plan) -> StepSummary:
    """Summarizes a simulated step of the plan."""
    limits, peaks = simulation.limits, [memory.peak for memory in simulation.memory]

    def closeness(device: int) -> tuple[float, float]:
        limit = limits[device]
        return (0.0 if not limit else peaks[device] / limit, peaks[device])

    device = max(range(len(peaks)), key=closeness)
    limit = limits[device]
    return StepSummary(
        schedule=simulation.schedule.name,
        micro_batches=simulation.micro_batches,
        checkpoint=mode_text(plan),
        step_seconds=simulation.step_seconds,
        bubble=simulation.mean_bubble,
        device=device,
        peak_bytes=round(peaks[device]),
        limit_bytes=None if limit is None else round(limit),
    )


# Of a device, for each beside the first. A plan knows no more closely; and replicas gain nearly a whole one.
LEAST_GAIN = 0.1


def one_device_text(tuning: Tuning) -> str:
    """Compares the chosen way with one device that has the whole model: and takes the mini-batch at once, if it can.

    Empty where replicas share the mini-batch, or there is one device only.
    """
    from fxpipe.planning.plans.retarget import resize_plan

    plan, batch = tuning.best.plan, tuning.batch
    if plan is None or tuning.best.data_parallel > 1 or len(plan.row_devices) == 1:
        return ""
    limits = [stage.memory_limit for stage in plan.stages if plan.placement[stage.index] == 0]
    limit = math.inf if None in limits else sum(filter(None, limits))
    for samples in (batch, plan.micro_batch):
        alone = resize_plan(replace(plan, chunks=1), samples, "never")
        needed = sum(int(alone.memory(stage.index, b=samples)) for stage in alone.stages)
        if needed <= limit:
            break
    else:
        return wrap_text(
            "one device alone has no room for the model, not even with a micro-batch at a time: it takes "
            f"{bytes_of_limit(needed, limit)}"
        )
    if not plan.estimated_for and any(device.partition(":")[0] == "cpu" for device in plan.row_devices):
        return wrap_text(
            "one device alone is not compared: a worker's share of the CPU's threads was measured, and the model alone "
            "has them all; time a step of the model itself"
        )
    count = math.ceil(batch / samples)
    seconds = count * sum(stage.seconds for stage in alone.stages)
    how = "the mini-batch at once" if count == 1 else f"{count} micro-batches, one after the other"
    devices, speedup = count_text(len(plan.row_devices), "device"), seconds / tuning.best.step_seconds
    text = f"one device alone would take {human_seconds(seconds)} for {how}: "
    if speedup < 1 + LEAST_GAIN * (len(plan.row_devices) - 1):
        text += (
            f"{speedup:.2f} times the chosen step, so that a pipeline is not worth it here. One device holds the model "
            f"({human_bytes(needed)}); for more speed, let {devices} share the mini-batch, each with a copy of the "
            "model (torch's DistributedDataParallel)"
        )
    else:
        text += f"the chosen way is {speedup:.2f} times as fast, on {devices}"
    return wrap_text(text)


def mode_text(plan: Plan) -> str:
    """Formats the checkpoint mode of a plan; `some` where stages differ."""
    modes = {*plan.modes}
    return modes.pop() if len(modes) == 1 else "some"


def summarize_schedule(plan: Plan, schedule: str) -> StepSummary:
    """Summarizes the plan's stages in a schedule, to be compared with the plan's own.

    Beside a stream a step has its updates, as that does, and cuts the mini-batch into as many micro-batches as the
    stream has in flight: so the same samples take as long as they need.

    Raises:
        ArgumentError, ScheduleError: it wants its stages elsewhere.
    """
    import fxpipe
    from fxpipe.scheduling import is_stream, steady_micro_batches

    if not is_stream(plan.schedule) or is_stream(schedule):
        return summarize_step(fxpipe.simulate(plan, schedule=schedule), plan)
    chunks = steady_micro_batches(plan.schedule, len(plan.stages), plan.chunks, plan.stage_turns)
    step = fxpipe.simulate(plan, schedule=schedule, chunks=chunks)
    run = summarize_step(step, plan)
    return replace(run, step_seconds=run.step_seconds + step.update_seconds)


def compare_schedules(plan: Plan, simulation: Simulation) -> tuple[StepSummary, ...]:
    """The step of the plan, first, and other schedules that can have the stages where they are, by time."""
    from fxpipe.planning.options.stage_placement import COMPARED_SCHEDULES

    own, others = summarize_step(simulation, plan), list[StepSummary]()
    if len(plan.workers) == 1:  # one after the other, whatever the schedule
        return (own,)
    for name in COMPARED_SCHEDULES:
        if name == own.schedule:
            continue
        with contextlib.suppress(ArgumentError, ScheduleError):  # it wants its stages elsewhere
            others.append(summarize_schedule(plan, name))
    return (own, *sorted(others, key=lambda run: run.step_seconds))


# The text of a simulated step: what each device does and holds, and how the same stages fare in other schedules.

LEAST_UPDATE_SHARE = 1e-3  # of a step, for the optimizer to be told
MAX_DEVICE_ROWS = 16  # rows; of more, those that come closest to their limits

DEVICE_HEADERS = (
    "device", "", "bubble", "peak memory", "parameters", "gradients", "optimizer", "activations", "portals",
    "working",
)  # fmt: skip
SUMMARY_HEADERS = ("schedule", "step", "change", "bubble", "peak memory", "on device", "fits")


def step_text(simulation: Simulation, plan: Plan) -> str:
    """The step, what it depends on, where it takes most memory."""
    run = summarize_step(simulation, plan)
    samples = simulation.samples
    rate = f", {three_digits(samples / run.step_seconds)} samples a second" if samples and run.step_seconds else ""
    shares = sorted(simulation.critical_shares.items(), key=lambda item: -item[1])
    path = ", ".join(f"{percent(share)} {_path_word(kind)}" for kind, share in shares)
    is_worth_telling = simulation.update_seconds > LEAST_UPDATE_SHARE * run.step_seconds
    of = f"{run.schedule}, {count_text(run.micro_batches, 'micro-batch', 'es')}"
    lines = [
        f"a step as simulated, {of}" if simulation.steady is None else f"a mini-batch of a stream as simulated, {of}",
        f"- takes {human_seconds(run.step_seconds)}{rate}; devices idle for {percent(run.bubble)} of it",
        *_stream_lines(simulation),
        f"- critical path: {path}" if path else "",
        f"- {simulation.host_note}" if simulation.host_note else "",
        f"- takes most memory on device {run.device}: {_memory_text(run)}",
        f"- then the optimizer takes {human_seconds(simulation.update_seconds)}" if is_worth_telling else "",
        *_cluster_lines(simulation),
    ]
    return "\n".join(map(wrap_text, filter(None, lines)))


def _stream_lines(simulation: Simulation) -> list[str]:
    """Says how a stream begins and ends."""
    steady = simulation.steady
    if steady is None:
        return []
    return [
        "- that is with its update, in the steady state; the stream begins with "
        f"{human_seconds(steady.warm_up)} until all devices are at work, and ends with {human_seconds(steady.drain)}"
    ]


def _cluster_lines(simulation: Simulation) -> list[str]:
    """Says what crosses nodes, and what reductions take, where there are several nodes or replicas."""
    cluster, traffic = simulation.cluster, simulation.traffic
    has_replicas = cluster is not None and (cluster.data > 1 or bool(cluster.replicas))
    if cluster is None or traffic is None or (cluster.nodes == 1 and not has_replicas):
        return []
    within, between = traffic
    values = f"- stages of all replicas send {human_bytes(within.pipeline)} within nodes"
    lines = [f"- runs on {cluster}", f"{values}, {human_bytes(between.pipeline)} between nodes"]
    if simulation.steady is not None and simulation.schedule.replicas:
        lines.append(
            "- reduces gradients of replicas with their updates, for each mini-batch "
            f"{human_bytes(within.reduction)} within nodes, {human_bytes(between.reduction)} between nodes"
        )
    elif has_replicas:
        lines.append(
            f"- reduces gradients in {human_seconds(simulation.reduction_seconds)} on the busiest device, "
            f"{human_seconds(simulation.exposed_reduction_seconds)} of it after the last action: "
            f"{human_bytes(within.reduction)} within nodes, {human_bytes(between.reduction)} between nodes"
        )
    return lines


MAX_PACKET_ROWS = 16  # of more, those that relay the most
PACKET_HEADERS = ("stages", "values", "of it\nrelayed", "on the way", "gradients", "of it\nrelayed", "on the way")


def packets_table(plan: Plan) -> str:
    """Formats what stages hand each other over processes, for one micro-batch; nothing in one process."""
    if not (plan.is_over_processes and plan.packets):
        return ""
    here = plan.here
    by_cut = {(one.source, one.target): one for one in plan.packets}
    cuts = [one for one in plan.packets if not one.is_gradient]
    rest = ""
    if len(cuts) > MAX_PACKET_ROWS:
        largest = sorted(cuts, key=lambda one: -one.relayed.at(here))[:MAX_PACKET_ROWS]
        rest = f"\nand {len(cuts) - MAX_PACKET_ROWS} boundaries that relay less"
        cuts = sorted(largest, key=lambda one: one.source)
    rows = []
    for one in cuts:
        cells = [f"{one.source} | {one.target}"]
        for way in (one, by_cut[one.target, one.source]):
            relayed = way.relayed.at(here)
            cells += [human_bytes(way.bytes), human_bytes(relayed) if relayed else EMPTY_CELL]
            cells.append(human_seconds(way.seconds))
        rows.append(tuple(cells))
    handling = human_seconds(2 * cuts[0].handling)
    head = f"between processes, for one micro-batch; to pack and to unpack a packet takes {handling} more"
    return f"{head}\n\n{text_table(rows, PACKET_HEADERS)}{rest}"


def summaries_text(runs: Sequence[StepSummary]) -> str:
    """The same stages in other schedules; the first is the plan's."""
    rows = [
        (
            run.schedule,
            human_seconds(run.step_seconds),
            EMPTY_CELL if run is runs[0] else _change_text(run.step_seconds, runs[0].step_seconds),
            percent(run.bubble),
            human_bytes(run.peak_bytes),
            str(run.device),
            fits_cell(run.limit_bytes, run.over_bytes),
        )
        for run in runs
    ]
    head = f"these stages in other schedules, {count_text(runs[0].micro_batches, 'micro-batch', 'es')}"
    if counts := {run.micro_batches for run in runs[1:]} - {runs[0].micro_batches}:
        head += f"; beside the stream steps with their updates, {count_text(max(counts), 'micro-batch', 'es')}"
    return f"{head}\n\n{text_table(rows, SUMMARY_HEADERS, left=('schedule',))}"


def fits_cell(limit: int | None, over: float) -> str:
    """`yes`, or by how much it does not; nothing where no limit is known."""
    if over:
        return f"over by {human_bytes(over)}"
    return EMPTY_CELL if limit is None else "yes"


def _path_word(kind: str) -> str:
    """`forward` of "F"; "sending" and "waiting" are words already."""
    return ActionKind(kind).words if len(kind) == 1 else kind


def _change_text(seconds: float, first: float) -> str:
    return f"{100 * (seconds / first - 1):+.1f} %" if first else EMPTY_CELL


def _memory_text(run: StepSummary) -> str:
    if run.limit_bytes is None:
        return f"{human_bytes(run.peak_bytes)} (no limit known)"
    over = f", over by {human_bytes(run.over_bytes)}" if run.over_bytes else ""
    return bytes_of_limit(run.peak_bytes, run.limit_bytes) + over


def device_table(simulation: Simulation) -> str:
    """Formats a table of devices: the bubble of each, and its memory at its peak, by what it is for."""
    limits, memory, bubbles, names = simulation.limits, simulation.memory, simulation.bubble, simulation.devices
    shown, rest = list(range(len(names))), ""
    if len(names) > MAX_DEVICE_ROWS:
        by_peak = sorted(shown, key=lambda d: -memory[d].peak / (limits[d] or 1))
        shown, rest = sorted(by_peak[:MAX_DEVICE_ROWS]), f"\nand {len(names) - MAX_DEVICE_ROWS} devices that hold less"
    rows = []
    for d in shown:
        parts, limit = memory[d].at_peak, limits[d]
        sizes = (parts.parameters, parts.gradients, parts.optimizer, parts.activations, parts.portals, parts.working)
        peak = human_bytes(parts.total) if limit is None else bytes_of_limit(parts.total, limit)
        cells = (human_bytes(size) if size else EMPTY_CELL for size in sizes)
        rows.append((str(d), names[d], percent(bubbles[d]), peak, *cells))
    return text_table(rows, DEVICE_HEADERS, left=("",)) + rest
