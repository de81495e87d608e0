"use strict";
// Which requests are shown side by side, where the slider is, and, of a live page, what is new.

const MOST_PANELS = 4, POLL_MS = 2000;
const byId = (id) => document.getElementById(id);

class Page {
  constructor(data) {
    this.requests = new Map();
    this.panels = [];
    this.stops = [];
    this.limits = { generated: 1, kv: 1 };
    this.cursor = data.cursor;
    this.live = data.live;
    this.most = data.most;
    this.merge(data.requests);
    const asked = location.hash.slice(1).split(",").map(Number);
    this.shown = asked.filter((number) => this.requests.has(number)).slice(0, MOST_PANELS);
    this.controls();
    this.list();
    this.choose(this.shown.length ? this.shown : this.first(data.side_by_side));
    new ResizeObserver(() => this.panels.forEach((panel) => panel.resize())).observe(byId("panels"));
    if (data.live && location.protocol.startsWith("http")) this.follow();
  }

  /** Requests that the command named, or else the last one that has finished. */
  first(named) {
    if (named && named.length) return named.slice(0, MOST_PANELS);
    const all = [...this.requests.values()];
    const last = all.filter((request) => request.finished).pop() ?? all.pop();
    return last ? [last.number] : [];
  }

  /** Add requests, or replace those that changed. */
  merge(requests) {
    for (const data of requests) {
      this.requests.set(data.number, new TracedRequest(data, this.requests));
    }
  }

  // -- the list

  list() {
    const nav = byId("requests");
    nav.hidden = this.requests.size < 2;
    const lists = new Map([[undefined, element("ul")]]);
    for (const request of this.requests.values()) {
      const parent = lists.get(request.parent?.number) ?? lists.get(undefined);
      const item = element("li"), own = element("ul");
      item.append(this.entry(request), own);
      lists.set(request.number, own);
      if (this.live && parent === lists.get(undefined)) parent.prepend(item); // the newest first
      else parent.append(item);
    }
    const top = nav.scrollTop;
    nav.replaceChildren(element("h2", {}, "Requests"), lists.get(undefined));
    nav.scrollTop = top;
  }

  entry(request) {
    const entry = element("div", { class: "entry", "data-number": request.number });
    const pick = element("button", { type: "button", class: "pick" });
    const state = request.finished ? "" : "running, ";
    const tokens = count.format(request.finished ? request.tokens : request.generated);
    const turn = request.parent ? `turn ${request.depth + 1}, ` : "";
    const budget = request.budget ? ` ${count.format(request.budget)}` : "";
    pick.append(
      element("span", { class: "rid" }, request.title),
      element("small", {}, `${turn}${state}${request.policy}${budget}, ${tokens} tokens`),
    );
    pick.addEventListener("click", () => this.choose([request.number]));
    const label = element("label", { title: "Show side by side" });
    const box = element("input", { type: "checkbox" });
    box.setAttribute("aria-label", `Show ${request.title} side by side`);
    box.addEventListener("change", () => {
      const others = this.shown.filter((number) => number !== request.number);
      const wanted = box.checked ? [...others, request.number].slice(-MOST_PANELS) : others;
      this.choose(wanted.length ? wanted : [request.number]);
    });
    label.append(box);
    entry.append(pick, label);
    return entry;
  }

  // -- the panels

  choose(numbers) {
    const atEnd = !this.stops.length || Number(byId("slider").value) === this.stops.length - 1;
    const stop = this.stops[Number(byId("slider").value)], before = this.shown.join();
    this.shown = numbers.filter((number) => this.requests.has(number));
    const shown = this.shown.map((number) => this.requests.get(number));
    byId("empty").hidden = shown.length > 0;
    this.limits = {
      generated: Math.max(1, ...shown.map((one) => one.generated)),
      kv: 1.05 * Math.max(1, ...shown.map((one) => one.full(Infinity))),
    };
    const places = before === this.shown.join() ? this.panels.map((one) => one.text.place()) : [];
    this.panels = shown.map((request) => new Panel(request, this));
    const panels = byId("panels");
    panels.replaceChildren(...this.panels.map((panel) => panel.root));
    panels.dataset.count = this.panels.length;
    const times = new Set(shown.flatMap((request) => request.at));
    this.stops = [...[...times].sort((a, b) => a - b), Infinity];
    byId("slider").max = this.stops.length - 1;
    this.step(atEnd ? this.stops.length - 1 : Math.max(atMost(this.stops, stop) - 1, 0));
    this.panels.forEach((panel, i) => {
      panel.resize();
      if (places[i]) panel.text.restore(places[i]);
    });
    this.markShown();
    if (this.shown.length) history.replaceState(null, "", `#${this.shown.join(",")}`);
  }

  markShown() {
    for (const entry of document.querySelectorAll(".entry")) {
      const chosen = this.shown.includes(Number(entry.dataset.number));
      entry.classList.toggle("shown", chosen);
      entry.querySelector("input").checked = chosen;
      entry.querySelector(".pick").setAttribute("aria-current", chosen);
    }
  }

  // -- the slider

  /** The last stop with at most so many generated tokens. */
  goTo(generated) {
    this.step(Math.max(atMost(this.stops, generated) - 1, 0));
  }

  step(index) {
    const slider = byId("slider"), last = this.stops.length - 1;
    const at = Math.min(Math.max(index, 0), last), generated = this.stops[at];
    slider.value = at;
    byId("previous").disabled = at === 0;
    byId("next").disabled = at === last;
    const moments = this.panels.map((panel) => panel.show(generated));
    const told = this.told(moments, generated);
    byId("now").textContent = told;
    slider.setAttribute("aria-valuetext", told);
  }

  told(moments, generated) {
    if (!moments.length) return "";
    const requests = this.panels.map((panel) => panel.request), [request] = requests;
    // A number per request, in the order of the panels, or one where all have the same.
    const each = (numberOf) => {
      const all = requests.map((one, i) => count.format(numberOf(one, moments[i])));
      return new Set(all).size === 1 ? all[0] : all.join(" / ");
    };
    const compactions = count.format(request.steps.length);
    const tokens = each((one) => Math.min(generated, one.generated));
    const held = each((one, moment) => one.held(moment));
    const full = each((one) => one.full(generated));
    const alone = this.panels.length === 1;
    const ended = this.panels.every((panel) => panel.request.finished);
    const name = generated === Infinity
      ? ended ? "At the end" : "Now"
      : alone
        ? `Compaction ${count.format(moments[0].step)} of ${compactions}`
        : `After ${count.format(generated)} tokens`;
    const after = alone || generated === Infinity ? `${tokens} tokens generated, ` : "";
    return `${name}: ${after}${held} KV tokens held, a full cache ${full}`;
  }

  controls() {
    const slider = byId("slider"), at = () => Number(slider.value);
    slider.addEventListener("input", () => this.step(at()));
    byId("previous").addEventListener("click", () => this.step(at() - 1));
    byId("next").addEventListener("click", () => this.step(at() + 1));
    document.addEventListener("keydown", (event) => {
      const elsewhere = event.target.closest?.("input, .text");
      if (elsewhere || event.ctrlKey || event.altKey || event.metaKey) return;
      if (event.key === "ArrowLeft") this.step(at() - 1);
      if (event.key === "ArrowRight") this.step(at() + 1);
    });
    for (const mark of document.querySelectorAll("input[name=marks]")) {
      mark.addEventListener("change", () => (document.documentElement.dataset.marks = mark.value));
    }
    document.documentElement.dataset.marks = "strike";
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const theme = (name) => {
      document.documentElement.dataset.theme = name;
      byId("theme").textContent = name === "dark" ? "Light" : "Dark";
      this.panels.forEach((panel) => panel.recolor());
    };
    theme(dark.matches ? "dark" : "light");
    dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
    byId("theme").addEventListener("click", () => {
      theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    });
  }

  // -- a server's page

  async follow() {
    const told = byId("live");
    told.hidden = false;
    told.textContent = "Live";
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      if (document.hidden) continue;
      try {
        const answer = await fetch(`skipkv/trace?since=${encodeURIComponent(this.cursor)}`);
        if (!answer.ok) throw new Error(`status ${answer.status}`);
        this.take(await answer.json());
        told.textContent = "Live";
      } catch (error) {
        told.textContent = `The server does not answer (${error.message})`;
      }
    }
  }

  take(data) {
    this.cursor = data.cursor;
    if (!data.requests.length) return;
    this.merge(data.requests);
    for (const number of this.requests.keys()) {
      if (this.requests.size <= this.most) break;
      if (!this.shown.includes(number)) this.requests.delete(number);
    }
    const focused = document.activeElement?.closest(".entry")?.dataset.number;
    this.list();
    document.querySelector(`.entry[data-number="${focused}"] .pick`)?.focus();
    const changed = new Set(data.requests.map((request) => request.number));
    if (!this.shown.length) this.choose(this.first());
    else if (this.shown.some((number) => changed.has(number))) this.choose(this.shown);
    else this.markShown();
  }
}

new Page(JSON.parse(byId("data").textContent));
