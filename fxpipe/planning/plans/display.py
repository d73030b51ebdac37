"""The text of a plan: a table of its stages, a table of its portals, the totals."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.inspect.html import (
    HtmlCell,
    bytes_cell,
    code_cell,
    missing_cell,
    notebook_fragment,
    notebook_heading,
    notebook_note,
    notebook_table,
    number_cell,
    seconds_cell,
    text_cell,
)
from fxpipe.inspect.svg import escape_markup
from fxpipe.planning.plans.data import HeaviestNode, PlanData, PlannedSize, Portal, StagePlan, TiedParameter
from fxpipe.planning.plans.figures import PlanFigures, SizeFigures, StageFigures, plan_figures, size_figures
from fxpipe.utils import units
from fxpipe.utils.text_table import (
    EMPTY_CELL,
    MAX_LIST_LINES,
    bytes_of_limit,
    number_ranges,
    shorten_name,
    shorten_source_line,
    text_table,
    wrap_text,
)
from fxpipe.utils.units import count_text, human_bytes, human_seconds, percent

LEAST_CONTENTION = 1.02  # to be told
LEAST_LIMITING_SHARE = 0.75  # of the slowest stage, for a node to be told
MAX_TEXT_PORTALS = 20  # rows; a dense network has hundreds, and its largest are what one looks for

PLAN_STAGE_HEADERS = (
    "stage", "device", "nodes", "parameters", "forward", "backward", "in\nflight", "memory", "sends",
    "portals\nin/out",
)  # fmt: skip
SIZE_HEADERS = ("step", "balance", "slowest\nstage", "share of each stage", "most memory", "in\nstage", "fits")
PLAN_PORTAL_HEADERS = ("portal", "from", "to", "bytes", "of b samples", "line")


def plan_table(plan: PlanData) -> str:
    """The plan as it prints. Seconds and bytes are those of one micro-batch; memory is a step's (`Plan.memory`)."""
    figures = plan_figures(plan)
    blocks = [_head(plan), _stage_table(plan, figures)]
    if plan.portals:
        blocks.append(_portal_table(plan.portals))
    return "\n\n".join([*blocks, *_plan_lists(plan), _totals(plan, figures)])


def _head(plan: PlanData) -> str:
    samples = f"{plan.micro_batch} sample{'' if plan.micro_batch == 1 else 's'}"
    most = "" if plan.micro_batches == 1 else "at most "
    rows = len(plan.row_devices)
    devices = f" on {count_text(rows, 'device')}" if rows != len(plan.stages) else ""
    name = plan.schedule.partition(":")[0]  # in front of a table of the user's own
    micro_batches = f"{count_text(plan.micro_batches, 'micro-batch', 'es')} of {most}{samples}{sizes_suffix(plan)}"
    choices = (
        f"schedule {name}, checkpoint {_checkpoint_text(plan)}, balance {plan.balance}, tracer {plan.tracer}, "
        f"graph {plan.fingerprint[:12]}"
    )
    hint = ""
    if plan.chunks > plan.micro_batches:
        hint = f"chunks={plan.chunks}, but the mini-batch has {count_text(plan.micro_batches, 'sample')}"
    elif plan.micro_batches == 1 and rows > 1 and plan.weight_versions(0) == 1:
        hint = "one micro-batch: the devices work one after another; larger mini-batches or chunks= let them overlap"
    lines = [
        f"{count_text(len(plan.stages), 'stage')}{devices}, {micro_batches}",
        hint,
        wrap_text(choices),
        _replicas(plan),
        f"seconds are estimates for {plan.estimated_for}" if plan.estimated_for else "",
        f"slowest stage: {_bottlenecks(plan)}" if plan.bottlenecks else "",
        _versions(plan),
        _heaviest(plan),
        _loss(plan),
        _contention(plan),
    ]
    return "\n".join(filter(None, lines))


def _versions(plan: PlanData) -> str:
    """Tells how many versions of their weights the stages of a stream hold."""
    versions = [plan.weight_versions(stage.index) for stage in plan.stages]
    if max(versions) == 1:
        return ""
    numbers = ", ".join(map(str, versions))
    stream = "as mini-batches stream through them (train_stream)"
    return wrap_text(
        f"versions of the weights, by stage: {numbers}, {stream}; a step, as told here, is one of them in the steady "
        "state, with its update"
    )


def sizes_suffix(plan: PlanData) -> str:
    """`, s=128` of a plan with a dynamic size: that for which figures are given."""
    return "".join(f", {one.name}={one.size}" for one in plan.sizes)


def _size_line(size: PlannedSize) -> str:
    largest = f"; memory limits are asked at {size.largest}" if size.largest > size.size else ""
    return f"{size.name}, {', '.join(size.dims)}: {size.size} in these figures, may be {size.bounds}{largest}"


def sizes_table(plans: Sequence[PlanData]) -> str:
    """The same stages at several sizes, a row for each plan."""
    rows = [_size_row(size_figures(plan)) for plan in plans]
    head = f"these stages at other sizes, micro-batches of {count_text(plans[0].micro_batch, 'sample')}"
    return f"{head}\n\n{text_table(rows, (*(one.name for one in plans[0].sizes), *SIZE_HEADERS))}"


def _size_row(figures: SizeFigures) -> tuple[str, ...]:
    over = figures.over_bytes
    return (
        *map(str, figures.sizes.values()),
        human_seconds(figures.step_seconds),
        f"{figures.slowest_to_mean:.2f}",
        str(figures.slowest),
        "/".join(f"{100 * share:.0f}" for share in figures.shares) + " %",
        human_bytes(figures.memory_bytes),
        str(figures.fullest),
        EMPTY_CELL if over is None else f"over by {human_bytes(over)}" if over else "yes",
    )


def _bottlenecks(plan: PlanData) -> str:
    """Formats the slowest stage with each cut that was compared, the plan's own first."""
    compared = sorted(plan.bottlenecks, key=lambda bottleneck: bottleneck.balance != plan.balance)
    used = [" (used)" if bottleneck.balance == plan.balance and len(compared) > 1 else "" for bottleneck in compared]
    return ", ".join(
        f'{human_seconds(bottleneck.seconds)} with cut "{bottleneck.balance}"{mark}'
        + ("" if bottleneck.fits else ", which does not fit")
        for bottleneck, mark in zip(compared, used, strict=True)
    )


def _loss(plan: PlanData) -> str:
    """Says what the loss adds to each F of the last stage, where that is known."""
    last = plan.stages[-1]
    if not last.loss_seconds:
        return ""
    return f"loss {human_seconds(last.loss_seconds)} of each F of stage {last.index}, beside its forward"


def _contention(plan: PlanData) -> str:
    """Says what workers cost each other, where it was seen."""
    if plan.contention < LEAST_CONTENTION:
        return ""
    return wrap_text(
        f"workers slow each other down by {plan.contention:.2f}×: the step time includes this, the stage times do not"
    )


def _replicas(plan: PlanData) -> str:
    """Says how many replicas each stage has, where PipeDream's planner was to say so, or they take turns."""
    if plan.balance != "pipedream" and not plan.turns:
        return ""
    from fxpipe.scheduling import is_stream

    if plan.turns:
        what = "and update it by the mean of a round" if is_stream(plan.schedule) else "and add up its gradients"
        return wrap_text(
            f"replicas {'-'.join(map(str, plan.replicas))}: the devices of a stage take micro-batches in turn, "
            f"{what}; seconds and memory of stages are those of one of them"
        )
    if plan.data_parallel > 1 and plan.cluster is not None:
        return wrap_text(
            f"replicas {'-'.join(map(str, plan.replicas))}: data_parallel={plan.data_parallel}, mesh "
            f"{plan.cluster.mesh}; figures are those of one pipeline and its part of the mini-batch"
        )
    return f"replicas {'-'.join(map(str, plan.replicas))}"


def _heaviest(plan: PlanData) -> str:
    """Describes the heaviest node, where it is what bounds the balance."""
    node = limiting_node(plan)
    if node is None:
        return ""
    share = node.seconds / plan.stages[node.stage].seconds
    return wrap_text(
        f"heaviest node {shorten_name(node.name)}, {human_seconds(node.seconds)}, {100 * min(1.0, share):.0f} % of "
        f"stage {node.stage}{_line_suffix(node.line)}: no cut makes the slowest stage faster than that"
    )


def limiting_node(plan: PlanData) -> HeaviestNode | None:
    """The heaviest node, where it is nearly all that the slowest stage does: more stages would not help."""
    node, slowest = plan.heaviest, max(stage.seconds for stage in plan.stages)
    if node is None or not plan.stages[node.stage].seconds:
        return None
    return node if 0 < LEAST_LIMITING_SHARE * slowest <= node.seconds else None


def _line_suffix(line: str) -> str:
    return f" ({shorten_source_line(line)})" if line else ""


def _checkpoint_text(plan: PlanData) -> str:
    """Formats one mode, or that of most stages and where there are others: `never (always in stages 1-2, 5)`."""
    most, *others = sorted({*plan.modes}, key=lambda mode: -plan.modes.count(mode))
    where = []
    for mode in others:
        places = [j for j, one in enumerate(plan.modes) if one == mode]
        where.append(f"{mode} in stage{'' if len(places) == 1 else 's'} {number_ranges(places)}")
    return f"{most} ({'; '.join(where)})" if where else most


def _stage_table(plan: PlanData, figures: PlanFigures) -> str:
    rows = [_stage_row(plan, stage, own) for stage, own in zip(plan.stages, figures.stages, strict=True)]
    return text_table(rows, PLAN_STAGE_HEADERS, left=("device",))


def _stage_row(plan: PlanData, stage: StagePlan, figures: StageFigures) -> tuple[str, ...]:
    return (
        str(stage.index),
        stage.device,
        str(len(stage.nodes)),
        human_bytes(stage.parameter_bytes),
        human_seconds(stage.forward_seconds),
        human_seconds(stage.backward_seconds),
        str(plan.in_flight(stage.index)),
        _memory_cell(stage, figures),
        human_bytes(stage.sent_bytes) if stage.sent_bytes else EMPTY_CELL,
        _portal_cell(figures),
    )


def _memory_cell(stage: StagePlan, figures: StageFigures) -> str:
    if stage.memory_limit is None:
        return human_bytes(figures.memory_bytes)
    return bytes_of_limit(figures.memory_bytes, stage.memory_limit)


def _portal_cell(figures: StageFigures) -> str:
    if not (figures.portals_in or figures.portals_out):
        return EMPTY_CELL
    return "/".join(
        str(len(portals)) if portals else EMPTY_CELL for portals in (figures.portals_in, figures.portals_out)
    )


def _portal_table(portals: tuple[Portal, ...]) -> str:
    """Formats the table of portals, a row for each value: all or, where there are many, the largest and a sum."""
    by_value: dict[tuple[str, int, int], list[Portal]] = {}
    for portal in portals:
        by_value.setdefault((portal.name, portal.source, portal.bytes), []).append(portal)
    rows, rest = list(by_value.values()), ""
    if len(rows) > MAX_TEXT_PORTALS:
        rows.sort(key=lambda same: -same[0].bytes)
        others = [portal for same in rows[MAX_TEXT_PORTALS:] for portal in same]
        total = human_bytes(sum(portal.bytes for portal in others))
        rows, rest = rows[:MAX_TEXT_PORTALS], f"\nand {count_text(len(others), 'smaller portal')}, {total} together"
    return text_table([_portal_row(same) for same in rows], PLAN_PORTAL_HEADERS, left=("portal", "line")) + rest


def _portal_row(same: Sequence[Portal]) -> tuple[str, ...]:
    """Makes the row of a value; bytes are those that go to each of the stages."""
    portal = same[0]
    return (
        shorten_name(portal.name),
        str(portal.source),
        number_ranges(sorted(portal.target for portal in same)),
        human_bytes(portal.bytes),
        str(portal.size) if portal.size else EMPTY_CELL,
        shorten_source_line(portal.line) or EMPTY_CELL,
    )


def _plan_lists(plan: PlanData) -> list[str]:
    """Formulas; ties; what was not looked into; how the graph came to be, where that is not plain recording; guards."""
    memory = tuple(f"stage {stage.index}: {plan.memory(stage.index)}" for stage in plan.stages)
    whole = tuple(f"{module.name}{_line_suffix(module.line)}: {module.why}" for module in plan.whole)
    told = tuple(f"{name} is kept whole" for module in plan.whole for name in (f"module {module.name!r}", module.name))
    lists = (
        ("sizes that differ from batch to batch", tuple(map(_size_line, plan.sizes))),
        ("memory in bytes, with micro-batches of b samples", memory),
        ("tied parameters", tuple(map(_tied_line, plan.tied))),
        ("modules kept whole, each one node", whole),
        ("how it was traced", tuple(why for why in plan.why if not why.startswith(told))),
        ("holds where (asked once for each mini-batch)", plan.guards),
    )
    return ["\n".join([head, *_list_items(lines)]) for head, lines in lists if lines]


def _tied_line(tied: TiedParameter) -> str:
    """`wte.weight = lm_head.weight, 147.2 MiB, in stages 0 and 3, which copy it for each step`."""
    names = " = ".join(tied.names)
    if len(tied.stages) == 1:
        return f"{names}, {human_bytes(tied.bytes)}, in stage {tied.stages[0]}"
    stages = f"{', '.join(map(str, tied.stages[:-1]))} and {tied.stages[-1]}"
    others = "the other copies" if len(tied.stages) == 2 else "the others copy"
    return f"{names}, {human_bytes(tied.bytes)}, in stages {stages}: {others} it for each step"


def _list_items(lines: Sequence[str]) -> list[str]:
    items = [wrap_text(f"- {line}") for line in lines[:MAX_LIST_LINES]]
    return items + ([f"- and {len(lines) - MAX_LIST_LINES} more"] if len(lines) > MAX_LIST_LINES else [])


def _totals(plan: PlanData, figures: PlanFigures) -> str:
    parameters = human_bytes(sum(stage.parameter_bytes for stage in plan.stages))
    totals = (
        f"balance {figures.slowest_to_mean:.2f} (slowest device / mean), bubble {percent(figures.mean_bubble)} "
        f"of device time, step {human_seconds(figures.step_seconds)}, parameters {parameters}"
    )
    fits = str(figures.fits) if {*figures.fits} != {None} else ""
    return "\n".join(wrap_text(line) for line in (totals, fits, figures.host_note) if line)


# -- A plan in notebooks ---------------------------------------------------------------------------------------------

MAX_HTML_STAGES, MAX_HTML_PORTALS = 64, 20  # rows


def plan_html(plan: PlanData) -> str:
    """The stages, the largest portals, and what a step comes to."""
    figures = plan_figures(plan)
    headers = ("stage", "device", "nodes", "parameters", "forward", "backward", "in flight", "memory", "sends")
    rows: list[tuple[HtmlCell, ...]] = []
    for stage, own in zip(plan.stages[:MAX_HTML_STAGES], figures.stages, strict=False):
        limit = "" if stage.memory_limit is None else f"of {human_bytes(stage.memory_limit)}"
        rows.append(
            (
                number_cell(stage.index),
                text_cell(stage.device),
                number_cell(len(stage.nodes)),
                bytes_cell(stage.parameter_bytes),
                seconds_cell(stage.forward_seconds),
                seconds_cell(stage.backward_seconds),
                number_cell(plan.in_flight(stage.index)),
                bytes_cell(own.memory_bytes, limit),
                bytes_cell(stage.sent_bytes) if stage.sent_bytes else missing_cell(),
            )
        )
    most = "" if plan.micro_batches == 1 else "at most "
    title = (
        f"{count_text(len(plan.stages), 'stage')} on {count_text(len(plan.row_devices), 'device')}, "
        f"{count_text(plan.micro_batches, 'micro-batch', 'es')} of {most}{count_text(plan.micro_batch, 'sample')}"
        f"{sizes_suffix(plan)}"
    )
    facts = (
        f"schedule {plan.schedule.partition(':')[0]}; step {human_seconds(figures.step_seconds)}, "
        f"bubble {units.percent(figures.mean_bubble)}, slowest device {figures.slowest_to_mean:.2f} times the mean one"
    )
    parts = [notebook_heading(title, facts), notebook_table(headers, rows)]
    if len(plan.stages) > MAX_HTML_STAGES:
        parts.append(notebook_note(f"and {len(plan.stages) - MAX_HTML_STAGES} more stages"))
    return notebook_fragment([*parts, *_html_portals(plan)])


def _html_portals(plan: PlanData) -> list[str]:
    if not plan.portals:
        return []
    by_size = sorted(plan.portals, key=lambda portal: -portal.bytes)
    rows = [
        (code_cell(p.name), number_cell(p.source), number_cell(p.target), bytes_cell(p.bytes))
        for p in by_size[:MAX_HTML_PORTALS]
    ]
    total = human_bytes(sum(portal.bytes for portal in plan.portals))
    summary = f"{count_text(len(plan.portals), 'portal')}, {total} of each micro-batch"
    more = len(plan.portals) - MAX_HTML_PORTALS
    rest = notebook_note(f"and {count_text(more, 'smaller portal')}") if more > 0 else ""
    shown = notebook_table(("portal", "from", "to", "bytes"), rows)
    return [f"<details><summary>{escape_markup(summary)}</summary>{shown}{rest}</details>"]
