"use strict";
// A timeline whose time axis can be zoomed and moved. The picture is there without this script; what stands on the axis
// is drawn anew for the part of the step that is seen: boxes with their names where there is room, and round ticks.
for (const figure of document.querySelectorAll("figure.timeline")) (() => {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg"), NS = svg.namespaceURI;
  const width = data.right - data.left, part = (name) => svg.querySelector(`g.time g.${name}`);
  const make = (tag, attributes, text) => {
    const element = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // -- the parts that move, behind a window ---------------------------------------------------------------------------
  const id = `window-${Math.random().toString(36).slice(2)}`;
  const pane = make("clipPath", { id });
  pane.append(make("rect", { x: data.left, y: 0, width, height: data.bottom + 4 }));
  svg.append(pane);
  const windowed = make("g", { "clip-path": `url(#${id})` });
  const still = part("boxes"), names = part("names"), ticks = part("ticks"), memory = part("memory");
  const zoomed = make("g", {}); // boxes made for what is seen, in place of the picture's own
  still.before(windowed);
  windowed.append(still, zoomed, names, ...(memory ? [memory] : []));
  for (const line of windowed.querySelectorAll("polyline, rect")) line.setAttribute("vector-effect", "non-scaling-stroke");
  for (const title of svg.querySelectorAll("g.boxes title, g.memory title")) title.remove(); // the tip tells more
  for (const title of svg.querySelectorAll(":scope > title")) title.remove(); // aria-label has it
  const asDrawn = names.innerHTML, ticksAsDrawn = ticks.innerHTML;

  // -- what is seen: the seconds from `from` to `to` ------------------------------------------------------------------
  let from = 0, to = data.seconds;
  let shortest = data.seconds;
  for (const row of data.rows) for (const [, , , start, end] of row) if (end > start) shortest = Math.min(shortest, end - start);
  const closest = Math.max(shortest / 2, data.seconds * 1e-7);
  const x = (time) => data.left + (time - from) / (to - from) * width;
  const look = (start, length) => {
    length = Math.min(data.seconds, Math.max(closest, length));
    from = Math.min(Math.max(0, start), data.seconds - length);
    to = from + length;
    draw();
  };
  const zoom = (factor, at) => look(at - (at - from) * factor, (to - from) * factor);

  const firstSeen = (row) => { // the first span that ends behind the left edge
    let low = 0, high = row.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row[middle][4] <= from) low = middle + 1; else high = middle;
    }
    return low;
  };
  const seen = () => {
    const found = [];
    data.rows.forEach((row, device) => {
      for (let k = firstSeen(row); k < row.length && row[k][3] < to; k++) found.push([device, row[k]]);
    });
    return found;
  };

  const draw = () => {
    const isWhole = from === 0 && to === data.seconds;
    const scale = data.seconds / (to - from), shift = data.left - (data.left + from / data.seconds * width) * scale;
    const transform = `translate(${shift} 0) scale(${scale} 1)`;
    still.setAttribute("transform", transform);
    if (memory) memory.setAttribute("transform", transform);
    figure.classList.toggle("zoomed", !isWhole);
    zoomed.replaceChildren();
    if (isWhole) {
      still.style.display = "";
      names.innerHTML = asDrawn;
      ticks.innerHTML = ticksAsDrawn;
      return;
    }
    const found = seen();
    const isDrawn = found.length <= data.most;
    still.style.display = isDrawn ? "none" : "";
    names.replaceChildren();
    if (isDrawn) for (const [device, span] of found) box(device, span);
    drawTicks();
  };

  const box = (device, [kind, stage, batch, start, end, receiving]) => {
    const y = data.top + device * data.pitch, look = data.kinds[kind];
    const left = Math.max(data.left - 2, x(start)), middle = Math.max(left, x(start + receiving));
    const right = Math.min(data.right + 2, Math.max(x(end), x(start) + 1));
    if (receiving && middle > left) {
      zoomed.append(make("rect", { x: left, y, width: Math.min(middle, right) - left, height: data.height, fill: data.receiving }));
    }
    if (right <= middle) return;
    const rim = right - middle >= 5 ? { stroke: "#fff" } : {};
    zoomed.append(make("rect", { x: middle, y, width: right - middle, height: data.height, fill: look.fill, ...rim }));
    const size = Math.min(11, data.height * 0.68);
    const name = data.loops ? `${stage}${look.letter}${batch}` : `${look.letter}${batch}`;
    if (size < 5 || right - middle < name.length * 0.68 * size + 3) return;
    const at = { x: (middle + right) / 2, y: y + data.height / 2 + size * 0.36, "font-size": size, fill: look.ink };
    names.append(make("text", { ...at, "text-anchor": "middle" }, name));
  };

  // -- numbers --------------------------------------------------------------------------------------------------------
  const units = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
  const unitOf = (seconds) => units.find(([size]) => size <= seconds * 1.0005) || units[3];
  const duration = (seconds) => {  // as fxpipe.units.human_seconds
    if (seconds >= 120) {
      const all = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
      const minutes = Math.floor(all / 60);
      return minutes >= 120 ? `${Math.floor(minutes / 60)}:${pad(minutes % 60)}:${pad(all % 60)} h` : `${minutes}:${pad(all % 60)} min`;
    }
    if (seconds >= 10) return `${seconds.toFixed(1)} s`;
    const ms = seconds * 1e3;
    return `${ms.toFixed(ms >= 100 ? 0 : ms >= 10 ? 1 : ms >= 1 ? 2 : 3)} ms`;
  };
  const drawTicks = () => {
    const least = (to - from) / Math.max(1, Math.floor(width / 110)), power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= least * (1 - 1e-9));
    const [size, unit] = unitOf(to), places = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
    ticks.replaceChildren();
    for (let k = Math.ceil(from / step - 1e-9); k * step <= to * (1 + 1e-12); k++) {
      const at = x(k * step);
      for (const [top, bottom] of data.grid) ticks.append(make("polyline", { points: `${at},${top} ${at},${bottom}`, stroke: "#e3e3e3" }));
      const text = k ? `${(k * step / size).toFixed(places)} ${unit}` : "0";
      ticks.append(make("text", { x: at, y: data.axis, "font-size": 9, fill: "#6b6b6b", "text-anchor": "middle" }, text));
    }
  };

  // -- pointer, wheel and keys ----------------------------------------------------------------------------------------
  const place = (event) => { // in the picture's points
    const area = svg.getBoundingClientRect();
    return [(event.clientX - area.left) / area.width * data.width, (event.clientY - area.top) / area.height * data.depth];
  };
  const isInside = ([px, py]) => px >= data.left && px <= data.right && py >= data.top - 4 && py <= data.bottom;
  const timeAt = (px) => from + (px - data.left) / width * (to - from);

  svg.addEventListener("wheel", (event) => {
    const at = place(event);
    if (!isInside(at) || !data.seconds) return;
    const isZoom = event.ctrlKey || event.metaKey || data.wheel;
    const across = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (Math.abs(across) > Math.abs(event.deltaY) || event.shiftKey) {
      event.preventDefault();
      look(from + across / 800 * (to - from), to - from);
    } else if (isZoom && (event.deltaY < 0 || to - from < data.seconds)) { // zoomed out, the page scrolls on
      event.preventDefault();
      zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * 0.002))), timeAt(at[0]));
    }
  }, { passive: false });

  let grip = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button || !isInside(place(event))) return;
    grip = { id: event.pointerId, x: place(event)[0], from };
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (grip && grip.id === event.pointerId) look(grip.from - (place(event)[0] - grip.x) / width * (to - from), to - from);
    showTip(event);
  });
  for (const end of ["pointerup", "pointercancel"]) svg.addEventListener(end, () => { grip = null; });
  svg.addEventListener("dblclick", (event) => { if (isInside(place(event))) look(0, data.seconds); });
  figure.addEventListener("keydown", (event) => {
    const length = to - from, middle = (from + to) / 2;
    const act = {
      "+": () => zoom(0.7, middle), "=": () => zoom(0.7, middle), "-": () => zoom(1 / 0.7, middle),
      "0": () => look(0, data.seconds),
      ArrowLeft: () => look(from - length / 8, length), ArrowRight: () => look(from + length / 8, length),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });

  // -- the tip --------------------------------------------------------------------------------------------------------
  const tip = figure.querySelector(".tip");
  const spanAt = ([px, py]) => {
    const device = Math.floor((py - data.top) / data.pitch), row = data.rows[device];
    if (!row || px < data.left || px > data.right || py - data.top - device * data.pitch > data.height) return null;
    const time = timeAt(px), slack = 0.5 / width * (to - from);
    return row.find(([, , , start, end]) => start <= time + (end > start ? 0 : slack) && time <= end + (end > start ? 0 : slack)) || null;
  };
  const showTip = (event) => {
    const span = spanAt(place(event));
    tip.hidden = !span;
    if (!span) return;
    const [kind, stage, batch, start, end, receiving] = span;
    const copied = receiving ? `, ${duration(receiving)} of it receiving` : "";
    tip.textContent = `${data.kinds[kind].name}, stage ${stage}, micro-batch ${batch}: ${duration(end - start)} from ${duration(start)}${copied}`;
    const area = figure.getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(event.clientX - area.left + 12, area.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${event.clientY - area.top + 16}px`;
  };
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  figure.querySelector(".help").hidden = false;
})();
