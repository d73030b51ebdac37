"""A plan as notebooks show it."""

from __future__ import annotations

from fxpipe import units
from fxpipe.drawing.fragments import aside, fragment, head, table
from fxpipe.drawing.markup import Cell, code, missing, number, seconds, size, text
from fxpipe.drawing.svg import escaped
from fxpipe.plans.data import PlanData
from fxpipe.plans.figures import plan_figures
from fxpipe.units import counted, human_bytes, human_seconds

MOST_STAGES, MOST_PORTALS = 64, 20  # rows


def plan_html(plan: PlanData) -> str:
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
    title = (
        f"{counted(len(plan.stages), 'stage')} on {counted(len(plan.workers), 'device')}, "
        f"{counted(plan.micro_batches, 'micro-batch', 'es')} of {most}{counted(plan.micro_batch, 'sample')}"
    )
    facts = (
        f"schedule {plan.schedule.partition(':')[0]}; step {human_seconds(figures.step_seconds)}, "
        f"bubble {units.percent(figures.mean_bubble)}, slowest stage {figures.slowest_to_mean:.2f} times the mean one"
    )
    parts = [head(title, facts), table(headers, rows)]
    if len(plan.stages) > MOST_STAGES:
        parts.append(aside(f"and {len(plan.stages) - MOST_STAGES} more stages"))
    return fragment([*parts, *_portals(plan)])


def _portals(plan: PlanData) -> list[str]:
    if not plan.portals:
        return []
    by_size = sorted(plan.portals, key=lambda portal: -portal.bytes)
    rows = [(code(p.name), number(p.source), number(p.target), size(p.bytes)) for p in by_size[:MOST_PORTALS]]
    total = human_bytes(sum(portal.bytes for portal in plan.portals))
    summary = f"{counted(len(plan.portals), 'portal')}, {total} of each micro-batch"
    more = len(plan.portals) - MOST_PORTALS
    rest = aside(f"and {counted(more, 'smaller portal')}") if more > 0 else ""
    shown = table(("portal", "from", "to", "bytes"), rows)
    return [f"<details><summary>{escaped(summary)}</summary>{shown}{rest}</details>"]
