"""A page around one picture, which can be dragged and zoomed: with mouse and wheel, fingers, or keys."""

from __future__ import annotations

from fxpipe.inspect.svg import escaped

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

STYLE = """\
:root { color-scheme: light dark; }
html, body { height: 100%; margin: 0; background: #fff; font: 13px/1.4 system-ui, sans-serif; }
#view { height: 100%; overflow: auto; }
#view > svg { display: block; margin: 0 auto; max-width: 100%; height: auto; }
.moves #view { overflow: hidden; cursor: grab; touch-action: none; }
.moves #view:active { cursor: grabbing; }
.moves #view > svg { width: 100%; height: 100%; max-width: none; }
#view:focus-visible { outline: 2px solid #0a5c99; outline-offset: -2px; }
#help { position: fixed; right: 12px; bottom: 10px; padding: 2px 8px; border-radius: 4px; color: #5c6470;
  background: #fffc; }
@media (prefers-color-scheme: dark) { html { filter: invert(0.9) hue-rotate(180deg); } }
@media print { #help { display: none; } }
"""

SCRIPT = """\
"use strict";
// The part of the picture that is seen is the view box: to move it is to drag, to shrink it is to zoom in.
const view = document.getElementById("view");
const svg = view.querySelector("svg");
const whole = svg.viewBox.baseVal;
const all = { x: whole.x, y: whole.y, width: whole.width, height: whole.height };
document.documentElement.classList.add("moves");
document.getElementById("help").hidden = false;
svg.setAttribute("preserveAspectRatio", "xMidYMin meet");

let box;
const set = (x, y, width, height) => {
  box = { x, y, width, height };
  svg.setAttribute("viewBox", `${x} ${y} ${width} ${height}`);
};
const points = () => box.width / svg.clientWidth; // of the picture, for a pixel
const home = () => { // as wide as the window, from the top: a high picture is scrolled
  const width = Math.max(all.width, Math.min(svg.clientWidth, 1.25 * all.width));
  set(all.x - (width - all.width) / 2, all.y, width, width * svg.clientHeight / svg.clientWidth);
};
const move = (right, down) => set(box.x + right, box.y + down, box.width, box.height);
const zoom = (factor, clientX, clientY) => {
  const width = Math.min(4 * Math.max(all.width, all.height), Math.max(all.width / 60, box.width * factor));
  const by = width / box.width, area = svg.getBoundingClientRect();
  const across = (clientX - area.left) / area.width, down = (clientY - area.top) / area.height;
  set(box.x + across * box.width * (1 - by), box.y + down * box.height * (1 - by), width, box.height * by);
};
const middle = () => [svg.clientWidth / 2, svg.clientHeight / 2];

view.addEventListener("wheel", (event) => {
  event.preventDefault();
  if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * 0.01), event.clientX, event.clientY);
  else if (event.shiftKey) move((event.deltaX + event.deltaY) * points(), 0);
  else move(event.deltaX * points(), event.deltaY * points());
}, { passive: false });

const held = new Map(); // fingers, or the mouse
view.addEventListener("pointerdown", (event) => {
  held.set(event.pointerId, event);
  view.setPointerCapture(event.pointerId);
});
for (const name of ["pointerup", "pointercancel"]) {
  view.addEventListener(name, (event) => held.delete(event.pointerId));
}
view.addEventListener("pointermove", (event) => {
  const before = held.get(event.pointerId);
  if (!before) return;
  const others = [...held.values()].filter((other) => other.pointerId !== event.pointerId);
  held.set(event.pointerId, event);
  if (others.length === 0) {
    move((before.clientX - event.clientX) * points(), (before.clientY - event.clientY) * points());
  } else {
    const apart = (one) => Math.hypot(one.clientX - others[0].clientX, one.clientY - others[0].clientY) || 1;
    const x = (event.clientX + others[0].clientX) / 2, y = (event.clientY + others[0].clientY) / 2;
    zoom(apart(before) / apart(event), x, y);
  }
});
view.addEventListener("dblclick", (event) => zoom(0.5, event.clientX, event.clientY));

view.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const step = 60 * points(), page = 0.9 * box.height;
  const keys = {
    ArrowLeft: () => move(-step, 0), ArrowRight: () => move(step, 0), ArrowUp: () => move(0, -step),
    ArrowDown: () => move(0, step), PageUp: () => move(0, -page), PageDown: () => move(0, page),
    "+": () => zoom(0.8, ...middle()), "=": () => zoom(0.8, ...middle()), "-": () => zoom(1.25, ...middle()),
    "0": home, Home: home,
  };
  if (keys[event.key]) {
    event.preventDefault();
    keys[event.key]();
  }
});

home();
let known = [svg.clientWidth, svg.clientHeight];
addEventListener("resize", () => { // the same scale in the new window
  const scale = box.width / known[0];
  known = [svg.clientWidth, svg.clientHeight];
  set(box.x, box.y, scale * known[0], scale * known[1]);
});
view.focus();
"""


def page_of(svg: str, title: str) -> str:
    """The page: without scripts the picture as wide as the window."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escaped(title)}</title>
<style>
{STYLE}</style>
</head>
<body>
<div id="view" tabindex="0">
{svg}</div>
<div id="help" hidden>drag to move, Ctrl + wheel or + and − to zoom, 0 to begin again</div>
<script>
{SCRIPT}</script>
</body>
</html>
"""
