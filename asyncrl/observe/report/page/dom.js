// Small tools: elements, numbers, theme, tooltip. Text only ever enters the page through textContent.
"use strict";
const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) element.append(child);  // a string becomes a text node
  }
  return element;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = id => document.getElementById(id);

function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}
const percent = share => (share * 100).toFixed(share < 0.1 && share > 0 ? 1 : 0) + " %";
function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 0.001) return (value * 1e6).toFixed(0) + " µs";
  if (value < 1) return (value * 1e3).toFixed(value < 0.1 ? 1 : 0) + " ms";
  if (value < 120) return value.toFixed(value < 10 ? 2 : 1) + " s";
  if (value < 7200) return Math.floor(value / 60) + " min " + Math.round(value % 60) + " s";
  return (value / 3600).toFixed(1) + " h";
}

function ticks(low, high, wanted) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * power).find(each => each >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) {
    found.push(Number(at.toPrecision(12)));
  }
  return found;
}

// Of a clock: steps of minutes and hours from some length on.
function timeTicks(low, high, wanted) {
  const step = [10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400].find(
    each => each >= (high - low) / wanted);
  if (high - low < 10 * wanted || !step) return ticks(low, high, wanted);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, index) => (first + index) * step);
}
// A moment of the run, as a label.
function moment(value) {
  if (value < 60) return number(value, 5) + " s";
  const whole = Math.floor(value), minutes = Math.floor(whole / 60) % 60, hours = Math.floor(whole / 3600);
  const rest = Number((value - whole + whole % 60).toFixed(3));
  const parts = [hours ? hours + " h" : "", minutes ? minutes + " min" : "", rest ? rest + " s" : ""];
  return parts.filter(Boolean).join(" ");
}

function floats(base64) {
  const raw = atob(base64);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Float32Array(bytes.buffer);
}
// How many of the sorted values are not above `limit`.
function upTo(values, limit) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= limit) low = middle + 1; else high = middle;
  }
  return low;
}

const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const CAUSES = {
  training: "trains", generation: "waits for completions", tail: "waits for the last completions",
  reward: "waits for rewards", sync: "waits for weights", checkpoint: "writes a checkpoint",
  evaluation: "held-out evaluation", other: "other",
};

const tooltip = {
  show(event, lines) {
    const box = byId("tooltip");
    box.replaceChildren(...lines.map(line => h("div", null, line)));
    box.hidden = false;
    const { innerWidth: width, innerHeight: height } = window;
    const left = Math.min(event.clientX + 14, width - box.offsetWidth - 8);
    const above = event.clientY + 18 + box.offsetHeight > height;
    box.style.left = Math.max(8, left) + "px";
    box.style.top = (above ? event.clientY - box.offsetHeight - 10 : event.clientY + 18) + "px";
  },
  hide() { byId("tooltip").hidden = true; },
};

const theme = {
  listeners: [],
  chosen: false,
  set(name) {
    document.documentElement.dataset.theme = name;
    for (const each of theme.listeners) each();
  },
  start() {
    const system = matchMedia("(prefers-color-scheme: dark)");
    const follow = () => { if (!theme.chosen) theme.set(system.matches ? "dark" : "light"); };
    follow();
    system.addEventListener("change", follow);
    byId("theme").addEventListener("click", () => {
      theme.chosen = true;
      theme.set(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    });
  },
};

// Draws now and whenever the width of the element changes.
function whenSized(element, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(element.clientWidth - width) > 1 && element.clientWidth) {
      width = element.clientWidth;
      draw(width);
    }
  }).observe(element);
}
