/** The times of places: their shares over the calls, their distributions, and the slowest calls. */

import uPlot from "../vendor/uPlot.esm.js";
import { color, dark, heat, onScheme } from "../core/colors.js";
import { byId, choices, element, emptyState, fill, foreign } from "../core/dom.js";
import { clock, count, number, ordinal, seconds } from "../core/format.js";
import { LiveView } from "../core/live_view.js";
import { runName, state } from "../core/state.js";
import { axisOf } from "../charts/scalar_chart.js";

/** @typedef {import("../core/types.js").Times} Times */

const PASSES = /^(backward|recomputed) /;

/** The tab "Time". */
export class TimeView extends LiveView {
  /** @param {{failed: (error: unknown) => void, showStep: (tab: string, step: number) => void}} page */
  constructor(page) {
    super("times", page);
    this.showStep = page.showStep;
    this.tap = byId("time-tap", HTMLSelectElement);
    this.unit = byId("time-unit", HTMLSelectElement);
    this.host = byId("time-plot", HTMLElement);
    this.tip = element("div", { class: "tip", role: "status", hidden: true });
    /** @type {Times|null} */
    this.found = null;
    /** @type {any} */
    this.plot = null;
    this.tap.addEventListener("change", () => this.refresh());
    this.unit.addEventListener("change", () => this.show());
    new ResizeObserver(() => this.draw()).observe(this.host);
    onScheme(() => this.show());
  }

  question() {
    return { tap: this.tap.value };
  }

  /** @param {Times} found */
  take(found) {
    this.found = found.taps.length ? found : null;
    byId("time-found", HTMLElement).hidden = !this.found;
    fill(byId("time-none", HTMLElement), !this.found && emptyState("No times yet", "The time of each part of a compiled program appears here, measured where it runs: ",
      element("code", {}, "with hcb.observe(where=\"layers/*\", what=\"time\"):")));
    if (!this.found) return;
    const several = state.overview.runs.length > 1;
    choices(this.tap, found.taps.map(([id, run, name]) => [String(id), several ? `${name}, ${runName(run)}` : name]));
    this.tap.value = String(found.tap);
    this.show();
  }

  show() {
    if (!this.found) return;
    this.draw();
    this.showPlaces(this.found);
    this.showSlowest(this.found);
  }

  /** The stacked columns; each series reaches down to 0, so that the highest is drawn first. */
  draw() {
    const { found, host } = this;
    this.plot?.destroy();
    this.plot = null;
    if (!found || !host.clientWidth) return;
    const isShare = this.unit.value === "share";
    const sums = found.x.map(() => 0);
    const tops = found.seconds.map((part) => part.map((each, i) => (sums[i] += isShare ? (100 * each) / (found.whole[i] || 1) : each * 1e3)));
    const bars = uPlot.paths.bars?.({ size: [1.02, Infinity] });
    const unit = isShare ? "%" : "ms";
    const last = found.x.length - 1;
    this.plot = new uPlot(/** @type {any} */ ({
      width: host.clientWidth, height: host.clientHeight, legend: { show: false }, padding: [8, 10, 0, 0],
      series: [{}, ...found.stacked.map((place) => ({ fill: this.colorOf(place), width: 0, paths: bars, points: { show: false } })).reverse()],
      scales: { x: { time: false, range: () => (last ? [found.x[0] - found.x[1] / 2 + found.x[0] / 2, found.x[last] + (found.x[last] - found.x[last - 1]) / 2] : [found.x[0] - 1, found.x[0] + 1]) },
        y: { range: (/** @type {any} */ _plot, /** @type {number} */ _low, /** @type {number} */ high) => [0, isShare ? 100 : high * 1.05 || 1] } },
      axes: [axisOf(28, labels(""), 70), axisOf(62, labels(` ${unit}`), 34)],
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
      hooks: { setCursor: [() => this.hover()] },
    }), [found.x, ...tops.reverse()], host);
    this.plot.over.append(this.tip);
  }

  hover() {
    const { left, idx } = this.plot?.cursor ?? {};
    const { found } = this;
    this.tip.hidden = !found || !(left >= 0) || idx === null || idx === undefined;
    if (this.tip.hidden || !found) return;
    const all = found.whole[idx];
    const rows = found.stacked.map((place, i) => element("div", { class: "tip-row" }, this.swatch(place), foreign(place), " ", element("b", {}, seconds(found.seconds[i][idx])), ` ${number(Math.round((1000 * found.seconds[i][idx]) / (all || 1)) / 10)} %`));
    this.tip.replaceChildren(element("div", { class: "tip-head" }, `${found.axis} ${ordinal(Math.round(found.x[idx]))}, ${seconds(all)}`), ...rows.reverse());
    const room = this.plot.over.clientWidth - this.tip.offsetWidth;
    this.tip.style.transform = `translate(${Math.round(Math.max(Math.min(left + 14, room), 0))}px, 4px)`;
  }

  /** @param {Times} found */
  showPlaces(found) {
    const spread = found.places.some((row) => row.slowest);
    const heads = ["Place", "Share", "Count", "Mean", "p50", "p90", "p99", ...(spread ? ["Slowest device"] : [])];
    const [low, high] = found.range;
    fill(byId("time-places", HTMLElement), element("table", { class: "devices" },
      element("thead", {}, element("tr", {}, heads.map((head, i) => element("th", { scope: "col", class: i ? "number" : null }, head)), element("th", { scope: "col" }, `Distribution, ${seconds(low)} to ${seconds(high)}`))),
      element("tbody", {}, found.places.map((row) => {
        const strip = element("canvas", { class: "strip", width: String(row.counts.length), height: "1", role: "img", "aria-label": `distribution of ${row.place.slice(0, 200)}` });
        drawStrip(strip, row.counts);
        const cells = [row.share === null ? "–" : `${number(Math.round(row.share * 1000) / 10)} %`, count(row.count), ...[row.mean, row.p50, row.p90, row.p99].map(seconds),
          ...(spread ? [row.slowest ? `${row.slowest} +${number(Math.round((row.spread ?? 0) * 1000) / 10)} %` : ""] : [])];
        return element("tr", {}, element("th", { scope: "row" }, this.swatch(row.place), foreign(row.place)),
          cells.map((cell, i) => element("td", { class: "number", "data-label": heads[i + 1] }, foreign(cell))), element("td", { class: "strip-cell" }, strip));
      }))));
  }

  /** @param {Times} found */
  showSlowest(found) {
    fill(byId("time-slowest", HTMLElement), element("table", { class: "devices" },
      element("thead", {}, element("tr", {}, [`Slowest ${found.axis}s`, "Time", "Far above its median", "Also logged"].map((head) => element("th", { scope: "col" }, head)))),
      element("tbody", {}, found.slowest.map(({ x, step, time, seconds: all, longer }) => {
        return element("tr", {}, element("th", { scope: "row" }, x !== null ? `iteration ${ordinal(x)}` : step === null ? clock(time) : `step ${ordinal(step)}`),
          element("td", { "data-label": "Time" }, element("b", {}, seconds(all)), ` ${ratio(all, found.usual)} × the median`),
          element("td", { "data-label": "Far above its median" }, longer.map(([place, took, median]) => element("span", { class: "longer" }, this.swatch(place), foreign(place), ` ${seconds(took)} (${median ? `${ratio(took, median)} ×` : "seldom runs"})`))),
          element("td", { "data-label": "Also logged" }, step !== null && ["charts", "texts"].map((tab) => element("button", { type: "button", class: "plain base", "data-key": `${tab} ${step}`, onclick: () => this.showStep(tab, step) }, tab))));
      }))));
  }

  /** A place and its backward pass have the same hue. @param {string} place */
  colorOf(place) {
    const names = [...new Set(this.found?.stacked.map((each) => each.replace(PASSES, "")))];
    const at = names.indexOf(place.replace(PASSES, ""));
    if (at < 0) return color("control");
    return `hsl(${Math.round(220 + at * 137.5) % 360} ${PASSES.test(place) ? 38 : 66}% ${dark() ? 62 : 50}%)`;
  }

  /** @param {string} place */
  swatch(place) {
    const made = element("span", { class: "swatch" });
    made.style.background = this.colorOf(place);
    return made;
  }
}

/** The labels of an axis. @param {string} unit */
const labels = (unit) => (/** @type {any} */ _plot, /** @type {number[]} */ splits) => splits.map((split) => `${number(split)}${unit}`);

/** With three digits. @param {number} one @param {number} other */
const ratio = (one, other) => number(Number((one / (other || 1)).toPrecision(3)));

/**
 * @param {HTMLCanvasElement} canvas
 * @param {number[]} counts
 */
function drawStrip(canvas, counts) {
  const context = canvas.getContext("2d");
  const most = Math.max(1, ...counts);
  counts.forEach((amount, i) => {
    if (!context) return;
    context.fillStyle = `rgb(${heat(amount ? 0.15 + 0.85 * Math.sqrt(amount / most) : 0).join(",")})`;
    context.fillRect(i, 0, 1, 1);
  });
}
