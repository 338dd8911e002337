// Very many ranks: a heat map instead of lanes, a matrix instead of arrows; and below
// either of them how busy the ranks' links were.

"use strict";

/** Colors of a style sheet's variables, as the canvas needs them. */
function colorsNow() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    paper: of("paper"), panel: of("panel"), ink: of("ink"), dim: of("dim"),
    line: of("line"), lane: of("lane"), move: of("move"), moveInk: of("move-ink"),
    wait: of("wait"), post: of("post"), stuck: of("stuck"), message: of("message"),
    path: of("path"), pick: of("pick"),
  };
}

function channels(color) {
  return [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
}

/** A picture of ranks (down) by time (across): blue where data moves, yellow where the
 * ranks wait, red where they do so forever, else the color of a lane. */
function heatPicture(trace, colors) {
  const { rows, parts, moving, waiting, stuck } = trace.overview;
  const canvas = document.createElement("canvas");
  canvas.width = parts;
  canvas.height = rows;
  const ctx = canvas.getContext("2d"), image = ctx.createImageData(parts, rows);
  const names = ["lane", "move", "wait", "stuck"];
  const [lane, move, wait, red] = names.map((name) => channels(colors[name]));
  for (let i = 0; i < rows * parts; i++) {
    const s = stuck[i] / 255, m = Math.min(moving[i] / 255, 1 - s);
    const w = Math.min(waiting[i] / 255, 1 - s - m), rest = 1 - s - m - w;
    for (let k = 0; k < 3; k++) {
      image.data[4 * i + k] = rest * lane[k] + m * move[k] + w * wait[k] + s * red[k];
    }
    image.data[4 * i + 3] = 255;
  }
  ctx.putImageData(image, 0, 0);
  return canvas;
}

function drawHeat(panel, view, colors) {
  const { trace, ctx, frame } = panel, { rows, parts } = trace.overview;
  const perRow = Math.ceil(trace.ranks / rows);
  drawAxis(panel, view, colors);
  const picture = heatPicture(trace, colors);
  const top = view.first / perRow, high = (view.last + 1) / perRow - top;
  const left = (view.from / trace.end) * parts;
  const wide = ((view.to - view.from) / trace.end) * parts;
  ctx.imageSmoothingEnabled = false;
  ctx.drawImage(
    picture, left, top, wide, high,
    GUTTER, AXIS, frame.right - GUTTER, panel.height - AXIS - 4,
  );
  ctx.textAlign = "right";
  ctx.font = "11px Verdana, sans-serif";
  ctx.fillStyle = colors.ink;
  const count = view.last - view.first + 1;
  const every = 2 ** Math.ceil(Math.log2(count / 16));
  for (let rank = view.first; rank <= view.last; rank += every) {
    ctx.fillText(`rank ${rank}`, GUTTER - 8, frame.y(rank) + 4);
  }
  panel.shown = [];
  panel.hidden = 0;
  ctx.save();
  ctx.beginPath();
  ctx.rect(GUTTER, AXIS, frame.right - GUTTER, panel.height);
  ctx.clip();
  if (view.path) drawPath(panel, view, colors);
  ctx.restore();
}

// ── who sent how much to whom ───────────────────────────────────────────────────────

function drawMatrix(panel, colors) {
  const { trace, matrix } = panel, { groups, matrix: cells } = trace.overview;
  const ctx = matrix.getContext("2d"), size = matrix.width / groups;
  const most = cells.reduce((a, b) => Math.max(a, b), 1);
  ctx.fillStyle = colors.lane;
  ctx.fillRect(0, 0, matrix.width, matrix.height);
  for (let src = 0; src < groups; src++) {
    for (let dst = 0; dst < groups; dst++) {
      const count = cells[src * groups + dst];
      if (!count) continue;
      ctx.globalAlpha = 0.25 + 0.75 * (Math.log1p(count) / Math.log1p(most));
      ctx.fillStyle = colors.move;
      ctx.fillRect(dst * size, src * size, Math.max(size, 2), Math.max(size, 2));
    }
  }
  ctx.globalAlpha = 1;
}

/** What a point of the matrix stands for, in words. */
function cellAt(panel, x, y) {
  const { groups, group, matrix } = panel.trace.overview, wide = panel.matrix.clientWidth;
  const [src, dst] = [y, x].map((at) => Math.min(groups - 1, Math.floor((at / wide) * groups)));
  return { src: src * group, dst: dst * group, group, bytes: matrix[src * groups + dst] };
}

// ── links ───────────────────────────────────────────────────────────────────────────

/** How many of the ranks' links, out and in, were in use, and the busiest one. */
function drawStrip(panel, view, colors) {
  const { trace, stripCtx: ctx, frame } = panel, high = panel.strip.clientHeight;
  const { mean, most } = trace.strip, parts = mean.length;
  ctx.clearRect(0, 0, frame.width, high);
  const floor = high - 5, tall = high - 12;
  const part = (i) => frame.x((i / parts) * trace.end);
  ctx.save();
  ctx.beginPath();
  ctx.rect(GUTTER, 0, frame.right - GUTTER, high);
  ctx.clip();
  const outline = (shares) => {
    ctx.beginPath();
    for (let i = 0; i < parts; i++) {
      const y = floor - (shares[i] / 255) * tall;
      ctx.lineTo(part(i), y);
      ctx.lineTo(part(i + 1), y);
    }
  };
  outline(mean);
  ctx.lineTo(part(parts), floor);
  ctx.lineTo(part(0), floor);
  ctx.fillStyle = colors.move;
  ctx.fill();
  outline(most);
  ctx.strokeStyle = colors.ink;
  ctx.lineWidth = 1.2;
  ctx.stroke();
  ctx.restore();
  ctx.font = "11px Verdana, sans-serif";
  ctx.textAlign = "right";
  ctx.fillStyle = colors.ink;
  ctx.fillText("links out", GUTTER - 10, high / 2 - 7);
  ctx.fillText("and in", GUTTER - 10, high / 2 + 5);
  ctx.fillStyle = colors.dim;
  ctx.fillText("in use", GUTTER - 10, high / 2 + 18);
}
