// What goes from lane to lane: messages, those that never come, the critical path.

"use strict";

/** The two ends of a message on the screen. */
function endsOf(panel, view, row) {
  const { trace, frame } = panel, m = trace.messages;
  const [begin, end] = timesOfMessage(trace, row, view.clock);
  const down = m.dst[row] > m.src[row] ? 1 : -1;
  const edge = (frame.bar / 2) * (frame.lane > 20 ? down : 0);
  return [
    frame.x(begin), frame.y(m.src[row]) + edge, frame.x(end), frame.y(m.dst[row]) - edge,
  ];
}

function drawMessages(panel, view, colors) {
  const { trace, ctx } = panel;
  const rows = messagesBetween(trace, view);
  panel.shown = rows.length <= LINES ? rows : [];
  panel.hidden = rows.length - panel.shown.length;
  if (rows.length > ARROWS) {
    ctx.strokeStyle = colors.message;
    ctx.globalAlpha = rows.length > 4 * ARROWS ? 0.2 : 0.4;
    ctx.lineWidth = 1;
    ctx.beginPath();
    for (const row of panel.shown) {
      const [x, y, toX, toY] = endsOf(panel, view, row);
      ctx.moveTo(x, y);
      ctx.lineTo(toX, toY);
    }
    ctx.stroke();
    ctx.globalAlpha = 1;
    return;
  }
  const thick = rows.length > 300 ? 1 : rows.length > 60 ? 1.5 : 2.2;
  for (const row of rows) {
    const ends = endsOf(panel, view, row);
    if (trace.messages.lost[row]) lost(ctx, ...ends, colors.stuck, thick);
    else arrow(ctx, ...ends, colors.message, thick);
  }
}

/** A message that went under on its way: half of it, and a cross. */
function lost(ctx, x, y, toX, toY, color, thick) {
  const midX = (x + toX) / 2, midY = (y + toY) / 2;
  ctx.strokeStyle = color;
  ctx.lineWidth = thick;
  ctx.setLineDash([5, 4]);
  ctx.beginPath();
  ctx.moveTo(x, y);
  ctx.lineTo(midX, midY);
  ctx.stroke();
  ctx.setLineDash([]);
  ctx.lineWidth = 2.5;
  ctx.beginPath();
  for (const side of [-5, 5]) {
    ctx.moveTo(midX - 5, midY - side);
    ctx.lineTo(midX + 5, midY + side);
  }
  ctx.stroke();
}

function arrow(ctx, x, y, toX, toY, color, thick) {
  const length = Math.hypot(toX - x, toY - y) || 1;
  const size = Math.min(4 + 2 * thick, length / 2);
  const ux = (toX - x) / length, uy = (toY - y) / length;
  const baseX = toX - ux * size, baseY = toY - uy * size;
  ctx.strokeStyle = ctx.fillStyle = color;
  ctx.lineWidth = thick;
  ctx.beginPath();
  ctx.moveTo(x, y);
  ctx.lineTo(baseX, baseY);
  ctx.stroke();
  ctx.beginPath();
  ctx.moveTo(toX, toY);
  ctx.lineTo(baseX - uy * size * 0.5, baseY + ux * size * 0.5);
  ctx.lineTo(baseX + uy * size * 0.5, baseY - ux * size * 0.5);
  ctx.fill();
}

/** The messages that are waited for and never come: in red, in the time after both its sides began. */
function drawNever(panel, view, colors) {
  const { trace, ctx, frame } = panel;
  const shown = trace.never.filter(
    ([src, dst]) => [src, dst].every((r) => r >= view.first && r <= view.last),
  );
  const label = frame.lane > 40 ? 210 : 24; // room for the words above the bars
  shown.slice(0, 200).forEach(([src, dst, begun, beginStep, circle, given], index) => {
    const begin = Math.max(frame.x(view.clock === "steps" ? beginStep : begun), GUTTER);
    const first = Math.max(begin + 8, Math.min(begin + label, frame.right - 240));
    const room = Math.max(frame.right - 130 - first, 30);
    const apart = Math.min(190, Math.max(61, room / shown.length));
    const x = first + ((index * apart) % room);
    const down = dst > src ? 1 : -1, edge = (frame.bar / 2) * down;
    const y = frame.y(src) + edge, toY = frame.y(dst) - edge;
    const toX = Math.min(x + 40, frame.right - 6);
    ctx.setLineDash(circle ? [] : [7, 6]);
    arrow(ctx, x, y, toX, toY, colors.stuck, frame.lane > 20 ? 3 : 1.5);
    ctx.setLineDash([]);
    if (frame.lane < 40 || apart < 100) return;
    ctx.font = "12px Verdana, sans-serif";
    ctx.textAlign = "left";
    const words = given ? "never received" : "never sent";
    const left = (x + toX) / 2 + 12, base = (y + toY) / 2 + 4;
    ctx.fillStyle = colors.paper; // the bars behind the words are hatched
    ctx.fillRect(left - 3, base - 12, ctx.measureText(words).width + 6, 16);
    ctx.fillStyle = colors.stuck;
    ctx.fillText(words, left, base);
  });
}

/** The critical path as one line: along lanes, and across where a message leads. */
function drawPath(panel, view, colors) {
  const { trace, ctx, frame } = panel, { path, messages } = trace;
  ctx.strokeStyle = colors.path;
  ctx.lineWidth = frame.lane > 20 ? 4 : 2.5;
  ctx.lineJoin = "round";
  if (view.clock === "steps") {
    for (const row of trace.pathMessages) {
      if (row >= 0) arrow(ctx, ...endsOf(panel, view, row), colors.path, ctx.lineWidth);
    }
    for (const row of trace.pathCalls) if (row >= 0) outline(panel, view, row, colors.path);
    return;
  }
  const messageOf = (i) => (path.kind[i] === 0 ? path.message[i] : -1);
  ctx.beginPath();
  for (let i = 0; i < path.length; i++) {
    const message = messageOf(i);
    if (path.end[i] < view.from || path.start[i] > view.to) continue;
    const from = message < 0 ? path.rank[i] : messages.src[message];
    const to = message < 0 ? from : messages.dst[message];
    ctx.moveTo(frame.x(path.start[i]), frame.y(from));
    ctx.lineTo(frame.x(path.end[i]), frame.y(to));
    if (i + 1 < path.length) {
      // At this instant the chain goes on, on whichever side came last.
      const next = messageOf(i + 1);
      const rank = next < 0 ? path.rank[i + 1] : messages.src[next];
      ctx.lineTo(frame.x(path.end[i]), frame.y(rank));
    }
  }
  ctx.stroke();
}

function outline(panel, view, row, color) {
  const { trace, ctx, frame } = panel;
  const [begin, , end] = timesOfCall(trace, row, view.clock);
  if (begin < 0) return;
  const x = Math.max(frame.x(begin), GUTTER), right = Math.min(frame.x(end), frame.right);
  ctx.strokeStyle = color;
  ctx.lineWidth = 2.5;
  const top = frame.y(trace.calls.rank[row]) - frame.bar / 2;
  ctx.strokeRect(x - 1, top - 1.5, Math.max(right - x, 4) + 1, frame.bar + 3);
}

function drawPicked(panel, view, colors) {
  const picked = view.picked;
  if (!picked || picked.panel !== panel.number) return;
  if (picked.call >= 0) outline(panel, view, picked.call, colors.pick);
  if (picked.message < 0) return;
  const { ctx, trace } = panel;
  arrow(ctx, ...endsOf(panel, view, picked.message), colors.pick, 4);
  for (const row of [trace.messages.sent, trace.messages.received]) {
    if (row[picked.message] >= 0) outline(panel, view, row[picked.message], colors.pick);
  }
}

// ── what stands under the pointer ───────────────────────────────────────────────────

function hit(panel, view, x, y) {
  const message = messageAt(panel, view, x, y);
  if (message >= 0) return { panel: panel.number, message, call: -1 };
  const call = callAt(panel, view, x, y);
  return call >= 0 ? { panel: panel.number, message: -1, call } : null;
}

function messageAt(panel, view, x, y) {
  const { trace } = panel;
  let best = trace.calls.length ? -1 : messageBarAt(panel, view, x, y);
  if (best >= 0) return best;
  let nearest = 6;
  for (const row of panel.shown) {
    const [x1, y1, x2, y2] = endsOf(panel, view, row);
    const along = ((x - x1) * (x2 - x1) + (y - y1) * (y2 - y1)) /
      ((x2 - x1) ** 2 + (y2 - y1) ** 2 || 1);
    const t = Math.max(0, Math.min(1, along));
    const distance = Math.hypot(x - x1 - t * (x2 - x1), y - y1 - t * (y2 - y1));
    if (distance < nearest) [best, nearest] = [row, distance];
  }
  return best;
}

/** Where messages are bars: what a rank sends in the upper half, what it gets below. */
function messageBarAt(panel, view, x, y) {
  const { frame } = panel, m = panel.trace.messages;
  const rank = frame.rank(y), time = frame.time(x), below = y - frame.y(rank);
  if (Math.abs(below) > frame.bar / 2) return -1;
  const ranks = below < 0 ? m.src : m.dst;
  const within = (row) => m.start[row] <= time && time <= m.end[row];
  return panel.shown.find((row) => ranks[row] === rank && within(row)) ?? -1;
}

function callAt(panel, view, x, y) {
  const { trace, frame } = panel, rank = frame.rank(y), time = frame.time(x);
  if (rank < view.first || rank > view.last || rank >= trace.ranks) return -1;
  if (Math.abs(y - frame.y(rank)) > frame.bar / 2 + 2) return -1;
  const slack = frame.time(3) - frame.time(0);
  let best = -1;
  for (let row = trace.firstCall[rank]; row < trace.firstCall[rank + 1]; row++) {
    const [begin, , end] = timesOfCall(trace, row, view.clock);
    if (begin >= 0 && begin - slack <= time && time <= end + slack) best = row;
  }
  return best;
}
