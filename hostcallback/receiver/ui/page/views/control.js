/** Control of running processes: the rules of taps, the values of knobs, and a stop of their loops. */

import { ask, send } from "../core/api.js";
import { byId, choices, element, emptyState, fill, foreign, shortened, sourcePlace } from "../core/dom.js";
import { count } from "../core/format.js";
import { runChoices, state } from "../core/state.js";

/** @typedef {import("../core/types.js").Tap} Tap */
/** @typedef {{name: string, values: any[], default: any, min: any, max: any, source_line: string}} Knob */

const ROWS = 200;

/** The tab "Control". */
export class Control {
  /** @param {{failed: (error: unknown) => void, overviewNeeded: () => void, say: (text: string) => void}} page */
  constructor(page) {
    this.page = page;
    this.allowed = byId("control-allowed", HTMLElement);
    this.refused = byId("control-refused", HTMLElement);
    this.form = byId("rule-form", HTMLFormElement);
    this.list = byId("rule-list", HTMLElement);
    this.applied = byId("rule-applied", HTMLElement);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.apply();
    });
    byId("stop", HTMLButtonElement).addEventListener("click", () => void this.stop());
  }

  /** @param {boolean} active */
  setActive(active) {
    if (active) this.update();
  }

  /** The overview was read. */
  update() {
    const { control } = state.overview;
    this.allowed.hidden = !control;
    this.refused.hidden = control;
    if (!control) {
      fill(this.refused, emptyState("This page is read-only", "To switch taps from here, start the page of a running process or a collector with ", element("code", {}, "hcb ui --control"), "."));
      return;
    }
    choices(byId("rule-run", HTMLSelectElement), runChoices("all runs"));
    this.rows();
    void this.showKnobs();
  }

  async showKnobs() {
    const list = byId("knob-list", HTMLElement);
    const { processes, knobs } = await ask("knobs").catch(() => ({ processes: 0, knobs: [] }));
    byId("running", HTMLElement).hidden = !processes;
    byId("knobs", HTMLElement).hidden = !knobs.length;
    if (list.contains(document.activeElement)) return; // someone types
    fill(list, element("ul", { class: "rules" }, knobs.map((/** @type {Knob} */ knob) => this.knobRow(knob))));
  }

  /** @param {Knob} knob */
  knobRow(knob) {
    const { name, values, min, max } = knob;
    const differ = values.some((value) => value !== values[0]);
    const bounds = [min !== null && `at least ${min}`, max !== null && `at most ${max}`, `default ${knob.default}`, differ && `now ${values.slice(0, 4).join(", ")}`];
    const field = element("input", { value: differ ? "" : String(values[0]), "aria-label": `the value of ${shortened(name, 200)}`, autocomplete: "off", spellcheck: "false" });
    return element("li", {}, element("span", { class: "rule-name" }, foreign(name), sourcePlace(knob.source_line)),
      element("span", { class: "muted" }, bounds.filter(Boolean).join(", ")),
      element("form", { class: "knob", onsubmit: (/** @type {Event} */ event) => {
        event.preventDefault();
        void this.setKnob(name, /** @type {HTMLInputElement} */ (field).value.trim());
      } }, field, element("button", { type: "submit", class: "plain" }, "Set")));
  }

  /**
   * @param {string} name
   * @param {string} text
   */
  async setKnob(name, text) {
    const told = byId("knob-told", HTMLElement);
    try {
      await send("knobs", { name, value: JSON.parse(text) });
      told.textContent = `“${shortened(name, 80)}” is ${text}.`;
      if (document.activeElement instanceof HTMLElement) document.activeElement.blur();
    } catch (error) {
      told.textContent = error instanceof SyntaxError ? `${text || "Nothing"} is not a value: give a number, true, false or a list of them.` : String(error instanceof Error ? error.message : error);
    }
    await this.showKnobs();
  }

  async stop() {
    if (!confirm("End the loops with stop=True of all processes shown here? They keep what they have computed.")) return;
    const told = byId("stop-told", HTMLElement);
    try {
      const { processes } = await send("stop", {});
      told.textContent = `A stop is requested of ${processes === 1 ? "one process" : `${processes} processes`}.`;
    } catch (error) {
      told.textContent = error instanceof Error ? error.message : String(error);
    }
  }

  rows() {
    /** @type {Map<string, Tap[]>} */
    const byName = new Map();
    for (const tap of state.overview.taps) {
      byName.set(tap.name, [...(byName.get(tap.name) ?? []), tap]);
    }
    const names = [...byName];
    if (!names.length) {
      fill(this.list, emptyState("No taps yet", "A tap or a check can be switched here from its first message on. A rule above also holds for taps that come later."));
      return;
    }
    fill(this.list, element("ul", { class: "rules" }, names.slice(0, ROWS).map(([name, taps]) => this.row(name, taps))),
      names.length > ROWS && element("p", { class: "hint" }, `The first ${count(ROWS)} of ${count(names.length)} names. The form above takes any name, and patterns such as layer_*.`));
  }

  /**
   * @param {string} name
   * @param {Tap[]} taps
   */
  row(name, taps) {
    const enabled = taps.some((tap) => tap.enabled !== false);
    const checks = taps.every((tap) => tap.kind === "check"); // they have no rate
    return element("li", {}, element("span", { class: "rule-name" }, foreign(name), sourcePlace(taps[0].place)),
      element("span", { class: "number muted" }, checks ? "check" : `${count(messages(taps))} messages`),
      !checks && element("button", { type: "button", class: "plain", "data-key": `fill ${name}`, onclick: () => this.prefill(name) }, "Limit…"),
      element("button", { type: "button", class: "switch", role: "switch", "aria-checked": String(enabled), "aria-label": `${shortened(name, 200)} sends`,
        "data-key": `switch ${name}`, onclick: () => this.send({ tap: name, run: null, enabled: !enabled }) }, enabled ? "on" : "off"));
  }

  /** @param {string} name */
  prefill(name) {
    byId("rule-tap", HTMLInputElement).value = name;
    byId("rule-rate", HTMLInputElement).focus();
  }

  async apply() {
    const value = (/** @type {string} */ id) => /** @type {HTMLInputElement} */ (document.getElementById(id)).value.trim();
    const amount = (/** @type {string} */ id) => (value(id) === "" ? null : Number(value(id)));
    const enabled = { on: true, off: false }[value("rule-enabled")] ?? null;
    const rule = { tap: value("rule-tap"), run: value("rule-run") || null, enabled, rate: amount("rule-rate"), truncate: amount("rule-truncate") };
    if (enabled === null && rule.rate === null && rule.truncate === null) {
      this.applied.textContent = "The rule changes nothing yet: choose on or off, a rate, or a number of elements.";
      return;
    }
    await this.send(rule);
  }

  /** @param {Record<string, any>} rule */
  async send(rule) {
    try {
      const { applied } = await send("rules", { run: null, enabled: null, rate: null, truncate: null, ...rule });
      this.applied.textContent = `Applied to “${shortened(rule.tap, 80)}”: ${told(rule)}.`;
      this.page.say(`${told(rule)}: ${shortened(rule.tap, 80)}`);
      if (rule.enabled !== null && rule.enabled !== undefined) this.mark(rule, applied);
    } catch (error) {
      this.applied.textContent = error instanceof Error ? error.message : String(error);
    }
    this.page.overviewNeeded();
  }

  /**
   * Shows the switch as it will be, until the overview says so.
   * @param {Record<string, any>} rule
   * @param {unknown} applied
   */
  mark(rule, applied) {
    if (!Array.isArray(applied)) return;
    for (const tap of state.overview.taps) {
      if (tap.name === rule.tap && (rule.run === null || tap.run === rule.run)) tap.enabled = rule.enabled;
    }
    this.rows();
  }
}

/**
 * The messages of taps of one name. A tap has an entry for each of its leaves, which are in the same messages.
 * @param {Tap[]} taps
 */
export function messages(taps) {
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const tap of taps) {
    const key = JSON.stringify([tap.run, tap.place]);
    counts.set(key, Math.max(counts.get(key) ?? 0, tap.count));
  }
  return [...counts.values()].reduce((sum, number) => sum + number, 0);
}

/** @param {Record<string, any>} rule */
function told(rule) {
  const parts = [];
  if (typeof rule.enabled === "boolean") parts.push(rule.enabled ? "switched on" : "switched off");
  if (typeof rule.rate === "number") parts.push(`at most ${count(rule.rate)} messages a second`);
  if (typeof rule.truncate === "number") parts.push(`the first ${count(rule.truncate)} elements`);
  return parts.join(", ");
}
