"""Where in the pipeline an exception was raised, in the user's words."""

from __future__ import annotations

from typing import Any

from fxpipe.rewriting.program import Location, Stage
from fxpipe.scheduling.actions import Action, Kind


def note(error: BaseException, action: Action, stage: Stage, stages: int, device: str) -> str:
    """What to add to an exception: stage, micro-batch, action and, where the stage's own code ran, the node."""
    text = (
        f"fxpipe: stage {action.stage} of {stages} on {device}, micro-batch {action.micro_batch}, {action.kind.words}"
    )
    name, location = _node(error, stage)
    if location is not None:
        module = f", module {location.module}" if location.module else ""
        text += f", node {name}{module} ({location.source})"
    if action.kind is Kind.RECOMPUTE:
        text += "; the forward of this micro-batch went well before, so it does not do the same twice"
    return text


def _node(error: BaseException, stage: Stage) -> tuple[str, Location | None]:
    """The node whose line of the stage's code the traceback goes through."""
    code = getattr(type(stage.run).forward, "__code__", None)  # type: ignore[attr-defined]
    traceback: Any = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            line = str(stage.run.code).split("\n")[traceback.tb_lineno - 1]  # type: ignore[attr-defined]
            name = line.strip().split(" = ")[0].split(":")[0]
            return name, stage.locations.get(name)
        traceback = traceback.tb_next
    return "", None
