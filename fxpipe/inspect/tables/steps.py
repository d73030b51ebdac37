"""The text of a simulated step: what each device does and holds, and how the same stages fare in other schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpipe.drawing.columns import NOTHING, of_limit, table
from fxpipe.inspect.tables.comparing import Run, run_of
from fxpipe.scheduling.actions import Kind
from fxpipe.units import counted, human_bytes, human_seconds, percent, three_digits

if TYPE_CHECKING:
    from fxpipe.plans import Plan
    from fxpipe.simulation import Simulation

LEAST_SHARE = 1e-3  # of a step, for the optimizer to be told
MOST_DEVICES = 16  # rows; of more, those that come closest to their limits

DEVICE_HEADERS = (
    "device", "", "bubble", "peak memory", "parameters", "gradients", "optimizer", "activations", "portals",
    "working",
)  # fmt: skip
RUN_HEADERS = ("schedule", "step", "change", "bubble", "peak memory", "on device", "fits")


def step_text(simulation: Simulation, plan: Plan) -> str:
    """The step, what it hangs on, where it takes most memory."""
    run = run_of(simulation, plan)
    samples = simulation.samples
    rate = f", {three_digits(samples / run.step_seconds)} samples a second" if samples and run.step_seconds else ""
    shares = sorted(simulation.critical_shares.items(), key=lambda item: -item[1])
    path = ", ".join(f"{percent(share)} {_spent_on(kind)}" for kind, share in shares)
    is_worth_telling = simulation.update_seconds > LEAST_SHARE * run.step_seconds
    lines = [
        f"a step as simulated, {run.schedule}, {counted(run.micro_batches, 'micro-batch', 'es')}",
        f"- takes {human_seconds(run.step_seconds)}{rate}; devices idle for {percent(run.bubble)} of it",
        f"- critical path: {path}" if path else "",
        f"- takes most memory on device {run.device}: {_memory(run)}",
        f"- then the optimizer takes {human_seconds(simulation.update_seconds)}" if is_worth_telling else "",
    ]
    return "\n".join(filter(None, lines))


def runs_text(runs: Sequence[Run]) -> str:
    """The same stages in other schedules; the first is the plan's."""
    rows = [
        (
            run.schedule,
            human_seconds(run.step_seconds),
            NOTHING if run is runs[0] else _against(run.step_seconds, runs[0].step_seconds),
            percent(run.bubble),
            human_bytes(run.peak_bytes),
            str(run.device),
            fits_cell(run.limit_bytes, run.over_bytes),
        )
        for run in runs
    ]
    head = f"these stages in other schedules, {counted(runs[0].micro_batches, 'micro-batch', 'es')}"
    return f"{head}\n\n{table(rows, RUN_HEADERS, left=('schedule',))}"


def fits_cell(limit: int | None, over: float) -> str:
    """`yes`, or by how much it does not; nothing where no limit is known."""
    if over:
        return f"over by {human_bytes(over)}"
    return NOTHING if limit is None else "yes"


def _spent_on(kind: str) -> str:
    """`forward` of "F"; "sending" and "waiting" are words already."""
    return Kind(kind).words if len(kind) == 1 else kind


def _against(seconds: float, first: float) -> str:
    return f"{100 * (seconds / first - 1):+.1f} %" if first else NOTHING


def _memory(run: Run) -> str:
    if run.limit_bytes is None:
        return f"{human_bytes(run.peak_bytes)} (no limit known)"
    over = f", over by {human_bytes(run.over_bytes)}" if run.over_bytes else ""
    return of_limit(run.peak_bytes, run.limit_bytes) + over


def device_table(simulation: Simulation) -> str:
    """How much each device idles, and its memory at its peak, by what it is for."""
    limits, memory, bubbles, names = simulation.limits, simulation.memory, simulation.bubble, simulation.devices
    shown, rest = list(range(len(names))), ""
    if len(names) > MOST_DEVICES:
        by_peak = sorted(shown, key=lambda d: -memory[d].peak / (limits[d] or 1))
        shown, rest = sorted(by_peak[:MOST_DEVICES]), f"\nand {len(names) - MOST_DEVICES} devices that hold less"
    rows = []
    for d in shown:
        parts, limit = memory[d].at_peak, limits[d]
        sizes = (parts.parameters, parts.gradients, parts.optimizer, parts.activations, parts.portals, parts.working)
        peak = human_bytes(parts.total) if limit is None else of_limit(parts.total, limit)
        cells = (human_bytes(size) if size else NOTHING for size in sizes)
        rows.append((str(d), names[d], percent(bubbles[d]), peak, *cells))
    return table(rows, DEVICE_HEADERS, left=("",)) + rest
