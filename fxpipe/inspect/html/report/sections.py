"""What a report says of a plan, part by part: functions from plan to markup, empty where there is nothing to say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fxpipe.drawing.columns import shortened_line
from fxpipe.drawing.markup import (
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
from fxpipe.drawing.svg import escaped, svg_of
from fxpipe.inspect.html.report.variants import Scheduled
from fxpipe.inspect.lanes.frame import seconds_of
from fxpipe.inspect.lanes.layout import lanes
from fxpipe.inspect.tables.comparing import Run, run_of
from fxpipe.units import counted, human_bytes, human_seconds, three_digits

if TYPE_CHECKING:
    import sympy

    from fxpipe.plans import Plan, StagePlan
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
        "memory", "sends", *(["portals in", "portals out"] if plan.portals else ()),
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
        Cell(three_digits(flops), flops),
        text(plan.modes[j]),
        number(plan.in_flight(j)),
        size(float(memory.subs({symbol: plan.micro_batch for symbol in memory.free_symbols})), limit),
        size(stage.sent_bytes) if stage.sent_bytes else missing(),
        *([_portals(plan, target=j), _portals(plan, source=j)] if plan.portals else ()),
    )


def _portals(plan: Plan, source: int | None = None, target: int | None = None) -> Cell:
    """Those from a stage, or to a stage."""
    found = [portal for portal in plan.portals if portal.source == source or portal.target == target]
    return size(sum(portal.bytes for portal in found), f"in {len(found)}") if found else missing()


def graph(plan: Plan) -> str:
    return f'<figure class="wide" tabindex="0">\n{svg_of(lanes(plan))}</figure>'


def portals(plan: Plan) -> str:
    if not plan.portals:
        return ""
    rows = tuple(
        (
            code(p.name),
            number(p.source),
            number(p.target),
            size(p.bytes),
            code(str(p.size)) if p.size.coefficients else missing(),
            _line(p.line),
        )
        for p in plan.portals
    )
    total = human_bytes(sum(portal.bytes for portal in plan.portals))
    found = Table(("portal", "from", "to", "bytes", "bytes, for b samples", "made at"), rows)
    many = counted(len(plan.portals), "value")
    return aside(f"{many} skip stages: {total} of each micro-batch go straight to where they are used.") + sortable(
        found, "portals"
    )


def _line(line: str) -> Cell:
    """Where in the user's code; others, who have other folders, read this, too."""
    return code(shortened_line(line)) if line else missing()


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
        at = f" ({shortened_line(heaviest.line)})" if heaviest.line else ""
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


OUTCOME = ("step", "bubble", "peak memory")


def outcome(run: Run, least: float) -> tuple[Cell, Cell, Cell]:
    """For `OUTCOME`; the least step of those that fit is marked."""
    fits = not run.over_bytes
    return (
        Cell(human_seconds(run.step_seconds), run.step_seconds, is_marked=fits and run.step_seconds == least),
        percent(run.bubble),
        size(run.peak_bytes, "" if fits else "does not fit"),
    )


def least_step(runs: Iterable[Run]) -> float:
    """Of those that fit."""
    return min((run.step_seconds for run in runs if not run.over_bytes), default=0.0)


def schedules(plan: Plan, compared: Sequence[Scheduled]) -> str:
    own = plan.schedule.partition(":")[0]
    runs = [None if found.simulation is None else run_of(found.simulation, plan) for found in compared]
    least = least_step(filter(None, runs))
    rows = []
    for found, run in zip(compared, runs, strict=True):
        name = Cell(found.schedule, note="the plan's" if found.schedule == own else "", is_code=True)
        cells = (missing(),) * 3 if run is None else outcome(run, least)
        rows.append((name, *cells, Cell(found.why, is_prose=True)))
    return sortable(Table(("schedule", *OUTCOME, "why not"), tuple(rows)), "schedules")


def sweep(plans: Sequence[tuple[Plan, Simulation]]) -> str:
    if not plans:
        return ""
    runs = [run_of(simulation, plan) for plan, simulation in plans]
    least, first = least_step(runs), runs[0].step_seconds
    rows = []
    for (plan, _), run in zip(plans, runs, strict=True):
        times = first / run.step_seconds if run.step_seconds else 1.0
        schedule = code(plan.schedule.partition(":")[0])
        numbers = number(len(plan.workers)), number(len(plan.stages)), schedule
        rows.append((*numbers, *outcome(run, least), Cell(f"{times:.2f}", times)))
    headers = ("devices", "stages", "schedule", *OUTCOME, "times as fast as the first")
    return sortable(Table(headers, tuple(rows)), "numbers of devices")


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
    rows = tuple((code(found.name), Cell(found.why, is_prose=True), _line(found.line)) for found in plan.whole)
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
