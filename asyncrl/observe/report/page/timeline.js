// The timeline: lanes on a canvas. Only what is visible is drawn, so a long run stays fluid.
"use strict";
const LANES = { trainer: 40, weights: 26, reward: 40, engine: 84, axis: 26, gap: 10 };
const TRACKS = 5;
const MANY_ENGINES = 8;

class Timeline {
  constructor(data, canvas, detail) {
    this.data = data;
    this.canvas = canvas;
    this.detail = detail;
    this.pen = canvas.getContext("2d");
    this.engines = data.engines.map(engine => ({
      ...engine, started: floats(engine.started), finished: floats(engine.finished),
    }));
    this.ends = data.trainer.start.map((start, index) => start + data.trainer.seconds[index]);
    this.tall = this.engines.length <= MANY_ENGINES;
    this.lanes = this.layout();
    this.whole = [0, Math.max(data.seconds, 1e-6)];
    this.view = [...this.whole];
    this.chosen = null;
    this.placeCompletions();
    this.listen();
  }

  layout() {
    const lanes = [{ kind: "trainer", name: "trainer", height: LANES.trainer },
      { kind: "weights", name: "weights", height: LANES.weights }];
    if (this.data.reward.end.length) lanes.push({ kind: "reward", name: "reward", height: LANES.reward,
      most: Math.max(...this.data.reward.judging) });
    for (const engine of this.engines) {
      lanes.push({ kind: "engine", name: engine.name, engine, most: engine.most,
        height: this.tall ? LANES.engine : LANES.reward });
    }
    let top = LANES.axis;
    for (const lane of lanes) { lane.top = top; top += lane.height + LANES.gap; }
    this.height = top;
    return lanes;
  }

  // The longest completions first, each in the first track that is free there; who finds none is not shown.
  placeCompletions() {
    const { completions } = this.data;
    const order = completions.start.map((_, index) => index).sort((a, b) => completions.seconds[b] - completions.seconds[a]);
    const taken = this.engines.map(() => Array.from({ length: TRACKS }, () => ({ starts: [], ends: [] })));
    this.placed = this.engines.map(() => []);
    for (const index of order) {
      const start = completions.start[index], end = start + completions.seconds[index];
      const track = taken[completions.engine[index]].findIndex(each => {
        const place = upTo(each.starts, start);
        if (place > 0 && each.ends[place - 1] > start || place < each.starts.length && each.starts[place] < end) return false;
        each.starts.splice(place, 0, start);
        each.ends.splice(place, 0, end);
        return true;
      });
      if (track >= 0) this.placed[completions.engine[index]].push({ index, track });
    }
  }

  x(time) { return this.left + (time - this.view[0]) / (this.view[1] - this.view[0]) * (this.width - this.left); }
  time(x) { return this.view[0] + (x - this.left) / (this.width - this.left) * (this.view[1] - this.view[0]); }

  draw() {
    this.width = this.canvas.parentElement.clientWidth;
    this.left = this.width < 700 ? 76 : 100;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = this.width * scale;
    this.canvas.height = this.height * scale;
    this.canvas.style.height = this.height + "px";
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
    this.colours = Object.fromEntries([...Object.keys(CAUSES), "text", "muted", "line", "lane", "area", "edge",
      "trained", "dropped", "held", "version"].map(name => [name, colour(name)]));
    this.pen.clearRect(0, 0, this.width, this.height);
    this.pen.font = "12px system-ui, sans-serif";
    this.pen.textBaseline = "middle";
    for (const lane of this.lanes) this.drawLane(lane);
    this.drawVersions();
    this.drawAxis();
  }

  drawLane(lane) {
    const { pen } = this;
    pen.fillStyle = this.colours.lane;
    pen.fillRect(this.left, lane.top, this.width - this.left, lane.height);
    pen.fillStyle = this.colours.text;
    pen.textAlign = "left";
    pen.fillText(lane.name.length > 13 ? lane.name.slice(0, 12) + "…" : lane.name, 0, lane.top + lane.height / 2 - (lane.most ? 8 : 0));
    if (lane.most) {
      pen.fillStyle = this.colours.muted;
      pen.fillText("up to " + number(lane.most), 0, lane.top + lane.height / 2 + 8);
    }
    pen.save();
    pen.beginPath();
    pen.rect(this.left, lane.top, this.width - this.left, lane.height);
    pen.clip();
    ({ trainer: this.drawTrainer, weights: this.drawWeights, reward: this.drawReward, engine: this.drawEngine })[
      lane.kind].call(this, lane);
    pen.restore();
  }

  drawTrainer(lane) {
    const { trainer } = this.data;
    let last = -Infinity;
    for (let i = upTo(this.ends, this.view[0]); i < trainer.start.length && trainer.start[i] < this.view[1]; i++) {
      const from = this.x(trainer.start[i]), to = this.x(this.ends[i]);
      if (to - last < 0.3) continue;  // less than a pixel since the last one
      last = to;
      this.pen.fillStyle = this.colours[this.data.kinds[trainer.kind[i]]];
      this.pen.fillRect(from, lane.top, Math.max(to - from, 0.6), lane.height);
    }
  }

  drawWeights(lane) {
    const { weights } = this.data;
    this.pen.fillStyle = this.colours.sync;
    weights.start.forEach((start, index) => {
      const from = this.x(start);
      if (from > this.width || this.x(start + weights.seconds[index]) < this.left) return;
      this.pen.fillRect(from, lane.top + 4, Math.max(this.x(start + weights.seconds[index]) - from, 1.2), lane.height - 8);
    });
  }

  drawReward(lane) {
    const { reward } = this.data;
    const most = Math.max(lane.most, 1);
    this.pen.fillStyle = this.colours.reward;
    reward.end.forEach((end, index) => {
      const from = this.x(reward.start[index]), height = reward.judging[index] / most * (lane.height - 4);
      this.pen.fillRect(from, lane.top + lane.height - height, Math.max(this.x(end) - from, 0.6), height);
    });
  }

  drawEngine(lane) {
    const { pen } = this, { engine } = lane;
    const high = this.tall ? lane.height - TRACKS * 8 - 4 : lane.height;
    const base = lane.top + high, pixel = (this.view[1] - this.view[0]) / (this.width - this.left);
    pen.fillStyle = this.colours.area;
    pen.beginPath();
    pen.moveTo(this.left, base);
    for (let x = this.left; x <= this.width; x++) {
      pen.lineTo(x, base - this.running(engine, this.time(x), pixel) / engine.most * (high - 3));
    }
    pen.lineTo(this.width, base);
    pen.fill();
    if (this.tall) this.drawCompletions(lane, base + 3);
  }

  // Mean over one pixel where there are many completions in it, so that nothing flickers between the pixels.
  running(engine, time, pixel) {
    const at = moment => engine.every * (upTo(engine.started, moment) - upTo(engine.finished, moment));
    return Math.max(0, (at(time) + at(time + pixel / 3) + at(time + pixel * 2 / 3)) / 3);
  }

  drawCompletions(lane, top) {
    const { completions } = this.data, number = this.engines.indexOf(lane.engine);
    for (const { index, track } of this.placed[number]) {
      const from = this.x(completions.start[index]), to = this.x(completions.start[index] + completions.seconds[index]);
      if (to < this.left || from > this.width || to - from < 0.7) continue;
      this.pen.fillStyle = this.chosen === index ? this.colours.text : this.colours[fateColour(completions.fate[index])];
      this.pen.fillRect(from, top + track * 8, Math.max(to - from - 0.5, 0.7), 6);
    }
  }

  drawVersions() {
    const { pen } = this, { versions } = this.data;
    pen.strokeStyle = pen.fillStyle = this.colours.version;
    pen.lineWidth = 1;
    const shown = versions.time.filter(time => time >= this.view[0] && time <= this.view[1]).length;
    pen.globalAlpha = shown > (this.width - this.left) / 6 ? 0.25 : 0.7;
    let last = -Infinity;
    pen.textAlign = "left";
    versions.time.forEach((time, index) => {
      const x = this.x(time);
      if (x < this.left || x > this.width) return;
      pen.beginPath();
      pen.moveTo(x, LANES.axis - 6);
      pen.lineTo(x, this.height - LANES.gap);
      pen.stroke();
      if (x - last < 44 || x > this.width - 30) return;
      pen.globalAlpha = 1;
      pen.fillText("v" + versions.version[index], x + 3, LANES.axis - 9);
      pen.globalAlpha = shown > (this.width - this.left) / 6 ? 0.25 : 0.7;
      last = x;
    });
    pen.globalAlpha = 1;
  }

  drawAxis() {
    const shown = timeTicks(...this.view, (this.width - this.left) / 90).filter(at => this.x(at) < this.width - 28);
    this.axis.replaceChildren(...shown.map(at => {
      const label = h("span", null, moment(at));
      label.style.left = this.x(at) + "px";
      return label;
    }));
  }

  zoom(factor, around = (this.view[0] + this.view[1]) / 2) {
    const length = Math.min(Math.max((this.view[1] - this.view[0]) * factor, 1e-3), this.whole[1]);
    const share = (around - this.view[0]) / (this.view[1] - this.view[0]);
    this.show(around - share * length, length);
  }

  show(from, length) {
    const start = Math.min(Math.max(from, 0), this.whole[1] - length);
    this.view = [start, start + length];
    this.later();
  }

  later() {
    if (!this.asked) this.asked = requestAnimationFrame(() => { this.asked = 0; this.draw(); });
  }

  listen() {
    const { canvas } = this;
    let held = null;
    canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;  // the page scrolls
      event.preventDefault();
      this.zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, this.time(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", event => {
      held = { x: event.offsetX, view: [...this.view], moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", event => {
      if (!held) return;
      const moved = event.offsetX - held.x;
      held.moved = held.moved || Math.abs(moved) > 3;
      const length = held.view[1] - held.view[0];
      if (held.moved) this.show(held.view[0] - moved / (this.width - this.left) * length, length);
    });
    canvas.addEventListener("pointerup", event => {
      if (held && !held.moved) this.click(event.offsetX, event.offsetY);
      held = null;
    });
    canvas.addEventListener("dblclick", event => this.zoom(0.25, this.time(event.offsetX)));
    canvas.addEventListener("keydown", event => this.key(event));
  }

  key(event) {
    const length = this.view[1] - this.view[0];
    const act = { ArrowLeft: () => this.show(this.view[0] - length / 8, length), "+": () => this.zoom(0.5),
      ArrowRight: () => this.show(this.view[0] + length / 8, length), "-": () => this.zoom(2),
      "0": () => this.show(...this.whole) }[event.key];
    if (act) { event.preventDefault(); act(); }
  }
}
const fateColour = fate => fate === "trained" ? "trained" : fate.startsWith("dropped") ? "dropped" : "held";
