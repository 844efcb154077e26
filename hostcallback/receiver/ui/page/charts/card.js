/** A card of the charts: one tap, of all runs. */

import { ask } from "../core/api.js";
import { runColor } from "../core/colors.js";
import { element, fill, foreign, sourcePlace } from "../core/dom.js";
import { clock, count, duration, number, ordinal, plural } from "../core/format.js";
import { draw, forget } from "../core/frames.js";
import { icon } from "../core/icons.js";
import { runIndex, runName, settings, state } from "../core/state.js";
import { showArray } from "./array_view.js";
import { downloads } from "./download.js";
import { Heatmap } from "./heatmap.js";
import { ScalarChart } from "./scalar_chart.js";

/**
 * @typedef {import("../core/types.js").Tap} Tap
 * @typedef {import("../core/types.js").Series} Series
 * @typedef {{changed: (card: Card) => void, toggle?: (tap: Tap, enabled: boolean) => void, zoomed?: (card: Card) => void, pin?: (card: Card) => void}} Owner
 * @typedef {{host: HTMLElement, heatmap: Heatmap|null}} Part what shows the arrays of one run
 */

const COLUMNS = 200;
const STRIP = 8;
/** Runs that are named below a chart, and runs of which an array is shown. */
const NAMED = 12;
const PARTS = 8;

/** What one card shows. The view asks the server for its data while it is on the screen. */
export class Card {
  /**
   * @param {string} key
   * @param {Tap[]} taps one for each run
   * @param {Owner} owner
   */
  constructor(key, taps, owner) {
    this.key = key;
    this.taps = taps;
    this.owner = owner;
    this.kind = taps[0].kind;
    this.visible = false;
    /** Whether its section is folded away. */
    this.folded = false;
    /** Whether the server has what the card does not show yet. */
    this.stale = true;
    /** @type {[number, number]|null} */
    this.view = null;
    /** The card's own smoothing and scale, in place of those of all cards. @type {{smooth: number|null, log: boolean|null}} */
    this.own = { smooth: null, log: null };
    /** Which message of an array is shown; -1 is the last. */
    this.at = -1;
    /** The server's answers, by tap: series, heat maps and arrays. @type {Map<number, any>} */
    this.data = new Map();
    /** @type {ScalarChart|null} */
    this.chart = null;
    /** @type {Map<number, Part>} */
    this.parts = new Map();
    const keys = this.kind === "scalar" ? "left and right read values, plus and minus zoom, 0 shows all" : "arrow keys read counts";
    this.chartAttributes = { tabindex: "0", role: "application", "aria-roledescription": "chart", "aria-label": `chart of ${taps[0].title.slice(0, 200)}: ${keys}` };
    this.body = element("div", { class: `plot ${this.kind}`, ...(this.kind === "scalar" && this.chartAttributes) });
    this.legend = element("div", { class: "legend" });
    this.note = element("p", { class: "card-note" });
    this.head = element("div", { class: "card-title" });
    this.reset = button("reset", "Show all", () => this.zoomAll(null));
    this.wide = button("expand", "Make the card wide", () => this.widen());
    this.power = element("button", { class: "icon-button power", type: "button", role: "switch", "aria-label": "The tap sends", onclick: () => this.toggle() }, icon("power"));
    this.pin = button("pin", "Pin the card to the top", () => owner.pin?.(this));
    this.element = element("article", { class: "card", "aria-label": names(taps[0]).join(" ").trim().slice(0, 200) },
      element("header", {}, this.head, element("div", { class: "actions" }, this.reset,
        this.kind === "scalar" && [button("minus", "Zoom out", () => this.chart?.zoomBy(2)), button("plus", "Zoom in", () => this.chart?.zoomBy(0.5))],
        this.wide, owner.pin && this.pin, owner.toggle && this.power, this.menu())),
      this.body, this.slider(), this.legend, this.note);
  }

  get width() {
    return this.body.clientWidth;
  }

  /** The look of its chart: its own, or that of all cards. */
  get look() {
    return { axis: settings.axis, smooth: this.own.smooth ?? settings.smooth, log: this.own.log ?? settings.log };
  }

  menu() {
    const log = element("input", { type: "checkbox", onchange: () => this.setOwn({ log: log.checked }) });
    const smooth = element("input", { type: "range", min: "0", max: "0.99", step: "0.01", oninput: () => this.setOwn({ smooth: Number(smooth.value) }) });
    const menu = element("details", { class: "menu", ontoggle: () => ([log.checked, smooth.value] = [this.look.log, String(this.look.smooth)]) },
      element("summary", { class: "icon-button", "aria-label": "More", title: "More" }, icon("more")),
      element("div", { class: "menu-body" },
        this.kind === "scalar" && [element("label", {}, log, "Log scale"), element("label", {}, "Smoothing", smooth)],
        downloads(this.kind).map(([name, save]) => element("button", { type: "button", class: "plain", onclick: () => {
          menu.open = false;
          void save(this);
        } }, `Download ${name}`))));
    menu.addEventListener("focusout", (event) => menu.contains(/** @type {Node|null} */ (event.relatedTarget)) || (menu.open = false));
    return menu;
  }

  /** @param {{smooth?: number, log?: boolean}} own */
  setOwn(own) {
    Object.assign(this.own, own);
    this.draw();
  }

  slider() {
    if (this.kind !== "image" && this.kind !== "array") return null;
    this.range = element("input", { type: "range", min: "0", max: "0", value: "0", "aria-label": "message", oninput: () => this.show(Number(this.range?.value)) });
    this.place = element("output", { class: "muted" });
    return element("div", { class: "slider" }, this.range, this.place);
  }

  /** Shows a message of an array. @param {number} at */
  show(at) {
    this.at = String(at) === this.range?.max ? -1 : at;
    this.needs();
  }

  /** Something that the server has to answer changed. */
  needs() {
    this.stale = true;
    this.owner.changed(this);
  }

  /** @param {Tap[]} taps as the overview has them now */
  update(taps) {
    this.taps = taps;
    const [name, field] = names(taps[0]);
    fill(this.head, element("h3", {}, foreign(name), field && element("span", { class: "field" }, foreign(field))), sourcePlace(taps[0].place));
    this.element.hidden = this.folded || this.shownTaps().length === 0;
    this.pin.setAttribute("aria-pressed", String(settings.pins.includes(this.key)));
    this.power.hidden = !state.overview.control || taps.every((each) => each.enabled === null);
    this.power.setAttribute("aria-checked", String(taps.some((each) => each.enabled !== false)));
    this.reset.hidden = !this.view;
    this.fillLegend();
  }

  shownTaps() {
    return this.taps.filter((tap) => !state.hidden.has(tap.run));
  }

  toggle() {
    const enabled = this.taps.some((tap) => tap.enabled !== false);
    this.taps.forEach((tap) => this.owner.toggle?.(tap, !enabled));
  }

  widen() {
    const isWide = this.element.classList.toggle("wide");
    fill(this.wide, icon(isWide ? "shrink" : "expand"));
    this.wide.title = isWide ? "Make the card smaller" : "Make the card wide";
    this.wide.setAttribute("aria-label", this.wide.title);
    this.needs();
  }

  /** Those of which an array is shown: the first ones. */
  partTaps() {
    return this.shownTaps().slice(0, PARTS);
  }

  fillLegend() {
    const shown = this.kind === "scalar" ? this.shownTaps() : this.partTaps();
    const rest = this.shownTaps().length - Math.min(shown.length, NAMED);
    fill(this.legend, shown.slice(0, NAMED).map((tap) => element("span", { class: "legend-item" }, swatch(tap.run), foreign(runName(tap.run)), " ",
      this.kind === "scalar" ? element("b", {}, number(tap.last)) : plural(tap.count, "message"),
      tap.run === settings.baseline && element("span", { class: "muted" }, " baseline"),
      tap.enabled === false && element("span", { class: "off" }, "off"))), rest > 0 && element("span", { class: "muted" }, `and ${count(rest)} more`));
  }

  /** @param {[number, number]|null} view the range of x, or all */
  zoom(view) {
    this.view = view && view[1] > view[0] ? view : null;
    this.reset.hidden = !this.view;
    this.draw();
    this.needs();
  }

  /** The reader chose a range, which may hold for other cards, too. @param {[number, number]|null} view */
  zoomAll(view) {
    this.zoom(view);
    this.owner.zoomed?.(this);
  }

  /** @param {boolean} visible */
  setVisible(visible) {
    this.visible = visible;
    if (visible) {
      this.needs();
      return;
    }
    this.clear();
  }

  clear() {
    forget(this);
    this.chart?.destroy();
    this.chart = null;
    this.parts.forEach((part) => part.heatmap?.destroy());
    this.parts.clear();
    this.body.replaceChildren();
  }

  /** Asks the server for what is no series. */
  async load() {
    const taps = this.partTaps().map((tap) => tap.id);
    if (!taps.length) return;
    if (this.kind === "histogram") {
      const { edges, taps: found } = await ask("heatmap", { tap: taps, columns: COLUMNS });
      for (const { tap, x, counts } of found) this.data.set(tap, { x, counts, edges });
    } else {
      const strip = this.kind === "image" ? STRIP : 0;
      const found = await Promise.all(taps.map((tap) => ask("array", { tap, at: this.at, strip })));
      taps.forEach((tap, i) => this.data.set(tap, found[i]));
    }
    this.draw();
  }

  /** @param {Series[]} found */
  takeSeries(found) {
    for (const series of found) this.data.set(series.tap, series);
    this.draw();
  }

  draw() {
    if (this.visible) draw(this, () => this.drawNow());
  }

  drawNow() {
    if (this.kind === "scalar") this.drawLines();
    else this.drawParts();
    if (this.kind !== "scalar") this.note.replaceChildren(...this.measures());
    this.fillLegend();
  }

  /** The lines of the shown runs, as far as the server has answered. */
  lines() {
    return this.shownTaps().flatMap((tap) => {
      const series = marked(/** @type {Series|undefined} */ (this.data.get(tap.id)));
      return series?.x.length ? [{ label: runName(tap.run), color: runColor(runIndex(tap.run)), dashed: tap.run === settings.baseline, series }] : [];
    });
  }

  drawLines() {
    const lines = this.lines();
    this.note.replaceChildren(...this.notes(lines));
    if (!lines.length) return;
    this.chart ??= new ScalarChart(this.body, (view) => this.zoomAll(view));
    this.chart.show(lines, this.look, this.view);
  }

  /** Says what complex numbers are measured by. */
  measures() {
    const shown = this.kind === "array" ? "The statistics are of the magnitudes." : "Magnitudes of complex numbers.";
    return this.shownTaps().some((tap) => tap.complex) ? [element("span", {}, shown)] : [];
  }

  /** @param {{series: Series}[]} lines */
  notes(lines) {
    const found = this.measures();
    const wrong = lines.flatMap((line) => line.series.nonfinite);
    if (wrong.length) {
      const [x, kind] = wrong.reduce((first, each) => (each[0] < first[0] ? each : first));
      const all = lines.reduce((sum, line) => sum + line.series.nonfinite_count, 0);
      const { axis } = lines[0].series;
      const told = axis === "time" ? `at ${clock(x)}` : axis === "elapsed" ? `after ${duration(x)}` : `at ${ordinal(x)}`;
      const marked = all > wrong.length ? ` (${wrong.length} are marked)` : "";
      found.push(element("span", { class: "bad" }, `▲ ${plural(all, "value")} not finite, the first: ${kind} ${told}${marked}`));
    }
    if (this.look.log && lines.some((line) => line.series.min.some((value) => value !== null && value <= 0))) {
      found.push(element("span", {}, "Values that are zero or negative have no place on a log scale."));
    }
    if (this.view) found.push(element("span", {}, lines.every((line) => line.series.exact) ? "Every message is a point." : "Zoom in for more detail."));
    return found;
  }

  /** A heat map, picture or table for each run. */
  drawParts() {
    const taps = this.partTaps().filter((tap) => this.data.has(tap.id));
    for (const [id, part] of this.parts) {
      if (taps.some((tap) => tap.id === id)) continue;
      part.heatmap?.destroy();
      part.host.parentElement?.remove();
      this.parts.delete(id);
    }
    taps.forEach((tap, i) => {
      let part = this.parts.get(tap.id);
      if (!part) {
        const host = element("div", { class: "part-body", ...(this.kind === "histogram" && this.chartAttributes) });
        part = { host, heatmap: null };
        this.parts.set(tap.id, part);
        this.body.insertBefore(element("div", { class: "part" }, taps.length > 1 && element("p", { class: "part-name" }, swatch(tap.run), foreign(runName(tap.run))), host), this.body.children[i] ?? null);
      }
      if (this.kind === "histogram") {
        part.heatmap ??= new Heatmap(part.host);
        part.heatmap.show(this.data.get(tap.id));
      } else showArray(part.host, this.data.get(tap.id), tap.name, (at) => this.show(at));
    });
    if (this.range) this.drawSlider(taps.map((tap) => this.data.get(tap.id)));
  }

  /** @param {import("../core/types.js").ArrayData[]} shown */
  drawSlider(shown) {
    const range = /** @type {HTMLInputElement} */ (this.range);
    const last = Math.max(0, ...shown.map((data) => data.count - 1));
    range.max = String(last);
    range.value = String(this.at < 0 ? last : this.at);
    range.disabled = last === 0;
    const steps = [...new Set(shown.map((data) => ordinal(data.step)))].join(", ");
    /** @type {HTMLElement} */ (this.place).textContent = `step ${steps} · message ${count(Number(range.value) + 1)} of ${count(last + 1)}`;
  }

  destroy() {
    this.clear();
    this.element.remove();
  }
}

/** What a card is called: a metric by its own name, others by the tap and the leaf. @param {Tap} tap */
function names(tap) {
  return tap.field !== "" && tap.title === tap.field ? [tap.title, ""] : [tap.name, tap.field];
}

/**
 * A series without finite values has points without a value where it is marked, so that the marks are drawn.
 * @param {Series|undefined} series
 */
function marked(series) {
  if (!series || series.x.length || !series.nonfinite.length) return series;
  const x = [...new Set(series.nonfinite.map(([at]) => at))];
  const none = x.map(() => null);
  return { ...series, x, min: none, max: none, mean: none, exact: true, first: Math.min(series.first ?? x[0], x[0]), last: Math.max(series.last ?? 0, x[x.length - 1]) };
}

/** @param {string} run */
export function swatch(run) {
  const made = element("span", { class: "swatch" });
  made.style.background = runColor(runIndex(run));
  return made;
}

/**
 * @param {Parameters<typeof icon>[0]} name
 * @param {string} label
 * @param {() => void} onclick
 */
function button(name, label, onclick) {
  return element("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick }, icon(name));
}
