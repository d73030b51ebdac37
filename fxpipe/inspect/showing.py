"""What was found out, as text, as JSON and in files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fxpipe.inspect.files import Output
from fxpipe.inspect.finding import Findings
from fxpipe.inspect.request import Request
from fxpipe.units import counted

if TYPE_CHECKING:
    from fxpipe.simulation import Simulation


def shown(found: Findings, request: Request, out: TextIO) -> str:
    """What goes to `out`: the answer to what was asked; if nothing in particular, the plan and its step."""
    if request.code is not None:
        assert found.plan is not None
        return found.plan.stages[request.code].code
    if request.json:
        from fxpipe.inspect.tables.document import document

        return json.dumps(document(found), indent=2)
    return "\n\n".join([*_drawn(found), *(_answers(found, request) or _everything(found, out))])


def write_files(found: Findings, outputs: Sequence[Output]) -> None:
    """The files that were asked for."""
    for output in outputs:
        _write(found, output.option, output.path)


def _write(found: Findings, option: str, path: Path) -> None:
    assert found.plan is not None
    assert found.simulation is not None
    title = os.path.basename(found.name)  # a picture is shown to others, who have other folders
    if option == "save":
        found.plan.save(path)
    elif option == "timeline":
        from fxpipe.timelines.pictures import save_timeline

        schedule = found.simulation.schedule
        step = f"{schedule.name}, {counted(schedule.micro_batches, 'micro-batch', 'es')}"
        save_timeline(found.simulation, path, title=f"{title}, {step}")
    elif option == "graph":
        from fxpipe.inspect.lanes.saving import save_graph

        save_graph(found.plan, path, title=title)
    else:
        from fxpipe.inspect.html.report import save_report

        plans = [row.plan for row in found.sweep if row.plan is not None and row.schedule == row.plan.schedule]
        save_report(found.plan, path, title=title, sweep=plans)


def _answers(found: Findings, request: Request) -> list[str]:
    """To questions that were asked."""
    texts = []
    if found.sweep:
        from fxpipe.inspect.tables.sweep_text import sweep_table

        texts.append(sweep_table(found.sweep))
    if found.tuning is not None:
        texts.append(str(found.tuning))
    if found.difference is not None:
        from fxpipe.inspect.tables.diff_text import difference_text

        texts.append(difference_text(found.difference, str(request.diff), str(request.subject)))
    return texts


def _everything(found: Findings, out: TextIO) -> list[str]:
    from fxpipe.inspect.tables.steps import device_table, runs_text, step_text
    from fxpipe.plans.text import plan_table

    assert found.plan is not None
    assert found.simulation is not None
    timeline = _timeline(found.simulation, out)
    texts = [plan_table(found.plan), step_text(found.simulation, found.plan), timeline, device_table(found.simulation)]
    if len(found.schedules) > 1:
        texts.append(runs_text(found.schedules))
    return texts


def _timeline(simulation: Simulation, out: TextIO) -> str:
    """As wide as the window, or as all that is printed here."""
    from fxpipe.drawing.columns import WIDTH
    from fxpipe.timelines.terminal import plain, shows_colours, timeline_text

    is_window = shows_colours(out) or out.isatty()
    return timeline_text(simulation, out) if is_window else plain(simulation, columns=WIDTH)


def _drawn(found: Findings) -> list[str]:
    """Inputs that nobody gave: whoever reads the figures must know them."""
    if not found.drawn:
        return []
    return [f"inputs {', '.join(map(str, found.drawn))}, drawn; give others with --input"]
