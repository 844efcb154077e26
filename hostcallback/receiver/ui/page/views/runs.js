/** The runs: a table of their configurations and results, which sorts by each column. */

import { swatch } from "../charts/card.js";
import { byId, element, emptyState, fill, foreign, shortened } from "../core/dom.js";
import { clock, number } from "../core/format.js";
import { LiveView } from "../core/live_view.js";
import { settings, state } from "../core/state.js";

/**
 * @typedef {import("../core/types.js").Run & {config: Record<string, any>, metrics: Record<string, (number|null)[]>}} Row
 * @typedef {{key: string, head: string, value: (row: Row) => any, show?: (row: Row) => any, isNumber?: boolean}} Column
 */

const COLUMNS = 60;

/** The tab "Runs". */
export class Runs extends LiveView {
  /** @param {{failed: (error: unknown) => void, toggleRun: (run: string) => void, pinRun: (run: string) => void}} page */
  constructor(page) {
    super("runs", page);
    this.actions = page;
    this.body = byId("run-table", HTMLElement);
    this.search = byId("run-search", HTMLInputElement);
    this.value = byId("run-value", HTMLSelectElement);
    /** @type {import("../core/types.js").RunTable} */
    this.found = { runs: [], differing: [] };
    this.sorted = { key: "started", descending: true };
    this.search.addEventListener("input", () => this.update());
    this.value.addEventListener("change", () => this.update());
  }

  /** @param {import("../core/types.js").RunTable} found */
  take(found) {
    this.found = found;
    this.update();
  }

  /** The table, the overview or a choice changed. */
  update() {
    if (!this.active) return;
    const rows = this.rows();
    if (!this.found.runs.length) {
      fill(this.body, emptyState("No runs yet", "A run appears here with its first message. Its configuration is that of ", element("code", {}, "hcb.record(\"logs\", config={\"lr\": 0.1})"), "."));
      return;
    }
    const columns = this.columns(rows);
    fill(this.body, element("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-label": "Table of runs" }, element("table", { class: "devices" },
      element("thead", {}, element("tr", {}, columns.map((column) => this.head(column)))),
      element("tbody", {}, rows.map((row) => element("tr", {}, columns.map((column, i) => this.cell(column, row, i === 0))))))),
    rows.length === 0 && element("p", { class: "hint" }, "No run has this in its name or configuration."), this.common());
  }

  /** The runs that fit the search, in order. @returns {Row[]} */
  rows() {
    const wanted = this.search.value.trim().toLowerCase();
    const rows = this.found.runs.flatMap((found) => {
      const run = state.overview.runs.find((each) => each.id === found.id);
      return run ? [{ ...run, ...found }] : [];
    });
    const told = (/** @type {Row} */ row) => [row.name, row.id, ...Object.entries(row.config).map(([key, value]) => `${key}=${value}`)].join("\n").toLowerCase();
    const { key, descending } = this.sorted;
    const column = this.columns(rows).find((each) => each.key === key);
    const order = (/** @type {any} */ a, /** @type {any} */ b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    const isNothing = (/** @type {any} */ value) => value === null || value === undefined;
    return rows.filter((row) => told(row).includes(wanted)).sort((left, right) => {
      const [a, b] = [column?.value(left), column?.value(right)];
      return isNothing(a) || isNothing(b) ? Number(isNothing(a)) - Number(isNothing(b)) : order(a, b) * (descending ? -1 : 1);
    });
  }

  /**
   * @param {Row[]} rows
   * @returns {Column[]}
   */
  columns(rows) {
    const metrics = [...new Set(rows.flatMap((row) => Object.keys(row.metrics)))];
    /** @type {Column[]} */
    const columns = [
      { key: "name", head: "Run", value: (row) => row.name, show: (row) => this.name(row) },
      { key: "started", head: "Started", value: (row) => row.started, show: (row) => clock(row.started) },
      { key: "messages", head: "Messages", value: (row) => row.messages, isNumber: true },
    ];
    return [...columns,
      ...this.found.differing.map((name) => ({ key: `config ${name}`, head: name, value: (/** @type {Row} */ row) => row.config[name] })),
      ...metrics.map((name) => ({ key: `metric ${name}`, head: name, isNumber: true, value: (/** @type {Row} */ row) => row.metrics[name]?.[Number(this.value.value)] ?? null,
        show: (/** @type {Row} */ row) => this.metric(name, row) })),
    ].slice(0, COLUMNS);
  }

  /** @param {Column} column */
  head(column) {
    const { key, descending } = this.sorted;
    const isSorted = key === column.key;
    return element("th", { scope: "col", class: column.isNumber ? "number" : null, "aria-sort": isSorted ? (descending ? "descending" : "ascending") : null },
      element("button", { type: "button", class: "plain", "data-key": `sort ${column.key}`, onclick: () => {
        this.sorted = { key: column.key, descending: isSorted ? !descending : Boolean(column.isNumber) };
        this.update();
      } }, foreign(column.head), isSorted && element("span", { "aria-hidden": "true" }, descending ? " ▾" : " ▴")));
  }

  /**
   * @param {Column} column
   * @param {Row} row
   * @param {boolean} isFirst
   */
  cell(column, row, isFirst) {
    const value = column.value(row);
    const shown = column.show?.(row) ?? (typeof value === "number" ? number(value) : foreign(shortened(String(value ?? "–"), 80)));
    return element(isFirst ? "th" : "td", { scope: isFirst ? "row" : null, class: column.isNumber ? "number" : null, "data-label": column.head }, shown);
  }

  /** @param {Row} row */
  name(row) {
    const isBase = settings.baseline === row.id;
    return element("span", { class: "run-name" },
      element("input", { type: "checkbox", checked: !state.hidden.has(row.id), "aria-label": `show ${row.name}`, "data-key": `show ${row.id}`, onchange: () => this.actions.toggleRun(row.id) }),
      swatch(row.id), foreign(row.name), row.live && element("span", { class: "live", title: "live" }, "●"),
      element("button", { type: "button", class: "plain base", "aria-pressed": String(isBase), "data-key": `base ${row.id}`, title: "Measure the other runs by this one", onclick: () => this.actions.pinRun(row.id) }, "baseline"));
  }

  /**
   * The chosen value, how far it is from the baseline's, and the range.
   * @param {string} name
   * @param {Row} row
   */
  metric(name, row) {
    const found = row.metrics[name];
    if (!found) return "–";
    const chosen = Number(this.value.value);
    const base = this.found.runs.find((run) => run.id === settings.baseline && run.id !== row.id)?.metrics[name]?.[chosen];
    const change = base && found[chosen] !== null ? (/** @type {number} */ (found[chosen]) - base) / Math.abs(base) : null;
    return [element("b", {}, number(found[chosen])), change !== null && element("span", { class: "change" }, ` ${change < 0 ? "−" : "+"}${number(Number(Math.abs(change * 100).toPrecision(3)))} %`),
      element("small", {}, `${number(found[1])} to ${number(found[2])}`)];
  }

  /** The settings that all runs share, and those of a run alone. */
  common() {
    const configured = this.found.runs.filter((run) => Object.keys(run.config).length);
    const shared = Object.entries(configured[0]?.config ?? {}).filter(([name]) => !this.found.differing.includes(name));
    if (!shared.length) return null;
    return [element("h3", {}, configured.length > 1 ? "The same in all runs" : "Configuration"),
      element("dl", { class: "stats settings" }, shared.map(([name, value]) => element("div", {}, element("dt", {}, foreign(name)), element("dd", {}, foreign(String(value))))))];
  }
}
