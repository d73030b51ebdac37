"""A simulated step as a summary, as text and in tables, compared with the same stages in other schedules."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import fxpipe
from fxpipe.errors import FxpipeError, MemoryLimitError
from fxpipe.inspect.cli_options import as_options
from fxpipe.inspect.table import Cell, Column, Table, bytes_column, device_table, number_column, text_column
from fxpipe.planning.options.parse import COMPARED_SCHEDULES
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.data import PlannedTransfer
from fxpipe.planning.plans.retarget import resize_plan
from fxpipe.planning.tuning.candidates import Tuning
from fxpipe.scheduling import SCHEDULES
from fxpipe.scheduling.actions import ActionKind
from fxpipe.scheduling.streams import is_stream, steady_micro_batches
from fxpipe.simulation import Simulation
from fxpipe.simulation.timeline import timeline_lines
from fxpipe.utils.text_table import bytes_of_limit, text_width, wrap_text
from fxpipe.utils.units import count_text, human_bytes, human_seconds, percent, three_digits


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The summary of a step or of a mini-batch of a stream, with the memory of the device closest to its limit."""

    schedule: str  # a name
    micro_batches: int
    checkpoint: str
    step_seconds: float
    bubble: float  # idle share of the device time, 0 to 1
    device: int
    peak_bytes: int
    limit_bytes: int | None  # None: not known

    @property
    def over_bytes(self) -> int:
        """The bytes over the limit; 0 if it fits."""
        return 0 if self.limit_bytes is None else max(0, self.peak_bytes - self.limit_bytes)


def summarize_step(simulation: Simulation, plan: Plan) -> StepSummary:
    fit = simulation.fits
    device = fit.fullest[0]
    limit = fit.limits[device]
    return StepSummary(
        schedule=simulation.schedule.name,
        micro_batches=simulation.micro_batches,
        checkpoint=plan.modes[0] if len({*plan.modes}) == 1 else "some",
        step_seconds=simulation.step_seconds,
        bubble=simulation.mean_bubble,
        device=device,
        peak_bytes=round(fit.needs[device]),
        limit_bytes=None if limit is None else round(limit),
    )


# Least speed-up for each device after the first. Estimates are no more exact, and replicas gain nearly 1.
LEAST_GAIN = 0.1


def one_device_text(tuning: Tuning) -> str:
    """Compares the chosen step with one device that runs the model; empty if there are replicas or only one device."""
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step of the model in a schedule on some devices, or the reason why there is none."""

    schedule: str  # a name
    devices: int
    run: StepSummary | None = None  # None: no such step
    plan: Plan | None = None
    speedup: float | None = None  # over one device; None: not known
    lacks: float = 0.0  # if no plan fits: bytes by which the nearest one exceeds the limit
    problem: str = ""  # why there is no step, if memory is not the reason

    @property
    def over_bytes(self) -> float:
        """The bytes over the limit, of the device or stage furthest over it; 0 if it fits."""
        return self.lacks if self.run is None else self.run.over_bytes

    @property
    def fits(self) -> bool:
        return self.run is not None and not self.over_bytes


def schedule_outcomes(plan: Plan) -> tuple[Outcome, ...]:
    """Returns the plan's schedule, then other schedules by time, then schedules that its stages do not allow."""
    outcomes = []
    for name in dict.fromkeys([plan.schedule, *COMPARED_SCHEDULES]):
        short_name = name.partition(":")[0]  # without a user's table
        try:
            if is_stream(plan.schedule) and not is_stream(name):
                # The step includes its updates, and has the micro-batches that the stream has in flight.
                chunks = steady_micro_batches(plan.schedule, len(plan.stages), plan.chunks, plan.stage_turns)
                step = fxpipe.simulate(plan, schedule=name, chunks=chunks)
                run = summarize_step(step, plan)
                run = replace(run, step_seconds=run.step_seconds + step.update_seconds)
            else:
                run = summarize_step(fxpipe.simulate(plan, schedule=name), plan)
            outcomes.append(Outcome(short_name, len(plan.row_devices), run, plan))
        except FxpipeError as error:
            recipe, problem = SCHEDULES.get(name), str(error)
            if recipe is not None and recipe.has_fixed_placement:
                problem = f"needs a plan with stages_per_device={recipe.stages_per_device}"
            outcomes.append(Outcome(short_name, len(plan.row_devices), problem=problem))
    own, *others = outcomes
    return (own, *sorted(others, key=lambda one: math.inf if one.run is None else one.run.step_seconds))


def compare_schedules(plan: Plan) -> tuple[StepSummary, ...]:
    """Returns the plan's step, then other schedules that allow its placement, by time; on one device all are equal."""
    outcomes = schedule_outcomes(plan)[: 1 if len(plan.workers) == 1 else None]
    return tuple(one.run for one in outcomes if one.run is not None)


def run_columns(rows: Sequence[Outcome]) -> tuple[Column[Outcome], Column[Outcome], Column[Outcome], Column[Outcome]]:
    """Returns the columns step, bubble, peak memory and fits; the shortest step that fits is marked."""
    least = min((row.run.step_seconds for row in rows if row.run is not None and not row.over_bytes), default=None)

    def step(row: Outcome) -> Cell | None:
        if row.run is None:
            return None
        seconds = row.run.step_seconds
        return Cell(human_seconds(seconds), seconds, is_marked=not row.over_bytes and seconds == least)

    def fits(row: Outcome) -> Cell | None:
        if row.over_bytes:
            return Cell(f"over by {human_bytes(row.over_bytes)}", row.over_bytes)
        return None if row.run is None or row.run.limit_bytes is None else Cell("yes", 0)

    return (
        Column("step", step),
        number_column("bubble", lambda row: None if row.run is None else row.run.bubble, percent),
        bytes_column("peak memory", lambda row: None if row.run is None else row.run.peak_bytes),
        Column("fits", fits),
    )


def schedules_table(outcomes: Sequence[Outcome]) -> Table[Outcome]:
    """Returns a table of the same stages in several schedules, the plan's first."""
    first = outcomes[0].run

    def change(row: Outcome) -> Cell | None:
        if row.run is None or first is None or row is outcomes[0] or not first.step_seconds:
            return None
        share = row.run.step_seconds / first.step_seconds - 1
        return Cell(f"{100 * share:+.1f} %", share)

    step, bubble, peak, fits = run_columns(outcomes)
    columns: list[Column[Outcome]] = [
        text_column("schedule", lambda row: row.schedule),
        step,
        Column("change", change),
        bubble,
        peak,
        number_column("on device", lambda row: None if row.run is None else row.run.device),
        fits,
    ]
    if any(one.problem for one in outcomes):
        columns.append(Column("why not", lambda row: Cell(row.problem, is_prose=True)))
    return Table(columns, outcomes)


def summaries_text(runs: Sequence[StepSummary]) -> str:
    head = f"these stages in other schedules, {count_text(runs[0].micro_batches, 'micro-batch', 'es')}"
    if counts := {run.micro_batches for run in runs[1:]} - {runs[0].micro_batches}:
        head += f"; beside the stream steps with their updates, {count_text(max(counts), 'micro-batch', 'es')}"
    return f"{head}\n\n{schedules_table([Outcome(run.schedule, 0, run) for run in runs])}"


NARROWEST_COLUMNS = 20  # least columns of time; a narrower window breaks the lines


def timeline_text(simulation: Simulation) -> str:
    """Formats a line for each device, as wide as the window: its actions over time, and its busy time."""
    digits = len(str(len(simulation.devices) - 1))
    busy, bubbles = [*map(human_seconds, simulation.busy)], [*map(percent, simulation.bubble)]
    longest, width = (max(map(len, texts)) for texts in (busy, bubbles))
    room = text_width() - len("device  || busy , bubble ") - digits - longest - width
    columns = max(NARROWEST_COLUMNS, room)
    lines = timeline_lines(simulation.spans, len(simulation.devices), simulation.seconds, columns=columns)
    return "\n".join(
        f"device {d:>{digits}} |{line}| busy {busy[d]:>{longest}}, bubble {bubbles[d]:>{width}}"
        for d, line in enumerate(lines)
    )


MAX_DEVICE_ROWS = 16  # shows the devices closest to their limits


def device_text(simulation: Simulation) -> str:
    """Formats the table of devices; of many devices, the devices closest to their limits."""
    table, rest = device_table(simulation, "busy"), ""
    if len(table.rows) > MAX_DEVICE_ROWS:
        rest = f"\nand {len(table.rows) - MAX_DEVICE_ROWS} devices that hold less"
        fullest = simulation.fits.fullest[:MAX_DEVICE_ROWS]
        table = replace(table, rows=[row for row in table.rows if row.index in fullest])
    return f"{table}{rest}"


def packets_text(plan: Plan) -> str:
    """Formats the packets between processes for one micro-batch, by stage boundary; empty in one process."""
    if not (plan.is_over_processes and plan.packets):
        return ""

    def columns(index: int) -> tuple[Column[tuple[PlannedTransfer, PlannedTransfer]], ...]:
        return (
            bytes_column("gradients" if index else "values", lambda row: row[index].bytes),
            bytes_column("of it\nrelayed", lambda row: row[index].relayed.at(plan.here) or None),
            number_column("on the way", lambda row: row[index].seconds, human_seconds),
        )

    by_cut = {(one.source, one.target): one for one in plan.packets}
    rows = [(one, by_cut[one.target, one.source]) for one in plan.packets if not one.is_gradient]
    cut: Column[Any] = text_column("stages", lambda row: f"{row[0].source} | {row[0].target}", is_left=False)
    handling = human_seconds(2 * rows[0][0].handling)
    head = f"between processes, for one micro-batch; to pack and to unpack a packet takes {handling} more"
    return f"{head}\n\n{Table((cut, *columns(0), *columns(1)), rows)}"


LEAST_UPDATE_SHARE = 1e-3  # share of a step from which the optimizer is shown


def step_text(simulation: Simulation, plan: Plan) -> str:
    """Formats the step and its critical path. The text of a plan has the memory, and what the host limits."""
    run = summarize_step(simulation, plan)
    samples, steady, update = simulation.samples, simulation.steady, simulation.update_seconds
    rate = f", {three_digits(samples / run.step_seconds)} samples a second" if samples and run.step_seconds else ""
    head = "a step as simulated" if steady is None else "a mini-batch of a stream as simulated"
    lines = [
        f"{head}, {run.schedule}, {count_text(run.micro_batches, 'micro-batch', 'es')}",
        f"- takes {human_seconds(run.step_seconds)}{rate}; devices idle for {percent(run.bubble)} of it",
    ]
    if steady is not None:
        lines.append(
            f"- that is with its update, in the steady state; the stream begins with {human_seconds(steady.warm_up)} "
            f"until all devices are at work, and ends with {human_seconds(steady.drain)}"
        )
    if path := critical_path_text(simulation):
        lines.append(f"- critical path: {path}")
    if update > LEAST_UPDATE_SHARE * run.step_seconds:
        lines.append(f"- then the optimizer takes {human_seconds(update)}")
    cluster, traffic = simulation.cluster, simulation.traffic
    has_replicas = cluster is not None and (cluster.data > 1 or bool(cluster.replicas))
    if cluster is not None and traffic is not None and (cluster.nodes > 1 or has_replicas):
        within, between = traffic
        sent, reduced = (
            f"{human_bytes(inside)} within nodes, {human_bytes(outside)} between nodes"
            for inside, outside in ((within.pipeline, between.pipeline), (within.reduction, between.reduction))
        )
        lines += [f"- runs on {cluster}", f"- stages of all replicas send {sent}"]
        if steady is not None and simulation.schedule.replicas:
            lines.append(f"- reduces gradients of replicas with their updates, for each mini-batch {reduced}")
        elif has_replicas:
            lines.append(
                f"- reduces gradients in {human_seconds(simulation.reduction_seconds)} on the busiest device, "
                f"{human_seconds(simulation.exposed_reduction_seconds)} of it after the last action: {reduced}"
            )
    return "\n".join(map(wrap_text, lines))


def critical_path_text(simulation: Simulation) -> str:
    """Formats the shares of the critical path, largest first: `60.0 % backward, 30.0 % forward, 10.0 % sending`."""
    shares = simulation.critical_shares.items()
    return ", ".join(f"{percent(share)} {ActionKind(k).words if len(k) == 1 else k}" for k, share in shares)


USUAL_DEVICES = 8  # devices that a sweep reaches if fewer were requested


def sweep_devices(
    counts: Sequence[int], schedules: Sequence[str], plan_for: Callable[[int, str], Plan]
) -> list[Outcome]:
    """Returns a row for each number of devices and schedule; for one device, where schedules are equal, one row."""
    # `schedules`: the user's first. `plan_for`: of a number of devices and a schedule; may raise a `FxpipeError`.
    rows: list[Outcome] = []
    for count in counts:
        for schedule in schedules[:1] if count == 1 else schedules:
            try:
                rows.append(outcome_of(count, schedule, plan_for(count, schedule)))
            except MemoryLimitError as error:
                problem = "" if error.over else error.brief
                rows.append(Outcome(schedule, count, lacks=error.over, problem=problem))
            except FxpipeError as error:
                rows.append(Outcome(schedule, count, problem=" ".join(str(error).split())))
    alone = next((row.run for row in rows if row.devices == 1), None)
    if alone is None:
        return rows
    return [replace(row, speedup=alone.step_seconds / row.run.step_seconds) if row.run else row for row in rows]


def outcome_of(count: int, schedule: str, plan: Plan) -> Outcome:
    return Outcome(schedule, count, summarize_step(fxpipe.simulate(plan, schedule=schedule), plan), plan)


def sweep_table(rows: Sequence[Outcome]) -> Table[Outcome]:
    """Returns a table with a row for each number of devices and schedule; `*` marks the fastest that fits."""
    fitting = [row for row in rows if row.run is not None and row.fits]
    best = {row.devices: row for row in sorted(fitting, key=lambda row: -row.run.step_seconds if row.run else 0.0)}
    firsts = {row.devices: row for row in reversed(rows)}

    def number(row: Outcome) -> Cell:
        return Cell(str(row.devices) if firsts[row.devices] is row else "", row.devices)

    step, bubble, peak, fits = run_columns(rows)
    columns: list[Column[Outcome]] = [
        Column("devices", number),
        text_column("schedule", lambda row: f"{row.schedule} *" if best.get(row.devices) is row else row.schedule),
        number_column("micro-\nbatches", lambda row: None if row.run is None else row.run.micro_batches),
        text_column("checkpoint", lambda row: None if row.run is None else row.run.checkpoint),
        step,
        number_column("speed-up", lambda row: row.speedup, "{:.2f}".format),
        bubble,
        peak,
        fits,
    ]
    return Table(columns, rows, keys=2)


def sweep_text(rows: Sequence[Outcome]) -> str:
    head = "numbers of devices and schedules, as simulated; each row has its own cut"
    legend = "* the fastest that fits" if any(row.fits for row in rows) else "nothing fits"
    cores, plans = os.cpu_count() or 1, [row.plan for row in rows if row.plan is not None]
    are_here = [plan for plan in plans if not plan.estimated_for and {*plan.workers} == {"cpu"}]
    if any(len(plan.workers) > cores for plan in are_here):  # measurements assume one core for each device
        have = "is" if cores == 1 else "are"
        legend += f"\nCPU devices are simulated as if each had a core; there {have} {cores} here"
    schedules: dict[tuple[int, str], list[str]] = {}  # a line for each number of devices and reason
    for row in rows:
        if row.problem:
            schedules.setdefault((row.devices, row.problem), []).append(row.schedule)
    notes = [
        wrap_text(f"- {count_text(n, 'device')}, {', '.join(names)}: {as_options(problem)}")
        for (n, problem), names in schedules.items()
    ]
    problems = ["\n".join(["no plan for", *notes])] if notes else []
    return "\n\n".join([wrap_text(head), str(sweep_table(rows)), legend, *problems])
