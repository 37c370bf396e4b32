// Puts the page together from the report's data.
"use strict";
function section(id, title, intro, ...content) {
  byId("sections").append(h("section", { id, "aria-labelledby": id + "-title" },
    h("h2", { id: id + "-title" }, title), intro && h("p", { class: "intro" }, intro), ...content));
  byId("contents").append(h("a", { href: "#" + id }, title));
}
const charts = (described, id) => h("div", { class: "charts", id }, described.map(chart));
const nothing = text => h("p", { class: "muted empty" }, text);

function table(head, rows, numeric = 1) {
  const cells = (tag, row) => row.map((cell, index) => h(tag, { class: index >= numeric ? "num" : null }, cell));
  return h("div", { class: "scroll" }, h("table", null, h("thead", null, h("tr", null, cells("th", head))),
    h("tbody", null, rows.map(row => h("tr", null, cells("td", row))))));
}

function top(data) {
  byId("name").textContent = data.run.name;
  byId("status").textContent = data.run.status;
  byId("status").className = "pill " + data.run.tone;
  byId("when").textContent = data.run.when;
  const box = byId("headline");
  box.append(...[data.run.trouble && h("p", { class: "trouble" }, data.run.trouble),
    h("p", { class: "sentence", id: "sentence", "data-bound": data.headline.bound }, data.headline.sentence),
    data.headline.advice && h("p", { class: "advice", id: "advice" }, data.headline.advice),
    ...data.headline.beside.map(text => h("p", { class: "beside" }, text)),
    data.shares.length ? shares(data.shares) : null].filter(Boolean));
  byId("tiles").append(...data.tiles.map(tile => h("div", { class: "tile" }, h("span", null, tile.label),
    h("b", null, tile.value), tile.note && h("small", null, tile.note))));
}

function wasteSection(waste) {
  if (!waste.rows.length) return [nothing("No token is accounted for yet.")];
  return [shares(waste.rows), table(["outcome of the sampled tokens", "tokens", "share", "completions"],
    waste.rows.map(row => [h("span", { title: row.meaning || null }, row.label), row.tokens.toLocaleString("en"), percent(row.share),
      row.completions === null ? "" : row.completions.toLocaleString("en")])),
    waste.reasons.length ? h("details", null, h("summary", null, "what the reasons mean"),
      table(["reason", "meaning", "what to do"], waste.reasons, 3)) : null,
    waste.notes.map(text => h("p", { class: "muted" }, text))];
}

function start() {
  const data = JSON.parse(byId("data").textContent);
  theme.start();
  top(data);
  section("learning", "Learning", "Reward of the samples trained on, and score on held-out prompts.",
    data.learning.length ? charts(data.learning) : nothing("No step is finished yet."));
  if (data.prompts) {
    section("prompts", "Prompts", "What was asked, how often, and how often it was solved.", charts(data.prompts.charts),
      table(data.prompts.head, data.prompts.rows));
  }
  section("timeline-section", "Timeline",
    "Who worked, who waited, and for what. Vertical lines are policy versions; under each engine are its longest completions.",
    data.timeline ? timelineSection(data.timeline) : nothing("This directory holds no events."));
  section("distributions", "Lengths and staleness", "Of all finished completions.",
    data.distributions.length ? charts(data.distributions) : nothing("No trajectory is recorded."));
  section("correction", "Off-policy correction",
    "How far the engines' policy was from the trainer's, and what the correction did about it.",
    data.correction.length ? charts(data.correction) : nothing("No step is finished yet."));
  if (data.drafting.length) {
    section("drafting", "Speculation", "How many drafted tokens were accepted, and what drafting gained by batch size.",
      charts(data.drafting));
  }
  if (data.agents) {
    section("agents", "Agents", "Episodes of the harness: turns, time, and calls that branched off.", charts(data.agents.charts),
      data.agents.branches.length ? table(["why a call branched off", "branches", "episodes", "share of episodes"],
        data.agents.branches.map(row => [row[0], row[1], row[2], percent(row[3])])) : null,
      data.agents.notes.map(text => h("p", { class: "muted" }, text)));
  }
  if (data.judge) {
    section("judge", "Judge", "What the model that judges was asked, and what it cost.", charts(data.judge.charts),
      data.judge.notes.map(text => h("p", { class: "muted" }, text)));
  }
  section("waste", "Waste", "Every sampled token is trained on, on its way, or dropped for a reason.", wasteSection(data.waste));
  section("memory", "Memory and load", null, data.memory.length ? charts(data.memory) : nothing("Not recorded."));
  section("samples", "Samples", "A selection of completions, token by token.",
    data.samples ? samplesSection(data.samples) : nothing(data.no_samples));
  section("setup", "Config and environment", null,
    data.environment.length ? table(["environment", "version"], data.environment, 2) : nothing("The environment is not recorded."),
    data.log.length ? h("details", null, h("summary", null, "what happened (" + data.log.length + ")"),
      table(["when", "what", "details"], data.log, 3)) : null,
    h("details", null, h("summary", null, "resolved config"), h("pre", { class: "text" }, data.config)));
  document.documentElement.dataset.ready = "yes";
}
start();
