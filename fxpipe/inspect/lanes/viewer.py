"""A page around one picture, which can be dragged and zoomed: with mouse and wheel, fingers, or keys."""

from __future__ import annotations

from pathlib import Path

from fxpipe.drawing.pages import page_of

STYLE = """\
:root { color-scheme: light dark; }
html, body { height: 100%; margin: 0; background: #fff; font: 13px/1.4 system-ui, sans-serif; }
#view { height: 100%; overflow: auto; }
#view > svg { display: block; margin: 0 auto; max-width: 100%; height: auto; }
.moves #view { overflow: hidden; cursor: grab; touch-action: none; }
.moves #view:active { cursor: grabbing; }
.moves #view > svg { width: 100%; height: 100%; max-width: none; }
#view:focus { outline: none; } /* nothing else here has the focus */
#help { position: fixed; right: 12px; bottom: 10px; padding: 2px 8px; border-radius: 4px; color: #5c6470;
  background: #fffc; }
@media (prefers-color-scheme: dark) { html { filter: invert(0.9) hue-rotate(180deg); } }
@media print { #help { display: none; } }
"""


HELP = "drag to move, Ctrl + wheel or + and − to zoom, 0 to begin again"


def viewer_page(svg: str, title: str) -> str:
    """The page: without scripts the picture as wide as the window."""
    body = f'<div id="view" tabindex="0">\n{svg}</div>\n<div id="help" hidden>{HELP}</div>'
    return page_of(title, STYLE, body, Path(__file__).with_name("viewer.js").read_text(encoding="utf-8"))
