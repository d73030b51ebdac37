"""A report: a plan and its steps as one HTML file, which needs no other file and no network.

A script only sorts the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import fxpipe
from fxpipe import __version__
from fxpipe.inspect import plan_text, step_summary
from fxpipe.inspect.gantt import draw_gantt
from fxpipe.inspect.stage_graph import draw_stage_graph
from fxpipe.inspect.svg import Scene, escape_markup, list_markup, svg_of
from fxpipe.inspect.table import Cell, Column, Table, bytes_column, device_table, number_column, text_column
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.figures import StageFigures, plan_figures
from fxpipe.simulation import Simulation
from fxpipe.utils.files import check_output_path, write_atomically
from fxpipe.utils.text_table import number_ranges
from fxpipe.utils.units import count_text, human_bytes, human_seconds, percent, three_digits

# A page needs no other file and no network, and its content security policy forbids them.
CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def save_report(plan: Plan, path: str | Path, *, title: str = "", sweep: Sequence[step_summary.Outcome] = ()) -> None:
    """Writes a report of the plan: one HTML page with all tables and pictures.

        save_report(plan, "report.html", title="U-Net on four devices")

    Args:
        path: ends in `.html`.
        title: page title, such as the model's name.
        sweep: steps of the same model on other numbers of devices, for comparison.

    Raises:
        ArgumentError: the path has another suffix.
        FileError: the path cannot be written.
    """
    check_output_path(path, ("html",), "a report")
    write_atomically(path, report_page(plan, title=title, sweep=sweep).encode(), "a report")


def report_page(plan: Plan, *, title: str = "", sweep: Sequence[step_summary.Outcome] = ()) -> str:
    code = (
        f"<details>\n<summary>Stage {stage.index}"
        f"<small>{escape_markup(f'{stage.device}, ' + count_text(len(stage.nodes), 'node'))}</small></summary>\n"
        f'<pre tabindex="0"><code>{escape_markup(stage.code)}</code></pre>\n</details>'
        for stage in plan.stages
    )
    sizes = plan_text.sizes_table(plan.at_sizes()).for_report("other sizes") if plan.sizes else ""
    schedules = step_summary.schedules_table(step_summary.schedule_outcomes(plan))
    devices = step_summary.sweep_table(sweep).for_report("numbers of devices") if sweep else ""
    sections = (
        ("step", "A step", step_section(plan, fxpipe.simulate(plan))),
        ("stages", "Stages", stages_section(plan)),
        ("graph", "Graph", _figure("graph", draw_stage_graph(plan))),
        ("portals", "Portals", portals_section(plan)),
        ("facts", "Balance, memory and tracing", facts_section(plan)),
        ("sizes", "Other sizes", sizes),
        ("schedules", "Schedules", schedules.for_report("schedules")),
        ("devices", "Numbers of devices", devices),
        ("code", "Code of the stages", "\n".join(code)),
    )
    heading = escape_markup(title or count_text(len(plan.stages), "stage"))
    links = "\n".join(f'<a href="#{name}">{label}</a>' for name, label, body in sections if body)
    body = "\n".join(
        f'<section id="{name}">\n<h2>{label}</h2>\n{body}\n</section>' for name, label, body in sections if body
    )
    source = f"estimates for {plan.estimated_for}" if plan.estimated_for else "measured"
    footer = f"Written by fxpipe {__version__}. Seconds of nodes are {source}; steps are simulated."
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{heading}: pipeline</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{heading}</h1>
<p class="lead">{escape_markup(f"{plan_text.plan_headline(plan)}, {plan_text.plan_choices(plan)}")}</p>
<nav aria-label="sections">
{links}
</nav>
</header>
<main>
{body}
</main>
<footer>{escape_markup(footer)}</footer>
<script>
{script}</script>
</body>
</html>
"""


def _figure(label: str, scene: Scene) -> str:
    return f'<figure class="wide" tabindex="0" aria-label="{label}">\n{svg_of(scene)}</figure>'


def _note(line: str) -> str:
    return f'<p class="aside">{escape_markup(line)}</p>'


def step_section(plan: Plan, simulation: Simulation) -> str:
    names = [f"{d}: {name}".removesuffix(": ") for d, name in enumerate(simulation.devices)]
    table = device_table(simulation)
    stages = [[str(j) for j, rows in enumerate(plan.stage_rows) if row.index in rows] for row in table.rows]
    columns = [*table.columns]
    columns.insert(2, text_column("stages", lambda row: ", ".join(stages[row.index])))
    devices = replace(table, columns=columns)
    parts = [
        _step_figures(plan, simulation),
        _figure("timeline", draw_gantt(simulation.as_step())),
        _note(f"The critical path, which decides how long the step is: {step_summary.critical_path_text(simulation)}."),
        _note(f"The step is {simulation.host_note}.") if simulation.host_note else "",
        "<h3>Devices</h3>",
        devices.for_report("devices"),
    ]
    if simulation.sent:
        links: list[Column[tuple[tuple[int, int], float]]] = [
            Column("from", lambda row: Cell(names[row[0][0]], row[0][0])),
            Column("to", lambda row: Cell(names[row[0][1]], row[0][1])),
            bytes_column("bytes", lambda row: row[1]),
        ]
        sent = Table(links, [row for row in simulation.sent.items() if row[1]])
        parts += ["<h3>Sent in a step</h3>", sent.for_report("links")]
    return "\n".join(parts)


def _step_figures(plan: Plan, simulation: Simulation) -> str:
    run = step_summary.summarize_step(simulation, plan)
    step, samples = run.step_seconds, simulation.samples
    rate = f"{three_digits(samples / step)} samples a second" if samples and step else ""
    update = f"{human_seconds(simulation.update_seconds)} of updates after it" if simulation.update_seconds else ""
    limit = "" if run.limit_bytes is None else f"of {human_bytes(run.limit_bytes)}"
    parameters = sum(stage.parameter_bytes for stage in plan.stages)
    entries = [
        ("Step" if simulation.steady is None else "Mini-batch of a stream", human_seconds(step), "", (rate, update)),
        ("Bubble", percent(run.bubble), "", ("of device time",)),
        ("Most memory", human_bytes(run.peak_bytes), "warn" if run.over_bytes else "", (limit, f"device {run.device}")),
        ("Parameters", human_bytes(parameters), "", (f"in {count_text(len(plan.stages), 'stage')}",)),
    ]
    if plan.portals:
        skips = "value that skips stages" if len(plan.portals) == 1 else "values that skip stages"
        entries.append(("Portals", str(len(plan.portals)), "", (skips,)))
    lines = ['<dl class="facts">']
    for name, value, style, notes in entries:
        mark, note = f' class="{style}"' if style else "", escape_markup(", ".join(filter(None, notes)))
        lines.append(f"<div><dt>{name}</dt><dd{mark}>{value}<small>{note}</small></dd></div>")
    return "\n".join([*lines, "</dl>"])


REPORT_STAGE_COLUMNS: tuple[Column[StageFigures], ...] = (
    plan_text.STAGE_COLUMNS[0],
    Column("device", lambda row: Cell(f"{number_ranges(row.rows)}: {' '.join(row.devices)}", row.rows[0])),
    *plan_text.STAGE_COLUMNS[2:6],
    Column("both", lambda row: Cell(human_seconds(row.stage.seconds), row.stage.seconds, is_marked=row.is_slowest)),
    number_column("GFLOP", lambda row: row.flops / 1e9, three_digits),
    text_column("checkpoint", lambda row: row.mode),
    *plan_text.STAGE_COLUMNS[6:],
)


def stages_section(plan: Plan) -> str:
    note = "Seconds and bytes are those of one micro-batch; memory is what a stage holds at most in a step."
    return Table(REPORT_STAGE_COLUMNS, plan_figures(plan).stages).for_report("stages") + _note(note)


def portals_section(plan: Plan) -> str:
    if not plan.portals:
        return ""
    total, many = human_bytes(sum(portal.bytes for portal in plan.portals)), count_text(len(plan.portals), "value")
    skips, goes, it_is = ("skips", "goes", "it is") if len(plan.portals) == 1 else ("skip", "go", "they are")
    note = _note(f"{many} {skips} stages: {total} of each micro-batch {goes} straight to where {it_is} used.")
    return note + plan_text.portals_table(plan.portals)[0].for_report("portals")


def facts_section(plan: Plan) -> str:
    """Formats the slowest stage, and the lines and lists that the plan prints."""
    slowest, ratio = max(plan.stages, key=lambda stage: stage.seconds), plan_figures(plan).slowest_to_mean
    first = (
        f"stage {slowest.index} is the slowest: {human_seconds(slowest.seconds)} for each micro-batch; the slowest "
        f"device takes {ratio:.2f} times the mean device"
    )
    parts = [list_markup([first, *plan_text.plan_facts(plan)])]
    parts += [f"<h3>{escape_markup(name)}</h3>\n{list_markup(lines)}" for name, lines in plan_text.plan_lists(plan)]
    return "\n".join(parts)
