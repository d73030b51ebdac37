"""What a report says of a plan, part by part: functions from plan to markup, empty where there is nothing to say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpipe.inspect.lane_frame import seconds_of
from fxpipe.inspect.lanes import lanes
from fxpipe.inspect.markup import (
    Cell,
    Table,
    code,
    list_of,
    missing,
    number,
    percent,
    seconds,
    size,
    table_of,
    text,
)
from fxpipe.inspect.report.variants import Scheduled
from fxpipe.inspect.svg import escaped, svg_of
from fxpipe.units import counted, human_bytes, human_seconds

if TYPE_CHECKING:
    import sympy

    from fxpipe.plans import Plan, Portal, StagePlan
    from fxpipe.simulation import Simulation

MANY_ROWS = 24  # from here on a table scrolls by itself


def section(name: str, title: str, body: str) -> str:
    """With an anchor of that name; nothing where there is no body."""
    return f'<section id="{name}">\n<h2>{escaped(title)}</h2>\n{body}\n</section>' if body else ""


def sortable(found: Table, label: str) -> str:
    """A table that scrolls where it is too wide or too long."""
    which = "wide long" if len(found.rows) > MANY_ROWS else "wide"
    table = table_of(found, ' class="sortable"')
    return f'<div class="{which}" role="region" aria-label="{escaped(label)}" tabindex="0">\n{table}\n</div>'


def aside(line: str) -> str:
    return f'<p class="aside">{escaped(line)}</p>'


def stages(plan: Plan) -> str:
    slowest = max(seconds_of(stage) for stage in plan.stages)
    headers = (
        "stage", "device", "nodes", "parameters", "forward", "backward", "both", "GFLOP", "checkpoint", "in flight",
        "memory", "sends", "portals in", "portals out",
    )  # fmt: skip
    memory = [plan.memory(stage.index) for stage in plan.stages]
    rows = tuple(_stage(plan, stage, memory[stage.index], slowest) for stage in plan.stages)
    table = table_of(Table(("stage", "bytes"), tuple((number(j), code(str(memory[j]))) for j in range(len(memory)))))
    return (
        sortable(Table(headers, rows), "stages")
        + aside("Seconds and bytes are those of one micro-batch; memory is what a stage holds at most in a step.")
        + "\n<details>\n<summary>Memory as formulas, with micro-batches of b samples</summary>\n"
        + f'<div class="wide" tabindex="0">\n{table}\n</div>\n</details>'
    )


def _stage(plan: Plan, stage: StagePlan, memory: sympy.Expr, slowest: float) -> tuple[Cell, ...]:
    j, both = stage.index, seconds_of(stage)
    worker, flops = plan.placement[j], float(plan.flops(j, plan.micro_batch)) / 1e9
    limit = "" if stage.memory_limit is None else f"of {human_bytes(stage.memory_limit)}"
    return (
        number(j),
        Cell(f"{worker}: {stage.device}", worker),
        number(len(stage.nodes), f"+ {len(stage.copies)} again" if stage.copies else ""),
        size(stage.parameter_bytes),
        seconds(stage.forward_seconds),
        seconds(stage.backward_seconds),
        Cell(human_seconds(both), both, is_marked=both == slowest),
        Cell(f"{flops:.3g}", flops),
        text(plan.modes[j]),
        number(plan.in_flight(j)),
        size(float(memory.subs({symbol: plan.micro_batch for symbol in memory.free_symbols})), limit),
        size(stage.sent_bytes) if stage.sent_bytes else missing(),
        _portals([portal for portal in plan.portals if portal.target == j]),
        _portals([portal for portal in plan.portals if portal.source == j]),
    )


def _portals(found: Sequence[Portal]) -> Cell:
    return size(sum(portal.bytes for portal in found), f"in {len(found)}") if found else missing()


def graph(plan: Plan) -> str:
    return f'<figure class="wide" tabindex="0">\n{svg_of(lanes(plan))}</figure>'


def portals(plan: Plan) -> str:
    if not plan.portals:
        return ""
    rows = tuple(
        (code(p.name), number(p.source), number(p.target), size(p.bytes), code(str(p.size)), code(p.line))
        for p in plan.portals
    )
    total = human_bytes(sum(portal.bytes for portal in plan.portals))
    found = Table(("portal", "from", "to", "bytes", "bytes, for b samples", "made at"), rows)
    many = counted(len(plan.portals), "value")
    return aside(f"{many} skip stages: {total} of each micro-batch go straight to where they are used.") + sortable(
        found, "portals"
    )


def balance(plan: Plan) -> str:
    both = [seconds_of(stage) for stage in plan.stages]
    slowest = max(range(len(both)), key=both.__getitem__)
    mean = sum(both) / len(both)
    said = [
        f"Stage {slowest} is the slowest: {human_seconds(both[slowest])} for each micro-batch, "
        f"{both[slowest] / mean if mean else 1.0:.2f} times the mean stage."
    ]
    if plan.heaviest is not None:
        heaviest = plan.heaviest
        at = f" ({heaviest.line})" if heaviest.line else ""
        said.append(
            f"The heaviest node is {heaviest.name}{at}: {human_seconds(heaviest.seconds)}, in stage {heaviest.stage}. "
            "However the graph is cut, no slowest stage is shorter than that."
        )
    said += [
        f"Cut by {found.balance}, the slowest stage takes {human_seconds(found.seconds)}"
        + ("." if found.fits else ", which does not fit into memory.")
        for found in plan.bottlenecks
    ]
    return list_of(said)


def schedules(plan: Plan, compared: Sequence[Scheduled]) -> str:
    own = plan.schedule.partition(":")[0]
    best = min((found.simulation.step_seconds for found in compared if found.simulation is not None), default=0.0)
    rows = []
    for found in compared:
        name = Cell(found.schedule, note="the plan's" if found.schedule == own else "", is_code=True)
        if found.simulation is None:
            rows.append((name, missing(), missing(), missing(), Cell(found.why, is_prose=True)))
            continue
        step = found.simulation.step_seconds
        rows.append((name, *_step(found.simulation, is_best=step == best), text("")))
    return sortable(Table(("schedule", "step", "bubble", "most memory", "why not"), tuple(rows)), "schedules")


def sweep(plans: Sequence[tuple[Plan, Simulation]]) -> str:
    if not plans:
        return ""
    best = min(simulation.step_seconds for _, simulation in plans)
    first = plans[0][1].step_seconds
    rows = tuple(
        (
            number(len(plan.workers)),
            number(len(plan.stages)),
            *_step(simulation, is_best=simulation.step_seconds == best),
            Cell(
                f"{first / simulation.step_seconds if simulation.step_seconds else 1.0:.2f}",
                first / (simulation.step_seconds or 1.0),
            ),
        )
        for plan, simulation in plans
    )
    return sortable(
        Table(("devices", "stages", "step", "bubble", "most memory", "times as fast as the first"), rows), "devices"
    )


def _times(first: float, step: float) -> Cell:
    times = first / step if step else 1.0
    return Cell(f"{times:.2f}", times)


def _step(simulation: Simulation, is_best: bool) -> tuple[Cell, Cell, Cell]:
    """Its seconds, bubble, and most memory of a device."""
    step, peak = simulation.step_seconds, max(memory.peak for memory in simulation.memory)
    return Cell(human_seconds(step), step, is_marked=is_best), percent(simulation.mean_bubble), size(peak)


def tied(plan: Plan) -> str:
    if not plan.tied:
        return ""
    rows = tuple(
        (code(", ".join(found.names)), text(", ".join(map(str, found.stages))), size(found.bytes))
        for found in plan.tied
    )
    return sortable(Table(("parameter", "stages", "bytes"), rows), "tied parameters")


def whole(plan: Plan) -> str:
    if not plan.whole:
        return ""
    rows = tuple((code(found.name), Cell(found.why, is_prose=True), code(found.line)) for found in plan.whole)
    return sortable(Table(("module", "why", "called at"), rows), "modules kept whole")


def tracing(plan: Plan) -> str:
    said = f"<p>{escaped(f'Traced by {plan.tracer}; graph {plan.fingerprint[:12]}.')}</p>"
    if plan.why:
        said += "\n<h3>Why so</h3>\n" + list_of(plan.why)
    if plan.guards:
        said += "\n<h3>Holds where (asked once for each mini-batch)</h3>\n" + list_of(plan.guards)
    return said


def stage_code(plan: Plan) -> str:
    return "\n".join(
        f"<details>\n<summary>Stage {stage.index}"
        f"<small>{escaped(f'{stage.device}, ' + counted(len(stage.nodes), 'node'))}</small></summary>\n"
        f'<pre tabindex="0"><code>{escaped(stage.code)}</code></pre>\n</details>'
        for stage in plan.stages
    )
