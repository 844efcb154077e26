/** A card of the charts: one tap, of all runs for scalars, of one run for everything else. */

import { runColor } from "../core/colors.js";
import { element, fill, foreign, sourcePlace } from "../core/dom.js";
import { count, number, plural } from "../core/format.js";
import { draw, forget } from "../core/frames.js";
import { icon } from "../core/icons.js";
import { runIndex, runName, settings, state } from "../core/state.js";
import { showArray } from "./array_view.js";
import { Heatmap } from "./heatmap.js";
import { ScalarChart } from "./scalar_chart.js";

/**
 * @typedef {import("../core/types.js").Tap} Tap
 * @typedef {import("../core/types.js").Series} Series
 * @typedef {{changed: (card: Card) => void, toggle: (tap: Tap, enabled: boolean) => void}} Owner
 */

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
    /** Whether the server has what the card does not show yet. */
    this.stale = true;
    /** @type {[number, number]|null} */
    this.view = null;
    /** Which message of an array is shown; -1 is the last. */
    this.at = -1;
    /** @type {Map<number, Series>} */
    this.series = new Map();
    /** @type {any} */
    this.data = null;
    /** @type {ScalarChart|Heatmap|null} */
    this.chart = null;
    this.body = element("div", { class: `plot ${this.kind}` });
    this.legend = element("div", { class: "legend" });
    this.note = element("p", { class: "card-note" });
    this.actions = element("div", { class: "actions" });
    this.head = element("div", { class: "card-title" });
    this.element = element("article", { class: "card", "aria-label": `${taps[0].name} ${taps[0].field}`.slice(0, 200) },
      element("header", {}, this.head, this.actions), this.body, this.legend, this.note);
    this.build();
    this.update(taps);
  }

  get width() {
    return this.body.clientWidth;
  }

  build() {
    if (this.kind === "scalar" || this.kind === "histogram") {
      this.body.tabIndex = 0;
      this.body.setAttribute("role", "application");
      this.body.setAttribute("aria-roledescription", "chart");
      const keys = this.kind === "scalar" ? "left and right read values, plus and minus zoom, 0 shows all" : "arrow keys read counts";
      this.body.setAttribute("aria-label", `chart of ${this.taps[0].name.slice(0, 200)}: ${keys}`);
    }
    if (this.kind === "image" || this.kind === "array") this.buildSlider();
  }

  buildSlider() {
    this.slider = element("input", { type: "range", min: "0", max: "0", value: "0", "aria-label": "message",
      oninput: () => {
        const slider = /** @type {HTMLInputElement} */ (this.slider);
        this.at = slider.value === slider.max ? -1 : Number(slider.value);
        this.needs();
      } });
    this.place = element("output", { class: "muted" });
    this.element.insertBefore(element("div", { class: "slider" }, this.slider, this.place), this.legend);
  }

  /** Something that the server has to answer changed. */
  needs() {
    this.stale = true;
    this.owner.changed(this);
  }

  /** @param {Tap[]} taps as the overview has them now */
  update(taps) {
    this.taps = taps;
    const [tap] = taps;
    fill(this.head, element("h3", {}, foreign(tap.name), tap.field && element("span", { class: "field" }, foreign(tap.field))),
      sourcePlace(tap.place));
    const runs = this.shownTaps();
    this.element.hidden = runs.length === 0;
    this.fillActions();
    this.fillLegend();
  }

  shownTaps() {
    return this.taps.filter((tap) => !state.hidden.has(tap.run));
  }

  fillActions() {
    const wide = this.element.classList.contains("wide");
    const isScalar = this.kind === "scalar";
    const chart = () => /** @type {ScalarChart|null} */ (this.chart);
    fill(this.actions,
      isScalar && this.view && button("reset", "Show all", () => this.zoom(null), "reset"),
      isScalar && button("minus", "Zoom out", () => chart()?.zoomBy(2), "out"),
      isScalar && button("plus", "Zoom in", () => chart()?.zoomBy(0.5), "in"),
      button(wide ? "shrink" : "expand", wide ? "Make the card smaller" : "Make the card wide", () => this.widen(), "wide"),
      state.overview.control && this.taps.some((tap) => tap.enabled !== null) && this.power());
  }

  power() {
    const enabled = this.taps.some((tap) => tap.enabled !== false);
    return element("button", { class: "icon-button power", type: "button", role: "switch", "aria-checked": String(enabled), "data-key": "power",
      "aria-label": "The tap sends", title: enabled ? "Switch the tap off" : "Switch the tap on",
      onclick: () => this.taps.forEach((tap) => this.owner.toggle(tap, !enabled)) }, icon("power"));
  }

  widen() {
    this.element.classList.toggle("wide");
    this.fillActions();
    this.needs();
  }

  fillLegend() {
    const runs = this.shownTaps();
    fill(this.legend, runs.map((tap) => {
      const swatch = element("span", { class: "swatch" });
      swatch.style.background = runColor(runIndex(tap.run));
      const value = this.kind === "scalar" ? element("b", {}, number(tap.last)) : plural(tap.count, "message");
      return element("span", { class: "legend-item" }, swatch, foreign(runName(tap.run)), " ", value,
        tap.enabled === false && element("span", { class: "off" }, "off"));
    }));
  }

  /** @param {[number, number]|null} view the range of x, or all */
  zoom(view) {
    this.view = view && view[1] > view[0] ? view : null;
    this.draw();
    this.fillActions();
    this.needs();
  }

  /** @param {boolean} visible */
  setVisible(visible) {
    this.visible = visible;
    if (visible) {
      this.needs();
      return;
    }
    forget(this);
    this.chart?.destroy();
    this.chart = null;
    this.body.replaceChildren();
  }

  /** @param {Series[]} found */
  takeSeries(found) {
    for (const series of found) this.series.set(series.tap, series);
    this.draw();
  }

  /** @param {any} data a heat map or an array, as the server answered */
  takeData(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    if (this.visible) draw(this, () => this.drawNow());
  }

  drawNow() {
    if (this.kind === "scalar") this.drawLines();
    else if (!this.data) return;
    else if (this.kind === "histogram") {
      this.chart ??= new Heatmap(this.body);
      /** @type {Heatmap} */ (this.chart).show(this.data);
    } else this.drawArray();
    this.fillLegend();
  }

  drawLines() {
    const lines = this.shownTaps().flatMap((tap) => {
      const series = this.series.get(tap.id);
      return series?.x.length ? [{ label: runName(tap.run), color: runColor(runIndex(tap.run)), series }] : [];
    });
    this.note.replaceChildren(...this.notes(lines));
    if (!lines.length) return;
    this.chart ??= new ScalarChart(this.body, (view) => this.zoom(view));
    /** @type {ScalarChart} */ (this.chart).show(lines, settings, this.view);
  }

  /** @param {{series: Series}[]} lines */
  notes(lines) {
    const found = [];
    const wrong = lines.flatMap((line) => line.series.nonfinite);
    if (wrong.length) {
      const [x, kind] = wrong[0];
      found.push(element("span", { class: "bad" }, `▲ ${plural(wrong.length, "value")} not finite, the first: ${kind} at ${number(x)}`));
    }
    if (settings.log && lines.some((line) => line.series.min.some((value) => value !== null && value <= 0))) {
      found.push(element("span", {}, "Values that are zero or negative have no place on a log scale."));
    }
    if (this.view) found.push(element("span", {}, lines.every((line) => line.series.exact) ? "Every message is a point." : "Zoom in for more detail."));
    return found;
  }

  drawArray() {
    showArray(this.body, this.data, this.taps[0].name);
    if (!this.slider || !this.place) return;
    const last = Math.max(this.data.count - 1, 0);
    this.slider.max = String(last);
    if (this.at < 0) this.slider.value = String(last);
    this.slider.disabled = last === 0;
    const at = this.at < 0 ? last : this.at;
    this.place.textContent = `step ${number(this.data.step)} · message ${count(at + 1)} of ${count(this.data.count)}`;
  }

  destroy() {
    forget(this);
    this.chart?.destroy();
    this.element.remove();
  }
}

/**
 * @param {Parameters<typeof icon>[0]} name
 * @param {string} label
 * @param {() => void} onclick
 * @param {string} key
 */
function button(name, label, onclick, key) {
  return element("button", { type: "button", class: "icon-button", "aria-label": label, title: label, "data-key": key, onclick }, icon(name));
}
