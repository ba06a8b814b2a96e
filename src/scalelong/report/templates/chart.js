"use strict";
// One chart: axes, a line per method, and a readout that follows the pointer, the finger or the arrow keys.

const SVG = "http://www.w3.org/2000/svg";

function svg(parent, name, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  parent.append(node);
  return node;
}

function html(parent, name, className = "", text = "") {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text) node.textContent = text;
  parent.append(node);
  return node;
}

// ---------------------------------------------------------------------------------------------- numbers and ticks

function shortNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return +(value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return +(value / 1e3).toPrecision(4) + "k";
  if (size > 0 && size < 1e-3) return value.toExponential(0).replace("-", "−").replace("e−", "e-");
  return String(+value.toPrecision(4));
}

function exactNumber(value, digits = 4) {
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return value === 0 ? "0" : value.toPrecision(digits);
}

function niceTicks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const factors = decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 3, 5, 7];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  const every = Math.ceil(ticks.length / 6);
  return ticks.filter((_, i) => i % every === 0);
}

function timeUnit(longest) {
  if (longest < 180) return [1, "s"];
  if (longest < 7200) return [60, "min"];
  return [3600, "h"];
}

function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

// ------------------------------------------------------------------------------------------------------ the chart

class Chart {
  constructor(spec, groups) {
    this.spec = spec;
    this.groups = groups;
    this.hidden = new Set();
    this.variant = spec.chosen || "";
    this.holder = document.getElementById("chart-" + spec.id);
    this.readout = html(this.holder, "div", "readout");
    this.readout.setAttribute("role", "status");
    this.readout.hidden = true;
    new ResizeObserver(() => this.draw()).observe(this.holder);
    this.listen();
  }

  series() {
    const all = this.spec.variants ? this.spec.variants[this.variant] : this.spec.series;
    return all.filter((s) => s.y.length && !this.hidden.has(s.group));
  }

  label(series) {
    return series.label || this.groups[series.group].label;
  }

  colour(series) {
    return series.group < 0 ? "var(--muted)" : `var(--c${this.groups[series.group].colour})`;
  }

  range(shown) {
    const { spec } = this;
    const xs = shown.flatMap((s) => [s.x[0], s.x[s.x.length - 1]]);
    const ys = shown.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])]).filter((y) => !spec.log || y > 0);
    let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    let [y0, y1] = [ys.reduce((a, b) => Math.min(a, b)), ys.reduce((a, b) => Math.max(a, b))];
    if (spec.x_kind !== "index" && spec.x_kind !== "quality") x0 = 0;
    if (x1 === x0) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    if (spec.top && y1 > spec.top) y1 = spec.top;
    if (spec.log) return [x0, x1, y0 / 1.15, y1 * 1.15];
    const room = (y1 - y0) * 0.08 || Math.abs(y1) * 0.1 || 1;
    const grounded = y0 >= 0 && (spec.from_zero || y0 < (y1 - y0) * 0.6);
    return [x0, x1, grounded ? 0 : y0 - room / 2, y1 + room];
  }

  scales() {
    const [left, right, top, bottom] = this.frame;
    const [x0, x1, y0, y1] = this.limits;
    const f = this.spec.log ? (v) => Math.log(Math.max(v, 1e-30)) : (v) => v;
    const [from, to] = this.spec.x_kind === "quality" ? [x1, x0] : [x0, x1]; // lower values are better
    this.x = (v) => left + ((v - from) / (to - from)) * (right - left);
    this.back = (px) => from + ((px - left) / (right - left)) * (to - from);
    this.y = (v) => bottom - ((f(v) - f(y0)) / (f(y1) - f(y0))) * (bottom - top);
  }

  draw() {
    const width = this.holder.clientWidth;
    if (!width) return;
    const height = width < 420 ? 220 : 270;
    this.picture?.remove();
    this.picture = svg(this.holder, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    const shown = this.series();
    if (!shown.length) {
      svg(this.picture, "text", { x: width / 2, y: height / 2, class: "empty" }, "every method is switched off");
      return;
    }
    this.limits = this.range(shown);
    const [, , y0, y1] = this.limits;
    const ticks = this.spec.log ? logTicks(y0, y1) : niceTicks(y0, y1, 5);
    const longest = Math.max(...ticks.map((tick) => shortNumber(tick).length));
    this.frame = [16 + 7 * longest, width - 12, 26, height - 36];
    this.scales();
    this.axes(ticks);
    const [left, right, top, bottom] = this.frame;
    const clip = `clip-${this.spec.id}`;
    const area = svg(svg(this.picture, "clipPath", { id: clip }), "rect");
    for (const [k, v] of Object.entries({ x: left - 5, y: top - 4, width: right - left + 10, height: bottom - top + 8 }))
      area.setAttribute(k, v);
    this.lines = svg(this.picture, "g", { "clip-path": `url(#${clip})` });
    for (const series of shown) this.line(series);
    this.cursor = svg(this.picture, "g", { class: "cursor" });
  }

  axes(ticks) {
    const [left, right, , bottom] = this.frame;
    const [x0, x1] = this.limits;
    const { spec } = this;
    for (const tick of ticks) {
      svg(this.picture, "line", { x1: left, x2: right, y1: this.y(tick), y2: this.y(tick), class: "rule" });
      svg(this.picture, "text", { x: left - 8, y: this.y(tick) + 4, class: "tick y" }, shortNumber(tick));
    }
    const [unit, unitName] = spec.x_kind === "seconds" ? timeUnit(x1) : [1, ""];
    for (const [value, name] of this.xTicks(x0, x1, unit)) {
      const at = this.x(value);
      const anchor = at > right - 14 ? "end" : at < left + 10 ? "start" : "middle";
      svg(this.picture, "text", { x: at, y: bottom + 17, class: "tick x", "text-anchor": anchor }, name);
    }
    svg(this.picture, "line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis" });
    svg(this.picture, "text", { x: 0, y: 12, class: "axis-label" }, spec.y_label + (spec.log ? " (logarithmic)" : ""));
    const xLabel = spec.x_label + (unitName ? ` (${unitName})` : "");
    svg(this.picture, "text", { x: right, y: bottom + 33, class: "axis-label", "text-anchor": "end" }, xLabel);
  }

  xTicks(x0, x1, unit) {
    const { names, x_kind } = this.spec;
    if (names) {
      const middle = names.findIndex((name) => name.startsWith("mid"));
      const kept = [...new Set([0, middle < 0 ? names.length >> 1 : middle, names.length - 1])];
      return kept.filter((i) => i >= x0 && i <= x1).map((i) => [i, names[i]]);
    }
    if (x_kind === "index") {
      const every = Math.ceil((x1 - x0 + 1) / 12);
      const count = Math.floor((x1 - x0) / every) + 1;
      return Array.from({ length: count }, (_, i) => [x0 + i * every, String(x0 + i * every)]);
    }
    const wanted = (this.frame[1] - this.frame[0]) / 80;
    return niceTicks(x0 / unit, x1 / unit, wanted).map((tick) => [tick * unit, shortNumber(tick)]);
  }

  path(xs, ys) {
    return xs.map((x, i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(ys[i]).toFixed(1)}`).join("");
  }

  line(series) {
    const style = `stroke:${this.colour(series)}`;
    const part = svg(this.lines, "g", { class: "curve", "data-group": series.group });
    if (series.low) {
      const ring = this.path([...series.x, ...[...series.x].reverse()], [...series.high, ...[...series.low].reverse()]);
      svg(part, "path", { d: ring + "Z", class: "band", style: `fill:${this.colour(series)}` });
    }
    if (series.rawX) svg(part, "path", { d: this.path(series.rawX, series.rawY), class: "raw", style });
    svg(part, "path", { d: this.path(series.x, series.y), class: series.group < 0 ? "main reference" : "main", style });
    for (const at of series.marks || []) {
      const y = this.y(series.y[nearest(series.x, at)]);
      svg(part, "circle", { cx: this.x(at), cy: y, r: 5, class: "mark", style });
    }
    if (this.spec.dots)
      series.x.forEach((x, i) =>
        svg(part, "circle", { cx: this.x(x), cy: this.y(series.y[i]), r: 3, style: `fill:${this.colour(series)}` }));
  }

  // ------------------------------------------------------------------------------------------------ reading values

  listen() {
    const { holder } = this;
    holder.addEventListener("pointermove", (event) => this.point(event.clientX - holder.getBoundingClientRect().left));
    holder.addEventListener("pointerdown", (event) => this.point(event.clientX - holder.getBoundingClientRect().left));
    holder.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.leave());
    document.addEventListener("pointerdown", (event) => holder.contains(event.target) || this.leave());
    holder.addEventListener("blur", () => this.leave());
    holder.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const shown = this.series();
    if (event.key === "Escape") return this.leave();
    if (!["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key) || !shown.length) return;
    event.preventDefault();
    const xs = shown[0].x;
    const stride = Math.max(1, Math.round(xs.length / 40)) * (event.key === "ArrowLeft" ? -1 : 1);
    const now = this.at === undefined ? (stride > 0 ? -1 : xs.length) : nearest(xs, this.at);
    const next = event.key === "Home" ? 0 : event.key === "End" ? xs.length - 1 : now + stride;
    this.show(xs[Math.min(xs.length - 1, Math.max(0, next))]);
  }

  point(px) {
    if (!this.series().length) return;
    const [x0, x1] = this.limits;
    this.show(Math.min(x1, Math.max(x0, this.back(px))));
  }

  leave() {
    this.at = undefined;
    this.readout.hidden = true;
    this.cursor?.replaceChildren();
  }

  show(x) {
    const shown = this.series();
    const closest = shown.map((s) => s.x[nearest(s.x, x)]);
    const snapped = closest.reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));
    this.at = snapped;
    this.cursor.replaceChildren();
    const [left, right, top, bottom] = this.frame;
    const px = this.x(snapped);
    svg(this.cursor, "line", { x1: px, x2: px, y1: top, y2: bottom, class: "hair" });
    this.readout.replaceChildren();
    html(this.readout, "div", "at", this.xText(snapped));
    const rows = shown.map((series) => [series, nearest(series.x, snapped)]);
    rows.sort((a, b) => b[0].y[b[1]] - a[0].y[a[1]]);
    for (const [series, i] of rows) {
      const y = Math.max(top, this.y(series.y[i]));
      svg(this.cursor, "circle", { cx: this.x(series.x[i]), cy: y, r: 4, style: `fill:${this.colour(series)}` });
      const row = html(this.readout, "div", "row");
      html(row, "span", "swatch").style.background = this.colour(series);
      html(row, "span", "name", this.label(series));
      const spread = series.low ? ` ± ${exactNumber((series.high[i] - series.low[i]) / 2, 2)}` : "";
      html(row, "span", "value", exactNumber(series.y[i]) + spread);
    }
    this.readout.hidden = false;
    const wide = this.readout.offsetWidth;
    const beside = px + 14 + wide < right ? px + 14 : px - 14 - wide;
    this.readout.style.left = Math.max(0, Math.min(beside, this.holder.clientWidth - wide)) + "px";
  }

  xText(x) {
    const { spec } = this;
    if (spec.names) return spec.names[x];
    if (spec.x_kind === "index") return `skip ${x}`;
    if (spec.x_kind === "quality") return exactNumber(x);
    if (spec.x_kind === "steps") return `step ${Math.round(x).toLocaleString("en")}`;
    const [unit, name] = timeUnit(this.limits[1]);
    return `${+(x / unit).toPrecision(3)} ${name}`;
  }
}
