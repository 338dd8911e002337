// Lanes: a row for each rank, a bar for each call, an arrow for each message.

"use strict";

const GUTTER = 76, AXIS = 26, EDGE = 14;
const ARROWS = 2500; // messages that are drawn with a head
const LINES = 40000; // and those that are drawn at all

/** How high a lane is when `count` of them are shown on each of `panels`. */
function laneHeight(count, panels) {
  const most = panels > 1 ? 42 : count <= 4 ? 74 : count <= 8 ? 58 : 40;
  return Math.max(7, Math.min(most, Math.floor(620 / count / Math.min(panels, 1.5))));
}

/** Where things stand on one panel: from time and rank to points, and back. */
function frameOf(view, width, lane) {
  const across = width - GUTTER - EDGE, span = view.to - view.from;
  return {
    lane, width,
    bar: Math.min(26, Math.max(4, Math.round(lane * (lane > 30 ? 0.42 : 0.66)))),
    right: width - EDGE,
    x: (time) => GUTTER + ((time - view.from) / span) * across,
    y: (rank) => AXIS + (rank - view.first + 0.5) * lane,
    time: (x) => view.from + ((x - GUTTER) / across) * span,
    rank: (y) => view.first + Math.floor((y - AXIS) / lane),
  };
}

function drawLanes(panel, view, colors) {
  const { trace, ctx } = panel, frame = panel.frame;
  ctx.save();
  drawAxis(panel, view, colors);
  drawNames(panel, view, colors);
  ctx.beginPath();
  ctx.rect(GUTTER, AXIS - 8, frame.right - GUTTER, panel.height);
  ctx.clip();
  for (let rank = view.first; rank <= view.last; rank++) drawRank(panel, view, rank, colors);
  if (trace.calls.length === 0) drawMessageBars(panel, view, colors);
  drawMessages(panel, view, colors);
  drawNever(panel, view, colors);
  if (view.path) drawPath(panel, view, colors);
  drawPicked(panel, view, colors);
  ctx.restore();
}

/** Round times, a line for each. */
function ticks(view, count) {
  const rough = (view.to - view.from) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough);
  const whole = view.clock === "steps" ? Math.max(100, Math.round(step / 100) * 100) : step;
  const found = [];
  for (let t = Math.ceil(view.from / whole) * whole; t <= view.to; t += whole) found.push(t);
  return [found, whole];
}

function drawAxis(panel, view, colors) {
  const { ctx, frame } = panel;
  const [times, step] = ticks(view, Math.max(3, Math.floor(frame.width / 130)));
  const size = UNITS.find(([unit]) => view.to >= unit) || UNITS[4];
  ctx.font = "11px Verdana, sans-serif";
  ctx.textAlign = "center";
  for (const time of times) {
    const x = frame.x(time), digits = Math.max(0, Math.ceil(-Math.log10(step / size[0])));
    const words = view.clock === "steps"
      ? `step ${time / 100}` : `${(time / size[0]).toFixed(digits)} ${size[1]}`;
    ctx.fillStyle = colors.line;
    ctx.fillRect(Math.round(x), AXIS - 6, 1, panel.height - AXIS + 6);
    ctx.fillStyle = colors.dim;
    if (x > GUTTER + 12 && x < frame.right - 12) ctx.fillText(words, x, 14);
  }
}

function drawNames(panel, view, colors) {
  const { trace, ctx, frame } = panel;
  const every = Math.ceil(13 / frame.lane);
  ctx.textAlign = "right";
  for (let rank = view.first; rank <= view.last; rank++) {
    if (rank >= trace.ranks) break;
    const y = frame.y(rank), stuck = trace.cycle.includes(rank);
    drawGround(panel, view, rank, colors);
    if ((rank - view.first) % every) continue;
    ctx.fillStyle = stuck ? colors.stuck : colors.ink;
    ctx.font = `${stuck ? "bold " : ""}${frame.lane > 30 ? 14 : 11}px Verdana, sans-serif`;
    ctx.fillText(frame.lane > 30 ? `rank ${rank}` : rank, GUTTER - 10, y + 4);
  }
}

/** A rank's lane: as wide as a bar while the rank is known to live, then a line. */
function drawGround(panel, view, rank, colors) {
  const { trace, ctx, frame } = panel, y = frame.y(rank);
  const known = trace.calls.length || trace.ended[rank];
  const last = known ? trace.lastTime[view.clock][rank] : Infinity;
  const end = Math.max(GUTTER, Math.min(frame.right, frame.x(last)));
  ctx.fillStyle = colors.lane;
  ctx.fillRect(GUTTER, y - frame.bar / 2, end - GUTTER, frame.bar);
  ctx.fillRect(end, y - 1, frame.right - end, 2);
  if (!trace.ended[rank] || frame.lane < 14) return;
  ctx.fillStyle = colors.dim;
  ctx.font = "12px Verdana, sans-serif";
  ctx.fillText(trace.ended[rank], frame.right - 8, y - 5);
}

function drawRank(panel, view, rank, colors) {
  const { trace, ctx, frame } = panel, calls = trace.calls;
  if (rank >= trace.ranks) return;
  const top = frame.y(rank) - frame.bar / 2;
  let filled = -1; // nothing is drawn twice on one point of the screen
  for (let row = trace.firstCall[rank]; row < trace.firstCall[rank + 1]; row++) {
    const [begin, ready, end] = timesOfCall(trace, row, view.clock);
    if (end < view.from || begin > view.to || begin < 0) continue;
    const x = frame.x(begin), right = Math.min(frame.x(end), frame.width);
    if (right < filled + 0.6 && calls.state[row] !== 1 && calls.state[row] !== 2) continue;
    filled = right;
    drawBar(ctx, frame, [x, frame.x(ready), right, top], calls.state[row], colors);
    drawLabel(panel, row, [x, frame.x(ready), right], top, colors);
  }
}

/** A call: pale while it waits for the other side, full while data moves. */
function drawBar(ctx, frame, [x, ready, right, top], state, colors) {
  const high = frame.bar, wide = Math.max(right - x, 1);
  if (STATES[state] === "waiting") {
    hatch(ctx, Math.max(x, GUTTER), top, frame.right - Math.max(x, GUTTER), high, colors.stuck);
  } else if (STATES[state] === "posted") {
    ctx.fillStyle = colors.post;
    ctx.fillRect(x, top, Math.max(2, Math.min(wide, 8)), high);
  } else if (STATES[state] === "failed") {
    ctx.fillStyle = colors.stuck;
    ctx.fillRect(x, top, Math.max(wide, 6), high);
  } else {
    const gap = wide > 5 ? 1 : 0;
    ctx.fillStyle = colors.wait;
    if (ready > x) ctx.fillRect(x, top, ready - x, high);
    ctx.fillStyle = colors.move;
    if (right > ready) ctx.fillRect(ready, top, Math.max(right - ready - gap, 0.6), high);
  }
}

function hatch(ctx, x, y, wide, high, color) {
  if (wide <= 0) return;
  ctx.save();
  ctx.beginPath();
  ctx.rect(x, y, wide, high);
  ctx.clip();
  ctx.strokeStyle = color;
  ctx.lineWidth = 2;
  for (let at = x - high; at < x + wide; at += 7) {
    ctx.moveTo(at, y + high);
    ctx.lineTo(at + high, y);
  }
  ctx.stroke();
  ctx.restore();
  ctx.strokeStyle = color;
  ctx.lineWidth = 1;
  ctx.strokeRect(x + 0.5, y + 0.5, wide - 1, high - 1);
}

function drawLabel(panel, row, [x, ready, right], top, colors) {
  const { trace, ctx, frame } = panel, calls = trace.calls;
  if (frame.bar < 12 || STATES[calls.state[row]] === "posted") return;
  const words = trace.labels[calls.label[row]];
  const stuck = STATES[calls.state[row]] === "waiting";
  ctx.font = `${stuck ? "bold " : ""}${frame.bar > 18 ? 12 : 10}px Verdana, sans-serif`;
  const wide = ctx.measureText(words).width + 8;
  ctx.textAlign = "left";
  if (stuck) {
    ctx.fillStyle = colors.stuck;
    if (frame.lane < 40) return;
    const most = frame.right - 4 - ctx.measureText(`${words}: waits forever`).width;
    ctx.fillText(`${words}: waits forever`, Math.min(Math.max(x, GUTTER) + 4, most), top - 4);
    return;
  }
  const left = Math.max(x, GUTTER), moves = Math.max(ready, GUTTER);
  const where = right - moves >= wide ? moves : ready - left >= wide ? left : -1;
  if (where < 0) return;
  ctx.fillStyle = where === moves ? colors.moveInk : colors.ink;
  ctx.fillText(words, where + 4, top + frame.bar / 2 + 4);
}

/** Without the ranks' calls: what each sends in the upper half, what it gets below. */
function drawMessageBars(panel, view, colors) {
  const { trace, ctx, frame } = panel, m = trace.messages, half = frame.bar / 2;
  for (const row of messagesBetween(trace, view)) {
    const x = frame.x(m.start[row]), wide = Math.max(frame.x(m.end[row]) - x, 0.6);
    const gap = wide > 4 ? 1 : 0;
    ctx.fillStyle = colors.move;
    ctx.fillRect(x, frame.y(m.src[row]) - half, wide - gap, half - 0.5);
    ctx.fillStyle = colors.post;
    ctx.fillRect(x, frame.y(m.dst[row]) + 0.5, wide - gap, half - 0.5);
  }
  for (const [rank, since] of trace.stuck) {
    if (rank < view.first || rank > view.last) continue;
    const x = Math.max(frame.x(since), GUTTER);
    hatch(ctx, x, frame.y(rank) - half, frame.right - x, frame.bar, colors.stuck);
  }
}
