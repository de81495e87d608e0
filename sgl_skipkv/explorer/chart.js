"use strict";
// KV tokens over generated tokens: held, and what a full cache would hold.

const CHART_HEIGHT = 190;

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

class Chart {
  /** limits: {generated, kv}, the same for all requests side by side. */
  constructor(request, limits, onGenerated) {
    this.request = request;
    this.root = element("div", { class: "chart", role: "img" });
    const points = request.line();
    const x = points.map(([generated]) => generated);
    const held = points.map(([, tokens]) => tokens);
    const full = x.map((generated) => request.full(generated));
    const axis = {
      stroke: () => color("--quiet"),
      grid: { stroke: () => color("--rule"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    const named = { label: "generated tokens", labelSize: 18, labelGap: 0, labelFont: axis.font };
    const thousands = (_, values) => values.map((value) => count.format(value));
    this.plot = new uPlot(
      {
        width: 400,
        height: CHART_HEIGHT,
        padding: [8, 24, 0, 0], // half of the last number is beside the plot
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
        scales: {
          x: { time: false, range: [0, limits.generated] },
          y: { range: [0, limits.kv] },
        },
        axes: [
          { ...axis, ...named, size: 26, gap: 4, values: thousands, space: 70 },
          { ...axis, size: 52, gap: 6, values: thousands, space: 34 },
        ],
        series: [
          {},
          { stroke: () => color("--quiet"), width: 1, dash: [4, 4], points: { show: false } },
          {
            stroke: () => color("--accent"),
            fill: () => color("--accent-wash"),
            width: 1.5,
            points: { show: false },
          },
        ],
      },
      [x, full, held],
      this.root,
    );
    this.now = element("div", { class: "now" });
    this.plot.over.append(this.now);
    this.plot.over.addEventListener("click", (event) => {
      onGenerated(this.plot.posToVal(event.offsetX, "x"));
    });
    const all = count.format(request.full(Infinity));
    const peak = count.format(Math.max(...held));
    this.root.setAttribute("aria-label", `KV tokens held: at most ${peak}, a full cache ${all}`);
  }

  resize(width) {
    this.plot.setSize({ width, height: CHART_HEIGHT });
    if (this.moment) this.show(this.moment);
  }

  redraw() {
    this.plot.redraw(false, true);
  }

  show(moment) {
    this.moment = moment;
    const generated = Math.min(moment.generated, this.request.generated);
    this.now.style.transform = `translateX(${this.plot.valToPos(generated, "x")}px)`;
  }
}
