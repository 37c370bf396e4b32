// What a click on the timeline tells.
"use strict";
Timeline.prototype.click = function (x, y) {
  const lane = this.lanes.find(each => y >= each.top && y <= each.top + each.height);
  if (!lane || x < this.left) return;
  this.chosen = null;
  const time = this.time(x);
  const told = { trainer: this.ofTrainer, weights: this.ofWeights, reward: this.ofReward, engine: this.ofEngine }[
    lane.kind].call(this, time, lane, x, y);
  this.detail.replaceChildren(h("strong", null, lane.name + " at " + moment(Number(time.toFixed(2)))),
    ...told.filter(Boolean).map(text => h("span", null, text)));
  this.later();
};

Timeline.prototype.ofTrainer = function (time) {
  const { trainer, kinds } = this.data;
  const index = upTo(this.ends, time);
  if (index >= trainer.start.length || trainer.start[index] > time) return ["nothing is recorded"];
  return [CAUSES[kinds[trainer.kind[index]]] + " for " + seconds(trainer.seconds[index]),
    "in step " + (upTo(this.data.steps, time) + 1)];
};

Timeline.prototype.ofWeights = function (time) {
  const { weights } = this.data;
  const near = (this.view[1] - this.view[0]) / 200;
  const index = weights.start.findIndex((start, i) => start - near <= time && time <= start + weights.seconds[i] + near);
  if (index < 0) return ["no weight update"];
  return ["version " + weights.version[index] + " is sent to the engines for " + seconds(weights.seconds[index])];
};

Timeline.prototype.ofReward = function (time) {
  const { reward } = this.data;
  const index = upTo(reward.end, time);
  if (index >= reward.end.length) return ["nothing is recorded"];
  return ["on average over this step " + number(reward.judging[index]) + " completions waited for their reward",
    reward.latency[index] === null ? null : seconds(reward.latency[index]) + " each",
    "workers were busy " + percent(reward.busy[index])];
};

Timeline.prototype.ofEngine = function (time, lane, x, y) {
  const number_ = this.engines.indexOf(lane.engine), { completions } = this.data;
  const top = lane.top + lane.height - TRACKS * 8 - 1;
  const track = this.tall && y >= top ? Math.floor((y - top) / 8) : -1;
  const found = this.placed[number_].find(each => each.track === track && this.x(completions.start[each.index]) <= x + 2 &&
    x - 2 <= this.x(completions.start[each.index] + completions.seconds[each.index]));
  if (found) {
    const { index } = found;
    this.chosen = index;
    return ["group " + completions.group[index] + ", sample " + completions.sample[index],
      number(completions.tokens[index]) + " tokens in " + seconds(completions.seconds[index]),
      "reward " + number(completions.reward[index]), completions.fate[index]];
  }
  const running = this.running(lane.engine, time, 0);
  if (running >= 1) return [number(running) + " completions are generated"];
  return [this.idle(time)];
};

// Why no completion is generated.
Timeline.prototype.idle = function (time) {
  const { weights, trainer, kinds } = this.data;
  if (weights.start.some((start, i) => start <= time && time <= start + weights.seconds[i])) return "loads a weight update";
  const index = upTo(this.ends, time);
  const now = index < trainer.start.length && trainer.start[index] <= time ? kinds[trainer.kind[index]] : "";
  if (now === "evaluation") return "generates completions of held-out prompts";
  if (now === "training" || now === "checkpoint") return "waits for the trainer: no further group may be admitted";
  return "generates nothing: no group is admitted";
};

function timelineSection(data) {
  const canvas = h("canvas", { tabindex: 0, role: "img", id: "timeline",
    "aria-label": "Timeline of trainer, weights, reward and engines. Arrow keys move, plus and minus zoom." });
  const detail = h("div", { class: "detail", id: "timeline-detail", "aria-live": "polite" },
    h("span", { class: "muted" }, "Click on anything to see what it is."));
  const axis = h("div", { class: "time-axis", "aria-hidden": "true" });
  const timeline = new Timeline(data, canvas, detail);
  timeline.axis = axis;
  const button = (label, title, act) => h("button", { type: "button", title, "aria-label": title, onclick: act }, label);
  const controls = h("div", { class: "controls" }, button("+", "zoom in", () => timeline.zoom(0.5)),
    button("−", "zoom out", () => timeline.zoom(2)), button("all", "show the whole run", () => timeline.show(...timeline.whole)),
    h("span", { class: "muted" }, "drag to move · Ctrl + wheel or double click to zoom"));
  const used = new Set(data.trainer.kind.map(kind => data.kinds[kind]));
  const entry = (name, label) => h("li", null, h("i", { class: "swatch k-" + name }), label);
  const keys = h("ul", { class: "legend" }, Object.entries(CAUSES).filter(([name]) => used.has(name)).map(
    ([name, label]) => entry(name, label)), entry("area", "completions being generated"), entry("trained", "a long completion, trained on"),
    data.completions.fate.some(fate => fate.startsWith("dropped")) ? entry("dropped", "dropped") : null, entry("version", "new version served"));
  const holder = h("div", { class: "canvas" }, canvas);
  whenSized(holder, () => timeline.draw());
  theme.listeners.push(() => timeline.later());
  return h("div", null, keys, controls, holder, axis, detail, data.note ? h("p", { class: "muted" }, data.note) : null);
}
