// The page: controls, the state they set, and one or two panels that are drawn from it.
"use strict";

const report = JSON.parse(document.getElementById("report").textContent);
const maximum = Math.max(...report.samples.flat().map((about) => about.maximum));
const tip = new Tip(document.getElementById("tip"));
const control = Object.fromEntries(
  ["play", "step", "where", "speed", "sample", "layer", "head", "epsilon", "epsilon-slider", "floor-note", "theme"].map(
    (id) => [id, document.getElementById(id)],
  ),
);

const state = { at: 0, layer: MEAN, head: MEAN, epsilon: report.epsilon, counting: false };
let timeline = [0]; // step numbers, all that any of the panels keeps
let panels = [];
let timer = null;

/** One run: its facts, text and figures. */
class Panel {
  constructor(run) {
    const content = document.getElementById("panel").content.cloneNode(true);
    this.root = content.firstElementChild;
    this.find = (selector) => this.root.querySelector(selector);
    this.find("h2").textContent = `${run.model}, ${run.masking ? "keys blocked" : "nothing blocked"}`;
    const masking = run.masking ? `Masking: ${run.masking}.` : "No masking.";
    this.find(".settings").textContent = `${run.folder}: ${run.settings}. ${masking}`;
    this.text = new TokenText(...this.root.querySelectorAll(".tokens"), tip);
    this.map = new HeadMap(this.find(".map canvas"), tip, choose);
    this.path = new Trajectory(this.find(".path canvas"), (t) => goTo(nearest(t)));
    this.find(".counting").addEventListener("change", (event) => update({ counting: event.target.value === "count" }));
    document.getElementById("panels").append(this.root);
  }

  load(about, buffer) {
    this.recording = new Recording(about, buffer);
    this.text.load(this.recording);
    this.root.dataset.sample = about.name;
  }

  draw() {
    const { recording } = this;
    const view = { ...state, maximum, index: recording.indexAt(timeline[state.at]) };
    view.row = recording.row(state.layer, state.head);
    this.text.draw(view);
    this.map.draw(recording, view);
    this.path.draw(recording, view);
    this.writeFacts(view);
    this.describe(view);
  }

  writeFacts({ index, row, epsilon }) {
    const { recording } = this;
    const set = (name, text) => (this.find(`.${name}`).textContent = text);
    const states = Array.from({ length: recording.length }, (_, j) => recording.state(index, j).kind);
    this.writeOwnStep(index);
    this.find(".masked").parentElement.hidden = !recording.hasMasks;
    set("masked", `${states.filter((kind) => kind === "mask").length} of ${states.filter((kind) => kind !== "absent").length}`);
    if (row < 0) return ["count", "strongest", "blocked"].forEach((name) => set(name, "not kept in this run"));
    set("count", `${recording.countSinks(index, row, epsilon)} of ${recording.keyCount(index, row)} keys`);
    const best = recording.strongest(index, row);
    set("strongest", best ? inWords(recording, best) : "none");
    set("blocked", `${recording.blockedKeys(index, row)}${row < recording.firstHead ? " in all heads" : ""}`);
  }

  /** Where this run cannot show the step that the other one shows. */
  writeOwnStep(index) {
    const step = this.recording.steps[index];
    this.find(".own-step").parentElement.hidden = step === timeline[state.at];
    this.find(".own-step").textContent = index === this.recording.steps.length - 1 ? `${step}, its last` : `${step}`;
  }

  describe({ index, row, epsilon, counting }) {
    const { recording } = this;
    const low = Math.max(epsilon, recording.floor(recording.rows - 1));
    const scale = `From 0 to ${MANY_SINKS} or more sinks at ε = ${low}`;
    const meaning = counting ? scale : "By the strongest key, on the scale above";
    this.find(".counting").value = counting ? "count" : "strongest";
    this.find(".map .note").textContent = `${meaning}; click to choose.`;
    this.find(".map canvas").ariaLabel = `Map of layers and heads at step ${recording.steps[index]}. ${meaning}`;
    const best = row < 0 ? null : recording.strongest(index, row);
    const now = best ? `; at step ${recording.steps[index]} it is ${best.position}` : "";
    this.find(".path canvas").ariaLabel = `Position of the strongest key at every denoising step${now}`;
  }
}

/** Changes the state and draws everything from it. */
function update(change) {
  Object.assign(state, change);
  if (state.layer === MEAN) state.head = MEAN;
  const floor = Math.max(...panels.map(({ recording }) => recording.floor(recording.row(state.layer, state.head))));
  state.epsilon = Math.max(state.epsilon, floor);
  control.epsilon.min = control["epsilon-slider"].min = floor;
  control["floor-note"].textContent = floor ? `In this file single heads begin at ε = ${floor}.` : "";
  draw();
}

function draw() {
  const { at, layer, head, epsilon } = state;
  control.step.value = at;
  control.step.ariaValueText = `step ${timeline[at]}`;
  control.where.textContent = `Step ${timeline[at]} of ${timeline.at(-1)}`;
  control.layer.value = layer;
  control.head.value = head;
  control.head.disabled = layer === MEAN;
  control["epsilon-slider"].value = epsilon;
  if (Number(control.epsilon.value) !== epsilon) control.epsilon.value = epsilon;
  for (const panel of panels) panel.draw();
  tip.refresh();
}

/** The layer and head that hold the strongest key of all steps: where the page opens. */
function headOfStrongest(recording) {
  const { layers, heads } = recording.about;
  let found = { c: -1 };
  for (let index = 0; index < recording.steps.length; index++) {
    for (let row = recording.firstHead; row < recording.rows; row++) {
      const c = recording.strongest(index, row)?.c ?? -1;
      if (c > found.c) found = { c, row };
    }
  }
  const head = (found.row ?? recording.firstHead) - recording.firstHead;
  return { layer: layers[Math.floor(head / heads.length)], head: heads[head % heads.length] };
}

function choose(layer, head) {
  update({ layer, head });
}

/** Goes to a place on the timeline, clamped to its ends. */
function goTo(at) {
  update({ at: Math.min(Math.max(at, 0), timeline.length - 1) });
}

/** The place of the kept step nearest to step `t`. */
function nearest(t) {
  const distances = timeline.map((step) => Math.abs(step - t));
  return distances.indexOf(Math.min(...distances));
}

/** Starts or ends playing; at the last step it begins anew. */
function play(on) {
  clearInterval(timer);
  timer = null;
  if (on) {
    if (state.at === timeline.length - 1) goTo(0);
    timer = setInterval(advance, 1000 / Number(control.speed.value));
  }
  control.play.textContent = on ? "Pause" : "Play";
  control.where.ariaLive = on ? "off" : "polite"; // nobody wants every step of a film read out
}

function advance() {
  goTo(state.at + 1);
  if (state.at === timeline.length - 1) play(false);
}

async function showSample(index) {
  play(false);
  const abouts = report.samples.map((samples) => samples[index]);
  const buffers = await Promise.all(abouts.map(({ data }) => unpack(document.getElementById(data).textContent)));
  if (Number(control.sample.value) !== index) return; // another one was picked meanwhile
  panels.forEach((panel, i) => panel.load(abouts[i], buffers[i]));
  const recordings = panels.map((panel) => panel.recording);
  timeline = [...new Set(recordings.flatMap(({ steps }) => [...steps]))].sort((a, b) => a - b);
  control.step.max = timeline.length - 1;
  const { layers, heads } = recordings[0].about;
  offer(control.layer, "mean over layers", layers);
  offer(control.head, "mean over heads", heads);
  const layer = layers.includes(state.layer) ? state.layer : MEAN;
  const head = heads.includes(state.head) ? state.head : MEAN;
  describeFile(recordings);
  update({ at: Math.min(state.at, timeline.length - 1), layer, head });
}

function offer(select, meanName, numbers) {
  const choices = [[MEAN, meanName], ...numbers.map((number) => [number, String(number)])];
  select.replaceChildren(...choices.map(([value, name]) => new Option(name, value)));
}

function describeFile(recordings) {
  const lines = [...new Set(recordings.map(({ about }) => about.kept))];
  const strong = element("b", "", "This file. ");
  document.getElementById("kept").replaceChildren(strong, lines.join(" Beside it: "));
  document.getElementById("below-mark").hidden = recordings.every(({ starts }) => starts === null);
  document.getElementById("mask-mark").hidden = !recordings.some((recording) => recording.hasMasks);
  const hasBlocks = ({ about, length }) => about.block_len && about.block_len < length - about.prompt_length;
  document.getElementById("block-mark").hidden = !recordings.some(hasBlocks);
}

function drawScale() {
  const stops = ramp().map(({ fill }) => fill);
  document.getElementById("scale-bar").style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  const marks = scaleTicks(maximum).map((c) => {
    const mark = element("span", "", c === 1 ? "≤ 1" : show(c).replace(/\.0+$/, ""));
    mark.style.left = `${(levelOf(c, maximum) / (LEVELS - 1)) * 100}%`;
    return mark;
  });
  document.getElementById("scale-ticks").replaceChildren(...marks);
}

function repaint() {
  control.theme.textContent = isDark() ? "Light" : "Dark";
  drawScale();
  draw();
}

function number(text) {
  return text === MEAN ? MEAN : Number(text);
}

function connect() {
  control.play.addEventListener("click", () => play(timer === null));
  control.speed.addEventListener("change", () => timer !== null && play(true));
  control.step.addEventListener("input", () => goTo(Number(control.step.value)));
  control.sample.addEventListener("change", () => showSample(Number(control.sample.value)));
  control.layer.addEventListener("change", () => choose(number(control.layer.value), state.head));
  control.head.addEventListener("change", () => choose(state.layer, number(control.head.value)));
  control["epsilon-slider"].addEventListener("input", (event) => update({ epsilon: Number(event.target.value) }));
  control.epsilon.addEventListener("input", () => {
    if (control.epsilon.checkValidity()) update({ epsilon: Number(control.epsilon.value) });
  });
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
  control.theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    repaint();
  });
  darkWanted.addEventListener("change", repaint);
  addEventListener("resize", draw);
  document.addEventListener("keydown", onKey);
}

/** Keys for the steps, except where a control or a token wants them itself. */
function onKey(event) {
  const isOthers = event.ctrlKey || event.metaKey || event.altKey;
  if (isOthers || event.target.closest?.("select, input:not(#step)")) return;
  const moves = { ArrowLeft: -1, ArrowRight: 1, ",": -1, ".": 1, Home: -Infinity, End: Infinity };
  if (event.key === " " && !event.target.closest?.("button")) play(timer === null);
  else if (event.key in moves) goTo(state.at + moves[event.key]);
  else return;
  event.preventDefault();
}

/** Says in one line why there is nothing to see. */
function fail(message) {
  const problem = document.getElementById("problem");
  problem.textContent = message;
  problem.hidden = false;
}

async function start() {
  if (typeof DecompressionStream === "undefined" || !CSS.supports("color", "light-dark(#fff, #000)")) {
    return fail("This browser is too old for this page: use Chrome 123, Firefox 120, Safari 17.5 or later.");
  }
  const count = report.samples[0].length;
  const names = report.runs.map(({ model }) => model);
  document.getElementById("introduction").textContent = `${[...new Set(names)].join(" and ")}, ${count} sample${count > 1 ? "s" : ""}`;
  document.getElementById("panels").classList.toggle("compared", report.runs.length > 1);
  document.getElementById("main").hidden = false;
  panels = report.runs.map((run) => new Panel(run));
  control.sample.replaceChildren(...report.samples[0].map(({ name }, i) => new Option(name, i)));
  document.getElementById("sample-label").hidden = count < 2;
  control["epsilon-slider"].max = Math.max(10, 2 * report.epsilon);
  await showSample(0);
  Object.assign(state, headOfStrongest(panels[0].recording));
  update({});
  repaint();
  connect();
}

start().catch((error) => fail(`The data in this page cannot be read: ${error.message}.`));
