// What was clicked, in words; and the start of it all.

"use strict";

function place(box, trace, site, what) {
  if (site < 0 || !trace.sites[site] || !trace.sites[site][0]) return;
  const [file, line, text] = trace.sites[site];
  const row = add(box, "p");
  add(row, "span", `${what} at `, "where");
  add(row, "code", `${file}:${line}`);
  if (text) {
    add(row, "span", "  ");
    add(row, "code", text);
  }
}

function showPicked(trace, picked) {
  const box = element("details");
  box.replaceChildren();
  delete root.dataset.picked;
  if (!picked) {
    add(box, "p", "Click a bar or an arrow to see what it is and which line of code " +
      "it comes from.", "dim");
    return;
  }
  root.dataset.picked = picked.message >= 0 ? `m${picked.message}` : `c${picked.call}`;
  (picked.message >= 0 ? messageInWords : callInWords)(box, trace, picked);
}

function facts(box, count, tag, begin, end) {
  const tagged = tag ? `, tag ${tag}` : "";
  add(box, "p", `${bytes(count)}${tagged} · from ${duration(begin)} to ` +
    `${duration(end)}: ${duration(end - begin)}`);
}

function messageInWords(box, trace, { message }) {
  const m = trace.messages;
  add(add(box, "p"), "b", `message of rank ${m.src[message]} to rank ${m.dst[message]}`);
  facts(box, m.num_bytes[message], m.tag[message], m.start[message], m.end[message]);
  if (m.lost[message]) add(box, "p", "It was lost on its way and never arrived.");
  for (const [call, what] of [[m.sent, "sent"], [m.received, "received"]]) {
    if (call[message] >= 0) place(box, trace, trace.calls.site[call[message]], what);
  }
  if (m.sent[message] < 0) {
    add(box, "p", "This run kept no record of its calls: no line is known.", "dim");
  }
}

function callInWords(box, trace, { call }) {
  const c = trace.calls, label = trace.labels[c.label[call]];
  const head = add(box, "p");
  add(head, "b", `rank ${c.rank[call]}: ${label}`);
  add(head, "span", `  (call ${c.number[call]} of this rank)`, "where");
  const waited = c.ready[call] - c.start[call];
  const state = STATES[c.state[call]];
  if (state === "waiting") {
    add(box, "p", `began at ${duration(c.start[call])} and waits forever`);
  } else {
    facts(box, c.num_bytes[call], c.tag[call], c.start[call], c.end[call]);
  }
  if (state === "failed") add(box, "p", "failed, or was refused");
  if (state === "posted") add(box, "p", "returned at once; the transfer goes on");
  if (state === "done" && waited > 0) {
    const last = c.last[call];
    const whom = last >= 0 ? `rank ${c.rank[last]}` : "the other side";
    add(box, "p", `of these, ${duration(waited)} waiting for ${whom}`);
  }
  place(box, trace, c.site[call], "called");
}

// ── with very many ranks ────────────────────────────────────────────────────────────

function goTo(box, first, last) {
  const button = add(box, "button", `look at ranks ${first} to ${last}`);
  button.addEventListener("click", () => showRanks(first, last));
}

/** The ranks round `rank` that make a readable picture of lanes. */
function around(rank) {
  const first = Math.max(0, rank - (rank % 32));
  return [first, Math.min(first + 31, ranksOf() - 1)];
}

function showSpot(panel, rank, time) {
  const { trace } = panel, { rows, parts, moving, waiting, stuck } = trace.overview;
  const box = element("details");
  const row = Math.floor(rank / Math.ceil(trace.ranks / rows));
  const part = Math.max(0, Math.min(parts - 1, Math.floor((time / trace.end) * parts)));
  const at = row * parts + part, percent = (share) => `${Math.round(share / 2.55)} %`;
  box.replaceChildren();
  add(add(box, "p"), "b", `rank ${rank}, about ${duration(time)}`);
  add(box, "p", `moves data ${percent(moving[at])} of the time, waits ` +
    `${percent(waiting[at])}${stuck[at] ? " and then forever" : ""}`);
  goTo(box, ...around(rank));
  root.dataset.picked = `r${rank}`;
}

function showCell(panel, event) {
  const cell = cellAt(panel, event.offsetX, event.offsetY), box = element("details");
  const name = (rank) =>
    cell.group === 1 ? `rank ${rank}` : `ranks ${rank} to ${rank + cell.group - 1}`;
  box.replaceChildren();
  add(add(box, "p"), "b", `${name(cell.src)} → ${name(cell.dst)}`);
  add(box, "p", cell.bytes ? `${bytes(cell.bytes)} in all` : "nothing was sent");
  goTo(box, ...around(cell.src));
  root.dataset.picked = `g${cell.src}-${cell.dst}`;
}

// ── the start ───────────────────────────────────────────────────────────────────────

function tools() {
  const on = (id, action) => element(id).addEventListener("click", action);
  on("steps", () => setClock("steps"));
  on("seconds", () => setClock("seconds"));
  on("path", () => { view.path = !view.path; redraw(); });
  on("closer", () => zoom(0.6));
  on("farther", () => zoom(1 / 0.6));
  on("whole", () => {
    look(0, fullTime());
    showRanks(0, ranksOf() - 1);
  });
  on("up", () => showRanks(2 * view.first - view.last - 1, view.first - 1));
  on("down", () => showRanks(view.last + 1, 2 * view.last - view.first + 1));
  element("ranks").addEventListener("change", (event) => readRanks(event.target.value));
  addEventListener("resize", redraw);
  addEventListener("hashchange", readAddress);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  element("tools").hidden = false;
  element("steps").disabled = !panels.every((panel) => panel.trace.steps);
  element("path").hidden = !panels.some((panel) => panel.trace.path.length);
  for (const id of ["up", "down"]) element(id).hidden = ranksOf() <= 8;
}

function readRanks(text) {
  const [, first, last] = /^\s*(\d+)(?:\s*[-–]\s*(\d+))?\s*$/.exec(text) || [];
  if (first !== undefined) showRanks(+first, +(last ?? first));
}

/** `#clock=steps&zoom=0.2,0.4&ranks=0-63&path=1&select=m12`: a view as an address. */
function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (["steps", "seconds"].includes(wanted.get("clock"))) {
    if (wanted.get("clock") === "seconds" || !element("steps").disabled) {
      view.clock = wanted.get("clock");
    }
    look(0, fullTime());
  }
  const [from, to] = (wanted.get("zoom") || "").split(",").map(Number);
  if (to > from) look(from * fullTime(), to * fullTime());
  readRanks(wanted.get("ranks") || "");
  if (wanted.get("path")) view.path = wanted.get("path") === "1";
  const [, kind, row] = /^([mc])(\d+)$/.exec(wanted.get("select") || "") || [];
  const trace = panels[0].trace, rows = kind === "m" ? trace.messages : trace.calls;
  if (kind && +row < rows.length) {
    pick({ panel: 0, message: kind === "m" ? +row : -1, call: kind === "c" ? +row : -1 });
  }
}

async function main() {
  const packed = JSON.parse(element("trace-data").textContent);
  for (const one of packed.traces) {
    panels.push(makePanel(await unpack(one), panels.length));
  }
  view.last = ranksOf() - 1;
  tools();
  view.clock = packed.clock;
  view.to = fullTime();
  showPicked(null, null);
  readAddress();
  draw();
  root.dataset.readyMs = performance.now().toFixed(0);
}

main().catch((error) => {
  element("details").textContent = `The picture cannot be drawn here (${error}). ` +
    "Everything it shows is below, in words.";
});
