// The sample viewer: a list to choose from, and one completion with its tokens coloured.
"use strict";
function samplesSection(data) {
  const list = h("ul", { class: "list", id: "sample-list", role: "listbox", "aria-label": "samples" });
  const view = h("div", { class: "sample", id: "sample-view", "aria-live": "polite" });
  const state = { kind: data.kinds[0].name, sample: null, by: "version" };

  const kinds = data.kinds.map(kind => h("button", { type: "button", "data-kind": kind.name, title: kind.title,
    onclick: () => { state.kind = kind.name; fillList(); } }, kind.name + " ", h("small", null, String(kind.samples.length))));

  function fillList() {
    for (const each of kinds) each.setAttribute("aria-pressed", String(each.dataset.kind === state.kind));
    const chosen = data.kinds.find(kind => kind.name === state.kind).samples;
    list.replaceChildren(...chosen.map(index => item(index)));
    select(chosen[0]);
  }
  function item(index) {
    const sample = data.samples[index];
    return h("li", { role: "option", tabindex: 0, "data-index": index, onclick: () => select(index),
      onkeydown: event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); select(index); } } },
      h("b", null, number(sample.reward)), h("span", null, sample.preview), h("small", null, number(sample.tokens) + " tokens"));
  }
  function select(index) {
    state.sample = index;
    for (const each of list.children) each.setAttribute("aria-selected", String(Number(each.dataset.index) === index));
    show();
  }
  function show() {
    const sample = data.samples[state.sample];
    const by = state.by === "gap" && !sample.gaps ? "logprob" : state.by;
    view.replaceChildren(facts(sample), h("h4", null, "Prompt"), h("pre", { class: "text" }, sample.prompt || "(not recorded)"),
      h("div", { class: "completion-head" }, h("h4", null, sample.episode ? "Conversation" : "Completion"), toggles(sample, by), scale(sample, by)),
      completion(sample, by));
  }
  function toggles(sample, by) {
    const way = (name, label) => h("button", { type: "button", "data-by": name, "aria-pressed": String(by === name),
      onclick: () => { state.by = name; show(); } }, label);
    return h("div", { class: "controls" }, "coloured by ", way("version", "policy version"), way("logprob", "log-probability"),
      sample.gaps ? way("gap", "log-prob gap") : null);
  }
  fillList();
  return h("div", null, h("div", { class: "controls wrap" }, kinds), h("div", { class: "viewer" }, list, view));
}

function facts(sample) {
  const row = (name, value) => value === null || value === undefined || value === "" ? null :
    h("div", null, h("dt", null, name), h("dd", null, value));
  const parts = Object.entries(sample.parts || {});
  return h("dl", { class: "facts" },
    row("reward", number(sample.reward)), parts.map(([name, value]) => row("reward: " + name, number(value))),
    row("above its group's mean", sample.above === null ? null : (sample.above >= 0 ? "+" : "") + number(sample.above)),
    row("outcome", sample.fate), row("tokens", number(sample.tokens)), row("ended by", sample.finish),
    row("oldest token", sample.age === null ? null : sample.age + (sample.age === 1 ? " version" : " versions") + " old"),
    row("generated", seconds(sample.seconds) + " on " + sample.engine),
    Object.entries(sample.episode || {}).map(([name, value]) => row(name, value)),
    row("slot", "group " + sample.group + ", sample " + sample.sample), row("prompt id", sample.uid));
}

// Tokens of one completion; `pieces` are their texts, some shared by several tokens that are one character together.
function completion(sample, by) {
  const box = h("pre", { class: "text tokens by-" + by });
  const values = by === "gap" ? sample.gaps : sample.logprobs;
  const marks = sample.marks || [];
  let run = 0, mark = 0;
  sample.pieces.forEach((piece, index) => {
    while (mark < marks.length && marks[mark].at <= index) {
      const each = marks[mark++];
      if (each.branch) box.append(h("strong", { class: "branch" }, "⑂ " + each.branch));
      box.append(h("strong", { class: "turn " + each.role }, each.title));
    }
    if (index === sample.cut) box.append(h("em", null, " … " + number(sample.left_out) + " tokens left out … "));
    while (run + 1 < sample.runs.length && sample.runs[run + 1][0] <= index) run++;
    const version = sample.runs.length ? sample.runs[run][1] : null;
    const given = version === -1;
    const token = h("span", { class: given ? "given" : shade(by, run, values[index]) }, piece);
    token.addEventListener("mousemove", event => tooltip.show(event, given ? ["given, not sampled: from the prompt, the environment or the harness"] :
      ["version " + version, "log-probability " + number(sample.logprobs[index]) + " (p " + number(Math.exp(sample.logprobs[index]), 2) + ")",
        ...(sample.gaps ? ["trainer − engine " + number(sample.gaps[index])] : [])]));
    token.addEventListener("mouseleave", tooltip.hide);
    box.append(token);
  });
  return box;
}

function shade(by, run, value) {
  if (by === "version") return "t v" + run % 6;
  if (value === null || value === undefined) return "t";
  if (by === "logprob") return "t l" + (value > -0.05 ? 0 : value > -0.4 ? 1 : value > -1.2 ? 2 : value > -3 ? 3 : 4);
  const size = Math.abs(value), level = size < 0.01 ? 0 : size < 0.05 ? 1 : size < 0.2 ? 2 : 3;
  return "t " + (level === 0 ? "g0" : (value > 0 ? "gp" : "gn") + level);
}

function scale(sample, by) {
  const entry = (name, label) => h("li", null, h("i", { class: "swatch t " + name }), label);
  if (by === "version") {
    const sampled = sample.runs.map((run, index) => [run, index]).filter(([run]) => run[1] !== -1);
    return h("ul", { class: "legend" }, sampled.slice(0, 12).map(([run, index]) => entry("v" + index % 6, "version " + run[1])));
  }
  if (by === "logprob") {
    return h("ul", { class: "legend" }, ["p > 0.95", "> 0.67", "> 0.3", "> 0.05", "less likely"].map((label, i) => entry("l" + i, label)));
  }
  return h("ul", { class: "legend" }, entry("gn3", "trainer finds it less likely"), entry("g0", "equal"), entry("gp3", "more likely"));
}
