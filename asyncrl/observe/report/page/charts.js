// Charts as SVG: lines over steps, and bars. A chart is described by the report; here it is only drawn.
"use strict";
const MARGIN = { top: 10, right: 14, bottom: 40, left: 68 };
const HEIGHT = 230;

function chart(described) {
  const plot = h("div", { class: "plot" });
  const draw = described.type === "bars" ? bars : lines;
  whenSized(plot, width => plot.replaceChildren(draw(described, width)));
  return h("figure", { class: "chart" },
    h("figcaption", null, h("strong", null, described.title), described.note && h("span", null, described.note)),
    described.type === "lines" && described.series.length > 1 ? legend(described.series) : null,
    plot);
}

function legend(series) {
  return h("ul", { class: "legend" }, series.map((one, index) =>
    h("li", null, h("i", { class: "swatch c" + (index + 1) + (one.dots ? " dot" : "") }), one.name)));
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

function range(described) {
  let [low, high] = extent(described.series.flatMap(one => one.y));
  if (low === Infinity) return [0, 1];
  if (described.from_zero) low = Math.min(0, low);
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  return [described.from_zero && low === 0 ? 0 : low - pad, high + pad];
}

function axes(described, width, x, y, xTicks, yTicks, xText, yText) {
  const right = width - MARGIN.right, bottom = HEIGHT - MARGIN.bottom;
  return s("g", { class: "axes" },
    yTicks.map(value => [
      s("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y(value), y2: y(value) }),
      s("text", { x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" }, yText(value))]),
    xTicks.map(value => s("text", { x: x(value), y: bottom + 17, "text-anchor": "middle" }, xText(value))),
    s("line", { class: "base", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom }),
    s("text", { class: "label", x: (MARGIN.left + right) / 2, y: HEIGHT - 6, "text-anchor": "middle" },
      described.x_label),
    s("text", { class: "label", "text-anchor": "middle",
      transform: `translate(13 ${(MARGIN.top + bottom) / 2}) rotate(-90)` }, described.y_label));
}

// Labels with as many digits as tell the ticks apart.
function tickText(values, percents) {
  const scale = percents ? 100 : 1, step = values.length > 1 ? (values[1] - values[0]) * scale : 1;
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  if (digits > 5 || Math.abs(values[values.length - 1]) * scale >= 1e7) return percents ? percent : number;
  return value => (value * scale).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) +
    (percents ? " %" : "");
}

function picture(described, width, ...children) {
  return s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img",
    "aria-label": described.title + ": " + described.y_label + " over " + described.x_label }, ...children);
}

function lines(described, width) {
  const bottom = HEIGHT - MARGIN.bottom;
  let [first, last] = extent(described.series.flatMap(one => one.x));
  if (first === Infinity) [first, last] = [0, 1];
  if (first === last) [first, last] = [first - 0.5, last + 0.5];
  const [low, high] = range(described);
  const x = value => MARGIN.left + (value - first) / (last - first) * (width - MARGIN.left - MARGIN.right);
  const y = value => bottom - (value - low) / (high - low) * (bottom - MARGIN.top);
  const text = described.percent ? percent : number;
  const yTicks = ticks(low, high, 5);
  const drawn = described.series.map((one, index) => line(one, index + 1, x, y));
  const marker = s("line", { class: "cross", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
  const svg = picture(described, width,
    axes(described, width, x, y, ticks(first, last, Math.min(8, width / 90)).filter(Number.isInteger),
      yTicks, number, tickText(yTicks, described.percent)), drawn, marker);
  svg.addEventListener("mousemove", event => {
    const at = first + (event.offsetX - MARGIN.left) / (width - MARGIN.left - MARGIN.right) * (last - first);
    const told = described.series.map(one => [one, nearest(one.x, at)]).filter(([, index]) => index >= 0);
    if (!told.length) return;
    const step = told[0][0].x[told[0][1]];
    marker.setAttribute("x1", x(step));
    marker.setAttribute("x2", x(step));
    marker.setAttribute("visibility", "visible");
    tooltip.show(event, [described.x_label + " " + number(step, 6),
      ...told.map(([one, index]) => one.name + ": " + text(one.y[index]) +
        (one.x[index] === step ? "" : " (at " + number(one.x[index], 6) + ")"))]);
  });
  svg.addEventListener("mouseleave", () => { tooltip.hide(); marker.setAttribute("visibility", "hidden"); });
  return svg;
}

function line(one, place, x, y) {
  let path = "", pen = false;
  one.x.forEach((value, index) => {
    const height = one.y[index];
    if (height === null || height === undefined) { pen = false; return; }
    path += (pen ? "L" : "M") + x(value).toFixed(1) + " " + y(height).toFixed(1);
    pen = true;
  });
  const dots = one.dots || one.x.length < 3;
  return s("g", { class: "series c" + place },
    s("path", { d: path, fill: "none" }),
    dots ? one.x.map((value, index) => one.y[index] === null ? null :
      s("circle", { cx: x(value), cy: y(one.y[index]), r: 3.5 })) : null);
}

function nearest(values, at) {
  if (!values.length) return -1;
  const index = Math.min(upTo(values, at), values.length - 1);
  return index > 0 && at - values[index - 1] < values[index] - at ? index - 1 : index;
}

function bars(described, width) {
  const bottom = HEIGHT - MARGIN.bottom, count = described.values.length;
  const high = Math.max(...described.values, 0) * 1.06 || 1;
  const slot = (width - MARGIN.left - MARGIN.right) / Math.max(count, 1);
  const x = index => MARGIN.left + (index + 0.5) * slot;
  const y = value => bottom - value / high * (bottom - MARGIN.top);
  const yTicks = ticks(0, high, 5);
  const every = Math.max(1, Math.ceil(count * 56 / (width - MARGIN.left - MARGIN.right)));
  const shown = described.labels.map((_, index) => index).filter(index => index % every === 0);
  const text = described.percent ? percent : number;
  return picture(described, width,
    axes(described, width, x, y, shown, yTicks, index => described.labels[index], tickText(yTicks, described.percent)),
    described.values.map((value, index) => {
      const bar = s("rect", { class: "bar " + ((described.marked || []).includes(index) ? "c5" : "c1"),
        x: x(index) - slot * 0.42, y: y(value), width: slot * 0.84, height: Math.max(0, bottom - y(value)), rx: 2 });
      bar.addEventListener("mousemove", event => tooltip.show(event,
        [described.x_label + " " + (described.ranges || described.labels)[index], text(value) + " " + described.unit]));
      bar.addEventListener("mouseleave", tooltip.hide);
      return bar;
    }),
    described.line === undefined ? null :
      s("line", { class: "level", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(described.line), y2: y(described.line) }));
}

// One bar of parts, with a legend that carries the numbers: colours alone tell nothing.
function shares(parts) {
  return h("div", { class: "shares" },
    h("div", { class: "stack", role: "img", "aria-label": parts.map(p => p.label + " " + percent(p.share)).join(", ") },
      parts.filter(part => part.share > 0).map(part => {
        const piece = h("span", { class: "part " + part.colour });
        piece.style.flexGrow = part.share;
        return piece;
      })),
    h("ul", { class: "legend" }, parts.map(part => h("li", null, h("i", { class: "swatch " + part.colour }),
      part.label, " ", h("b", null, percent(part.share)), part.detail && h("span", { class: "muted" }, part.detail)))));
}
