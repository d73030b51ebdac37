"""The sections of a report: functions from plan to markup, empty where there is nothing to say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.errors import FxpipeError
from fxpipe.inspect.html import (
    HtmlCell,
    HtmlTable,
    bytes_cell,
    code_cell,
    list_markup,
    missing_cell,
    number_cell,
    percent_cell,
    seconds_cell,
    table_markup,
    text_cell,
)
from fxpipe.inspect.stage_graph import draw_stage_graph
from fxpipe.inspect.step_summary import StepSummary, summarize_schedule, summarize_step
from fxpipe.inspect.svg import escape_markup, svg_of
from fxpipe.planning.plans.display import limiting_node
from fxpipe.planning.plans.figures import StageFigures, plan_figures, size_figures, slowest_to_mean
from fxpipe.utils.batch_split import largest_micro_batch
from fxpipe.utils.text_table import number_ranges, shorten_source_line
from fxpipe.utils.units import count_text, human_bytes, human_seconds, three_digits

if TYPE_CHECKING:
    from fxpipe.planning.plans import Plan, StagePlan
    from fxpipe.simulation import Simulation


# -- Variants of a plan that a report compares: other numbers of micro-batches, schedules and devices ----------------

MAX_CHUNKS = 512
MAX_STAGE_CELLS = 10_000  # stages times micro-batches: more takes seconds to simulate, and a picture of it is grey


@dataclass(frozen=True, slots=True)
class ChunksVariant:
    """A step with this many micro-batches."""

    chunks: int
    samples: int  # of the largest micro-batch
    simulation: Simulation


@dataclass(frozen=True, slots=True)
class ScheduleVariant:
    """A step with this schedule, or why there is none."""

    schedule: str
    run: StepSummary | None
    why: str = ""


def chunks_variants(plan: Plan) -> tuple[ChunksVariant, ...]:
    """1, 2, 4, ... micro-batches, and the plan's own number of them; only that where the schedule is for it alone."""
    import fxpipe

    variants = []
    for chunks in chunks_to_compare(plan):
        try:
            simulation = fxpipe.simulate(plan, chunks=chunks)
        except FxpipeError:
            if chunks == plan.micro_batches:
                raise
            continue
        batch = plan.batch or plan.micro_batch * plan.micro_batches
        variants.append(ChunksVariant(chunks, largest_micro_batch(batch, chunks), simulation))
    return tuple(variants)


def chunks_to_compare(plan: Plan) -> Iterator[int]:
    most = min(plan.batch or 4 * plan.chunks, MAX_CHUNKS, max(plan.micro_batches, MAX_STAGE_CELLS // len(plan.stages)))
    powers = {2**k for k in range(most.bit_length()) if 2**k <= most}
    yield from sorted(powers | {plan.micro_batches})


def schedule_variants(plan: Plan) -> tuple[ScheduleVariant, ...]:
    """Every schedule there is, and one of the user's own; those that the plan's stages allow are simulated."""
    from fxpipe.planning.options.stage_placement import COMPARED_SCHEDULES

    variants = []
    for name in dict.fromkeys([*COMPARED_SCHEDULES, plan.schedule]):
        try:
            variants.append(ScheduleVariant(name.partition(":")[0], summarize_schedule(plan, name)))
        except FxpipeError as error:
            variants.append(ScheduleVariant(name.partition(":")[0], None, _short_reason(name, str(error))))
    return tuple(variants)


def _short_reason(schedule: str, error: str) -> str:
    """Shortens the reason of an error, where it is the number of stages."""
    from fxpipe.scheduling import SCHEDULES

    recipe = SCHEDULES.get(schedule)
    if recipe is None or not recipe.has_fixed_placement:
        return error
    return f"needs a plan with stages_per_device={recipe.stages_per_device}"


LONG_TABLE_ROWS = 24  # from here on a table scrolls by itself


def section_markup(name: str, title: str, body: str) -> str:
    """Makes a section with an anchor of that name; nothing where there is no body."""
    return f'<section id="{name}">\n<h2>{escape_markup(title)}</h2>\n{body}\n</section>' if body else ""


def sortable_table(table_data: HtmlTable, label: str) -> str:
    """A table that scrolls where it is too wide or too long."""
    which = "wide long" if len(table_data.rows) > LONG_TABLE_ROWS else "wide"
    table = table_markup(table_data, ' class="sortable"')
    return f'<div class="{which}" role="region" aria-label="{escape_markup(label)}" tabindex="0">\n{table}\n</div>'


def note_paragraph(line: str) -> str:
    return f'<p class="aside">{escape_markup(line)}</p>'


def stages_section(plan: Plan) -> str:
    slowest = max(stage.seconds for stage in plan.stages)
    headers = (
        "stage", "device", "nodes", "parameters", "forward", "backward", "both", "GFLOP", "checkpoint", "in flight",
        "memory", "sends", *(["portals in", "portals out"] if plan.portals else ()),
    )  # fmt: skip
    figures = plan_figures(plan).stages
    rows = tuple(_stage_row(plan, stage, figures[stage.index], slowest) for stage in plan.stages)
    formulas = tuple((number_cell(stage.index), code_cell(str(plan.memory(stage.index)))) for stage in plan.stages)
    table = table_markup(HtmlTable(("stage", "bytes"), formulas))
    return (
        sortable_table(HtmlTable(headers, rows), "stages")
        + note_paragraph(
            "Seconds and bytes are those of one micro-batch; memory is what a stage holds at most in a step."
        )
        + "\n<details>\n<summary>Memory as formulas, with micro-batches of b samples</summary>\n"
        + f'<div class="wide" tabindex="0">\n{table}\n</div>\n</details>'
    )


def _stage_row(plan: Plan, stage: StagePlan, figures: StageFigures, slowest: float) -> tuple[HtmlCell, ...]:
    j, both, devices = stage.index, stage.seconds, plan.stage_rows[stage.index]
    flops = float(plan.flops(j, plan.micro_batch)) / 1e9
    names = " ".join(dict.fromkeys(plan.row_devices[device] for device in devices))
    limit = "" if stage.memory_limit is None else f"of {human_bytes(stage.memory_limit)}"
    return (
        number_cell(j),
        HtmlCell(f"{number_ranges(devices)}: {names}", devices[0]),
        number_cell(len(stage.nodes), f"+ {len(stage.copies)} again" if stage.copies else ""),
        bytes_cell(stage.parameter_bytes),
        seconds_cell(stage.forward_seconds),
        seconds_cell(stage.backward_seconds),
        HtmlCell(human_seconds(both), both, is_marked=both == slowest),
        HtmlCell(three_digits(flops), flops),
        text_cell(plan.modes[j]),
        number_cell(plan.in_flight(j)),
        bytes_cell(figures.memory_bytes, limit),
        bytes_cell(stage.sent_bytes) if stage.sent_bytes else missing_cell(),
        *([_portals_cell(plan, target=j), _portals_cell(plan, source=j)] if plan.portals else ()),
    )


def _portals_cell(plan: Plan, source: int | None = None, target: int | None = None) -> HtmlCell:
    """Makes the cell of the portals from a stage, or to a stage."""
    portals = [portal for portal in plan.portals if portal.source == source or portal.target == target]
    return bytes_cell(sum(portal.bytes for portal in portals), f"in {len(portals)}") if portals else missing_cell()


def graph_section(plan: Plan) -> str:
    return f'<figure class="wide" tabindex="0">\n{svg_of(draw_stage_graph(plan))}</figure>'


def sizes_section(plan: Plan) -> str:
    """The same stages at other sizes, where some are dynamic."""
    if not plan.sizes:
        return ""
    headers = ("step", "balance", "slowest stage", "most memory", "in stage", "over its limit by")
    rows = tuple(
        (
            *map(number_cell, figures.sizes.values()),
            seconds_cell(figures.step_seconds),
            number_cell(round(figures.slowest_to_mean, 2)),
            number_cell(figures.slowest),
            bytes_cell(figures.memory_bytes),
            number_cell(figures.fullest),
            missing_cell() if not figures.over_bytes else bytes_cell(figures.over_bytes),
        )
        for figures in map(size_figures, plan.at_sizes())
    )
    return sortable_table(HtmlTable((*(one.name for one in plan.sizes), *headers), rows), "other sizes")


def portals_section(plan: Plan) -> str:
    if not plan.portals:
        return ""
    rows = tuple(
        (
            code_cell(p.name),
            number_cell(p.source),
            number_cell(p.target),
            bytes_cell(p.bytes),
            code_cell(str(p.size)) if p.size else missing_cell(),
            _source_line_cell(p.line),
        )
        for p in plan.portals
    )
    total = human_bytes(sum(portal.bytes for portal in plan.portals))
    table = HtmlTable(("portal", "from", "to", "bytes", "bytes, for b samples", "made at"), rows)
    many = count_text(len(plan.portals), "value")
    what = ("skips", "goes", "it is") if len(plan.portals) == 1 else ("skip", "go", "they are")
    return note_paragraph(
        f"{many} {what[0]} stages: {total} of each micro-batch {what[1]} straight to where {what[2]} used."
    ) + sortable_table(table, "portals")


def _source_line_cell(line: str) -> HtmlCell:
    """Makes the cell of a line of the user's code, with its path shortened: readers of a report have other folders."""
    return code_cell(shorten_source_line(line)) if line else missing_cell()


def balance_section(plan: Plan) -> str:
    slowest = max(plan.stages, key=lambda stage: stage.seconds)
    said = [
        f"Stage {slowest.index} is the slowest: {human_seconds(slowest.seconds)} for each micro-batch. "
        f"The slowest device takes {slowest_to_mean(plan):.2f} times the mean device."
    ]
    if (heaviest := limiting_node(plan)) is not None:
        at = f" ({shorten_source_line(heaviest.line)})" if heaviest.line else ""
        said.append(
            f"The heaviest node is {heaviest.name}{at}: {human_seconds(heaviest.seconds)}, in stage {heaviest.stage}. "
            "However the graph is cut, no slowest stage is shorter than that."
        )
    said += [
        f"Cut by {bottleneck.balance}, the slowest stage takes {human_seconds(bottleneck.seconds)}"
        + ("." if bottleneck.fits else ", which does not fit into memory.")
        for bottleneck in plan.bottlenecks
    ]
    return list_markup(said)


OUTCOME_HEADERS = ("step", "bubble", "peak memory")


def outcome_cells(run: StepSummary, least: float) -> tuple[HtmlCell, HtmlCell, HtmlCell]:
    """Makes the cells for `OUTCOME_HEADERS`; the least step of those that fit is marked."""
    fits = not run.over_bytes
    return (
        HtmlCell(human_seconds(run.step_seconds), run.step_seconds, is_marked=fits and run.step_seconds == least),
        percent_cell(run.bubble),
        bytes_cell(run.peak_bytes, "" if fits else "does not fit"),
    )


def least_step_seconds(runs: Iterable[StepSummary]) -> float:
    """Returns the shortest step of the runs that fit."""
    return min((run.step_seconds for run in runs if not run.over_bytes), default=0.0)


def schedules_section(plan: Plan, compared: Sequence[ScheduleVariant]) -> str:
    own = plan.schedule.partition(":")[0]
    least = least_step_seconds(variant.run for variant in compared if variant.run is not None)
    rows = []
    for variant in compared:
        run = variant.run
        name = HtmlCell(variant.schedule, note="the plan's" if variant.schedule == own else "", is_code=True)
        cells = (missing_cell(),) * 3 if run is None else outcome_cells(run, least)
        rows.append((name, *cells, HtmlCell(variant.why, is_prose=True)))
    return sortable_table(HtmlTable(("schedule", *OUTCOME_HEADERS, "why not"), tuple(rows)), "schedules")


def sweep_section(plans: Sequence[tuple[Plan, Simulation]]) -> str:
    if not plans:
        return ""
    runs = [summarize_step(simulation, plan) for plan, simulation in plans]
    least, first = least_step_seconds(runs), runs[0].step_seconds
    rows = []
    for (plan, _), run in zip(plans, runs, strict=True):
        times = first / run.step_seconds if run.step_seconds else 1.0
        schedule = code_cell(plan.schedule.partition(":")[0])
        numbers = number_cell(len(plan.row_devices)), number_cell(len(plan.stages)), schedule
        rows.append((*numbers, *outcome_cells(run, least), HtmlCell(f"{times:.2f}", times)))
    headers = ("devices", "stages", "schedule", *OUTCOME_HEADERS, "times as fast as the first")
    return sortable_table(HtmlTable(headers, tuple(rows)), "numbers of devices")


def tied_parameters_section(plan: Plan) -> str:
    if not plan.tied:
        return ""
    rows = tuple(
        (
            code_cell(", ".join(parameter.names)),
            text_cell(", ".join(map(str, parameter.stages))),
            bytes_cell(parameter.bytes),
        )
        for parameter in plan.tied
    )
    return sortable_table(HtmlTable(("parameter", "stages", "bytes"), rows), "tied parameters")


def opaque_nodes_section(plan: Plan) -> str:
    if not plan.whole:
        return ""
    rows = tuple(
        (code_cell(opaque.name), HtmlCell(opaque.why, is_prose=True), _source_line_cell(opaque.line))
        for opaque in plan.whole
    )
    return sortable_table(HtmlTable(("module", "why", "called at"), rows), "modules kept whole")


def tracing_section(plan: Plan) -> str:
    said = f"<p>{escape_markup(f'Traced by {plan.tracer}; graph {plan.fingerprint[:12]}.')}</p>"
    if plan.why:
        said += "\n<h3>Why so</h3>\n" + list_markup(plan.why)
    if plan.guards:
        said += "\n<h3>Holds where (asked once for each mini-batch)</h3>\n" + list_markup(plan.guards)
    return said


def stage_code_section(plan: Plan) -> str:
    return "\n".join(
        f"<details>\n<summary>Stage {stage.index}"
        f"<small>{escape_markup(f'{stage.device}, ' + count_text(len(stage.nodes), 'node'))}</small></summary>\n"
        f'<pre tabindex="0"><code>{escape_markup(stage.code)}</code></pre>\n</details>'
        for stage in plan.stages
    )
