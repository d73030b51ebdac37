"""A timeline as a page of its own: the picture, and a script that zooms its time axis. Nothing comes from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fxpipe.scheduling.actions import ActionKind
from fxpipe.simulation.text_timeline import has_looped_stages
from fxpipe.simulation.timeline import StepTimeline
from fxpipe.utils import units
from fxpipe.utils.units import count_text, human_seconds
from fxpipe.viz.gantt import MAX_BOXES, Gantt, draw_gantt
from fxpipe.viz.html import (
    bytes_cell,
    html_page,
    notebook_fragment,
    notebook_heading,
    notebook_picture,
    notebook_table,
    number_cell,
    percent_cell,
    seconds_cell,
    text_cell,
)
from fxpipe.viz.style import KIND_COLOURS, RECEIVING_COLOUR, text_colour_on
from fxpipe.viz.svg import svg_of

DIGITS = 9  # of a second: a nanosecond
TIMELINE_BODY_STYLE = "body { margin: 8px; background: #fff; }\n"
TIMELINE_STYLE = """\
figure.timeline { position: relative; margin: 0; font: 13px/1.4 system-ui, sans-serif; color: #222; }
figure.timeline > svg { display: block; max-width: 100%; height: auto; touch-action: pan-y; }
figure.timeline g.time { cursor: grab; }
figure.timeline text { pointer-events: none; user-select: none; -webkit-user-select: none; }
figure.timeline .tip { position: absolute; z-index: 1; padding: 2px 8px; border-radius: 4px; background: #222;
  color: #fff; font-size: 12px; white-space: nowrap; pointer-events: none; }
figure.timeline .help { color: #5c6470; margin: 0 16px; }
figure.timeline [hidden] { display: none; }
figure.timeline:focus-visible { outline: 2px solid #0a5c99; outline-offset: 2px; }
@media print { figure.timeline .help, figure.timeline .tip { display: none; } }
"""


def timeline_page(step: StepTimeline, drawn: Gantt, title: str) -> str:
    """The text of an HTML file."""
    return html_page(
        title, TIMELINE_BODY_STYLE + TIMELINE_STYLE, timeline_figure(step, drawn, wheel=True), timeline_script()
    )


def timeline_figure(step: StepTimeline, drawn: Gantt, *, wheel: bool = False) -> str:
    """A `figure` element for any page that has `TIMELINE_STYLE` and, once behind all figures, `timeline_script()`.

    Args:
        wheel: the mouse wheel alone zooms; if not, it does with Ctrl, and alone scrolls the page.
    """
    keys = "the wheel" if wheel else "Ctrl and the wheel"
    return f"""<figure class="timeline" tabindex="0">
{svg_of(drawn.scene)}<p class="help" hidden>Zoom with {keys} or + and -; move by dragging or with the arrow keys; \
a double click or 0 shows all.</p>
<div class="tip" role="status" hidden></div>
<script type="application/json">{_json_in_page(_timeline_data(step, drawn, wheel))}</script>
</figure>"""


def timeline_script() -> str:
    """Returns the script for the end of a page with such figures."""
    return Path(__file__).with_name("timeline.js").read_text(encoding="utf-8")


def _timeline_data(step: StepTimeline, drawn: Gantt, wheel: bool) -> dict[str, Any]:
    """Collects the data that the script draws from; times in seconds, lengths in points of the picture."""
    kinds = list(ActionKind)
    rows = [
        [
            [
                kinds.index(span.action.kind),
                span.action.stage,
                span.action.micro_batch,
                *(round(time, DIGITS) for time in (span.start, span.end, span.receiving)),
            ]
            for span in row
        ]
        for row in step.rows
    ]
    return {
        "seconds": step.seconds,
        "width": drawn.scene.width,
        "depth": drawn.scene.height,
        "left": drawn.frame.left,
        "right": drawn.frame.right,
        "top": drawn.top,
        "pitch": drawn.pitch,
        "height": drawn.height,
        "bottom": drawn.bottom,
        "axis": drawn.axis,
        "grid": drawn.grid,
        "most": MAX_BOXES,
        "loops": has_looped_stages(step.spans),
        "wheel": wheel,
        "receiving": RECEIVING_COLOUR,
        "kinds": [
            {
                "letter": str(kind),
                "name": kind.words,
                "fill": KIND_COLOURS[kind],
                "ink": text_colour_on(KIND_COLOURS[kind]),
            }
            for kind in kinds
        ],
        "rows": rows,
    }


def _json_in_page(value: Any) -> str:
    """Formats JSON for a page: nothing in it ends the element that it stands in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# -- A step in notebooks ---------------------------------------------------------------------------------------------


def step_html(step: StepTimeline) -> str:
    """The timeline, and for each device its time and, of a simulation, its memory."""
    headers = ["device", "", "busy", "bubble", *(["most memory"] if step.memory else [])]
    rows = []
    for d, (name, busy, bubble) in enumerate(zip(step.devices, step.busy, step.bubble, strict=True)):
        memory = (bytes_cell(step.memory[d].peak),) if step.memory else ()
        rows.append((number_cell(d), text_cell(name), seconds_cell(busy), percent_cell(bubble), *memory))
    title = f"{step.schedule}: step {human_seconds(step.seconds)}, bubble {units.percent(step.mean_bubble)}"
    facts = (
        f"{'simulated' if step.is_simulated else 'measured'}: {count_text(step.stages, 'stage')}, "
        f"{count_text(step.micro_batches, 'micro-batch', 'es')}"
    )
    return notebook_fragment(
        [
            notebook_heading(title, facts),
            notebook_picture(svg_of(draw_gantt(step).scene)),
            notebook_table(headers, rows),
        ]
    )
