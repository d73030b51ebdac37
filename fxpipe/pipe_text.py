"""A pipe in a few lines, in front of the model that it prints: where it runs, in what order, what each stage is."""

from __future__ import annotations

from fxpipe.drawing.fragments import aside, fragment, head
from fxpipe.plans import Plan
from fxpipe.plans.grouping import groups_of
from fxpipe.plans.html import plan_html
from fxpipe.settings import Settings
from fxpipe.units import counted, human_bytes, human_seconds

MOST_STAGES = 8


def pipe_lines(model: str, settings: Settings, plan: Plan | None) -> list[str]:
    """`model` is the name of its class. Without a plan it says when there will be one."""
    workers, stages = settings.workers, len(settings.placement)
    shared = f"in {stages} stages " if stages > len(workers) else ""
    devices = ", ".join(map(str, workers))
    chunks = counted(settings.chunks, "micro-batch", "es")
    head = f"{model} {shared}on [{devices}], {chunks}, schedule {schedule_name(settings)}"
    if plan is None:
        return [head, "no plan yet: it plans at the first call"]
    stage_lines = [
        f"stage {stage.index} on {stage.device}: {_content(plan, stage.index)}, "
        f"{counted(len(stage.nodes), 'node')}, {human_bytes(stage.parameter_bytes)}, "
        f"{human_seconds(stage.forward_seconds)} + {human_seconds(stage.backward_seconds)}"
        for stage in plan.stages
    ]
    if len(stage_lines) > MOST_STAGES:
        left_out = len(stage_lines) - MOST_STAGES
        stage_lines[MOST_STAGES - 1 : -1] = [f"... {counted(left_out, 'more stage')}, as print(pipe.plan) shows"]
    return [head, *stage_lines]


def pipe_html(model: str, settings: Settings, plan: Plan | None) -> str:
    """The same as notebooks show it: what it is and where, and its plan, once there is one."""
    first, *rest = pipe_lines(model, settings, plan)
    if plan is None:
        return fragment([head("Pipeline", first), *map(aside, rest)])
    return fragment([head("Pipeline", first)]) + plan_html(plan)


def schedule_name(settings: Settings) -> str:
    """What its schedule is called; one of the user's own may be a text, a `Schedule` or a function."""
    given = settings.schedule
    if isinstance(given, str):
        return given
    return str(getattr(given, "name", None) or getattr(given, "__name__", "custom"))


def _content(plan: Plan, stage: int) -> str:
    """Its first and its last module."""
    groups = groups_of(plan.stages[stage], 1, 0.0)
    return groups[0].name if groups else "nothing"
