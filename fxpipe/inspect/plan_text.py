"""A plan, and the result of a tuner, as text and in notebooks: headlines, tables, lists, and the totals of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpipe.inspect.svg import escape_markup, notebook_note, notebook_view
from fxpipe.inspect.table import Cell, Column, Table, bytes_column, number_column, text_column
from fxpipe.planning.plans.data import PlanData, Portal, TiedParameter
from fxpipe.planning.plans.figures import PlanFigures, StageFigures, limiting_node, plan_figures
from fxpipe.utils.text_table import (
    EMPTY_CELL,
    MAX_LIST_LINES,
    number_ranges,
    shorten_name,
    shorten_source_line,
    wrap_text,
)
from fxpipe.utils.units import count_text, human_bytes, human_seconds, percent

if TYPE_CHECKING:
    from fxpipe.planning.tuning.candidates import CandidateResult, Tuning

MAX_TEXT_PORTALS = 20  # rows: a dense network has hundreds of portals, but the largest matter
MAX_HTML_STAGES = 64  # rows
MAX_PRINTED_CANDIDATES = 20  # rows of the printed table, in addition to the chosen one
MAX_HTML_CANDIDATES = 12  # rows


def _portal_cell(row: StageFigures) -> Cell | None:
    counts = len(row.portals_in), len(row.portals_out)
    return Cell("/".join(str(count or EMPTY_CELL) for count in counts), sum(counts)) if any(counts) else None


STAGE_COLUMNS: tuple[Column[StageFigures], ...] = (
    number_column("stage", lambda row: row.stage.index),
    text_column("device", lambda row: row.stage.device),
    number_column("nodes", lambda row: len(row.stage.nodes)),
    bytes_column("parameters", lambda row: row.stage.parameter_bytes),
    number_column("forward", lambda row: row.stage.forward_seconds, human_seconds),
    number_column("backward", lambda row: row.stage.backward_seconds, human_seconds),
    number_column("in\nflight", lambda row: row.in_flight),
    bytes_column("memory", lambda row: row.memory_bytes, lambda row: row.stage.memory_limit),
    bytes_column("sends", lambda row: row.stage.sent_bytes or None),
    Column("portals\nin/out", _portal_cell),
)


SIZE_COLUMNS: tuple[Column[PlanFigures], ...] = (
    number_column("step", lambda row: row.step_seconds, human_seconds),
    number_column("balance", lambda row: row.slowest_to_mean, "{:.2f}".format),
    number_column("slowest\nstage", lambda row: row.slowest),
    text_column(
        "share of each stage", lambda row: "/".join(f"{100 * share:.0f}" for share in row.shares) + " %", is_left=False
    ),
    bytes_column("most memory", lambda row: row.memory_bytes),
    number_column("in\nstage", lambda row: row.fullest),
    number_column("fits", lambda row: row.over_bytes, lambda over: f"over by {human_bytes(over)}" if over else "yes"),
)


def sizes_table(plans: Sequence[PlanData]) -> Table[PlanFigures]:
    def size_column(name: str) -> Column[PlanFigures]:
        return number_column(name, lambda row: row.sizes[name])

    columns = (*(size_column(one.name) for one in plans[0].sizes), *SIZE_COLUMNS)
    return Table(columns, list(map(plan_figures, plans)))


def sizes_text(plans: Sequence[PlanData]) -> str:
    head = f"these stages at other sizes, micro-batches of {count_text(plans[0].micro_batch, 'sample')}"
    return f"{head}\n\n{sizes_table(plans)}"


# A row has the portals of one value, to one or more stages; bytes are per receiving stage.
PORTAL_COLUMNS: tuple[Column[Sequence[Portal]], ...] = (
    text_column("portal", lambda row: row[0].name, is_code=True),
    number_column("from", lambda row: row[0].source),
    Column("to", lambda row: Cell(number_ranges(sorted(one.target for one in row)), min(one.target for one in row))),
    bytes_column("bytes", lambda row: row[0].bytes),
    text_column("of b samples", lambda row: row[0].size or None, is_left=False, is_code=True),
    text_column("line", lambda row: shorten_source_line(row[0].line), is_code=True),
)


def portals_table(portals: Sequence[Portal], most: int | None = None) -> tuple[Table[Sequence[Portal]], str]:
    """Returns a table of at most `most` values with portals, the largest, and a line that counts omitted portals."""
    by_value: dict[tuple[str, int, int], list[Portal]] = {}
    for portal in portals:
        by_value.setdefault((portal.name, portal.source, portal.bytes), []).append(portal)
    rows, columns, left_out = list(by_value.values()), PORTAL_COLUMNS, ""
    if most is not None:
        columns = (text_column("portal", lambda row: shorten_name(row[0].name), is_code=True), *PORTAL_COLUMNS[1:])
    if most is not None and len(rows) > most:
        rows.sort(key=lambda same: -same[0].bytes)
        others = [portal for same in rows[most:] for portal in same]
        total = human_bytes(sum(portal.bytes for portal in others))
        rows, left_out = rows[:most], f"and {count_text(len(others), 'smaller portal')}, {total} together"
    return Table(columns, rows), left_out


def plan_text(plan: PlanData) -> str:
    """Formats a plan. Seconds and bytes are for one micro-batch, memory for a step (`Plan.memory`)."""
    figures = plan_figures(plan)
    head = "\n".join([plan_headline(plan), *map(wrap_text, plan_facts(plan))])
    blocks = [head, str(Table(STAGE_COLUMNS, figures.stages))]
    if plan.portals:
        table, left_out = portals_table(plan.portals, MAX_TEXT_PORTALS)
        blocks.append("\n".join(filter(None, [str(table), left_out])))
    for name, lines in plan_lists(plan):
        items = [wrap_text(f"- {line}") for line in lines[:MAX_LIST_LINES]]
        more = [f"- and {len(lines) - MAX_LIST_LINES} more"] if len(lines) > MAX_LIST_LINES else []
        blocks.append("\n".join([name, *items, *more]))
    parameters, step = human_bytes(sum(stage.parameter_bytes for stage in plan.stages)), figures.simulation
    totals = (
        f"balance {figures.slowest_to_mean:.2f} (slowest device / mean), bubble {percent(step.mean_bubble)} "
        f"of device time, step {human_seconds(step.step_seconds)}, parameters {parameters}"
    )
    fit = step.fits
    fits = str(fit) if {*fit} != {None} else ""
    blocks.append("\n".join(wrap_text(line) for line in (totals, fits, step.host_note) if line))
    return "\n\n".join(blocks)


def plan_headline(plan: PlanData, *, always_counts_devices: bool = False) -> str:
    """Formats `3 stages on 2 devices, 4 micro-batches of at most 16 samples, s=128`."""
    most = "" if plan.micro_batches == 1 else "at most "
    rows = len(plan.row_devices)
    devices = f" on {count_text(rows, 'device')}" if always_counts_devices or rows != len(plan.stages) else ""
    sizes = "".join(f", {one.name}={one.size}" for one in plan.sizes)
    micro_batches = f"{count_text(plan.micro_batches, 'micro-batch', 'es')} of {most}"
    return (
        f"{count_text(len(plan.stages), 'stage')}{devices}, {micro_batches}{count_text(plan.micro_batch, 'sample')}"
        f"{sizes}"
    )


def plan_choices(plan: PlanData) -> str:
    name = plan.schedule.partition(":")[0]  # without a user's table
    return (
        f"schedule {name}, checkpoint {checkpoint_text(plan.modes)}, balance {plan.balance}, "
        f"graph {plan.fingerprint[:12]}"
    )


def plan_facts(plan: PlanData) -> list[str]:
    """Returns the lines below the headline: choices, and bounds of the step."""
    hint = ""
    if plan.chunks > plan.micro_batches:
        hint = f"chunks={plan.chunks}, but the mini-batch has {count_text(plan.micro_batches, 'sample')}"
    elif plan.micro_batches == 1 and len(plan.row_devices) > 1 and plan.weight_versions(0) == 1:
        hint = "one micro-batch: the devices work one after another; larger mini-batches or chunks= let them overlap"
    lines = [hint, plan_choices(plan), _replicas(plan)]
    if plan.estimated_for:
        lines.append(f"seconds are estimates for {plan.estimated_for}")
    if compared := sorted(plan.bottlenecks, key=lambda bottleneck: bottleneck.balance != plan.balance):
        used = " (used)" if len(compared) > 1 else ""
        cuts = [
            f'{human_seconds(one.seconds)} with cut "{one.balance}"{used if one.balance == plan.balance else ""}'
            f"{'' if one.fits else ', which does not fit'}"
            for one in compared
        ]
        lines.append(f"slowest stage: {', '.join(cuts)}")
    versions = [plan.weight_versions(stage.index) for stage in plan.stages]
    if max(versions) > 1:
        lines.append(
            f"versions of the weights, by stage: {', '.join(map(str, versions))}, as mini-batches stream through them "
            "(train_stream); a step, as told here, is one of them in the steady state, with its update"
        )
    if (node := limiting_node(plan)) is not None:
        share = min(1.0, node.seconds / plan.stages[node.stage].seconds)
        lines.append(
            f"heaviest node {shorten_name(node.name)}, {human_seconds(node.seconds)}, {100 * share:.0f} % of "
            f"stage {node.stage}{_line_suffix(node.line)}: no cut makes the slowest stage faster than that"
        )
    last = plan.stages[-1]
    if last.loss_seconds:
        count, which = (plan.micro_batches, "the last") if plan.is_joint else (1, "each")
        loss = human_seconds(count * last.loss_seconds)
        lines.append(f"loss {loss} of {which} F of stage {last.index}, beside its forward")
    return list(filter(None, lines))


def checkpoint_text(modes: str | Sequence[str]) -> str:
    """Formats the mode of most stages, and the exceptions: `never (always in stages 1-2, 5)`."""
    if isinstance(modes, str):
        return modes
    most, *others = sorted(dict.fromkeys(modes), key=lambda mode: -modes.count(mode))
    where = []
    for mode in others:
        places = [j for j, one in enumerate(modes) if one == mode]
        where.append(f"{mode} in stage{'' if len(places) == 1 else 's'} {number_ranges(places)}")
    return f"{most} ({'; '.join(where)})" if where else most


def _replicas(plan: PlanData) -> str:
    """Formats the number of replicas of each stage, if chosen by PipeDream's planner or if replicas take turns."""
    if plan.balance != "pipedream" and not plan.turns:
        return ""
    from fxpipe.scheduling.streams import is_stream

    replicas = f"replicas {'-'.join(map(str, plan.replicas))}"
    if plan.turns:
        what = "and update it by the mean of a round" if is_stream(plan.schedule) else "and add up its gradients"
        return (
            f"{replicas}: the devices of a stage take micro-batches in turn, "
            f"{what}; seconds and memory of stages are those of one of them"
        )
    if plan.data_parallel > 1 and plan.cluster is not None:
        return (
            f"{replicas}: data_parallel={plan.data_parallel}, mesh "
            f"{plan.cluster.mesh}; figures are those of one pipeline and its part of the mini-batch"
        )
    return replicas


def _line_suffix(line: str) -> str:
    return f" ({shorten_source_line(line)})" if line else ""


def plan_lists(plan: PlanData) -> list[tuple[str, tuple[str, ...]]]:
    """Returns named lists: sizes, formulas of memory, tied parameters, opaque modules, tracing, guards."""
    sizes = tuple(
        f"{one.name}, {', '.join(one.dims)}: {one.size} in these figures, may be {one.bounds}"
        + (f"; memory limits are asked at {one.largest}" if one.largest > one.size else "")
        for one in plan.sizes
    )
    memory = tuple(f"stage {stage.index}: {plan.memory(stage.index)}" for stage in plan.stages)
    opaque = tuple(f"{module.name}{_line_suffix(module.line)}: {module.why}" for module in plan.whole)
    names = (name for m in plan.whole for name in (f"module {m.name!r}", f"method {m.name!r}", m.name))
    known = tuple(f"{name} is kept whole" for name in names)
    lists = (
        ("sizes that differ from batch to batch", sizes),
        ("memory in bytes, with micro-batches of b samples", memory),
        ("tied parameters", tuple(map(_tied_line, plan.tied))),
        ("modules and methods kept whole, each one node", opaque),
        ("how it was traced", tuple(why for why in plan.why if not why.startswith(known))),
        ("holds where (asked once for each mini-batch)", plan.guards),
    )
    return [(name, lines) for name, lines in lists if lines]


def _tied_line(tied: TiedParameter) -> str:
    """Formats `wte.weight = lm_head.weight, 147.2 MiB, in stages 0 and 3: the other copies it for each step`."""
    names = " = ".join(tied.names)
    if len(tied.stages) == 1:
        return f"{names}, {human_bytes(tied.bytes)}, in stage {tied.stages[0]}"
    stages = f"{', '.join(map(str, tied.stages[:-1]))} and {tied.stages[-1]}"
    others = "the other copies" if len(tied.stages) == 2 else "the others copy"
    return f"{names}, {human_bytes(tied.bytes)}, in stages {stages}: {others} it for each step"


def plan_html(plan: PlanData) -> str:
    figures = plan_figures(plan)
    step = figures.simulation
    facts = (
        f"schedule {plan.schedule.partition(':')[0]}; step {human_seconds(step.step_seconds)}, "
        f"bubble {percent(step.mean_bubble)}, slowest device {figures.slowest_to_mean:.2f} times the mean one"
    )
    parts = [Table(STAGE_COLUMNS, figures.stages[:MAX_HTML_STAGES]).for_notebook()]
    if len(plan.stages) > MAX_HTML_STAGES:
        parts.append(notebook_note(f"and {len(plan.stages) - MAX_HTML_STAGES} more stages"))
    if plan.portals:
        total = human_bytes(sum(portal.bytes for portal in plan.portals))
        summary = escape_markup(f"{count_text(len(plan.portals), 'portal')}, {total} of each micro-batch")
        table, left_out = portals_table(plan.portals, MAX_TEXT_PORTALS)
        body = table.for_notebook() + (notebook_note(left_out) if left_out else "")
        parts.append(f"<details><summary>{summary}</summary>{body}</details>")
    return notebook_view(plan_headline(plan, always_counts_devices=True), facts, *parts)


def tuning_table(tuning: Tuning, most: int, is_cut: bool = False) -> Table[CandidateResult]:
    """Returns a table of the first `most` candidates and the best; `is_cut`: only candidates with a plan."""
    rows = [row for row in tuning.rows if row.plan is not None or not is_cut]
    rows = rows[:most] + [row for row in rows[most:] if row is tuning.best]
    devices = len(tuning.devices) * tuning.best.data_parallel

    def replicas(row: CandidateResult) -> str:
        """Formats `8 x 4, data outside`: devices of a replica, number of replicas, and outer mesh dimension."""
        order = f", {row.mesh[0]} outside" if devices > row.data_parallel > 1 else ""
        return f"{devices // row.data_parallel} x {row.data_parallel}{order}"

    def step(row: CandidateResult) -> Cell | None:
        bound = "≥ " if row.plan is None else ""
        return Cell(bound + human_seconds(row.step_seconds), row.step_seconds) if row.step_seconds else None

    columns: list[Column[CandidateResult]] = [
        text_column("", lambda row: "->" if row is tuning.best else ""),
        text_column("schedule", lambda row: row.schedule.partition("\n")[0].partition(":")[0]),
        text_column("pipeline x data", replicas),
        number_column("chunks", lambda row: row.chunks),
        text_column("checkpoint", lambda row: checkpoint_text(row.checkpoint)),
        number_column("stages per\ndevice", lambda row: row.stages_per_device),
        Column("step", step),
        number_column("idle", lambda row: None if row.plan is None else row.simulation.mean_bubble, percent),
        bytes_column("peak memory", lambda row: None if row.plan is None else row.peak),
        bytes_column("lacks", lambda row: row.lacks if row.lacks > 0 else None),
    ]
    hidden = {
        "pipeline x data": all(row.data_parallel == 1 for row in tuning.rows),
        "lacks": all(row.lacks <= 0 for row in tuning.rows),
    }
    return Table([column for column in columns if not hidden.get(column.name)], rows, keys=2, missing="")


def tuning_text(tuning: Tuning, is_whole: bool = False, remaining: str = ".rows has") -> str:
    """Formats the first candidates and the best, or all; `remaining` begins the line that counts omitted rows."""
    kinds = Counter(name.partition(":")[0] for name in tuning.devices)
    listed = ", ".join(f"{count * tuning.best.data_parallel} x {kind}" for kind, count in kinds.items())
    how = f", seconds estimated for {tuning.estimated_for}" if tuning.estimated_for else ""
    table = tuning_table(tuning, len(tuning.rows) if is_whole else MAX_PRINTED_CANDIDATES)
    lines = [wrap_text(f"mini-batches of {tuning.batch} on {listed}{how}; the chosen way is marked"), str(table)]
    if len(tuning.rows) > len(table.rows):
        lines.append(f"{remaining} {len(tuning.rows) - len(table.rows)} more")
    bounds = [row.step_seconds for row in table.rows if row.plan is None and row.step_seconds]
    if bounds:
        least = min(bounds) / tuning.best.step_seconds if tuning.best.step_seconds else 1.0
        gain = f", at most {percent(1 - least)} shorter than the chosen step" if least < 1 else ""
        lines.append(f"≥: lower bound, with perfectly even stages{gain}; not simulated")
    if tuning.best.plan is not None and tuning.best.simulation.host_note:
        lines.append(wrap_text(f"the chosen way is {tuning.best.simulation.host_note}"))
    return "\n".join(lines)


def tuning_html(tuning: Tuning) -> str:
    best, table = tuning.best, tuning_table(tuning, MAX_HTML_CANDIDATES, is_cut=True)
    chunks = count_text(best.chunks, "micro-batch", "es")
    title = f"{best.schedule.partition(':')[0]}, {chunks}: step {human_seconds(best.step_seconds)}"
    cut = sum(row.plan is not None for row in tuning.rows)
    more = f", of which {len(table.rows)} are shown" if cut > len(table.rows) else ""
    devices = count_text(len(tuning.devices) * best.data_parallel, "device")
    facts = f"chosen from {count_text(cut, 'way')}{more}, for {count_text(tuning.batch, 'sample')} on {devices}"
    return notebook_view(title, facts, table.for_notebook())
