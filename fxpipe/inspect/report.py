"""A report: all that is known of a plan as one HTML file, which needs nothing else, and asks nobody else for anything.

It is read by all whom the decision concerns, also by those who have no Python: it can be mailed, opened from a disk,
and printed. Without scripts it has all tables and pictures; scripts sort the tables, and show the step for other
numbers of micro-batches, which were simulated when it was written. A content security policy forbids the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fxpipe.inspect import report_sections as sections
from fxpipe.inspect.gantt import draw_gantt
from fxpipe.inspect.html import (
    HtmlCell,
    HtmlTable,
    bytes_cell,
    html_page,
    missing_cell,
    number_cell,
    percent_cell,
    seconds_cell,
    text_cell,
)
from fxpipe.inspect.memory_chart import memory_bars
from fxpipe.inspect.report_sections import (
    OUTCOME_HEADERS,
    ChunksVariant,
    chunks_variants,
    least_step_seconds,
    note_paragraph,
    outcome_cells,
    schedule_variants,
    sortable_table,
)
from fxpipe.inspect.step_summary import summarize_step
from fxpipe.inspect.style import MEMORY_COLOURS
from fxpipe.inspect.svg import escape_markup, svg_of
from fxpipe.utils import units
from fxpipe.utils.files import check_output_path, write_atomically
from fxpipe.utils.units import count_text, human_bytes, human_seconds, three_digits

if TYPE_CHECKING:
    from fxpipe.planning.plans import Plan
    from fxpipe.simulation import Simulation
    from fxpipe.simulation.timeline import MemoryParts


# The part of a report that depends on the number of micro-batches: figures, timeline and memory of a step, for each.

MAX_PATH_SHARES, LEAST_PATH_SHARE = 6, 0.03  # of the critical path that are named


def step_figures(plan: Plan, simulation: Simulation, memory: Sequence[MemoryParts]) -> str:
    """Formats the main figures of a step as a list in HTML. `memory`: of each device at its peak."""
    peaks = [parts.total for parts in memory]
    lacks = [0.0 if limit is None else peak - limit for peak, limit in zip(peaks, simulation.limits, strict=True)]
    over = max(lacks) > 0
    fullest = max(range(len(peaks)), key=(lacks if over else peaks).__getitem__)
    limit = simulation.limits[fullest]
    of = f"of {human_bytes(limit)}, " if limit is not None else ""
    step, samples = simulation.step_seconds, simulation.samples
    rate = f"{three_digits(samples / step)} samples a second" if samples and step else ""
    parameters = sum(stage.parameter_bytes for stage in plan.stages)
    update = f"{human_seconds(simulation.update_seconds)} of updates after it" if simulation.update_seconds else ""
    notes = ", ".join(filter(None, (rate, update)))
    entries = [
        ("Step" if simulation.steady is None else "Mini-batch of a stream", human_seconds(step), notes, False),
        ("Bubble", units.percent(simulation.mean_bubble), "of device time", False),
        ("Most memory", human_bytes(peaks[fullest]), f"{of}device {fullest}", over),
        ("Parameters", human_bytes(parameters), f"in {count_text(len(plan.stages), 'stage')}", False),
    ]
    if plan.portals:
        entries.append(
            (
                "Portals",
                str(len(plan.portals)),
                "value that skips stages" if len(plan.portals) == 1 else "values that skip stages",
                False,
            )
        )
    return '<dl class="facts">\n' + "\n".join(_figure_markup(*one) for one in entries) + "\n</dl>"


def _figure_markup(name: str, value: str, note: str, is_over: bool) -> str:
    warned = ' class="warn"' if is_over else ""
    value, note = escape_markup(value), escape_markup(note)
    return f"<div><dt>{escape_markup(name)}</dt><dd{warned}>{value}<small>{note}</small></dd></div>"


def steps_section(plan: Plan, chunked: Sequence[ChunksVariant], own: int) -> str:
    """A part for each number of micro-batches, the plan's own to be seen, and the slider, which needs a script."""
    slider = (
        '<div class="chunks" hidden>\n<label for="chunks">Micro-batches</label>\n'
        f'<input id="chunks" type="range" min="0" max="{len(chunked) - 1}" step="1" value="{own}" autocomplete="off">\n'
        f'<output for="chunks">{escape_markup(_chunks_label(chunked[own]))}</output>\n</div>'
    )
    parts = [_chunks_part(plan, variant, is_own=k == own) for k, variant in enumerate(chunked)]
    return "\n".join([*([slider] if len(chunked) > 1 else []), *parts, _chunks_overview(plan, chunked, own)])


def _chunks_label(variant: ChunksVariant) -> str:
    most = "" if variant.chunks == 1 else "at most "
    return f"{count_text(variant.chunks, 'micro-batch', 'es')} of {most}{count_text(variant.samples, 'sample')}"


def _chunks_part(plan: Plan, variant: ChunksVariant, is_own: bool) -> str:
    simulation = variant.simulation
    names = device_names(simulation)
    memory = [variant.at_peak for variant in simulation.memory]
    bars = memory_bars(names, memory, simulation.limits)
    timeline = svg_of(draw_gantt(simulation.as_step()))
    parts = (
        step_figures(plan, simulation, memory),
        f'<figure class="wide" tabindex="0" aria-label="timeline">\n{timeline}</figure>',
        note_paragraph(_critical_path_line(simulation)),
        note_paragraph(f"The step is {simulation.host_note}.") if simulation.host_note else "",
        "<h3>Memory at its peak</h3>",
        f'<figure class="wide" tabindex="0" aria-label="memory">\n{svg_of(bars)}</figure>',
        "<h3>Devices</h3>",
        _devices_table(plan, simulation, memory, names),
        _links_table(simulation, names),
    )
    hidden = "" if is_own else " hidden"
    label = escape_markup(_chunks_label(variant))
    return f'<div data-chunks="{variant.chunks}" data-label="{label}"{hidden}>\n' + "\n".join(parts) + "\n</div>"


def device_names(simulation: Simulation) -> list[str]:
    return [f"{d}: {name}" if name else str(d) for d, name in enumerate(simulation.devices)]


def _critical_path_line(simulation: Simulation) -> str:
    """Formats the shares of the critical path: what would have to be faster for the step to be."""
    spent: defaultdict[str, float] = defaultdict(float)
    for leg in simulation.legs:
        what = leg.kind if leg.kind in ("sending", "waiting", "reducing") else f"in stage {leg.span.action.stage}"
        spent[what] += leg.seconds
    total = simulation.seconds or 1.0
    named = [what for what in sorted(spent, key=lambda what: -spent[what]) if spent[what] > LEAST_PATH_SHARE * total]
    shares = [f"{100 * spent[what] / total:.0f} % {what}" for what in named[:MAX_PATH_SHARES]]
    others = 1 - sum(spent[what] for what in named[:MAX_PATH_SHARES]) / total
    rest = [f"{100 * others:.0f} % others"] if others > 0.005 else []
    return f"Of the critical path, which decides how long the step is: {', '.join([*shares, *rest])}."


def _devices_table(plan: Plan, simulation: Simulation, memory: Sequence[MemoryParts], names: Sequence[str]) -> str:
    has_limits = any(limit is not None for limit in simulation.limits)
    headers = ("device", "stages", "busy", "bubble", "memory", *["limit"] * has_limits, *MEMORY_COLOURS)
    rows = []
    busy, bubble = simulation.busy, simulation.bubble
    for d, (parts, limit) in enumerate(zip(memory, simulation.limits, strict=True)):
        stages = ", ".join(str(j) for j, rows in enumerate(plan.stage_rows) if d in rows)
        limits = [missing_cell() if limit is None else bytes_cell(limit)] * has_limits
        rows.append(
            (
                HtmlCell(names[d], d),
                text_cell(stages),
                seconds_cell(busy[d]),
                percent_cell(bubble[d]),
                bytes_cell(parts.total),
                *limits,
                *(bytes_cell(getattr(parts, part)) for part in MEMORY_COLOURS),
            )
        )
    return sortable_table(HtmlTable(headers, tuple(rows)), "devices")


def _links_table(simulation: Simulation, names: Sequence[str]) -> str:
    rows = tuple(
        (HtmlCell(names[source], source), HtmlCell(names[target], target), bytes_cell(sent))
        for (source, target), sent in simulation.sent.items()
        if sent
    )
    return (
        "<h3>Sent in a step</h3>\n" + sortable_table(HtmlTable(("from", "to", "bytes"), rows), "links") if rows else ""
    )


def _chunks_overview(plan: Plan, chunked: Sequence[ChunksVariant], own: int) -> str:
    if len(chunked) == 1:
        return ""
    runs = [summarize_step(variant.simulation, plan) for variant in chunked]
    least = least_step_seconds(runs)
    rows = tuple(
        (
            number_cell(variant.chunks, "the plan's" if k == own else ""),
            number_cell(variant.samples),
            *outcome_cells(runs[k], least),
        )
        for k, variant in enumerate(chunked)
    )
    table = sortable_table(HtmlTable(("micro-batches", "samples in one", *OUTCOME_HEADERS), rows), "micro-batches")
    return "<h3>Numbers of micro-batches compared</h3>\n" + table


REPORT_FILE = "a report"


def save_report(plan: Plan, path: str | Path, *, title: str = "", sweep: Sequence[Plan] = ()) -> None:
    """Writes a report of the plan: one HTML page with all tables and pictures, and a slider for micro-batches.

        save_report(plan, "report.html", title="U-Net on four devices")

    Args:
        path: ends in `.html`.
        title: of the page, such as the model's name.
        sweep: plans of the same model for other numbers of devices, to compare with.

    Raises:
        ArgumentError: the path has another suffix, or (a `FileError`) cannot be written.
    """
    check_report_path(path)
    write_atomically(path, report_page(plan, title=title, sweep=sweep).encode(), REPORT_FILE)


def check_report_path(path: str | Path) -> str:
    """Before there is a plan: raises as `save_report` would; writes nothing."""
    return check_output_path(path, ("html",), REPORT_FILE)


def report_page(plan: Plan, *, title: str = "", sweep: Sequence[Plan] = ()) -> str:
    """The text of the page."""
    import fxpipe

    chunked = chunks_variants(plan)
    own = next(k for k, variant in enumerate(chunked) if variant.chunks == plan.micro_batches)
    compared = [(one, fxpipe.simulate(one)) for one in sorted(sweep, key=lambda one: len(one.row_devices))]
    parts = (
        ("step", "A step", steps_section(plan, chunked, own)),
        ("stages", "Stages", sections.stages_section(plan)),
        ("graph", "Graph", sections.graph_section(plan)),
        ("portals", "Portals", sections.portals_section(plan)),
        ("balance", "What bounds the balance", sections.balance_section(plan)),
        ("sizes", "Other sizes", sections.sizes_section(plan)),
        ("schedules", "Schedules", sections.schedules_section(plan, schedule_variants(plan))),
        ("devices", "Numbers of devices", sections.sweep_section(compared)),
        ("tied", "Tied parameters", sections.tied_parameters_section(plan)),
        ("whole", "Modules kept whole", sections.opaque_nodes_section(plan)),
        ("tracing", "How it was traced", sections.tracing_section(plan)),
        ("code", "Code of the stages", sections.stage_code_section(plan)),
    )
    heading = title or count_text(len(plan.stages), "stage")
    links = "\n".join(f'<a href="#{name}">{escape_markup(label)}</a>' for name, label, body in parts if body)
    body = "\n".join(sections.section_markup(name, label, body) for name, label, body in parts)
    content = f"""<header>
<h1>{escape_markup(heading)}</h1>
<p class="lead">{escape_markup(_lead_line(plan))}</p>
<nav aria-label="sections">
{links}
</nav>
</header>
<main>
{body}
</main>
<footer>{escape_markup(_footer_line(plan))}</footer>"""
    return html_page(f"{heading}: pipeline", _read_resource("page.css"), content, _read_resource("page.js"))


def _lead_line(plan: Plan) -> str:
    modes = "/".join(sorted(set(plan.modes)))
    return (
        f"{count_text(len(plan.stages), 'stage')} on {count_text(len(plan.row_devices), 'device')}, "
        f"{count_text(plan.micro_batches, 'micro-batch', 'es')} of {'' if plan.micro_batches == 1 else 'at most '}"
        f"{count_text(plan.micro_batch, 'sample')}, schedule {plan.schedule.partition(':')[0]}, checkpoint {modes}, "
        f"balance {plan.balance}"
    )


def _footer_line(plan: Plan) -> str:
    from fxpipe import __version__

    source = f"estimates for {plan.estimated_for}" if plan.estimated_for else "measured"
    return f"Written by fxpipe {__version__}. Seconds of nodes are {source}; steps are simulated."


def _read_resource(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
