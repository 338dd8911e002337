// The page: what is shown, and what the mouse, the keys and the address change of it.

"use strict";

const LANES = 96; // more ranks than these at once are a heat map
const view = { clock: "seconds", from: 0, to: 1, first: 0, last: 0, path: false, picked: null };
const panels = [];
const root = document.documentElement;
const element = (id) => document.getElementById(id);

function add(parent, tag, text = "", className = "") {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (className) made.className = className;
  parent.append(made);
  return made;
}

// ── what there is to see ────────────────────────────────────────────────────────────

const ranksOf = () => Math.max(...panels.map((p) => p.trace.ranks));
const fullTime = () => Math.max(
  ...panels.map((p) => (view.clock === "steps" ? p.trace.steps * 100 : p.trace.end)), 1,
);
const isOverview = (panel) =>
  panel.trace.overview && view.last - view.first + 1 > LANES;

function makePanel(trace, number) {
  const box = add(element("panels"), "section", "", "panel");
  if (trace.title) {
    const head = add(box, "h2", `${trace.title} `);
    add(head, "span", trace.sentence);
  }
  const row = add(box, "div", "", "row");
  const main = add(add(row, "figure", "", "wide"), "canvas", "", "main");
  main.tabIndex = 0;
  main.setAttribute("role", "application");
  main.setAttribute("aria-label", `${trace.title || "the run"}: ${trace.sentence}. ` +
    "Arrow keys move, plus and minus zoom, n and p go from call to call.");
  const strip = add(main.parentNode, "canvas");
  strip.className = "strip";
  const panel = { number, trace, main, strip, shown: [], hidden: 0 };
  if (trace.overview) {
    panel.caption = add(main.parentNode, "figcaption", "Each row is a rank. The bluer " +
      "it is, the more of that time data moves there; yellow: it waits. Click for a " +
      "closer look.");
    const side = add(row, "figure", "", "side");
    panel.matrix = add(side, "canvas", "", "matrix");
    panel.matrix.width = panel.matrix.height = 256;
    panel.side = side;
    add(side, "figcaption", "Who sent how much to whom: a row for each sender, a " +
      "column for each receiver. Click for figures.");
    panel.matrix.addEventListener("click", (event) => showCell(panel, event));
  }
  listen(panel);
  return panel;
}

/** Fit a canvas to its place on the page and to the screen's points. */
function fit(canvas, high) {
  const scale = window.devicePixelRatio || 1, wide = canvas.parentNode.clientWidth;
  canvas.style.width = `${wide}px`;
  canvas.style.height = `${high}px`;
  canvas.width = Math.round(wide * scale);
  canvas.height = Math.round(high * scale);
  const ctx = canvas.getContext("2d");
  ctx.scale(scale, scale);
  return [ctx, wide];
}

function draw() {
  const started = performance.now(), colors = colorsNow();
  for (const panel of panels) {
    const heat = isOverview(panel), count = view.last - view.first + 1;
    if (panel.side) panel.side.hidden = panel.caption.hidden = !heat;
    const lane = heat ? 560 / count : laneHeight(count, panels.length);
    panel.height = Math.round(AXIS + lane * count + 6);
    [panel.ctx, panel.width] = fit(panel.main, panel.height);
    panel.frame = frameOf(view, panel.width, lane);
    (heat ? drawHeat : drawLanes)(panel, view, colors);
    panel.strip.hidden = view.clock === "steps";
    [panel.stripCtx] = fit(panel.strip, 46);
    if (view.clock !== "steps") drawStrip(panel, view, colors);
    if (heat) drawMatrix(panel, colors);
  }
  report(performance.now() - started);
}

/** Say in words, and where a program can read it, what is shown. */
function report(ms) {
  const hidden = panels.reduce((sum, panel) => sum + panel.hidden, 0);
  element("hidden").textContent = hidden
    ? `${hidden.toLocaleString("en")} messages here: zoom in to see them.` : "";
  element("ranks").value = `${view.first}-${view.last}`;
  for (const [id, on] of [
    ["steps", view.clock === "steps"], ["seconds", view.clock === "seconds"],
    ["path", view.path],
  ]) element(id).setAttribute("aria-pressed", String(on));
  Object.assign(root.dataset, {
    ready: "yes", from: view.from, to: view.to, first: view.first, last: view.last,
    mode: isOverview(panels[0]) ? "overview" : "lanes", drawMs: ms.toFixed(1),
  });
}

let planned = false;
function redraw() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => { planned = false; draw(); });
}

// ── moving about ────────────────────────────────────────────────────────────────────

function look(from, to) {
  const full = fullTime(), least = view.clock === "steps" ? 50 : full * 1e-6;
  const span = Math.min(full, Math.max(least, to - from));
  view.from = Math.max(0, Math.min(from + (to - from - span) / 2, full - span));
  view.to = view.from + span;
  redraw();
}

function zoom(factor, centre = (view.from + view.to) / 2) {
  look(centre - (centre - view.from) * factor, centre + (view.to - centre) * factor);
}

function pan(share) {
  const by = (view.to - view.from) * share;
  const most = fullTime() - view.to;
  const step = Math.max(-view.from, Math.min(by, most));
  look(view.from + step, view.to + step);
}

function showRanks(first, last) {
  const most = ranksOf() - 1;
  view.first = Math.max(0, Math.min(first, most));
  view.last = Math.max(view.first, Math.min(last, most));
  redraw();
}

function setClock(clock) {
  if (view.clock === clock) return;
  view.clock = clock;
  look(0, fullTime());
}

function listen(panel) {
  const { main } = panel;
  let held = null;
  const at = (event) => {
    const box = main.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  main.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey) pan(Math.sign(event.deltaY || event.deltaX) * 0.15);
    else zoom(event.deltaY > 0 ? 1.25 : 0.8, panel.frame.time(at(event)[0]));
  }, { passive: false });
  main.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, moved: false, from: view.from, to: view.to };
    main.setPointerCapture(event.pointerId);
  });
  main.addEventListener("pointermove", (event) => {
    if (!held || Math.abs(event.clientX - held.x) < 3) return;
    held.moved = true;
    main.classList.add("drag");
    const perPoint = (held.to - held.from) / (panel.width - GUTTER - EDGE);
    const by = -(event.clientX - held.x) * perPoint;
    const step = Math.max(-held.from, Math.min(by, fullTime() - held.to));
    look(held.from + step, held.to + step);
  });
  main.addEventListener("pointerup", (event) => {
    const moved = held && held.moved;
    held = null;
    main.classList.remove("drag");
    if (!moved) clicked(panel, ...at(event));
  });
  main.addEventListener("keydown", (event) => key(panel, event));
}

function clicked(panel, x, y) {
  if (isOverview(panel)) {
    const rank = Math.max(0, Math.min(panel.trace.ranks - 1, panel.frame.rank(y)));
    showSpot(panel, rank, panel.frame.time(x));
    return;
  }
  pick(hit(panel, view, x, y));
}

function pick(picked) {
  view.picked = picked;
  showPicked(picked && panels[picked.panel].trace, picked);
  redraw();
}

const KEYS = {
  ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2),
  "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7),
  Home: () => look(0, fullTime()), 0: () => look(0, fullTime()),
  c: () => { view.path = !view.path; redraw(); },
  Escape: () => pick(null),
  ArrowDown: (panel) => walk(panel, 0, 1), ArrowUp: (panel) => walk(panel, 0, -1),
  n: (panel) => walk(panel, 1, 0), p: (panel) => walk(panel, -1, 0),
};

function key(panel, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key](panel);
}

/** From the picked call to the next one of its rank, or to the next rank. */
function walk(panel, calls, ranks) {
  const { trace } = panel, { firstCall } = trace;
  if (!trace.calls.length) return;
  const row = view.picked && view.picked.panel === panel.number ? view.picked.call : -1;
  const rank = row < 0 ? view.first : trace.calls.rank[row] + ranks;
  if (rank < view.first || rank > Math.min(view.last, trace.ranks - 1)) return;
  const wanted = row < 0 || ranks ? firstCall[rank] : row + calls;
  if (wanted < firstCall[rank] || wanted >= firstCall[rank + 1]) return;
  pick({ panel: panel.number, message: -1, call: wanted });
  const [begin, , end] = timesOfCall(trace, wanted, view.clock);
  if (begin < view.from || end > view.to) {
    const half = (view.to - view.from) / 2;
    look((begin + end) / 2 - half, (begin + end) / 2 + half);
  }
}
