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
