"use strict";
// One request: its numbers, its text, the KV that it held and what lived how long.

/** An element; its text is text, whatever it says. */
function element(name, attributes = {}, text = undefined) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

class Panel {
  /** page: {limits, goTo(generated), choose(numbers)}. */
  constructor(request, page) {
    this.request = request;
    this.page = page;
    const id = `request-${request.number}`;
    this.root = element("article", { class: "panel", "aria-labelledby": id });
    this.root.append(this.header(id));
    this.info = element("p", { class: "info", role: "status" });
    this.text = new TextView(request, (view, index) => this.tell(index));
    this.chart = new Chart(request, page.limits, (generated) => page.goTo(generated));
    this.map = new LifeMap(request, (generated, position) => {
      page.goTo(generated);
      this.text.reveal(position);
    });
    const words = element("section", { class: "words" });
    words.append(this.info, this.text.root);
    const drawn = element("section", { class: "drawn" });
    const legend = element("h3", { class: "legend" });
    legend.append(
      element("span", { class: "key held" }, "KV tokens held, prompt included"),
      element("span", { class: "key full" }, "full cache"),
    );
    drawn.append(legend, this.chart.root, element("h3", {}, "What lived how long"));
    const keys = element("p", { class: "legend" });
    keys.append(
      element("span", { class: "key live" }, "live"),
      element("span", { class: "key lost" }, "evicted"),
      element("span", { class: "key not-yet" }, "not generated yet"),
      element("span", { class: "key prompt" }, "end of the prompt"),
    );
    drawn.append(keys, this.map.root);
    this.root.append(words, drawn);
    this.tell(null);
  }

  header(id) {
    const { request } = this, { summary } = request;
    const header = element("header");
    const title = element("h2", { id }, request.title);
    const numbers = element("dl");
    const add = (name, value, note) => {
      const entry = element("div");
      const told = element("dd", {}, value);
      if (note) told.append(" ", element("small", {}, note));
      entry.append(element("dt", {}, name), told);
      numbers.append(entry);
    };
    add("Policy", request.policy || "none");
    if (request.budget !== undefined && request.budget !== null) {
      add("KV budget", count.format(request.budget));
    }
    if (summary) {
      const share = summary.full_kv_tokens
        ? `${Math.round((100 * summary.peak_kv_tokens) / summary.full_kv_tokens)}% of the full cache’s ${count.format(summary.full_kv_tokens)}`
        : "";
      const counted = request.params?.count_prompt || request.reuse === "budget";
      const what = counted ? "Peak KV tokens" : "Peak KV tokens beside the prompt";
      add(what, count.format(summary.peak_kv_tokens), share);
      add("Evicted tokens", count.format(summary.evicted_tokens));
      add(
        "Sentences evicted whole",
        count.format(summary.evicted_sentences),
        `of ${count.format(summary.sentences)}`,
      );
    }
    add("Compactions", count.format(request.steps.length));
    header.append(title);
    if (request.reuse) header.append(this.reuse());
    header.append(numbers);
    if (request.ids && request.ids.length < request.tokens) {
      const shown = `The first ${count.format(request.ids.length)} of ${count.format(request.tokens)} tokens are shown.`;
      header.append(element("p", { class: "note" }, shown));
    }
    return header;
  }

  /** How this request goes on from another one. */
  reuse() {
    const { request } = this, note = element("p", { class: "note" });
    note.textContent = `Turn ${request.depth + 1}, kv_reuse ${request.reuse}`;
    if (!request.continues) return note;
    const tokens = count.format(request.continues.tokens);
    const gone = count.format(request.inheritedTokens());
    note.append(`: ${tokens} tokens continue `);
    if (request.parent) {
      const earlier = element("button", { type: "button" }, request.continues.rid);
      earlier.addEventListener("click", () => this.page.choose([request.parent.number]));
      note.append(earlier, `, ${gone} of them evicted before`);
    } else {
      note.append(`${request.continues.rid}, which is not on this page`);
    }
    return note;
  }

  /** Say of a sentence what became of it, and what it is similar to. */
  tell(index) {
    const hint = "Point at a sentence, or walk through them with Tab and the arrow keys.";
    this.info.textContent = "";
    if (index === null) {
      if (this.text.sentences.length) this.info.append(element("span", { class: "hint" }, hint));
      return;
    }
    const { request, text } = this, sentence = text.sentences[index];
    const what = sentence.closed ? "Sentence" : "Open text";
    const where = `positions ${count.format(sentence.start)}–${count.format(sentence.stop - 1)}`;
    this.info.append(element("strong", {}, `${what}, ${where}`), `: ${this.fate(sentence)} `);
    const found = text.partner(index);
    if (found) this.info.append(this.similarity(found, text.sentences[found.index]));
    if (sentence.of !== request) {
      this.info.append(` From ${sentence.of.title}, which this request continues.`);
    }
  }

  fate({ start, stop }) {
    const moment = this.text.moment ?? this.request.moment(Infinity);
    const last = this.request.evictedAt[moment.life];
    let gone = 0, latest = 0, there = 0;
    for (let p = start; p < stop; p++) {
      const state = this.request.stateOf(p, moment);
      if (state === LATER) break;
      there++;
      if (state !== EVICTED) continue;
      gone++;
      latest = Math.max(latest, last[p] <= moment.step ? last[p] : 0);
    }
    if (!there) return "not generated yet.";
    const tokens = `${count.format(there)} tokens${there < stop - start ? " so far" : ""}`;
    if (!gone) return `all ${tokens} are live.`;
    const when = latest ? `, the last by compaction ${count.format(latest)}` : " before this request";
    if (gone === there) return `all ${tokens} are evicted${when}.`;
    return `${count.format(gone)} of ${tokens} are evicted${when}.`;
  }

  similarity(found, other) {
    const node = element("span", { class: "similar" });
    const where = `positions ${count.format(other.start)}–${count.format(other.stop - 1)}`;
    if (found.cosine === undefined) {
      const share = Math.round(100 * found.overlap);
      node.textContent = `Shares ${share}% of its tokens with the later sentence at ${where}; this page counted them, the policy did not.`;
      return node;
    }
    const { tau } = this.request.params ?? {};
    const cosine = found.cosine.toFixed(3);
    if (tau === undefined) node.textContent = `Most similar later sentence: ${where}, cosine ${cosine}.`;
    else if (found.cosine > tau) {
      node.textContent = `Redundant to the later sentence at ${where}: cosine ${cosine}, above tau ${tau}.`;
    } else {
      node.textContent = `Not redundant: its most similar later sentence, at ${where}, has cosine ${cosine}, tau is ${tau}.`;
    }
    return node;
  }

  resize() {
    const width = this.map.root.clientWidth;
    if (!width || width === this.width) return;
    this.width = width;
    this.chart.resize(width);
    this.map.resize(width);
  }

  show(generated) {
    const moment = this.request.moment(generated);
    this.text.show(moment);
    this.chart.show(moment);
    this.map.show(moment);
    return moment;
  }

  recolor() {
    this.chart.redraw();
    this.map.resize(this.width);
  }
}
