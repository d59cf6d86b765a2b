// Two canvases for one sample: the map of layers and heads, and the strongest key over the steps.
"use strict";

const MANY_SINKS = 8; // the map's scale for numbers of sinks ends here, at every step
const FONT = "11px system-ui, sans-serif";

/** A canvas fitted to its box and the screen's pixels. Gives its context and the size in CSS pixels. */
function prepare(canvas, height) {
  const width = canvas.parentElement.clientWidth;
  const ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = FONT;
  return { context, width, height };
}

/** A key's strength, position and token. */
function inWords(recording, { c, position }) {
  return `${show(c)} at ${position} “${recording.about.labels[position]}”`;
}

/** Every n-th of `count` things, so that at most `most` are labelled. */
function labelled(count, most) {
  const every = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128].find((n) => count / n <= most) ?? Math.ceil(count / most);
  return Array.from({ length: Math.ceil(count / every) }, (_, i) => i * every);
}

/** Layers downwards, heads to the right; the first column is the mean over heads, the first row the mean of all. */
class HeadMap {
  constructor(canvas, tip, choose) {
    this.canvas = canvas;
    this.tip = tip;
    canvas.addEventListener("click", (event) => {
      const cell = this.cellAt(event);
      if (cell) choose(cell.layer, cell.head);
    });
    canvas.addEventListener("pointermove", (event) => this.onMove(event));
    canvas.addEventListener("pointerleave", () => tip.hide());
  }

  /** @param view: index, row, epsilon, maximum, counting */
  draw(recording, view) {
    this.recording = recording;
    this.view = view;
    const { layers, heads } = recording.about;
    this.lay(layers.length, heads.length);
    const colours = ramp();
    for (let row = 0; row < recording.rows; row++) {
      const { x, y, width, height } = this.boxOf(row);
      this.context.fillStyle = colours[this.level(row)].fill;
      this.context.fillRect(x, y, width, height);
    }
    this.drawLabels(layers, heads);
    if (view.row >= 0) this.drawChosen(this.boxOf(view.row));
  }

  /** Sizes: margins for labels, a gap after the means, cells of at most 17 pixels' height. */
  lay(layerCount, headCount) {
    const left = 34;
    const gap = 6;
    const available = this.canvas.parentElement.clientWidth - left - gap - 2;
    const cellWidth = Math.min(available / (headCount + 1), 44);
    const cellHeight = Math.max(Math.min(cellWidth, 17, 250 / (layerCount + 1)), 7);
    const top = 18;
    const height = top + gap + cellHeight * (layerCount + 1) + 2;
    Object.assign(this, prepare(this.canvas, height), { left, top, gap, cellWidth, cellHeight });
  }

  boxOf(row) {
    const { recording, left, top, gap, cellWidth, cellHeight } = this;
    const heads = recording.about.heads.length;
    const isHead = row >= recording.firstHead;
    const layer = isHead ? Math.floor((row - recording.firstHead) / heads) : row - 1;
    const column = isHead ? ((row - recording.firstHead) % heads) + 1 : 0;
    const seam = cellWidth > 8 ? 1 : 0;
    return {
      x: left + column * cellWidth + (column ? gap : 0),
      y: top + (layer + 1) * cellHeight + (layer >= 0 ? gap : 0),
      width: cellWidth - seam,
      height: cellHeight - (cellHeight > 8 ? 1 : 0),
    };
  }

  level(row) {
    const { recording, view } = this;
    if (!view.counting) return levelOf(recording.strongest(view.index, row)?.c ?? 0, view.maximum);
    const count = recording.countSinks(view.index, row, Math.max(view.epsilon, recording.floor(row)));
    return Math.round((Math.min(count, MANY_SINKS) / MANY_SINKS) * (LEVELS - 1));
  }

  drawLabels(layers, heads) {
    const { context, left, top, gap, cellWidth, cellHeight } = this;
    context.fillStyle = themeColour("faint");
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillText("all", left - 6, top + cellHeight / 2);
    for (const i of labelled(layers.length, (layers.length * cellHeight) / 13)) {
      context.fillText(layers[i], left - 6, top + gap + (i + 1.5) * cellHeight);
    }
    context.textAlign = "center";
    if (cellWidth > 26) context.fillText("mean", left + cellWidth / 2, top - 9);
    for (const i of labelled(heads.length, (heads.length * cellWidth) / 22)) {
      context.fillText(heads[i], left + gap + (i + 1.5) * cellWidth, top - 9);
    }
  }

  drawChosen({ x, y, width, height }) {
    const { context } = this;
    context.lineWidth = 2;
    context.strokeStyle = themeColour("card");
    context.strokeRect(x - 0.5, y - 0.5, width + 1, height + 1);
    context.strokeStyle = themeColour("sink");
    context.strokeRect(x - 1.5, y - 1.5, width + 3, height + 3);
  }

  /** The row under the pointer with its layer and head; null beside the cells. */
  cellAt(event) {
    const { recording, left, top, gap, cellWidth, cellHeight } = this;
    const { layers, heads } = recording.about;
    const box = this.canvas.getBoundingClientRect();
    const across = event.clientX - box.left - left;
    const down = event.clientY - box.top - top;
    const column = across < cellWidth ? Math.floor(across / cellWidth) : Math.floor((across - gap) / cellWidth);
    const line = down < cellHeight ? Math.floor(down / cellHeight) : Math.floor((down - gap) / cellHeight);
    if (column < 0 || line < 0 || column > heads.length || line > layers.length) return null;
    if (line === 0) return column === 0 ? { row: 0, layer: MEAN, head: MEAN } : null;
    const layer = layers[line - 1];
    const head = column === 0 ? MEAN : heads[column - 1];
    return { row: recording.row(layer, head), layer, head };
  }

  onMove(event) {
    const cell = this.cellAt(event);
    this.canvas.classList.toggle("over", cell !== null);
    if (!cell) return this.tip.hide();
    const box = this.canvas.getBoundingClientRect();
    const at = this.boxOf(cell.row);
    const rectangle = { left: box.left + at.x, top: box.top + at.y, bottom: box.top + at.y + at.height };
    this.tip.show(rectangle, () => this.numbers(cell));
  }

  numbers({ row, layer, head }) {
    const { recording, view } = this;
    const best = recording.strongest(view.index, row);
    const epsilon = Math.max(view.epsilon, recording.floor(row));
    const lines = [
      ["layer", layer === MEAN ? "mean over layers" : String(layer)],
      ["head", head === MEAN ? "mean over heads" : String(head)],
      ["sinks", `${recording.countSinks(view.index, row, epsilon)} at ε = ${epsilon}`],
    ];
    if (!best) return lines;
    return [...lines, ["strongest", inWords(recording, best)]];
  }
}

/** The strongest key's position at every step, over the front of tokens being filled; a click goes to a step. */
class Trajectory {
  constructor(canvas, jump) {
    this.canvas = canvas;
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect();
      jump(this.stepAt(event.clientX - box.left));
    });
  }

  draw(recording, view) {
    this.recording = recording;
    Object.assign(this, prepare(this.canvas, 172));
    this.plot = { left: 38, right: this.width - 10, top: 8, bottom: this.height - 34 };
    this.drawPrompt();
    this.drawAxes();
    this.drawFront();
    if (view.row >= 0) this.drawPath(view);
    this.drawCursor(recording.steps[view.index]);
  }

  x(step) {
    const { left, right } = this.plot;
    return left + 4 + (step / Math.max(this.recording.about.steps - 1, 1)) * (right - left - 8);
  }

  y(position) {
    const { top, bottom } = this.plot;
    return bottom - 4 - (position / Math.max(this.recording.length - 1, 1)) * (bottom - top - 8);
  }

  stepAt(x) {
    const { left, right } = this.plot;
    const last = this.recording.about.steps - 1;
    return Math.min(Math.max(Math.round(((x - left - 4) / (right - left - 8)) * last), 0), last);
  }

  drawPrompt() {
    const { context, recording } = this;
    const { left, right, bottom } = this.plot;
    const count = recording.about.prompt_length;
    if (!count) return;
    const top = this.y(Math.min(count - 0.5, recording.length - 1));
    context.fillStyle = themeColour("shade");
    context.fillRect(left, top, right - left, bottom - top);
    context.fillStyle = themeColour("faint");
    context.textAlign = "right";
    context.textBaseline = "bottom";
    if (bottom - top > 16) context.fillText("prompt", right - 5, bottom - 3);
  }

  drawAxes() {
    const { context, recording } = this;
    const { left, right, top, bottom } = this.plot;
    context.strokeStyle = themeColour("rule");
    context.lineWidth = 1;
    context.strokeRect(left + 0.5, top + 0.5, right - left - 1, bottom - top - 1);
    context.fillStyle = themeColour("faint");
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const t of labelled(recording.about.steps, 7)) context.fillText(t, this.x(t), bottom + 4);
    context.fillText("denoising step", (left + right) / 2, bottom + 19);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const j of labelled(recording.length, 6)) context.fillText(j, left - 5, this.y(j));
  }

  drawFront() {
    const { context, recording } = this;
    context.fillStyle = themeColour("front");
    for (let j = 0; j < recording.length; j++) {
      const t = recording.filled_at[j];
      if (t >= 0) context.fillRect(this.x(t) - 1, this.y(j) - 1, 2, 2);
    }
  }

  /** A filled dot where the strongest key is a sink, a ring where it is not. */
  drawPath({ row, epsilon }) {
    const { context, recording } = this;
    const radius = recording.steps.length > 100 ? 2 : 3;
    context.strokeStyle = context.fillStyle = themeColour("sink");
    context.lineWidth = 1.25;
    recording.steps.forEach((step, index) => {
      const best = recording.strongest(index, row);
      if (!best) return;
      context.beginPath();
      context.arc(this.x(step), this.y(best.position), radius, 0, 2 * Math.PI);
      if (recording.isSink(index, row, best.c, epsilon)) context.fill();
      else context.stroke();
    });
  }

  drawCursor(step) {
    const { context } = this;
    const { top, bottom } = this.plot;
    context.strokeStyle = themeColour("ink");
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(this.x(step), top);
    context.lineTo(this.x(step), bottom);
    context.stroke();
  }
}
