"""The output of the command: its findings as text, as JSON and in files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fxpipe.inspect.request import OutputFile, Request
from fxpipe.inspect.run import Findings
from fxpipe.utils.units import count_text

if TYPE_CHECKING:
    from fxpipe.simulation import Simulation


def output_text(found: Findings, request: Request, out: TextIO) -> str:
    """Formats what goes to `out`: the answer to what was asked; if nothing in particular, the plan and its step."""
    if request.code is not None:
        assert found.plan is not None
        return found.plan.stages[request.code].code
    if request.json:
        from fxpipe.inspect.json_document import findings_document

        return json.dumps(findings_document(found), indent=2)
    return "\n\n".join([*_drawn_inputs_note(found), *(_answer_texts(found, request) or _plan_texts(found, out))])


def write_outputs(found: Findings, outputs: Sequence[OutputFile]) -> None:
    """The files that were asked for."""
    for output in outputs:
        _write_output(found, output.option, output.path)


def _write_output(found: Findings, option: str, path: Path) -> None:
    assert found.plan is not None
    assert found.simulation is not None
    title = os.path.basename(found.name)  # a picture is shown to others, who have other folders
    if option == "save":
        found.plan.save(path)
    elif option == "timeline":
        from fxpipe.viz.save_timeline import save_timeline

        schedule = found.simulation.schedule
        step = f"{schedule.name}, {count_text(schedule.micro_batches, 'micro-batch', 'es')}"
        save_timeline(found.simulation, path, title=f"{title}, {step}")
    elif option == "graph":
        from fxpipe.viz.stage_graph import save_graph

        save_graph(found.plan, path, title=title)
    else:
        from fxpipe.inspect.report import save_report

        plans = [row.plan for row in found.sweep if row.plan is not None and row.schedule == row.plan.schedule]
        save_report(found.plan, path, title=title, sweep=plans)


def _answer_texts(found: Findings, request: Request) -> list[str]:
    """Formats the answers to the questions that were asked."""
    texts = []
    if found.sweep:
        from fxpipe.inspect.sweep import sweep_table

        texts.append(sweep_table(found.sweep))
    if found.tuning is not None:
        texts.append(str(found.tuning))
    if found.difference is not None:
        from fxpipe.inspect.diff import difference_text

        texts.append(difference_text(found.difference, str(request.diff), str(request.subject)))
    return texts


def _plan_texts(found: Findings, out: TextIO) -> list[str]:
    from fxpipe.inspect.step_summary import device_table, step_text, summaries_text
    from fxpipe.plans.display import plan_table

    assert found.plan is not None
    assert found.simulation is not None
    timeline = _timeline_text(found.simulation, out)
    texts = [plan_table(found.plan), step_text(found.simulation, found.plan), timeline, device_table(found.simulation)]
    if len(found.schedules) > 1:
        texts.append(summaries_text(found.schedules))
    return texts


def _timeline_text(simulation: Simulation, out: TextIO) -> str:
    """Formats the timeline, as wide as the window, or as all that is printed here."""
    from fxpipe.utils.text_table import TEXT_WIDTH
    from fxpipe.viz.terminal import plain_timeline, shows_colours, timeline_text

    is_window = shows_colours(out) or out.isatty()
    return timeline_text(simulation, out) if is_window else plain_timeline(simulation, columns=TEXT_WIDTH)


def _drawn_inputs_note(found: Findings) -> list[str]:
    """Inputs that nobody gave: whoever reads the figures must know them."""
    if not found.drawn:
        return []
    return [f"inputs {', '.join(map(str, found.drawn))}, drawn; give others with --input"]
