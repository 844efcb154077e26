/** The errors: a card for each group, with the source lines around its tap. */

import { byId, element, emptyState, fill, foreign, shortened, sourcePlace } from "../core/dom.js";
import { ago, clock, count, failureName, ordinal, plural } from "../core/format.js";
import { LiveView } from "../core/live_view.js";

/**
 * @typedef {import("../core/types.js").ErrorGroup} ErrorGroup
 * @typedef {import("../core/types.js").Moment} Moment
 */

const SENDERS_SHOWN = 8;

/** The tab "Errors". */
export class Errors extends LiveView {
  /** @param {{failed: (error: unknown) => void}} page */
  constructor(page) {
    super("errors", page);
    this.list = byId("error-list", HTMLElement);
    this.summary = byId("error-summary", HTMLElement);
    /** What was drawn; what is the same is not drawn again, so that a selection and open details stay. */
    this.drawn = new Map();
  }

  /** @param {{groups: ErrorGroup[]}} answer */
  take({ groups }) {
    if (!groups.length) {
      this.drawn.clear();
      this.summary.textContent = "";
      fill(this.list, emptyState("No errors", "Failed checks, exceptions in tap functions, values that are not finite and lost messages appear here, grouped by source line. ",
        element("code", {}, "hcb.check(x >= 0, \"x is {}\", x)"), " adds a check to a jitted function."));
      return;
    }
    this.list.querySelector(".empty")?.remove();
    this.summary.textContent = summary(groups);
    const ids = new Set(groups.map((group) => group.id));
    for (const [id, drawn] of this.drawn) {
      if (!ids.has(id)) {
        drawn.made.remove();
        this.drawn.delete(id);
      }
    }
    groups.forEach((group, i) => this.place(group, i));
  }

  /**
   * @param {ErrorGroup} group
   * @param {number} index
   */
  place(group, index) {
    const text = JSON.stringify(group);
    const drawn = this.drawn.get(group.id);
    if (drawn?.text !== text) {
      const made = card(group, drawn?.made.querySelector("details")?.open ?? false);
      drawn?.made.replaceWith(made);
      this.drawn.set(group.id, { text, made });
    }
    const { made } = this.drawn.get(group.id);
    if (this.list.children[index] !== made) this.list.insertBefore(made, this.list.children[index] ?? null);
  }
}

/**
 * @param {number} kinds
 * @param {number} times
 */
export function toldErrors(kinds, times) {
  return `${plural(kinds, "different error")}, which occurred ${plural(times, "time")}`;
}

/** @param {ErrorGroup[]} groups */
function summary(groups) {
  const times = (/** @type {ErrorGroup[]} */ some) => some.reduce((sum, group) => sum + group.count, 0);
  const failures = groups.filter((group) => group.kind !== "loss");
  const lost = times(groups.filter((group) => group.kind === "loss"));
  return [failures.length && toldErrors(failures.length, times(failures)), lost && plural(lost, "lost message")].filter(Boolean).join("; ");
}

/**
 * @param {ErrorGroup} group
 * @param {boolean} open whether its details were open
 */
function card(group, open) {
  const heading = element("h3", {}, foreign(group.title.split("\n")[0]));
  return element("article", { class: `error-card ${group.kind === "loss" ? "loss" : ""}`, "aria-label": shortened(group.title, 200) },
    element("header", {},
      element("div", { class: "error-title" }, element("span", { class: "badge" }, failureName(group.kind)), heading),
      element("span", { class: "times" }, element("b", {}, count(group.count)), group.count === 1 ? " time" : " times")),
    element("p", { class: "error-when" }, sourcePlace(group.place), inFunction(group.place),
      element("span", {}, "first ", moment(group.first)), group.count > 1 && element("span", {}, "last ", moment(group.last)),
      group.steps && element("span", {}, foreign(group.steps))),
    element("div", { class: "error-body" },
      element("div", { class: "error-main" }, source(group), values(group), traceback(group, open)),
      senders(group)));
}

/** The function in which the tap is. @param {string} place */
function inFunction(place) {
  const found = place.match(/ \((.*)\)$/);
  return found && element("span", {}, "in ", foreign(found[1].replaceAll("<locals>.", "")));
}

/** @param {Moment} when */
function moment(when) {
  const step = when.step === null ? null : element("b", {}, `step ${ordinal(when.step)}`);
  const time = when.time === null ? null : element("time", { datetime: new Date(when.time * 1000).toISOString(), title: ago(when.time) }, clock(when.time));
  return element("span", {}, step, step && time ? " at " : "", time);
}

/** @param {ErrorGroup} group */
function source(group) {
  if (!group.source?.length) return null;
  const line = Number(group.place.match(/:(\d+)(?: \(.*\))?$/)?.[1] ?? NaN);
  return element("pre", { class: "source", tabindex: "0", "aria-label": `source lines around ${group.place}` },
    group.source.map(([at, text]) => element("span", { class: at === line ? "line marked" : "line" },
      element("span", { class: "line-number" }, at), element("span", { class: "line-text" }, shortened(text, 400)))));
}

/** @param {ErrorGroup} group */
function values(group) {
  const rest = group.title.split("\n").slice(1).join("\n");
  const text = [rest, group.values].filter(Boolean).join("\n");
  return text ? element("pre", { class: "error-values" }, shortened(text, 4000)) : null;
}

/**
 * @param {ErrorGroup} group
 * @param {boolean} open
 */
function traceback(group, open) {
  if (!group.traceback) return null;
  return element("details", { open }, element("summary", {}, "Traceback"), element("pre", { class: "traceback" }, shortened(group.traceback, 20000)));
}

/** @param {ErrorGroup} group */
function senders(group) {
  const sorted = [...group.per].sort((a, b) => b.count - a.count);
  const most = Math.max(1, ...sorted.map((sender) => sender.count));
  const rows = sorted.slice(0, SENDERS_SHOWN).map((sender) => {
    const bar = element("span", { class: "bar" });
    bar.style.width = `${Math.max((sender.count / most) * 100, 2)}%`;
    return element("tr", {}, element("td", {}, foreign(sender.process), " ", foreign(sender.device, "muted")),
      element("td", { class: "number" }, count(sender.count)), element("td", { class: "bar-cell" }, bar));
  });
  const rest = sorted.length - rows.length;
  return element("div", { class: "senders" }, element("table", {}, element("caption", {}, "Process and device"), element("tbody", {}, rows)),
    rest > 0 && element("p", { class: "hint" }, `and ${plural(rest, "other")}`));
}
