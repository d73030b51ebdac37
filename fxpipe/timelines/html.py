"""A step as notebooks show it."""

from __future__ import annotations

from fxpipe import units
from fxpipe.drawing.fragments import fragment, head, picture, table
from fxpipe.drawing.markup import number, percent, seconds, size, text
from fxpipe.drawing.svg import svg_of
from fxpipe.timelines.gantt import gantt
from fxpipe.timelines.steps import Step
from fxpipe.units import counted, human_seconds


def step_html(step: Step) -> str:
    """The timeline, and for each device its time and, of a simulation, its memory."""
    headers = ["device", "", "busy", "bubble", *(["most memory"] if step.memory else [])]
    rows = []
    for d, (name, busy, bubble) in enumerate(zip(step.devices, step.busy, step.bubble, strict=True)):
        memory = (size(step.memory[d].peak),) if step.memory else ()
        rows.append((number(d), text(name), seconds(busy), percent(bubble), *memory))
    title = f"{step.schedule}: step {human_seconds(step.seconds)}, bubble {units.percent(step.mean_bubble)}"
    facts = (
        f"{'simulated' if step.is_simulated else 'measured'}: {counted(step.stages, 'stage')}, "
        f"{counted(step.micro_batches, 'micro-batch', 'es')}"
    )
    return fragment([head(title, facts), picture(svg_of(gantt(step).scene)), table(headers, rows)])
