// Curves drawn by hand: lines or stacked areas over steps, with a read-out for pointer and keyboard.

import { el, number, show, svg } from "./dom.js";

const TOP = 10;
const BOTTOM = 38;
const RIGHT = 14;
const NEARLY_ALL = 0.95; // of the points, from whose highest
const RARE = 3; // times as high ones are peaks
export const MANY = 100; // points, above which a line of means runs through a curve, and areas have no outlines
const PART = 1 / 30; // of a curve, over which such a mean is taken

/** The mean of those values that are known, or null. */
function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/** The mean of the last so many values. */
export const recent = (values, count) => mean((values ?? []).slice(-count));

/** At each point that has a value the mean of those around it. */
function through(values) {
  const half = Math.ceil((values.length * PART) / 2);
  return values.map((value, index) => (value === null || value === undefined ? null : mean(values.slice(Math.max(0, index - half), index + half + 1))));
}

/** Ticks at 1, 2, 2.5 or 5 times a power of ten, from `low` to at least `high`. */
export function ticks(low, high, about, whole = false) {
  const rough = (high - low || 1) / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((times) => times * power).find((size) => size >= rough * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let index = Math.floor(low / step + 1e-9); ; index++) {
    found.push(Number((index * step).toPrecision(12)));
    if (index * step >= high - step * 1e-6) return found;
  }
}

const ROUND = [60, 300, 600, 1800, 3600, 10800, 21600, 43200, 86400, 172800, 604800, 2592000];
const DAY = 86400;
const date = (time, shown) => new Intl.DateTimeFormat("en-GB", shown).format(new Date(1000 * time));

/** An axis of unix seconds: ticks at whole minutes, hours or days of the reader's clock. */
export const TIME = {
  name: "time",
  ticks(low, high, about) {
    const longest = ROUND.at(-1);
    const step = ROUND.find((size) => (high - low) / size <= about) ?? longest * Math.ceil((high - low) / longest / about);
    const zone = (time) => 60 * new Date(1000 * time).getTimezoneOffset(); // of summer and winter
    const found = [];
    for (let clock = Math.ceil((low - zone(low)) / step) * step; ; clock += step) {
      const time = clock + zone(clock + zone(low));
      if (!(time <= high)) return found.length ? found : [low];
      if (time >= low) found.push(time);
    }
  },
  labels(times, span) {
    const hour = { hour: "2-digit", minute: "2-digit" };
    const days = times.length < 2 || times[1] - times[0] > DAY - 2 * 3600; // one is shorter by an hour
    const shown = span < DAY ? hour : days ? { day: "numeric", month: "short" } : { weekday: "short", ...hour };
    return times.map((time) => date(time, shown));
  },
  long: (time) => date(time, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" }),
};
const FAR = 4; // times as far apart as usual: nothing was measured between two points
const MINUTE = 60; // between two points, at least

/** Whether a curve is interrupted before each of these unix seconds: nobody looked for a while, or the clock was set back. */
export function breaks(times) {
  const apart = times.map((time, index) => time - (times[index - 1] ?? time));
  const usual = apart.filter((size) => size > 0).sort((one, other) => one - other);
  const limit = FAR * Math.max(MINUTE, usual[(usual.length - 1) >> 1] ?? 0);
  return apart.map((size) => size < 0 || size > limit);
}
const STEPS = { name: "step", ticks: (low, high, about) => ticks(low, high, about, true), labels: (steps) => steps.map((step) => number(step)), long: (step) => `Step ${number(step)}` };

/** The decimals that these values need to be written whole. */
function decimals(values) {
  const whole = (digits) => values.every((value) => Math.abs(value - value.toFixed(digits)) < 1e-9);
  return [0, 1, 2, 3, 4, 5].find(whole) ?? 6;
}

/**
 * One curve card. `spec`: title, series ({key, name, tone, format}), kind, band, floor, ceiling, empty; along: what x is, steps or TIME;
 * peaks: rare ones are cut off, so that all else can be seen;
 * format: a value as text; axis: the same at a tick, from the value and the decimals that tell the ticks apart.
 */
export class Chart {
  constructor(spec) {
    this.spec = spec;
    this.data = null;
    this.at = null;
    this.legend = el("ul", { class: "legend" });
    this.plot = el("div", { class: "plot", tabindex: "0", role: "group", "aria-label": spec.title });
    this.tip = el("div", { class: "tip", role: "status", hidden: true });
    const caption = el("figcaption", null, el("h3", null, spec.title), spec.note && el("p", { class: "note" }, spec.note));
    const keys = spec.series.map(({ key }) => key).join(" ");
    this.element = el("figure", { class: `card chart ${spec.size ?? ""}`, "data-keys": keys }, caption, this.legend, this.plot);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerdown", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.read(null));
    this.plot.addEventListener("blur", () => this.read(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.width = this.height = 0;
    new ResizeObserver(([entry]) => {
      const [width, height] = [Math.floor(entry.contentRect.width), Math.floor(entry.contentRect.height)];
      if (width && (width !== this.width || height !== this.height)) {
        Object.assign(this, { width, height });
        this.draw();
      }
    }).observe(this.plot);
    this.draw();
  }

  /** `columns`: name → values, one of which is `step`. A name stands beside the mean of its last `points` values. */
  update(columns, points = 1) {
    this.data = columns;
    this.points = points;
    this.draw();
  }

  /** The value that stands beside a series' name; of counts that are stacked, to a tenth in such a way that they add up. */
  now(one) {
    const { series, kind, whole } = this.spec;
    const mean = ({ key }) => recent(this.data[key], this.points);
    const value = mean(one);
    if (value === null || kind !== "stack" || !whole) return value;
    const under = series.slice(0, series.indexOf(one)).reduce((sum, other) => sum + mean(other), 0);
    return (Math.round(10 * (under + value)) - Math.round(10 * under)) / 10;
  }

  known() {
    const { data, spec } = this;
    return Boolean(data?.step?.length) && spec.series.some(({ key }) => data[key]?.some((value) => value !== null));
  }

  draw() {
    const { spec } = this;
    if (!this.known()) {
      show(this.legend, spec.series.map((one) => this.entry(one, null)));
      show(this.plot, el("p", { class: "empty" }, spec.empty));
      this.plot.removeAttribute("tabindex");
      return;
    }
    this.plot.setAttribute("tabindex", "0");
    const last = this.data.step.length - 1;
    this.edge = this.edges();
    this.seek();
    this.along = spec.along ?? STEPS;
    if (this.width) this.paint();
    show(this.legend, spec.series.map((one) => this.entry(one, this.now(one))), this.told());
    const told = spec.series.map((one) => `${one.name} ${this.text(one, this.now(one))}`).join(", ");
    this.plot.setAttribute("aria-label", `${spec.title}; ${this.along.long(this.data.step[last])}: ${told}`);
  }

  text(series, value) {
    return value === null || value === undefined ? "–" : (series.format ?? this.spec.format)(value);
  }

  entry(series, value) {
    return el("li", null, this.swatch(series), el("span", null, series.name), el("b", null, this.text(series, value)));
  }

  swatch(series) {
    const mark =
      this.spec.kind === "stack"
        ? svg("rect", { class: `area ${series.tone}`, x: 3, y: 1, width: 16, height: 10, rx: 2 })
        : svg("line", { class: `line ${series.tone}`, x1: 1, x2: 21, y1: 6, y2: 6 });
    return svg("svg", { class: "swatch", width: 22, height: 12, "aria-hidden": "true" }, mark);
  }

  /** Of each series its lower and upper edge at every point: they differ where areas are stacked. */
  edges() {
    const under = this.data.step.map(() => 0);
    return this.spec.series.map(({ key }) => {
      const values = this.data[key] ?? [];
      if (this.spec.kind !== "stack") return { low: null, high: values };
      const low = [...under];
      const high = under.map((base, index) => base + (values[index] ?? 0));
      high.forEach((value, index) => (under[index] = value));
      return { low, high };
    });
  }

  /** Peaks that would flatten all else: rare points above thrice what nearly all stay below. They are cut off, and told. */
  seek() {
    const { spec, edge } = this;
    const tops = this.data.step.map((step, index) => Math.max(...edge.map(({ high }) => high[index] ?? -Infinity)));
    const sorted = tops.filter(Number.isFinite).sort((one, other) => one - other);
    const usual = sorted[Math.floor(NEARLY_ALL * (sorted.length - 1))];
    this.limit = spec.peaks && usual > 0 ? Math.max(RARE * usual, tops.at(-1)) : Infinity;
    this.peaks = tops.map((value, index) => ({ value, index })).filter(({ value }) => value > this.limit);
  }

  told() {
    const { peaks } = this;
    if (!peaks.length) return null;
    const most = this.spec.format(Math.max(...peaks.map(({ value }) => value)));
    return el("li", { class: "note" }, peaks.length === 1 ? `▲ one peak of ${most} cut off` : `▲ ${peaks.length} peaks cut off, up to ${most}`);
  }

  paint() {
    const { spec, data, width, height } = this;
    const { edge: edges } = this;
    const band = (spec.band ?? []).map((key) => data[key] ?? []);
    const all = [...edges.flatMap(({ high }) => high), ...band.flat()].filter((value) => Number.isFinite(value));
    const low = Math.min(spec.floor ?? Infinity, ...all);
    const high = Math.max(spec.ceiling ?? -Infinity, ...all.filter((value) => value <= this.limit));
    const found = ticks(low, high > low ? high : low + 1, 4, spec.whole);
    // What hardly goes beyond its natural end needs no axis that does.
    const marks = high > (spec.ceiling ?? high) ? found.filter((mark) => mark <= high) : found;
    const top = Math.max(high, marks.at(-1));
    this.peaks = this.peaks.filter(({ value }) => value > top); // the axis has room for the others
    const digits = decimals(marks);
    const labels = marks.map((value) => (spec.axis ? spec.axis(value, digits) : spec.format(value)));
    const left = 12 + 7 * Math.max(3, ...labels.map((label) => label.length));
    const [first, final] = [Math.min(...data.step), Math.max(...data.step)]; // a clock may have been set back
    const span = Math.max(1, final - first);
    this.broken = this.along === TIME ? breaks(data.step) : [];
    const inner = width - left - RIGHT;
    this.x = (step) => left + ((step - first) / span) * inner;
    const y = (value) => TOP + (1 - (Math.min(value, top) - marks[0]) / (top - marks[0])) * (this.height - TOP - BOTTOM);
    this.y = y;

    const grid = marks.map((value, index) => [
      svg("line", { class: index ? "grid" : "base", x1: left, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: left - 8, y: y(value) + 4, "text-anchor": "end" }, labels[index]),
    ]);
    const { along } = this;
    const wide = 24 + 7 * Math.max(...along.labels([first, first + span], span).map((label) => label.length));
    const steps = along.ticks(first, first + span, Math.max(1, Math.floor(inner / wide)));
    const below = steps.filter((step) => step >= first && step <= first + span);
    const told = along.labels(below, span);
    const across = below.map((step, index) =>
      svg("text", { class: "tick", x: this.x(step), y: this.height - BOTTOM + 20, "text-anchor": "middle" }, told[index]),
    );
    const name = svg("text", { class: "tick name", x: left + inner / 2, y: this.height - 2, "text-anchor": "middle" }, along.name);

    const drawn = [];
    const many = data.step.length > MANY;
    if (band.length) drawn.push(svg("path", { class: "band own", d: this.area(band[0], band[1]) }));
    edges.forEach(({ low: under, high: over }, index) => {
      const { tone } = spec.series[index];
      if (under) drawn.push(svg("path", { class: `area ${many ? "bare " : ""}${tone}`, d: this.area(under, over) }), ...(over.length > 1 ? [] : this.dots(over, tone)));
      else if (many && !spec.dots) drawn.unshift(svg("path", { class: `line raw ${tone}`, d: this.line(over) }));
      if (!under) drawn.push(svg("path", { class: `line ${tone}`, d: this.line(many && !spec.dots ? through(over) : over) }), ...this.dots(over, tone));
    });
    for (const { index } of this.peaks) drawn.push(svg("path", { class: "peak", d: `M${(this.x(data.step[index]) - 4).toFixed(1)} ${TOP}h8l-4 -7Z` }));
    this.cursor = svg("g", { class: "cursor" });
    const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    picture.append(...grid.flat(), ...across, name, ...drawn, this.cursor);
    show(this.plot, picture, this.tip);
    this.read(this.at === null ? null : Math.min(this.at, data.step.length - 1));
  }

  /** A path through the values; where there is none, or nobody looked, it is interrupted. */
  line(values) {
    let path = "";
    let down = false;
    values.forEach((value, index) => {
      if (this.broken[index]) down = false;
      if (value === null || value === undefined) return (down = false);
      path += `${down ? "L" : "M"}${this.x(this.data.step[index]).toFixed(1)} ${this.y(value).toFixed(1)}`;
      down = true;
    });
    return path;
  }

  area(under, over) {
    const there = over.map((value, index) => index).filter((index) => over[index] !== null && under[index] !== null);
    const at = (values) => (index) => `${this.x(this.data.step[index]).toFixed(1)} ${this.y(values[index]).toFixed(1)}`;
    const points = [...there.map(at(over)), ...there.reverse().map(at(under))];
    return points.length ? `M${points.join("L")}Z` : "";
  }

  /** Each measurement where they are few, else those that no line goes through. */
  dots(values, tone) {
    const all = this.spec.dots && values.length <= 60;
    const none = (index, broken) => this.broken[broken] || (values[index] ?? null) === null;
    const alone = (index) => none(index - 1, index) && none(index + 1, index + 1);
    return values.flatMap((value, index) =>
      value !== null && value !== undefined && (all || alone(index))
        ? [svg("circle", { class: `dot ${tone}`, cx: this.x(this.data.step[index]), cy: this.y(value), r: 3 })]
        : [],
    );
  }

  point(event) {
    if (!this.known() || !this.x) return;
    const place = event.clientX - this.plot.getBoundingClientRect().left;
    let best = 0;
    this.data.step.forEach((step, index) => {
      if (Math.abs(this.x(step) - place) < Math.abs(this.x(this.data.step[best]) - place)) best = index;
    });
    this.read(best);
  }

  key(event) {
    if (!this.known()) return;
    const last = this.data.step.length - 1;
    const from = this.at ?? last;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last, Escape: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.read(to === null ? null : Math.min(last, Math.max(0, to)));
  }

  /** Shows what is at point `index`, or nothing. */
  read(index) {
    this.at = index;
    this.tip.hidden = index === null;
    if (!this.cursor) return;
    if (index === null) return this.cursor.replaceChildren();
    const { data, spec } = this;
    const x = this.x(data.step[index]);
    const marks = spec.series.flatMap(({ key, tone }, order) =>
      (data[key]?.[index] ?? null) === null
        ? []
        : [svg("circle", { class: `dot ${tone}`, cx: x, cy: this.y(this.edge[order].high[index]), r: 4 })],
    );
    this.cursor.replaceChildren(svg("line", { x1: x, x2: x, y1: TOP, y2: this.height - BOTTOM }), ...marks);
    const time = data.time?.[index];
    const clock = time ? ` · ${TIME.long(time)}` : "";
    const rows = spec.series.map((one) =>
      el("li", null, this.swatch(one), el("span", null, one.name), el("b", null, this.text(one, data[one.key]?.[index]))),
    );
    if (spec.band) {
      const [low, high] = spec.band.map((key) => data[key]?.[index]);
      rows.push(el("li", null, el("span", null, "95\u202f% interval"), el("b", null, `${spec.format(low)} – ${spec.format(high)}`)));
    }
    show(this.tip, el("p", null, `${this.along.long(data.step[index])}${clock}`), el("ul", null, rows));
    const most = this.width - this.tip.offsetWidth;
    const beside = x + 14 + this.tip.offsetWidth > this.width ? x - 14 - this.tip.offsetWidth : x + 14;
    this.tip.style.left = `${Math.max(0, Math.min(most, beside))}px`;
  }
}
