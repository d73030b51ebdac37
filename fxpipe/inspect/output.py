"""The output of the command: findings as text, as JSON and in files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from fxpipe.inspect.cli_options import (
    OUTPUT_NAMES,
    Request,
)
from fxpipe.inspect.gantt import save_timeline
from fxpipe.inspect.json_document import findings_document
from fxpipe.inspect.plan_text import plan_text
from fxpipe.inspect.report import save_report
from fxpipe.inspect.run import Findings
from fxpipe.inspect.stage_graph import save_graph
from fxpipe.inspect.step_summary import (
    device_text,
    one_device_text,
    packets_text,
    step_text,
    summaries_text,
    sweep_text,
)
from fxpipe.inspect.tuning_text import tuning_text
from fxpipe.simulation.timeline import timeline_text
from fxpipe.utils.text_table import text_width, wrap_text
from fxpipe.utils.units import count_text


def output_text(findings: Findings, request: Request) -> str:
    """Formats the printed output: the requested results or, by default, the plan and its step."""
    if request.code is not None:
        assert findings.plan is not None
        return findings.plan.stages[request.code].code
    if request.json:
        return json.dumps(findings_document(findings), indent=2)
    answers = _answer_texts(findings, request)
    shows_plan = not answers or (request.chooses_replicas and not request.tune)  # by an implicit tuning
    plan = _plan_texts(findings) if shows_plan else []
    return "\n\n".join([*_drawn_inputs_note(findings), *answers, *plan])


def write_outputs(findings: Findings, outputs: Mapping[str, Path]) -> list[str]:
    """Writes the requested files. Returns a line for each file, with its content and path."""
    lines = []
    for option, path in outputs.items():
        _write_output(findings, option, path)
        lines.append(f"wrote {OUTPUT_NAMES[option]} to {path}")
    return lines


def _write_output(findings: Findings, option: str, path: Path) -> None:
    assert findings.plan is not None
    assert findings.simulation is not None
    title = os.path.basename(findings.name)  # pictures are shared with people who have other folders
    if option == "save":
        findings.plan.save(path)
    elif option == "timeline":
        schedule = findings.simulation.schedule
        step = f"{schedule.name}, {count_text(schedule.micro_batches, 'micro-batch', 'es')}"
        save_timeline(findings.simulation, path, title=f"{title}, {step}")
    elif option == "graph":
        save_graph(findings.plan, path, title=title)
    else:
        plans = [row.plan for row in findings.sweep if row.plan is not None and row.schedule == row.plan.schedule]
        save_report(findings.plan, path, title=title, sweep=plans)


def _answer_texts(findings: Findings, request: Request) -> list[str]:
    texts = []
    if findings.sweep:
        texts.append(sweep_text(findings.sweep))
    if findings.tuning is not None:
        texts.append(tuning_text(findings.tuning, is_whole=request.all, remaining="--all shows"))
        texts += filter(None, [one_device_text(findings.tuning)])
    return texts


def _plan_texts(findings: Findings) -> list[str]:
    assert findings.plan is not None
    assert findings.simulation is not None
    texts = [
        plan_text(findings.plan),
        step_text(findings.simulation, findings.plan),
        timeline_text(findings.simulation, columns=text_width()),
        device_text(findings.simulation),
        *filter(None, [packets_text(findings.plan)]),
    ]
    if findings.plan.sizes:
        texts.append(findings.plan.compare_sizes())
    if len(findings.schedules) > 1:
        texts.append(summaries_text(findings.schedules))
    return texts


def _drawn_inputs_note(findings: Findings) -> list[str]:
    if not findings.drawn:
        return []
    return [wrap_text(f"inputs {', '.join(map(str, findings.drawn))}, drawn; give others with --input")]
