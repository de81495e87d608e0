"use strict";
// The text of a request: an element per sentence, and in it one per run of tokens that share their
// fate. A step of the slider changes the class of those runs alone whose state changes.

const CLASSES = ["", "gone", "later"];
const BLOCK_TOKENS = 300; // a browser skips whole blocks that are out of sight

class TextView {
  constructor(request, onSentence) {
    this.request = request;
    this.onSentence = onSentence;
    this.runs = []; // {node, position, state}
    this.gaps = [];
    this.sentences = []; // {start, stop, node, of}
    this.root = element("div", { class: "text", role: "region", "aria-label": "Text" });
    this.bounds = new Set(request.at.map((generated) => request.prompt + generated));
    for (const part of request.parts()) this.add(part);
    this.focused = 0;
    if (this.sentences.length) this.sentences[0].node.tabIndex = 0;
    this.root.addEventListener("mouseover", (event) => this.point(event.target));
    this.root.addEventListener("mouseleave", () => this.mark(null));
    this.root.addEventListener("focusin", (event) => this.point(event.target));
    this.root.addEventListener("keydown", (event) => this.key(event));
  }

  add(part) {
    if (part.kind !== "output") {
      const node = element("p", { class: "gap" });
      this.gaps.push({ ...part, node });
      this.root.append(node);
      return;
    }
    let block = element("div", { class: "block" }), tokens = 0;
    this.root.append(block);
    for (const sentence of sentencesOf(part)) {
      const node = element("span", { class: "sentence", tabindex: "-1" });
      const last = this.addRuns(node, part, sentence);
      node.dataset.sentence = this.sentences.length;
      this.sentences.push({ ...sentence, node, of: part.of });
      block.append(node);
      tokens += sentence.stop - sentence.start;
      if (tokens >= BLOCK_TOKENS && last.endsWith("\n")) {
        block = element("div", { class: "block" });
        tokens = 0;
        this.root.append(block);
      }
    }
  }

  /** The sentence's runs; returns its last text. */
  addRuns(node, part, { start, stop }) {
    const { evictedAt, inherited } = this.request, { ids, text, prompt } = part.of;
    let words = "", from = start;
    for (let p = start; p < stop; p++) {
      words += text ? text[p - prompt] : `${ids[p - prompt]} `;
      const next = p + 1;
      const differs =
        next === stop ||
        this.bounds.has(next) ||
        inherited[next] !== inherited[p] ||
        evictedAt.some((life) => life[next] !== life[p]);
      if (!differs) continue;
      const run = element("span", {}, words);
      this.runs.push({ node: run, position: from, state: LIVE });
      node.append(run);
      if (next < stop) words = "";
      from = next;
    }
    return words;
  }

  /** Show the text as it was at that moment. */
  show(moment) {
    for (const run of this.runs) {
      const state = this.request.stateOf(run.position, moment);
      if (state === run.state) continue;
      run.state = state;
      run.node.className = CLASSES[state];
    }
    for (const gap of this.gaps) gap.node.textContent = this.told(gap, moment);
    this.moment = moment;
    const { marked } = this;
    if (marked === undefined || marked === null) return;
    this.marked = undefined; // which sentences are similar depends on the moment
    this.mark(marked);
  }

  told(gap, moment) {
    const tokens = gap.stop - gap.start;
    if (gap.kind === "running") return `Running. Its text is in the trace when it has finished.`;
    let gone = 0;
    for (let p = gap.start; p < gap.stop; p++) {
      gone += this.request.stateOf(p, moment) === EVICTED ? 1 : 0;
    }
    const name = gap.kind === "prompt" ? "Prompt" : "Next turn";
    const evicted = gone ? `, ${count.format(gone)} evicted` : "";
    return `${name}: ${count.format(tokens)} tokens${evicted}. A trace holds no prompt text.`;
  }

  point(target) {
    const node = target instanceof Element ? target.closest(".sentence") : null;
    if (node !== null) this.mark(Number(node.dataset.sentence));
  }

  /** Mark a sentence, and the later one that is most similar to it. */
  mark(index) {
    if (index === this.marked) return;
    for (const node of this.root.querySelectorAll(".chosen, .partner")) {
      node.classList.remove("chosen", "partner");
    }
    this.marked = index;
    if (index === null) {
      this.onSentence(this, null);
      return;
    }
    this.sentences[index].node.classList.add("chosen");
    const found = this.partner(index);
    if (found) this.sentences[found.index].node.classList.add("partner");
    this.onSentence(this, index);
  }

  /** Whether a token was not generated yet at the moment that is shown. */
  isLater(position) {
    return this.moment !== undefined && this.request.stateOf(position, this.moment) === LATER;
  }

  /** The later sentence that the trace names, or else the one with the most words in common, of
   * those that had ended. */
  partner(index) {
    const sentence = this.sentences[index], request = this.request;
    const named = request.similar.find(([start]) => start === sentence.start);
    if (named) {
      const at = this.sentences.findIndex((one) => one.start === named[1]);
      const ended = at >= 0 && !this.isLater(this.sentences[at].stop - 1);
      return ended ? { index: at, cosine: named[3] } : null;
    }
    if (!sentence.closed) return null;
    return this.overlapping(index);
  }

  overlapping(index) {
    const own = this.idsOf(index), words = new Map();
    for (const id of own) words.set(id, (words.get(id) ?? 0) + 1);
    let best = null;
    for (let other = index + 1; other < this.sentences.length; other++) {
      if (this.isLater(this.sentences[other].stop - 1)) break;
      if (!this.sentences[other].closed) continue;
      const ids = this.idsOf(other), left = new Map(words);
      let common = 0;
      for (const id of ids) {
        const rest = left.get(id) ?? 0;
        if (rest > 0) {
          common++;
          left.set(id, rest - 1);
        }
      }
      const overlap = (2 * common) / (own.length + ids.length);
      if (overlap > 0.5 && overlap >= (best?.overlap ?? 0)) best = { index: other, overlap };
    }
    return best;
  }

  idsOf(index) {
    const { start, stop, of } = this.sentences[index];
    return of.ids.slice(start - of.prompt, stop - of.prompt);
  }

  key(event) {
    const moves = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 };
    if (this.marked === null || this.marked === undefined) return;
    let to = this.marked + (moves[event.key] ?? 0);
    if (event.key === "Enter") to = this.partner(this.marked)?.index ?? this.marked;
    if (to === this.marked || to < 0 || to >= this.sentences.length) return;
    event.preventDefault();
    if (this.isLater(this.sentences[to].start)) return;
    this.focus(to);
  }

  focus(index) {
    this.sentences[this.focused].node.tabIndex = -1;
    this.focused = index;
    const node = this.sentences[index].node;
    node.tabIndex = 0;
    node.focus();
  }

  /** What the reader looks at: for a view that takes this one's place. */
  place() {
    const marked = this.sentences[this.marked ?? -1];
    const focused = this.root.contains(document.activeElement);
    return { top: this.root.scrollTop, start: marked?.start, focused };
  }

  restore({ top, start, focused }) {
    const index = this.sentences.findIndex((one) => one.start === start);
    if (index >= 0 && focused) this.focus(index);
    else if (index >= 0) this.mark(index);
    this.root.scrollTop = top;
  }

  /** The sentence of a position comes into sight. */
  reveal(position) {
    const index = this.sentences.findIndex((one) => position < one.stop);
    if (index < 0 || position < this.sentences[index].start) return;
    // Within the text alone: what was pointed at stays where it is. Blocks that were out of sight
    // get their size when they come into it, so the second time is exact.
    for (let time = 0; time < 2; time++) {
      const box = this.sentences[index].node.getBoundingClientRect();
      const middle = this.root.getBoundingClientRect().top + this.root.clientHeight / 2;
      this.root.scrollTop += box.top - middle;
    }
    this.mark(index);
  }
}

/** Spans of a part's output that do not overlap: closed sentences, and what is between them. */
function sentencesOf({ start, stop, of }) {
  const found = [];
  let at = start;
  const open = (until) => {
    // Without sentences (an older trace) pieces of a size that can be pointed at.
    for (let from = at; from < until; from += 64) {
      found.push({ start: from, stop: Math.min(from + 64, until), closed: false });
    }
  };
  for (const [first, end] of of.sentences) {
    if (first < at || end <= first || end > stop) continue;
    open(first);
    found.push({ start: first, stop: end, closed: true });
    at = end;
  }
  open(stop);
  return found;
}
