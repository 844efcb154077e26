/** The difference of two runs: where they first part, and a strip for each tap. */

import { Card } from "../charts/card.js";
import { ScalarChart } from "../charts/scalar_chart.js";
import { ask } from "../core/api.js";
import { color, heat, onScheme } from "../core/colors.js";
import { byId, choices, element, emptyState, fill, foreign, shortened, sourcePlace } from "../core/dom.js";
import { count, number, ordinal, plural } from "../core/format.js";
import { runChoices, settings, state } from "../core/state.js";
import { grouped, loadSeries } from "./charts.js";

/**
 * @typedef {import("../core/types.js").Difference} Difference
 * @typedef {import("../core/types.js").Tap} Tap
 * @typedef {import("../core/types.js").TapDifference} TapDifference
 */

const ROWS = 100;
const CARDS = 12;

/** The tab "Compare". */
export class Compare {
  /** @param {{failed: (error: unknown) => void}} page */
  constructor(page) {
    this.page = page;
    this.left = byId("left", HTMLSelectElement);
    this.right = byId("right", HTMLSelectElement);
    this.result = byId("difference", HTMLElement);
    this.form = byId("compare-form", HTMLFormElement);
    /** @type {ScalarChart|null} */
    this.chart = null;
    /** @type {Card[]} */
    this.cards = [];
    /** @type {Difference|null} */
    this.found = null;
    this.chosen = "";
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.load();
    });
    onScheme(() => this.found && this.show(this.found));
  }

  /** @param {boolean} active */
  setActive(active) {
    this.active = active;
    if (!active) return;
    this.update();
    if (this.found || state.overview.runs.length < 2) return;
    if (settings.baseline && settings.baseline !== this.left.value) [this.left.value, this.right.value] = [settings.baseline, this.left.value];
    void this.load();
  }

  /** The overview was read. */
  update() {
    const { runs } = state.overview;
    choices(this.left, runChoices());
    if (!choices(this.right, runChoices()) && runs.length > 1) this.right.value = runs[1].id;
    this.form.hidden = runs.length < 2;
    if (runs.length < 2) {
      fill(this.result, emptyState("One run is not enough to compare", "Open the page over two runs, or over a folder with both: ", element("code", {}, "hcb ui runs/first runs/second"), "."));
    }
  }

  async load() {
    this.clear();
    fill(this.result, element("p", { class: "hint" }, "Comparing the messages of the two runs…"));
    try {
      this.found = await ask("diff", { left: this.left.value, right: this.right.value });
      this.show(/** @type {Difference} */ (this.found));
    } catch (error) {
      fill(this.result, element("p", { class: "refused", role: "alert" }, error instanceof Error ? error.message : String(error)));
      this.page.failed(error);
    }
  }

  /** @param {Difference} found */
  show(found) {
    const parted = found.taps.filter((tap) => tap.differing + tap.missing > 0);
    const sorted = [...parted].sort((a, b) => (a.first_step ?? Infinity) - (b.first_step ?? Infinity));
    const same = found.taps.length - parted.length;
    fill(this.result, verdict(found), found.notes.map((note) => element("p", { class: "hint" }, shortened(note, 400))),
      configuration(found),
      sorted.length > 0 && element("h3", {}, "Where the taps differ"),
      sorted.length > 0 && this.strips(sorted),
      same > 0 && element("p", { class: "hint" }, `${count(same)} ${same === 1 ? "tap is" : "taps are"} equal in both runs.`),
      element("div", { id: "difference-detail" }));
    const first = sorted.find((tap) => tap.name === this.chosen) ?? sorted.find((tap) => tap.name === found.first?.tap) ?? sorted[0];
    if (first) this.detail(first);
  }

  /** @param {TapDifference[]} taps */
  strips(taps) {
    const ends = taps.flatMap((tap) => (tap.x.length ? [tap.x[0], tap.x[tap.x.length - 1]] : []));
    const range = /** @type {[number, number]} */ ([Math.min(...ends), Math.max(...ends)]);
    return element("ul", { class: "strips" }, taps.slice(0, ROWS).map((tap) => {
      const canvas = element("canvas", { class: "strip", width: "800", height: "18", "aria-hidden": "true" });
      drawStrip(canvas, tap, range);
      const told = [tap.differing > 0 && `${tap.first_step === null ? "" : `from step ${ordinal(tap.first_step)}, `}${count(tap.differing)} of ${count(tap.compared)} differ`,
        tap.missing > 0 && `${plural(tap.missing, "message")} of one run only`].filter(Boolean).join("; ");
      return element("li", {}, element("button", { type: "button", class: "strip-button", "data-key": `strip ${tap.name}`, "aria-pressed": String(tap.name === this.chosen), onclick: () => this.detail(tap) },
        element("span", { class: "strip-name" }, foreign(tap.name)), canvas,
        element("span", { class: "strip-told" }, told)));
    }));
  }

  /** @param {TapDifference} tap */
  detail(tap) {
    this.chosen = tap.name;
    this.clear();
    this.result.querySelectorAll(".strip-button").forEach((button) =>
      button.setAttribute("aria-pressed", String(button.getAttribute("data-key") === `strip ${tap.name}`)));
    const cards = element("div", { class: "cards" });
    fill(byId("difference-detail", HTMLElement), cards);
    if (tap.x.length) {
      const host = element("div", { class: "plot scalar", tabindex: "0", role: "application", "aria-label": `difference of ${shortened(tap.name, 200)}` });
      cards.append(element("article", { class: "card" },
        element("header", {}, element("div", { class: "card-title" }, element("h3", {}, foreign(tap.name)), element("span", { class: "place" }, "absolute difference")),
          element("span", { class: "muted" }, "largest ", element("b", {}, number(tap.max_abs)))), host));
      const chart = new ScalarChart(host, (view) => chart.show(lines, look, view));
      const values = tap.difference;
      const series = { tap: 0, axis: "step", x: tap.x, min: values, max: values, mean: values, count: tap.compared, exact: true, first: null, last: null, nonfinite: [], nonfinite_count: 0 };
      const lines = [{ label: "difference", color: color("error"), series }];
      const look = { axis: "step", smooth: 0, log: false };
      chart.show(lines, look, null);
      this.chart = chart;
    }
    void this.values(tap, cards);
  }

  /**
   * The values of both runs: numbers in one chart, histograms, pictures and arrays one below the other.
   * @param {TapDifference} tap
   * @param {HTMLElement} host
   */
  async values(tap, host) {
    try {
      const { taps } = await ask("overview", { filter: tap.name, limit: 500 });
      const runs = [this.left.value, this.right.value];
      const mine = taps.filter((/** @type {Tap} */ each) => each.name === tap.name && runs.includes(each.run));
      if (this.chosen !== tap.name) return;
      for (const [key, some] of [...grouped(mine)].slice(0, CARDS)) {
        const card = new Card(key, some, { changed: (one) => void this.fillCard(one) });
        this.cards.push(card);
        card.update(some);
        host.append(card.element);
        card.setVisible(true);
      }
    } catch (error) {
      this.page.failed(error);
    }
  }

  /** @param {Card} card */
  async fillCard(card) {
    try {
      await (card.kind === "scalar" ? loadSeries([card], card.view) : card.load());
    } catch (error) {
      this.page.failed(error);
    }
  }

  clear() {
    this.chart?.destroy();
    this.chart = null;
    for (const card of this.cards.splice(0)) card.destroy();
  }
}

/** The settings in which the runs differ. @param {Difference} found */
function configuration(found) {
  const rows = Object.entries(found.config);
  return rows.length > 0 && element("table", { class: "devices config" }, element("thead", {}, element("tr", {}, ["Setting", "Left", "Right"].map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, rows.map(([name, sides]) => element("tr", {}, element("th", { scope: "row" }, foreign(name)), sides.map((side, i) => element("td", { "data-label": ["left", "right"][i] }, foreign(String(side ?? "–"))))))));
}

/** @param {Difference} found */
function verdict(found) {
  if (found.equal) return element("p", { class: "verdict equal" }, "The runs are equal: every message that was compared has the same values.");
  if (!found.first) return element("p", { class: "verdict" }, "The runs differ.");
  const { tap, leaf, step, place, text, left, right } = found.first;
  return element("div", { class: "verdict" },
    element("p", {}, "The runs first part ", step !== null && "at ", step !== null && element("b", {}, `step ${ordinal(step)}`), " in ",
      element("b", {}, foreign(leaf && tap.startsWith("metrics@") ? leaf : [tap, leaf].filter(Boolean).join(" "))), Boolean(place) && ", ", Boolean(place) && sourcePlace(place)),
    left || right ? element("dl", {}, element("div", {}, element("dt", {}, "left"), element("dd", {}, shortened(left, 400))),
      element("div", {}, element("dt", {}, "right"), element("dd", {}, shortened(right, 400)))) : element("p", {}, shortened(text, 400)));
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {TapDifference} tap
 * @param {[number, number]} range
 */
function drawStrip(canvas, tap, range) {
  const context = canvas.getContext("2d");
  if (!context) return;
  const { width, height } = canvas;
  context.fillStyle = color("grid");
  context.fillRect(0, 0, width, height);
  const most = tap.max_abs || 1;
  const wide = Math.max(width / Math.max(tap.x.length, 1), 2);
  const place = (/** @type {number} */ step) => ((step - range[0]) / (range[1] - range[0] || 1)) * (width - wide);
  tap.x.forEach((step, i) => {
    const size = Math.abs(tap.difference[i] ?? 0);
    if (!size) return;
    context.fillStyle = `rgb(${heat(0.25 + 0.75 * Math.sqrt(size / most)).join(",")})`;
    context.fillRect(place(step), 0, wide + 0.6, height);
  });
  if (tap.first_step !== null) {
    context.fillStyle = color("error");
    context.fillRect(Math.max(place(tap.first_step) - 1, 0), 0, 3, height);
  }
}
