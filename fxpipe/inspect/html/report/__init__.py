"""A report: all that is known of a plan as one HTML file, which needs nothing else, and asks nobody else for anything.

It is read by all whom the decision concerns, also by those who have no Python: it can be mailed, opened from a disk,
and printed. Without scripts it has all tables and pictures; scripts sort the tables, and show the step for other
numbers of micro-batches, which were simulated when it was written. A content security policy forbids the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fxpipe.drawing.pages import page_of
from fxpipe.drawing.svg import escaped
from fxpipe.files import check_path, write_whole
from fxpipe.inspect.html.report import sections
from fxpipe.inspect.html.report.steps import steps
from fxpipe.inspect.html.report.variants import by_chunks, by_schedule
from fxpipe.timelines import pages as timelines
from fxpipe.units import counted

if TYPE_CHECKING:
    from fxpipe.plans import Plan

__all__ = ["check_report_path", "report_of", "save_report"]

WHAT = "a report"


def save_report(plan: Plan, path: str | Path, *, title: str = "", sweep: Sequence[Plan] = ()) -> None:
    """Writes a report of the plan: one HTML page with all tables and pictures, and a slider for micro-batches.

        save_report(plan, "report.html", title="U-Net on four devices")

    Args:
        path: ends in `.html`.
        title: of the page, such as the model's name.
        sweep: plans of the same model for other numbers of devices, to compare with.

    Raises:
        ArgumentError: the path has another suffix, or (a `FileError`) cannot be written.
    """
    check_report_path(path)
    write_whole(path, report_of(plan, title=title, sweep=sweep).encode(), WHAT)


def check_report_path(path: str | Path) -> str:
    """Before there is a plan: raises as `save_report` would; writes nothing."""
    return check_path(path, ("html",), WHAT)


def report_of(plan: Plan, *, title: str = "", sweep: Sequence[Plan] = ()) -> str:
    """The text of the page."""
    import fxpipe

    chunked = by_chunks(plan)
    own = next(k for k, found in enumerate(chunked) if found.chunks == plan.micro_batches)
    compared = [(one, fxpipe.simulate(one)) for one in sorted(sweep, key=lambda one: len(one.workers))]
    parts = (
        ("step", "A step", steps(plan, chunked, own)),
        ("stages", "Stages", sections.stages(plan)),
        ("graph", "Graph", sections.graph(plan)),
        ("portals", "Portals", sections.portals(plan)),
        ("balance", "What bounds the balance", sections.balance(plan)),
        ("schedules", "Schedules", sections.schedules(plan, by_schedule(plan))),
        ("devices", "Numbers of devices", sections.sweep(compared)),
        ("tied", "Tied parameters", sections.tied(plan)),
        ("whole", "Modules kept whole", sections.whole(plan)),
        ("tracing", "How it was traced", sections.tracing(plan)),
        ("code", "Code of the stages", sections.stage_code(plan)),
    )
    heading = title or counted(len(plan.stages), "stage")
    links = "\n".join(f'<a href="#{name}">{escaped(label)}</a>' for name, label, body in parts if body)
    body = "\n".join(sections.section(name, label, body) for name, label, body in parts)
    content = f"""<header>
<h1>{escaped(heading)}</h1>
<p class="lead">{escaped(_lead(plan))}</p>
<nav aria-label="sections">
{links}
</nav>
</header>
<main>
{body}
</main>
<footer>{escaped(_foot(plan))}</footer>"""
    style, script = timelines.STYLE + _resource("page.css"), timelines.script() + _resource("page.js")
    return page_of(f"{heading}: pipeline", style, content, script)


def _lead(plan: Plan) -> str:
    modes = "/".join(sorted(set(plan.modes)))
    return (
        f"{counted(len(plan.stages), 'stage')} on {counted(len(plan.workers), 'device')}, "
        f"{counted(plan.micro_batches, 'micro-batch', 'es')} of {'' if plan.micro_batches == 1 else 'at most '}"
        f"{counted(plan.micro_batch, 'sample')}, schedule {plan.schedule.partition(':')[0]}, checkpoint {modes}, "
        f"balance {plan.balance}"
    )


def _foot(plan: Plan) -> str:
    from fxpipe import __version__

    source = f"estimates for {plan.estimated_for}" if plan.estimated_for else "measured"
    return f"Written by fxpipe {__version__}. Seconds of nodes are {source}; steps are simulated."


def _resource(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
