/** One chart of scalars: a line for each run, with the range of what was decimated behind it. */

import uPlot from "../vendor/uPlot.esm.js";
import { color, faded } from "../core/colors.js";
import { element, foreign } from "../core/dom.js";
import { clock, count, duration, number, ordinal, tickDurations, tickNumbers, tickTimes } from "../core/format.js";
import { smoothed } from "./smoothing.js";

/**
 * @typedef {{label: string, color: string, dashed?: boolean, series: import("../core/types.js").Series}} Line
 * @typedef {{axis: string, smooth: number, log: boolean}} Look
 * @typedef {[number, number]} Range
 */

const FONT = "12px system-ui, sans-serif";
const CHARACTER = 6.7;
const MARK = 5;
const TICK_PIXELS = 34;
const TIP_ROWS = 8;
const FOCUS_PIXELS = 20;
/** Values that are as near to each other, compared with the largest, are drawn as one. */
const FLAT = 1e-11;

/**
 * The range of a linear scale: a tenth more at both ends, to zero where that is near. uPlot's own has 24 decimals, and
 * goes to 100 for a chart of zeros.
 * @type {any}
 */
const heights = (/** @type {any} */ _, /** @type {number|null} */ low, /** @type {number|null} */ high) => {
  if (low === null || high === null) return [null, null];
  const most = Math.max(-low, high);
  if (most === 0) return [-1, 1];
  const room = high - low > FLAT * most ? (high - low) / 10 : most;
  return [low >= 0 && low < room ? 0 : low - room, high <= 0 && -high < room ? 0 : high + room];
};

/** uPlot wants distances between ticks to choose from; an axis that computes its ticks does not use them. */
const ANY = [1e300];

/**
 * The range of a log scale: to the next digit. uPlot's own is without an end where values are tiny.
 * @type {any}
 */
const magnitudes = (/** @type {any} */ _, /** @type {number|null} */ low, /** @type {number|null} */ high) => {
  if (low === null || high === null) return [null, null];
  const [least, most] = [digitOf(low, Math.floor, 1e-9), digitOf(high, Math.ceil, -1e-9)];
  return least === most ? [least / 10, most * 10] : [least, most];
};

/**
 * @param {number} value above zero
 * @param {(digits: number) => number} round
 * @param {number} slack
 */
function digitOf(value, round, slack) {
  const exponent = Math.max(Math.floor(Math.log10(value)), -300);
  return Number(`${Math.max(round(value / 10 ** exponent + slack), 1)}e${exponent}`);
}

/**
 * The ticks of a log scale: powers of ten, and their multiples where there is room.
 * @param {number} low
 * @param {number} high
 * @param {number} height pixels
 */
function powers(low, high, height) {
  const [first, last] = [Math.floor(Math.log10(low) + 1e-9), Math.ceil(Math.log10(high) - 1e-9)];
  const digits = (last - first) * 2 * TICK_PIXELS < height ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : [1];
  const exponents = Array.from({ length: last - first + 1 }, (_, i) => first + i);
  return exponents.flatMap((exponent) => digits.map((digit) => Number(`${digit}e${exponent}`))).filter((tick) => tick >= low && tick <= high);
}

/**
 * The ticks of a linear scale: multiples of 1, 2, 2.5 or 5 times a power of ten. uPlot's own have 17 decimals.
 * @param {number} low
 * @param {number} high
 * @param {number} height pixels
 */
function multiples(low, high, height) {
  const least = ((high - low) * TICK_PIXELS) / height;
  if (!(least > 1e-300 && least < 1e300)) return [];
  const exponent = Math.floor(Math.log10(least));
  const apart = [1, 2, 2.5, 5, 10].map((digit) => Number(`${digit}e${exponent}`)).find((each) => each >= least) ?? least;
  const [first, last] = [Math.ceil(low / apart - 1e-9), Math.floor(high / apart + 1e-9)];
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * apart).toPrecision(15)));
}

/** The chart; `host` gives its size. */
export class ScalarChart {
  /**
   * @param {HTMLElement} host
   * @param {(range: Range|null) => void} onZoom a range was chosen, or all (null)
   */
  constructor(host, onZoom) {
    this.host = host;
    this.onZoom = onZoom;
    /** @type {Line[]} */
    this.lines = [];
    /** @type {Look} */
    this.look = { axis: "step", smooth: 0, log: false };
    /** @type {Range|null} */
    this.view = null;
    /** @type {any} */
    this.plot = null;
    this.shape = "";
    this.tip = element("div", { class: "tip", role: "status", hidden: true });
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(host);
    /** Ends what listens on the host, which outlives the chart. */
    this.ended = new AbortController();
    const { signal } = this.ended;
    host.addEventListener("keydown", (event) => this.onKey(event), { signal });
    host.addEventListener("blur", () => (this.tip.hidden = true), { signal });
  }

  /**
   * Draws.
   * @param {Line[]} lines
   * @param {Look} look
   * @param {Range|null} view
   */
  show(lines, look, view) {
    [this.lines, this.look, this.view] = [lines, look, view];
    const shape = JSON.stringify([
      look.axis, look.log, look.smooth > 0, color("text"), lines.map((line) => [line.label, line.color, line.dashed, isBanded(line)]),
      this.hasValues(),
    ]);
    if (this.plot && shape === this.shape) {
      this.plot.setData(this.data(), true);
      return;
    }
    this.plot?.destroy();
    this.shape = shape;
    this.plot = new uPlot(this.options(), this.data(), this.host);
    this.plot.over.append(this.tip);
    this.plot.over.addEventListener("mouseleave", () => (this.tip.hidden = true));
  }

  /** Whether a line has a finite value: without one there is no vertical axis. */
  hasValues() {
    return this.lines.some((line) => line.series.mean.some((value) => value !== null));
  }

  destroy() {
    this.ended.abort();
    this.sizes.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.host;
    if (this.plot && width && (width !== this.plot.width || height !== this.plot.height)) {
      this.plot.setSize({ width, height });
    }
  }

  /** The columns of a line: shown, raw below a smoothed one, and the edges of the band. @param {Line} line */
  columns(line) {
    const { mean, min, max } = line.series;
    const columns = [smoothed(mean, this.look.smooth)];
    if (this.look.smooth > 0) columns.push(mean);
    if (isBanded(line)) columns.push(max, min);
    return this.look.log ? columns.map((column) => column.map(positive)) : columns;
  }

  /** @returns {any} */
  data() {
    const tables = this.lines.map((line) => [line.series.x, ...this.columns(line)]);
    if (tables.length === 0) return [[]];
    return tables.length === 1 ? tables[0] : uPlot.join(/** @type {any} */ (tables));
  }

  /** @returns {any} what uPlot takes */
  options() {
    const series = [{}];
    const bands = [];
    /** The places of the lines among their bands. @type {Set<number>} */
    const places = new Set();
    for (const line of this.lines) {
      places.add(series.length);
      const faint = { stroke: faded(line.color, 0.3), width: 1, points: { show: false } };
      series.push(/** @type {any} */ ({ stroke: line.color, width: 1.75, dash: line.dashed ? [6, 4] : undefined, points: { size: 5 } }));
      if (this.look.smooth > 0) series.push(/** @type {any} */ (faint));
      if (isBanded(line)) {
        const edge = /** @type {any} */ ({ stroke: faded(line.color, 0), width: 0, points: { show: false } });
        series.push(edge, edge);
        bands.push({ series: [series.length - 2, series.length - 1], fill: faded(line.color, 0.18) });
      }
    }
    return {
      width: this.host.clientWidth || 300, height: this.host.clientHeight || 200,
      legend: { show: false }, padding: [8, 10, 0, this.hasValues() ? 0 : 10], series, bands,
      scales: { x: { time: this.look.axis === "time", range: this.range() }, y: { distr: this.look.log ? 3 : 1, range: this.look.log ? magnitudes : heights } },
      axes: [this.axis(false), this.axis(true)],
      cursor: this.cursor(places), focus: { alpha: 0.2 },
      hooks: { setCursor: [() => this.hover()], setSelect: [() => this.select()], draw: [() => this.markNonfinite()] },
    };
  }

  range() {
    return () => {
      if (this.view) return this.view;
      const ends = this.lines.flatMap(({ series: { x, first, last } }) => (x.length ? [first ?? x[0], last ?? x[x.length - 1]] : []));
      const [min, max] = [Math.min(...ends), Math.max(...ends)];
      return min === max ? [min - 1, max + 1] : [min, max];
    };
  }

  /** @param {boolean} vertical */
  axis(vertical) {
    const isTime = !vertical && this.look.axis === "time";
    const values = (/** @type {any} */ _plot, /** @type {(number|null)[]} */ splits) =>
      isTime ? tickTimes(splits) : !vertical && this.look.axis === "elapsed" ? tickDurations(splits) : tickNumbers(splits, vertical && this.look.log);
    // As wide as the longest label, so that none is cut.
    const wide = (/** @type {any} */ _plot, /** @type {string[]|null} */ labels) =>
      Math.max(40, 14 + CHARACTER * Math.max(0, ...(labels ?? []).map((label) => label.length)));
    const size = vertical ? wide : isTime ? 44 : 28;
    const ticks = (/** @type {any} */ plot, /** @type {number} */ _, /** @type {number} */ low, /** @type {number} */ high) => (this.look.log ? powers : multiples)(low, high, plot.bbox.height / devicePixelRatio);
    return { ...axisOf(size, values, vertical ? TICK_PIXELS : 70), ...(vertical && { splits: ticks, incrs: ANY }) };
  }

  /** @param {Set<number>} places of the lines among the series */
  cursor(places) {
    const away = (/** @type {any} */ _plot, /** @type {number} */ index, /** @type {number} */ _, /** @type {number} */ y, /** @type {number} */ cursor) => (places.has(index) ? y - cursor : Infinity);
    return {
      y: false,
      drag: { x: true, y: false, setScale: false, dist: 4 },
      points: { size: 7 },
      focus: { prox: this.lines.length > TIP_ROWS ? FOCUS_PIXELS : -1, dist: away }, // of few lines all are seen
      dataIdx: nearestDefined,
      bind: {
        dblclick: () => () => {
          this.onZoom(null);
          return null;
        },
      },
    };
  }

  select() {
    const { left, width } = this.plot.select;
    if (width < 4) return;
    const range = /** @type {Range} */ ([this.plot.posToVal(left, "x"), this.plot.posToVal(left + width, "x")]);
    this.plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.onZoom(range);
  }

  /** Zooms around the cursor, or the middle. @param {number} factor below 1 shows less */
  zoomBy(factor) {
    if (!this.plot) return;
    const { min, max } = this.plot.scales.x;
    const left = this.plot.cursor.left;
    const at = left > 0 ? this.plot.posToVal(left, "x") : (min + max) / 2;
    if (min === null || max === null) return;
    this.onZoom([at - (at - min) * factor, at + (max - at) * factor]);
  }

  /** @param {number} share of the width, to the right if positive */
  moveBy(share) {
    const { min, max } = this.plot.scales.x;
    const by = (max - min) * share;
    this.onZoom([min + by, max + by]);
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    if (!this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const width = this.plot.over.clientWidth;
    const left = this.plot.cursor.left > 0 ? this.plot.cursor.left : width / 2;
    const by = Math.max(width / 60, 1);
    /** @type {Record<string, () => void>} */
    const keys = {
      ArrowLeft: () => (event.shiftKey ? this.moveBy(-0.2) : this.point(Math.max(left - by, 1))),
      ArrowRight: () => (event.shiftKey ? this.moveBy(0.2) : this.point(Math.min(left + by, width - 1))),
      "+": () => this.zoomBy(0.5),
      "=": () => this.zoomBy(0.5),
      "-": () => this.zoomBy(2),
      "0": () => this.onZoom(null),
      Escape: () => (this.tip.hidden ? this.onZoom(null) : (this.tip.hidden = true)),
    };
    if (!keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
  }

  /** @param {number} left */
  point(left) {
    this.plot.setCursor({ left, top: this.plot.over.clientHeight / 2 });
  }

  hover() {
    const left = this.plot?.cursor.left ?? -1;
    if (left < 0 || !this.lines.length) {
      this.tip.hidden = true;
      return;
    }
    const at = this.plot.posToVal(left, "x");
    const near = 0.02 * (this.plot.scales.x.max - this.plot.scales.x.min);
    const rows = this.lines.map((line) => tipRow(line, at, this.look.smooth, near)).filter((row) => row !== null);
    if (!rows.length) return;
    const nearest = rows.reduce((best, row) => (Math.abs(row.x - at) < Math.abs(best.x - at) ? row : best)).x;
    const head = this.look.axis === "time" ? clock(nearest) : this.look.axis === "elapsed" ? `after ${duration(nearest)}` : `${this.look.axis} ${ordinal(Math.round(nearest))}`;
    const shown = this.nearest(rows);
    this.tip.replaceChildren(element("div", { class: "tip-head" }, head), ...shown.map((row) => row.made),
      ...(shown.length < rows.length ? [element("div", { class: "tip-head" }, `and ${count(rows.length - shown.length)} more`)] : []));
    this.tip.hidden = false;
    const space = this.plot.over.clientWidth;
    const width = this.tip.offsetWidth;
    const x = left + 14 + width > space ? Math.max(left - width - 14, Math.min(0, space - width)) : left + 14;
    this.tip.style.transform = `translate(${Math.round(x)}px, 4px)`;
  }

  /**
   * All rows if they are few; else those of the lines that are nearest to the cursor, from the highest to the lowest.
   * @param {{y: number|null, made: HTMLElement}[]} rows
   */
  nearest(rows) {
    if (rows.length <= TIP_ROWS) return rows;
    const places = new Map(rows.map((row) => [row, row.y === null ? Infinity : this.plot.valToPos(row.y, "y")]));
    const place = (/** @type {any} */ row) => /** @type {number} */ (places.get(row));
    const away = (/** @type {any} */ row) => Math.abs(place(row) - this.plot.cursor.top);
    return [...rows].sort((a, b) => away(a) - away(b)).slice(0, TIP_ROWS).sort((a, b) => place(a) - place(b));
  }

  /** What is drawn, in pixels, for a picture: the lines, and the ticks with their grid lines. */
  drawn() {
    const { plot } = this;
    if (!plot) return null;
    const { left, top, width, height } = plot.over.getBoundingClientRect();
    const host = this.host.getBoundingClientRect();
    const [x0, y0] = [left - host.left, top - host.top];
    const at = (/** @type {number} */ x, /** @type {number} */ y) => [x0 + plot.valToPos(x, "x"), y0 + plot.valToPos(y, "y")];
    const lines = this.lines.map((line) => {
      const [values] = this.columns(line);
      const points = line.series.x.flatMap((x, i) => (values[i] === null ? [] : [at(x, /** @type {number} */ (values[i]))]));
      return { label: line.label, color: line.color, dashed: line.dashed, points: points.filter(([x]) => x >= x0 - 1 && x <= x0 + width + 1) };
    });
    const ticks = plot.axes.flatMap((/** @type {any} */ axis, /** @type {number} */ i) => (axis._splits ?? []).map((/** @type {number} */ split, /** @type {number} */ j) => {
      const place = (i ? y0 : x0) + plot.valToPos(split, i ? "y" : "x");
      const told = String(axis._values?.[j] ?? "").split("\n")[0];
      return i ? { x: x0 - 6, y: place + 4, told, grid: `M${x0} ${place}H${x0 + width}` } : { x: place, y: y0 + height + 16, told, grid: `M${place} ${y0}V${y0 + height}` };
    }));
    return { width: host.width, height: host.height, lines, ticks };
  }

  markNonfinite() {
    const { ctx, bbox } = this.plot;
    ctx.save();
    ctx.fillStyle = color("error");
    const size = MARK * devicePixelRatio;
    for (const line of this.lines) {
      for (const [x] of line.series.nonfinite) {
        const left = this.plot.valToPos(x, "x", true);
        if (left < bbox.left - 1 || left > bbox.left + bbox.width + 1) continue;
        const foot = bbox.top + bbox.height;
        ctx.beginPath();
        ctx.moveTo(left, foot - 2 * size);
        ctx.lineTo(left - size, foot);
        ctx.lineTo(left + size, foot);
        ctx.fill();
      }
    }
    ctx.restore();
  }
}

/**
 * An axis for uPlot.
 * @param {any} size
 * @param {any} values the labels
 * @param {number} space between two of them, at least
 */
export function axisOf(size, values, space) {
  const line = { stroke: color("grid"), width: 1 };
  return { stroke: color("muted"), font: FONT, grid: line, ticks: { ...line, size: 4 }, size, gap: 4, values, space };
}

/** @param {Line} line */
function isBanded(line) {
  return !line.series.exact;
}

/** @param {number|null} value */
function positive(value) {
  return value !== null && value > 0 ? value : null;
}

/**
 * The nearest point of this series: where runs have other steps, the joined table has holes.
 * @param {any} plot
 * @param {number} index
 * @param {number} closest
 */
function nearestDefined(plot, index, closest) {
  const values = plot.data[index];
  for (let away = 0; away < 64; away++) {
    if (values[closest - away] !== undefined && values[closest - away] !== null) return closest - away;
    if (values[closest + away] !== undefined && values[closest + away] !== null) return closest + away;
  }
  return null;
}

/**
 * @param {Line} line
 * @param {number} at
 * @param {number} smooth
 * @param {number} near how far beyond its ends a line still has a value
 */
function tipRow(line, at, smooth, near) {
  const { x, mean, min, max, exact } = line.series;
  const index = nearestIndex(x, at);
  if (index < 0 || (line.series.x.length > 1 && (at < x[0] - near || at > x[x.length - 1] + near))) return null;
  const range = exact || min[index] === max[index] ? "" : ` (${number(min[index])} to ${number(max[index])})`;
  const value = smooth > 0 ? smoothed(mean, smooth)[index] : mean[index];
  const raw = smooth > 0 ? `, raw ${number(mean[index])}` : "";
  const swatch = element("span", { class: "swatch" });
  swatch.style.background = line.color;
  const made = element("div", { class: "tip-row" }, swatch, foreign(line.label, "tip-name"), " ",
    element("b", {}, number(value)), `${raw}${range}`);
  return { x: x[index], y: value, made };
}

/**
 * @param {number[]} sorted
 * @param {number} at
 */
export function nearestIndex(sorted, at) {
  let [low, high] = [0, sorted.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low > 0 && at - sorted[low - 1] < sorted[low] - at ? low - 1 : high;
}
