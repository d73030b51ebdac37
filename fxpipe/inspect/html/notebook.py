"""Plans, pipes, simulations and records as notebooks show them: small pieces of HTML.

A notebook puts them in a page of its own. So they bring no style sheet, which would restyle that page, and no script,
which it may refuse: styles stand in the elements. Colours are the page's, so that they are legible on light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpipe import units
from fxpipe.inspect.drawing.svg import escaped, svg_of
from fxpipe.inspect.html.markup import Cell, code, missing, number, percent, seconds, size, text
from fxpipe.inspect.tables.figures import plan_figures
from fxpipe.units import counted, human_bytes, human_seconds

if TYPE_CHECKING:
    from fxpipe.api import Pipeline
    from fxpipe.plans import Plan
    from fxpipe.timelines.steps import Source
    from fxpipe.tuning import Tuning

MOST_STAGES, MOST_PORTALS, MOST_TRIED = 64, 20, 12  # rows

FRAME = "overflow-x:auto;max-width:100%"
TABLE = "border-collapse:collapse;border:0;margin:0.4em 0;font-variant-numeric:tabular-nums"
CELL = (
    "padding:0.15em 0.9em 0.15em 0;border:0;border-bottom:1px solid rgba(128,128,128,.3);background:transparent;"
    "color:inherit;white-space:nowrap"
)
PICTURE = "overflow-x:auto;max-width:100%;background:#fff;border-radius:4px;margin:0.4em 0"


def plan_html(plan: Plan) -> str:
    """The stages, the largest portals, and what a step comes to."""
    figures = plan_figures(plan)
    headers = ("stage", "device", "nodes", "parameters", "forward", "backward", "in flight", "memory", "sends")
    rows: list[tuple[Cell, ...]] = []
    for stage, found in zip(plan.stages[:MOST_STAGES], figures.stages, strict=False):
        limit = "" if stage.memory_limit is None else f"of {human_bytes(stage.memory_limit)}"
        rows.append(
            (
                number(stage.index),
                text(stage.device),
                number(len(stage.nodes)),
                size(stage.parameter_bytes),
                seconds(stage.forward_seconds),
                seconds(stage.backward_seconds),
                number(plan.in_flight(stage.index)),
                size(found.memory_bytes, limit),
                size(stage.sent_bytes) if stage.sent_bytes else missing(),
            )
        )
    most = "" if plan.micro_batches == 1 else "at most "
    head = (
        f"{counted(len(plan.stages), 'stage')} on {counted(len(plan.workers), 'device')}, "
        f"{counted(plan.micro_batches, 'micro-batch', 'es')} of {most}{counted(plan.micro_batch, 'sample')}"
    )
    facts = (
        f"schedule {plan.schedule.partition(':')[0]}; step {human_seconds(figures.step_seconds)}, "
        f"bubble {units.percent(figures.mean_bubble)}, slowest stage {figures.slowest_to_mean:.2f} times the mean one"
    )
    parts = [_head(head, facts), _table(headers, rows)]
    if len(plan.stages) > MOST_STAGES:
        parts.append(_aside(f"and {len(plan.stages) - MOST_STAGES} more stages"))
    return _fragment([*parts, *_portals(plan)])


def _portals(plan: Plan) -> list[str]:
    if not plan.portals:
        return []
    by_size = sorted(plan.portals, key=lambda portal: -portal.bytes)
    rows = [(code(p.name), number(p.source), number(p.target), size(p.bytes)) for p in by_size[:MOST_PORTALS]]
    total = human_bytes(sum(portal.bytes for portal in plan.portals))
    summary = f"{counted(len(plan.portals), 'portal')}, {total} of each micro-batch"
    more = len(plan.portals) - MOST_PORTALS
    rest = _aside(f"and {counted(more, 'smaller portal')}") if more > 0 else ""
    table = _table(("portal", "from", "to", "bytes"), rows)
    return [f"<details><summary>{escaped(summary)}</summary>{table}{rest}</details>"]


def pipeline_html(pipe: Pipeline) -> str:
    """What it is and where, and its plan, once there is one."""
    from fxpipe.inspect.tables.pipes import pipe_lines

    inside = pipe._fxpipe
    plan = inside.plan
    head, *rest = pipe_lines(type(pipe.model).__name__, inside.settings, plan)
    if plan is None:
        return _fragment([_head("Pipeline", head), *map(_aside, rest)])
    return _fragment([_head("Pipeline", head)]) + plan_html(plan)


def step_html(source: Source) -> str:
    """The timeline, and for each device its time and, of a simulation, its memory."""
    from fxpipe.inspect.timeline.gantt import gantt
    from fxpipe.timelines.steps import step_of

    step = step_of(source)
    headers = ["device", "", "busy", "bubble", *(["most memory"] if step.memory else [])]
    rows = []
    for d, (name, busy, bubble) in enumerate(zip(step.devices, step.busy, step.bubble, strict=True)):
        memory = (size(step.memory[d].peak),) if step.memory else ()
        rows.append((number(d), text(name), seconds(busy), percent(bubble), *memory))
    head = f"{step.schedule}: step {human_seconds(step.seconds)}, bubble {units.percent(step.mean_bubble)}"
    facts = (
        f"{'simulated' if step.is_simulated else 'measured'}: {counted(step.stages, 'stage')}, "
        f"{counted(step.micro_batches, 'micro-batch', 'es')}"
    )
    picture = svg_of(gantt(step).scene)
    return _fragment([_head(head, facts), f'<div style="{PICTURE}">{picture}</div>', _table(headers, rows)])


def tuning_html(tuning: Tuning) -> str:
    """The best of what was tried, the chosen one marked."""
    cut = [row for row in tuning.rows if row.plan is not None]
    shown = cut[:MOST_TRIED] + [row for row in cut[MOST_TRIED:] if row is tuning.best]
    headers = ("", "schedule", "chunks", "checkpoint", "stages per device", "step", "measured", "bubble", "memory", "")
    rows = [
        (
            text("→" if row is tuning.best else ""),
            code(row.schedule.partition(":")[0]),
            number(row.chunks),
            text(row.checkpoint if isinstance(row.checkpoint, str) else "by stage"),
            number(row.stages_per_device),
            seconds(row.step_seconds),
            missing() if row.measured_seconds is None else seconds(row.measured_seconds),
            percent(row.simulation.mean_bubble),
            size(row.peak),
            text(f"lacks {human_bytes(row.lacks)}" if row.lacks > 0 else ""),
        )
        for row in shown
    ]
    best = tuning.best
    chunks = counted(best.chunks, "micro-batch", "es")
    head = f"{best.schedule.partition(':')[0]}, {chunks}: step {human_seconds(best.step_seconds)}"
    more = f", of which {len(shown)} are shown" if len(cut) > len(shown) else ""
    facts = (
        f"chosen from {counted(len(cut), 'way')}{more}, for {counted(tuning.batch, 'sample')} on "
        f"{counted(len(tuning.devices), 'device')}"
    )
    return _fragment([_head(head, facts), _table(headers, rows)])


def _fragment(parts: Sequence[str]) -> str:
    return "<div>" + "".join(parts) + "</div>"


def _head(title: str, facts: str) -> str:
    return f"<div><b>{escaped(title)}</b></div>{_aside(facts)}"


def _aside(line: str) -> str:
    return f'<div style="opacity:.75">{escaped(line)}</div>'


def _table(headers: Sequence[str], rows: Sequence[tuple[Cell, ...]]) -> str:
    numbers = [any(row[k].value is not None for row in rows) for k in range(len(headers))]
    styles = [f"{CELL};text-align:{'right' if is_number else 'left'}" for is_number in numbers]
    head = "".join(
        f'<th style="{style};font-weight:normal;opacity:.75">{escaped(name)}</th>'
        for name, style in zip(headers, styles, strict=True)
    )
    lines = []
    for row in rows:
        cells = "".join(f'<td style="{style}">{_shown(cell)}</td>' for cell, style in zip(row, styles, strict=True))
        lines.append(f'<tr style="background:transparent">{cells}</tr>')
    body = "".join(lines)
    table = f'<table style="{TABLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div style="{FRAME}">{table}</div>'


def _shown(cell: Cell) -> str:
    shown = f"<code>{escaped(cell.text)}</code>" if cell.is_code else escaped(cell.text)
    return shown + (f" <small>{escaped(cell.note)}</small>" if cell.note else "")
