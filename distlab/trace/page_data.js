// The trace as the page gets it: columns of numbers, packed; here they are unpacked.

"use strict";

/** Bytes of a string in base64, unzipped by the browser itself. */
async function unzip(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream();
  const unzipped = stream.pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(unzipped).arrayBuffer());
}

/**
 * A column: differences between neighbors, as whole numbers of 4 or 8 bytes, all
 * lowest bytes first, then all second ones, and so on: so they zip best.
 */
async function column([width, text]) {
  const planes = await unzip(text);
  const n = planes.length / width;
  const values = width === 4 ? new Int32Array(n) : new Float64Array(n);
  const word = (at, i) =>
    planes[at * n + i] | (planes[(at + 1) * n + i] << 8) |
    (planes[(at + 2) * n + i] << 16) | (planes[(at + 3) * n + i] << 24);
  let value = 0;
  for (let i = 0; i < n; i++) {
    const low = word(0, i);
    value += width === 4 ? low : word(4, i) * 4294967296 + (low >>> 0);
    values[i] = value;
  }
  return values;
}

async function table(packed) {
  const columns = { length: packed.length };
  for (const [name, one] of Object.entries(packed.columns)) {
    columns[name] = await column(one);
  }
  return columns;
}

/** First position in `values[low, high)`, which rise, whose value is above `limit`. */
function after(values, limit, low = 0, high = values.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** One trace, unpacked, with what is looked up again and again worked out once. */
async function unpack(packed) {
  const trace = { ...packed };
  trace.calls = await table(packed.calls);
  trace.messages = await table(packed.messages);
  trace.path = await table(packed.path);
  trace.firstCall = new Int32Array(packed.ranks + 1);
  for (const rank of trace.calls.rank) trace.firstCall[rank + 1]++;
  for (let r = 0; r < packed.ranks; r++) trace.firstCall[r + 1] += trace.firstCall[r];
  trace.longest = 0;
  const { start, end } = trace.messages;
  for (let i = 0; i < start.length; i++) {
    trace.longest = Math.max(trace.longest, end[i] - start[i]);
  }
  trace.lastTime = { seconds: [], steps: [] }; // of each rank: when it was last seen
  for (let rank = 0; rank < packed.ranks; rank++) {
    const last = trace.firstCall[rank + 1] - 1;
    const any = last >= trace.firstCall[rank];
    trace.lastTime.seconds.push(any ? trace.calls.end[last] : 0);
    trace.lastTime.steps.push(any ? trace.calls.step_end[last] : 0);
  }
  trace.pathCalls = new Set(trace.path.call);
  trace.pathMessages = new Set(trace.path.message);
  if (packed.overview) {
    const { moving, waiting, stuck } = packed.overview;
    trace.overview = {
      ...packed.overview,
      moving: await unzip(moving),
      waiting: await unzip(waiting),
      stuck: await unzip(stuck),
      matrix: await column(packed.overview.matrix),
    };
  }
  trace.strip = {
    mean: await unzip(packed.strip.mean), most: await unzip(packed.strip.most),
  };
  return trace;
}

const STATES = ["done", "waiting", "failed", "posted"];
const ARROW = [15, 75]; // where in its step a message leaves and arrives, in hundredths

/** Where a call begins, waits until, and ends, by the clock that is shown. */
function timesOfCall(trace, row, clock) {
  const c = trace.calls;
  if (clock === "seconds") return [c.start[row], c.ready[row], c.end[row]];
  const begin = c.step[row], end = c.step_end[row];
  const ready = c.state[row] === 0 ? Math.max(begin, end - 100) : begin;
  return [begin, c.state[row] === 1 ? end : ready, end];
}

/** Where a message leaves and arrives, by the clock that is shown. */
function timesOfMessage(trace, row, clock) {
  const m = trace.messages;
  if (clock === "seconds") return [m.start[row], m.end[row]];
  return [m.step[row] + ARROW[0], m.step[row] + ARROW[1]];
}

/** The messages between two times of which one end is among the ranks shown. */
function messagesBetween(trace, view) {
  const m = trace.messages, found = [];
  const steps = view.clock === "steps";
  const from = steps ? 0 : after(m.start, view.from - trace.longest - 1);
  const to = steps ? m.length : after(m.start, view.to);
  for (let i = from; i < to; i++) {
    const [begin, end] = timesOfMessage(trace, i, view.clock);
    if (end < view.from || begin > view.to || (steps && m.step[i] < 0)) continue;
    const inside = (rank) => rank >= view.first && rank <= view.last;
    if (inside(m.src[i]) || inside(m.dst[i])) found.push(i);
  }
  return found;
}

// ── words ───────────────────────────────────────────────────────────────────────────

const UNITS = [[1e12, "s"], [1e9, "ms"], [1e6, "µs"], [1e3, "ns"], [1, "ps"]];

/** A time in picoseconds, with the unit in which it is easiest to read. */
function duration(ps) {
  const [size, unit] = UNITS.find(([size]) => Math.abs(ps) >= size) || UNITS[0];
  return `${+(ps / size).toPrecision(4)} ${unit}`;
}

function bytes(count) {
  for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (count >= size) return `${+(count / size).toPrecision(3)} ${unit}`;
  }
  return count === 1 ? "1 byte" : `${count} bytes`;
}
