"""A timeline as a page of its own: the picture, and a script that zooms its time axis. Nothing comes from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fxpipe.drawing.colours import KINDS, RECEIVING, letters_on
from fxpipe.drawing.pages import page_of
from fxpipe.drawing.svg import svg_of
from fxpipe.scheduling.actions import Kind
from fxpipe.timelines.boxes import MOST_BOXES
from fxpipe.timelines.gantt import Gantt
from fxpipe.timelines.steps import Step
from fxpipe.timelines.text import has_loops

DIGITS = 9  # of a second: a nanosecond
BODY = "body { margin: 8px; background: #fff; }\n"
STYLE = """\
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


def timeline_page(step: Step, drawn: Gantt, title: str) -> str:
    """The text of an HTML file."""
    return page_of(title, BODY + STYLE, timeline_figure(step, drawn, wheel=True), script())


def timeline_figure(step: Step, drawn: Gantt, *, wheel: bool = False) -> str:
    """A `figure` element for any page that has `STYLE` and, once behind all figures, `script()`.

    Args:
        wheel: the mouse wheel alone zooms; if not, it does with Ctrl, and alone scrolls the page.
    """
    keys = "the wheel" if wheel else "Ctrl and the wheel"
    return f"""<figure class="timeline" tabindex="0">
{svg_of(drawn.scene)}<p class="help" hidden>Zoom with {keys} or + and -; move by dragging or with the arrow keys; \
a double click or 0 shows all.</p>
<div class="tip" role="status" hidden></div>
<script type="application/json">{_json(_data(step, drawn, wheel))}</script>
</figure>"""


def script() -> str:
    """For the end of a page with such figures."""
    return Path(__file__).with_name("timeline.js").read_text(encoding="utf-8")


def _data(step: Step, drawn: Gantt, wheel: bool) -> dict[str, Any]:
    """What the script draws from; times in seconds, lengths in points of the picture."""
    kinds = list(Kind)
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
        "most": MOST_BOXES,
        "loops": has_loops(step.spans),
        "wheel": wheel,
        "receiving": RECEIVING,
        "kinds": [
            {"letter": str(kind), "name": kind.words, "fill": KINDS[kind], "ink": letters_on(KINDS[kind])}
            for kind in kinds
        ],
        "rows": rows,
    }


def _json(value: Any) -> str:
    """Within a page: nothing in it ends the element that it stands in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
