"use strict";
// What lived how long: a column per token position, a row per compaction. Where there are more
// positions than pixels, a pixel shows the share of its positions that were live.

const MAP_HEIGHT = 240, MOST_ROW_HEIGHT = 14;

class LifeMap {
  constructor(request, onPoint) {
    this.request = request;
    this.rows = request.steps.length + 1; // the last is the end
    this.root = element("div", { class: "map" });
    this.canvas = element("canvas", { role: "img", "aria-label": this.summary() });
    this.now = element("div", { class: "now-row" });
    this.read = element("p", { class: "read" });
    const frame = element("div", { class: "frame" });
    const promptEnd = element("div", { class: "prompt-end" });
    promptEnd.style.left = `${(100 * request.prompt) / Math.max(request.length, 1)}%`;
    frame.append(this.canvas, promptEnd, this.now);
    this.root.append(frame, this.read);
    frame.addEventListener("mousemove", (event) => this.hover(this.pointed(event)));
    frame.addEventListener("mouseleave", () => this.hover(null));
    frame.addEventListener("click", (event) => {
      const { row, position } = this.pointed(event);
      onPoint(row < request.steps.length ? request.at[row] : Infinity, position);
    });
    this.hover(null);
  }

  summary() {
    const { request } = this, end = request.moment(Infinity);
    let live = 0;
    for (let p = 0; p < request.length; p++) live += request.stateOf(p, end) === LIVE ? 1 : 0;
    return (
      `Of ${count.format(request.length)} token positions, ` +
      `${count.format(live)} are live after ${count.format(request.steps.length)} compactions`
    );
  }

  moments() {
    return [...this.request.at.map((_, i) => this.momentOf(i)), this.request.moment(Infinity)];
  }

  /** Right behind compaction `index`: several may have come with the same number of tokens. */
  momentOf(index) {
    const { request } = this, step = index + 1;
    let life = request.lives.length - 1;
    while (life > 0 && request.lives[life].first >= step) life--;
    return { step, life, generated: request.at[index] };
  }

  resize(width) {
    const { request, rows } = this, ratio = window.devicePixelRatio || 1;
    const height = Math.max(Math.min(MAP_HEIGHT, rows * MOST_ROW_HEIGHT), 28);
    const columns = Math.max(1, Math.min(request.length, Math.round(width * ratio)));
    this.canvas.width = columns;
    this.canvas.height = rows;
    this.canvas.style.height = `${height}px`;
    this.height = height;
    this.paint(columns);
    if (this.moment) this.show(this.moment);
  }

  paint(columns) {
    const { request, rows, canvas } = this, total = Math.max(request.length, 1);
    const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
    const live = rgb("--live"), gone = rgb("--lost");
    const column = new Int32Array(request.length);
    for (let p = 0; p < request.length; p++) column[p] = Math.floor((p * columns) / total);
    this.moments().forEach((moment, row) => {
      const alive = new Int32Array(columns), evicted = new Int32Array(columns);
      for (let p = 0; p < request.length; p++) {
        const state = request.stateOf(p, moment);
        if (state === LATER) break;
        if (state === LIVE) alive[column[p]]++;
        else evicted[column[p]]++;
      }
      for (let x = 0; x < columns; x++) {
        const there = alive[x] + evicted[x], at = 4 * (row * columns + x);
        if (there === 0) continue;
        const share = alive[x] / there;
        for (let channel = 0; channel < 3; channel++) {
          image.data[at + channel] = gone[channel] + share * (live[channel] - gone[channel]);
        }
        image.data[at + 3] = 255;
      }
    });
    context.putImageData(image, 0, 0);
  }

  pointed(event) {
    const box = this.canvas.getBoundingClientRect();
    const share = (at, size) => Math.min(Math.max(at / Math.max(size, 1), 0), 0.999999);
    return {
      row: Math.floor(share(event.clientY - box.top, box.height) * this.rows),
      position: Math.floor(share(event.clientX - box.left, box.width) * this.request.length),
    };
  }

  hover(point) {
    const { request } = this, rows = count.format(request.steps.length);
    if (point === null || !request.length) {
      const last = count.format(Math.max(request.length - 1, 0));
      const steps = request.steps.length ? `compactions 1 to ${rows} from the top` : "no compaction";
      this.read.textContent = `Positions 0 to ${last} from left, ${steps}`;
      return;
    }
    const evicted = request.evictedAt[request.lives.length - 1][point.position];
    const inPrompt = point.position < request.prompt ? " (prompt)" : "";
    const fate = request.inherited[point.position]
      ? "evicted before this request"
      : evicted
        ? `evicted by compaction ${count.format(evicted)}`
        : "live at the end";
    this.read.textContent = `Position ${count.format(point.position)}${inPrompt}: ${fate}`;
  }

  show(moment) {
    this.moment = moment;
    const row = moment.generated === Infinity ? this.rows - 1 : Math.max(moment.step - 1, 0);
    const height = this.height / this.rows;
    this.now.style.transform = `translateY(${row * height}px)`;
    this.now.style.height = `${Math.max(height, 2)}px`;
  }
}

function rgb(name) {
  const value = color(name).slice(1);
  return [0, 2, 4].map((at) => parseInt(value.slice(at, at + 2), 16));
}
