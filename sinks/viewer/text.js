// The text of one sample: a span for every token, repainted at each step, and the tooltip that gives its numbers.
"use strict";

const MASK_SIGN = "·";

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** Puts a text into a token's span; a line break is shown, and breaks the line. */
function fill(span, text) {
  const parts = text.split("\n");
  span.replaceChildren(parts[0]);
  for (const part of parts.slice(1)) {
    span.append(element("span", "newline", "↵"), element("br"), part);
  }
}

class TokenText {
  /** @param prompt, answer: the elements to fill; @param tip: the page's Tip */
  constructor(prompt, answer, tip) {
    this.parts = [prompt, answer];
    this.tip = tip;
    for (const part of this.parts) {
      part.addEventListener("pointerover", (event) => this.onEnter(event.target.closest(".token")));
      part.addEventListener("pointerleave", () => tip.hide());
      part.addEventListener("focusin", (event) => this.onEnter(event.target.closest(".token")));
      part.addEventListener("focusout", () => tip.hide());
      part.addEventListener("keydown", (event) => this.onKey(event));
    }
  }

  /** Makes the spans of a sample, the answer's in blocks. */
  load(recording) {
    const { texts, prompt_length: start, block_len } = recording.about;
    const size = block_len || recording.length;
    this.recording = recording;
    this.drawn = new Array(recording.length).fill(null);
    this.spans = texts.map((_, j) => this.makeSpan(j));
    this.spans[0].tabIndex = 0;
    this.blocks = [];
    for (let first = start; first < recording.length; first += size) {
      const block = element("span", "block");
      block.append(...this.spans.slice(first, first + size));
      this.blocks.push({ first, element: block });
    }
    this.parts[0].replaceChildren(...this.spans.slice(0, start));
    this.parts[1].replaceChildren(...this.blocks.map((block) => block.element));
    for (const part of this.parts) part.parentElement.hidden = part.childElementCount === 0;
  }

  makeSpan(position) {
    const span = element("span", "token");
    span.dataset.position = position;
    span.tabIndex = -1;
    return span;
  }

  /** Repaints what changed. @param view: index, row, epsilon, maximum */
  draw(view) {
    this.view = view;
    const { recording } = this;
    this.c = view.row < 0 ? new Float64Array(recording.length).fill(NaN) : recording.incoming(view.index, view.row);
    const colours = ramp();
    for (let j = 0; j < recording.length; j++) this.paint(j, recording.state(view.index, j), colours);
    const current = recording.currentBlock(view.index);
    for (const block of this.blocks) block.element.classList.toggle("current", current?.[0] === block.first);
  }

  paint(position, { token, kind, isNew }, colours) {
    const { view, recording } = this;
    const c = this.c[position];
    const known = !Number.isNaN(c);
    const colour = known ? colours[levelOf(c, view.maximum)] : { fill: "", ink: "" };
    const names = ["token", kind];
    if (isNew) names.push("new");
    if (known && recording.isSink(view.index, view.row, c, view.epsilon)) names.push("sink");
    if (!known && kind !== "absent" && view.row >= 0 && !recording.isComplete(view.row)) names.push("below");
    const next = { text: this.textAt(position, token, kind, isNew), names: names.join(" "), ...colour };
    const before = this.drawn[position];
    const span = this.spans[position];
    if (before?.text !== next.text) fill(span, next.text);
    if (before?.names !== next.names) span.className = next.names;
    if (before?.fill !== next.fill) span.style.backgroundColor = next.fill;
    if (before?.ink !== next.ink) span.style.color = next.ink;
    this.drawn[position] = next;
  }

  /** What to print: a token that the step fills is already shown, one that was replaced later by its id. */
  textAt(position, token, kind, isNew) {
    const { about, final } = this.recording;
    if (isNew) return about.texts[position];
    if (kind === "absent") return "";
    if (kind === "mask") return MASK_SIGN;
    return token === final[position] ? about.texts[position] : `#${token}`;
  }

  onEnter(span) {
    if (span) this.tip.show(span, () => this.numbers(Number(span.dataset.position)));
  }

  /** The tooltip's lines for one position, as [name, value]. */
  numbers(position) {
    const { recording, view } = this;
    const c = this.c[position];
    const lines = [
      ["position", `${position} (${position < recording.about.prompt_length ? "prompt" : "answer"})`],
      ["token", recording.about.labels[position]],
      ["state", this.stateInWords(position)],
    ];
    if (view.row < 0) return lines;
    if (Number.isNaN(c)) return [...lines, ["incoming c", this.unknownInWords(position)]];
    const threshold = recording.threshold(view.index, view.row, c, view.epsilon);
    const sink = recording.isSink(view.index, view.row, c, view.epsilon);
    return [...lines, ["incoming c", c.toFixed(3)], ["threshold", threshold.toFixed(3)], ["sink", sink ? "yes" : "no"]];
  }

  stateInWords(position) {
    const { recording, view } = this;
    const { kind, isNew, token } = recording.state(view.index, position);
    const at = recording.filled_at[position];
    const inPrompt = position < recording.about.prompt_length;
    if (isNew) return `filled at this step, ${at}`;
    if (kind === "absent") return at < 0 ? "not there" : `not there yet, written at step ${at}`;
    if (kind === "mask") return at < 0 ? "mask, never filled" : `mask, filled at step ${at}`;
    if (token !== recording.final[position]) return `id ${token}, replaced at step ${at}`;
    return at < 0 || inPrompt ? "given" : `filled at step ${at}`;
  }

  unknownInWords(position) {
    const { recording, view } = this;
    if (recording.state(view.index, position).kind === "absent" || recording.isComplete(view.row)) return "no key";
    return `below the file's floor: at most ${recording.floor(view.row)} above the mean of the others`;
  }

  /** Arrows move the focus from token to token; Escape leaves. */
  onKey(event) {
    const span = event.target.closest(".token");
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!span || (move === undefined && event.key !== "Escape")) return;
    event.preventDefault();
    event.stopPropagation();
    if (event.key === "Escape") return span.blur();
    const there = this.spans.filter((other) => other.textContent !== "");
    const place = Math.min(Math.max(there.indexOf(span) + move, 0), there.length - 1);
    span.tabIndex = -1;
    there[place].tabIndex = 0;
    there[place].focus();
  }
}

/** The one tooltip of the page; `describe` gives its lines anew whenever the picture changes. */
class Tip {
  constructor(box) {
    this.box = box;
    this.anchor = null;
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
    addEventListener("scroll", () => this.follow(), { passive: true });
  }

  /** @param anchor: an element, or a rectangle of the window */
  show(anchor, describe) {
    this.hide();
    this.anchor = anchor;
    this.describe = describe;
    if (anchor instanceof Element) anchor.setAttribute("aria-describedby", this.box.id);
    this.refresh();
  }

  refresh() {
    if (!this.anchor) return;
    const list = element("dl");
    for (const [name, value] of this.describe()) list.append(element("dt", "", name), element("dd", "", value));
    this.box.replaceChildren(list);
    this.box.hidden = false;
    this.place();
  }

  /** Under the anchor, or above it where there is no room, and always inside the window. */
  place() {
    const at = this.anchor instanceof Element ? this.anchor.getClientRects()[0] : this.anchor;
    if (!at) return this.hide();
    const { width, height } = this.box.getBoundingClientRect();
    const left = Math.min(Math.max(at.left, 8), innerWidth - width - 8);
    const below = at.bottom + 8;
    this.box.style.left = `${Math.max(left, 8)}px`;
    this.box.style.top = `${below + height > innerHeight ? at.top - height - 8 : below}px`;
  }

  /** Stays with a token that scrolls. */
  follow() {
    if (this.anchor instanceof Element) this.place();
    else this.hide();
  }

  hide() {
    if (this.anchor instanceof Element) this.anchor.removeAttribute("aria-describedby");
    this.anchor = null;
    this.box.hidden = true;
  }
}
