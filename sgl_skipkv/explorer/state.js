"use strict";
// One request of the trace, and what of it was live at any moment. Positions are logical: prompt
// first, then output, as if nothing had been evicted.

const LIVE = 0, EVICTED = 1, LATER = 2;
const count = new Intl.NumberFormat("en-US");

/** How many numbers of an ascending list are at most `most`. */
function atMost(list, most) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= most) low = middle + 1;
    else high = middle;
  }
  return low;
}

class TracedRequest {
  constructor(data, requests) {
    Object.assign(this, data);
    this.parent = data.continues ? requests.get(data.continues.number) : undefined;
    this.cut = this.parent ? Math.min(data.continues.tokens, data.prompt) : 0;
    this.at = this.steps.map(([generated]) => generated); // when each compaction came
    const last = this.at.length ? this.at[this.at.length - 1] : 0;
    this.generated = this.ids ? Math.max(this.tokens, last) : last;
    // Every generated token but the last sampled one has KV, and is counted in the trace.
    this.cached = this.ids ? Math.max(this.tokens - 1, last) : last;
    this.length = this.prompt + (this.ids ? this.ids.length : last); // positions that are drawn
    this.evictedAt = this.lives.map((life) => this.unpacked(life.evicted));
    this.inherited = this.parent ? this.parent.goneAtEnd(this.cut) : new Uint8Array(0);
    // What was evicted before is missing from the first list of what was kept, too.
    const life = this.evictedAt[this.evictedAt.length - 1];
    this.inherited.forEach((gone, position) => {
      if (gone) life[position] = 0;
    });
  }

  /** The number of the compaction that evicted each position; 0: none. */
  unpacked(runs) {
    const found = new Int32Array(Math.max(this.length, 0));
    let position = 0;
    for (let i = 0; i < runs.length; i += 2) {
      found.fill(runs[i + 1], position, position + runs[i]);
      position += runs[i];
    }
    return found;
  }

  /** Which of the first positions this request left evicted. */
  goneAtEnd(positions) {
    const gone = new Uint8Array(positions), last = this.evictedAt[this.evictedAt.length - 1];
    for (let p = 0; p < positions; p++) gone[p] = last[p] > 0 || this.inherited[p] === 1 ? 1 : 0;
    return gone;
  }

  /** How many compactions came until so many tokens were generated, and in which life. */
  moment(generated) {
    const step = atMost(this.at, generated);
    let life = this.lives.length - 1;
    if (generated !== Infinity) {
      while (life > 0 && this.lives[life].first >= Math.max(step, 1)) life--;
    }
    return { step, life, generated };
  }

  /** LIVE, EVICTED or LATER. */
  stateOf(position, { step, life, generated }) {
    if (position - this.prompt >= generated) return LATER;
    const evicted = this.evictedAt[life][position];
    if (evicted > 0 && evicted <= step) return EVICTED;
    return life === this.lives.length - 1 && this.inherited[position] === 1 ? EVICTED : LIVE;
  }

  /** KV tokens in the row, prompt included, right behind the last compaction of that moment. */
  held({ step, life, generated }) {
    const now = Math.min(generated, this.cached);
    if (step > this.lives[life].first) {
      const [at, , after] = this.steps[step - 1];
      return after + now - at;
    }
    return life > 0 || !this.steps.length
      ? this.full(now) - this.inheritedTokens()
      : this.steps[0][1] - this.steps[0][0] + now;
  }

  full(generated) {
    return this.prompt + Math.min(generated, this.cached);
  }

  inheritedTokens() {
    return this.inherited.reduce((sum, one) => sum + one, 0);
  }

  /** Points of the line of KV tokens: [generated, held]. */
  line() {
    const points = [[0, this.held({ step: 0, life: 0, generated: 0 })]];
    this.lives.forEach((life, index) => {
      if (index > 0) points.push([life.generated, this.full(life.generated)]);
      const next = this.lives[index + 1];
      for (const [generated, before, after] of this.steps.slice(life.first, next && next.first)) {
        points.push([generated, before], [generated, after]);
      }
    });
    const end = { step: this.steps.length, life: this.lives.length - 1, generated: Infinity };
    points.push([this.generated, this.held(end)]);
    return points;
  }

  /** Parts of the text in order: those of the requests that this one continues come first. */
  parts() {
    const parts = this.parent ? clipped(this.parent.parts(), this.cut) : [];
    if (this.cut < this.prompt) {
      parts.push({ start: this.cut, stop: this.prompt, kind: parts.length ? "turn" : "prompt" });
    }
    const stop = this.length;
    parts.push({ start: this.prompt, stop, kind: this.ids ? "output" : "running", of: this });
    return parts;
  }

  /** Turns before this one. A fork of the frontend prefills with a request that generates nothing. */
  get depth() {
    return this.parent ? this.parent.depth + (this.parent.tokens > 0 ? 1 : 0) : 0;
  }

  get title() {
    return this.source ? `${this.rid} (${this.source})` : this.rid;
  }
}

function clipped(parts, stop) {
  return parts
    .filter((part) => part.start < stop)
    .map((part) => ({ ...part, stop: Math.min(part.stop, stop) }));
}
