// The numbers of one sample: unpacking them, and judging which keys are sinks.
//
// A row is one head at one kept step, or a mean; sinks/report.py says in which order rows lie. Its values are 16-bit
// floats, its total and number of keys are exact, so that `isSink` decides as sinks.detect does, for every epsilon.
"use strict";

const MEAN = "mean";
const VIEWS = { float64: Float64Array, int32: Int32Array, uint16: Uint16Array, int16: Int16Array, float16: Uint16Array };

/** Every 16-bit float by its bits. */
const HALF = Float64Array.from({ length: 65536 }, (_, bits) => {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 25) * (1024 + fraction) : sign * 2 ** -24 * fraction;
});

/** The bytes of a sample: base64, gzip. */
async function unpack(base64) {
  const binary = atob(base64);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

class Recording {
  /** @param about what sinks/report.py says of the sample; @param buffer its unpacked bytes */
  constructor(about, buffer) {
    this.about = about;
    this.length = about.texts.length;
    for (const [name, [type, start, size]] of Object.entries(about.arrays)) {
      this[name] = new VIEWS[type](buffer, start, size);
    }
    this.firstHead = 1 + about.layers.length;
    this.rows = this.firstHead + about.layers.length * about.heads.length;
    this.starts = about.floor === null ? null : runningSum(this.counts);
    this.hasMasks = this.tokens.includes(about.mask);
    this.findStrongest();
  }

  /** The row of a layer and head by the model's own numbers, either of them MEAN; -1: not kept. */
  row(layer, head) {
    if (layer === MEAN) return 0;
    const l = this.about.layers.indexOf(layer);
    if (head === MEAN || l < 0) return l < 0 ? -1 : 1 + l;
    const h = this.about.heads.indexOf(head);
    return h < 0 ? -1 : this.firstHead + l * this.about.heads.length + h;
  }

  /** The last kept step that is not after step `t`. */
  indexAt(t) {
    let index = this.steps.length - 1;
    while (index > 0 && this.steps[index] > t) index--;
    return index;
  }

  /** Whether the file holds all keys of a row. */
  isComplete(row) {
    return row < this.firstHead || this.starts === null;
  }

  /** The smallest epsilon for which a row's sinks are all in the file. */
  floor(row) {
    return this.isComplete(row) ? 0 : this.about.floor;
  }

  /** Where a row's values lie: from where to where in which array, and their positions, null for 0, 1, 2, … */
  slice(index, row) {
    const { length, firstHead, starts } = this;
    const heads = this.rows - firstHead;
    if (row < firstHead) return { values: this.means, from: (index * firstHead + row) * length, size: length, positions: null };
    const at = index * heads + row - firstHead;
    if (starts === null) return { values: this.values, from: at * length, size: length, positions: null };
    return { values: this.values, from: starts[at], size: starts[at + 1] - starts[at], positions: this.positions };
  }

  /** Incoming attention by position; NaN where no key is, or none in the file. */
  incoming(index, row) {
    const { values, from, size, positions } = this.slice(index, row);
    const c = new Float64Array(this.length).fill(NaN);
    for (let i = 0; i < size; i++) c[positions ? positions[from + i] : i] = HALF[values[from + i]];
    return c;
  }

  keyCount(index, row) {
    return this.keys[index * this.rows + row];
  }

  /** What a key of strength `c` has to exceed: the mean of the others, plus epsilon. */
  threshold(index, row, c, epsilon) {
    const others = (this.totals[index * this.rows + row] - c) / Math.max(this.keyCount(index, row) - 1, 1);
    return others + epsilon;
  }

  isSink(index, row, c, epsilon) {
    return this.keyCount(index, row) > 1 && c > this.threshold(index, row, c, epsilon);
  }

  countSinks(index, row, epsilon) {
    const { values, from, size } = this.slice(index, row);
    let count = 0;
    for (let i = from; i < from + size; i++) count += this.isSink(index, row, HALF[values[i]], epsilon);
    return count;
  }

  /** Position and strength of the strongest key; null without keys. */
  strongest(index, row) {
    const at = index * this.rows + row;
    return this.keys[at] ? { position: this.bestPosition[at], c: this.bestStrength[at] } : null;
  }

  /** Finds the strongest key of every row once, the lower position of equals. */
  findStrongest() {
    const count = this.steps.length * this.rows;
    this.bestPosition = new Int32Array(count);
    this.bestStrength = new Float64Array(count).fill(-1);
    for (let at = 0; at < count; at++) {
      const { values, from, size, positions } = this.slice(Math.floor(at / this.rows), at % this.rows);
      for (let i = 0; i < size; i++) {
        const c = HALF[values[from + i]];
        if (!(c > this.bestStrength[at])) continue;
        this.bestStrength[at] = c;
        this.bestPosition[at] = positions ? positions[from + i] : i;
      }
    }
  }

  /** How many keys were blocked in a head, or in all heads of a mean. */
  blockedKeys(index, row) {
    if (!this.blocked) return 0;
    const heads = this.about.heads.length;
    const all = this.rows - this.firstHead;
    const [from, count] =
      row === 0 ? [0, all] : row < this.firstHead ? [(row - 1) * heads, heads] : [row - this.firstHead, 1];
    const start = index * all + from;
    return this.blocked.subarray(start, start + count).reduce((sum, keys) => sum + keys, 0);
  }

  /** What stands at a position when a kept step reads it: "absent", "mask" or "filled"; the id is `token`. */
  state(index, position) {
    const token = this.tokens[index * this.length + position];
    const kind = token < 0 ? "absent" : token === this.about.mask ? "mask" : "filled";
    return { token, kind, isNew: this.filled_at[position] === this.steps[index] };
  }

  /** The first and last position of the block that is being filled; null where there are no blocks, or all is filled. */
  currentBlock(index) {
    const { prompt_length: start, block_len: size } = this.about;
    if (!size || size >= this.length - start) return null;
    for (let j = start; j < this.length; j++) {
      if (this.state(index, j).kind === "filled") continue;
      const first = start + Math.floor((j - start) / size) * size;
      return [first, Math.min(first + size, this.length) - 1];
    }
    return null;
  }
}

function runningSum(counts) {
  const sums = new Uint32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) sums[i + 1] = sums[i] + counts[i];
  return sums;
}
