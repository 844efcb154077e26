/** The texts that taps printed, as a stream that can be searched. */

import { swatch } from "../charts/card.js";
import { ask } from "../core/api.js";
import { byId, choices, element, emptyState, fill, foreign, shortened, sourcePlace } from "../core/dom.js";
import { clock, count, failureName, ordinal } from "../core/format.js";
import { debounced, throttled } from "../core/frames.js";
import { runChoices, runName } from "../core/state.js";

/**
 * @typedef {import("../core/types.js").TextLine} TextLine
 * @typedef {import("../core/types.js").TextPage} TextPage
 * @typedef {import("../core/types.js").Device} Device
 */

const LINES = 200;
const KEPT = 2000;
const REFRESH_MS = 500;

/** The tab "Texts". New lines come at the end; the list keeps the newest 2,000, more are loaded on request. */
export class Texts {
  /** @param {{failed: (error: unknown) => void}} page */
  constructor(page) {
    this.page = page;
    this.list = byId("text-list", HTMLElement);
    this.scroller = byId("text-scroller", HTMLElement);
    this.older = byId("older", HTMLButtonElement);
    this.follow = byId("follow", HTMLInputElement);
    this.told = byId("text-count", HTMLElement);
    this.search = byId("text-search", HTMLInputElement);
    this.run = byId("text-run", HTMLSelectElement);
    this.show = byId("text-show", HTMLSelectElement);
    this.process = byId("text-process", HTMLSelectElement);
    this.device = byId("text-device", HTMLSelectElement);
    this.place = byId("text-place", HTMLInputElement);
    this.from = byId("text-from", HTMLInputElement);
    this.to = byId("text-to", HTMLInputElement);
    this.clear = byId("text-clear", HTMLButtonElement);
    this.filters = [this.search, this.run, this.show, this.process, this.device, this.place, this.from, this.to];
    this.active = false;
    this.total = -1;
    /** Counts the questions, so that a late answer to an earlier one is left out. */
    this.asked = 0;
    /** @type {string|null} */
    this.first = null;
    /** @type {string|null} */
    this.last = null;
    const again = debounced(() => this.restart(), 250);
    for (const filter of this.filters) filter.addEventListener(filter instanceof HTMLSelectElement ? "change" : "input", again);
    this.clear.addEventListener("click", () => this.clearFilters());
    this.list.addEventListener("click", (event) => this.onPlace(event));
    this.older.addEventListener("click", () => void this.loadOlder());
    this.follow.addEventListener("change", () => this.toEnd());
    this.scroller.addEventListener("scroll", () => this.onScroll(), { passive: true });
    this.refresh = throttled(() => this.loadNewer(), REFRESH_MS);
  }

  /** @param {boolean} active */
  setActive(active) {
    this.active = active;
    if (!active) return;
    void this.loadSenders();
    if (this.last === null) void this.restart();
    else this.refresh();
  }

  /** The overview was read. */
  update() {
    choices(this.run, runChoices("all runs"));
  }

  async loadSenders() {
    try {
      const { devices } = await ask("devices");
      const names = (/** @type {"process"|"device"} */ key) => [...new Set(devices.map((/** @type {Device} */ device) => device[key]))].sort((a, b) => a.localeCompare(b, "en", { numeric: true })).map((name) => /** @type {[string, string]} */ ([name, name]));
      choices(this.process, [["", "all processes"], ...names("process")]);
      choices(this.device, [["", "all devices"], ...names("device")]);
    } catch (error) {
      this.page.failed(error);
    }
  }

  /** Shows what was logged in a step. @param {number} step */
  showStep(step) {
    [this.from.value, this.to.value] = [String(step), String(step)];
    void this.restart();
  }

  clearFilters() {
    for (const filter of this.filters) filter.value = "";
    this.search.focus();
    void this.restart();
  }

  /** A click on the source line of a text shows the texts of that line. @param {MouseEvent} event */
  onPlace(event) {
    const place = event.target instanceof Element && event.target.closest("[data-place]");
    if (!place) return;
    this.place.value = String(place.getAttribute("data-place"));
    void this.restart();
  }

  /** @param {number} total of all texts, from the stream of changes */
  onTotal(total) {
    if (total === this.total) return;
    this.total = total;
    if (this.active) this.refresh();
  }

  question() {
    return { q: this.search.value, run: this.run.value, show: this.show.value, process: this.process.value, device: this.device.value,
      place: this.place.value.trim(), from: this.from.value, to: this.to.value, limit: LINES };
  }

  async restart() {
    const number = ++this.asked;
    this.clear.hidden = !this.isFiltered();
    try {
      const page = await ask("texts", this.question());
      if (number !== this.asked) return;
      [this.first, this.last] = [null, null];
      this.list.replaceChildren();
      this.take(page.lines, false);
      this.takeCursor(page);
      this.total = page.total;
      this.tell();
      if (!page.lines.length) this.nothing();
      this.toEnd();
    } catch (error) {
      if (this.last === null) fill(this.list, emptyState("No texts", error instanceof Error ? error.message : String(error)));
      this.page.failed(error);
    }
  }

  async loadNewer() {
    if (this.last === null) return this.restart();
    const number = this.asked;
    try {
      const page = await ask("texts", { ...this.question(), after: this.last });
      if (number !== this.asked) return;
      this.take(page.lines, false);
      this.total = page.total;
      this.tell();
      if (this.follow.checked && page.lines.length) this.toEnd();
    } catch (error) {
      this.page.failed(error);
    }
  }

  async loadOlder() {
    const number = this.asked;
    try {
      const page = await ask("texts", { ...this.question(), before: this.first });
      if (number !== this.asked) return;
      const height = this.scroller.scrollHeight;
      this.follow.checked = false;
      this.take(page.lines, true);
      this.takeCursor(page);
      this.scroller.scrollTop += this.scroller.scrollHeight - height;
    } catch (error) {
      this.page.failed(error);
    }
  }

  /**
   * @param {TextLine[]} lines
   * @param {boolean} before
   */
  take(lines, before) {
    if (!lines.length) return;
    this.list.querySelector(".empty")?.remove();
    const made = lines.map(row);
    if (before) this.list.prepend(...made);
    else this.list.append(...made);
    if (before || this.first === null) this.first = lines[0].cursor;
    if (!before) this.last = lines[lines.length - 1].cursor;
    while (!before && this.list.childElementCount > KEPT) this.dropFirst();
  }

  /** Where earlier texts go on: a search may have looked at many lines to find a few. @param {TextPage} page */
  takeCursor(page) {
    this.older.hidden = !page.more;
    this.first = page.next ?? this.first;
  }

  dropFirst() {
    this.list.firstElementChild?.remove();
    this.first = this.list.firstElementChild?.getAttribute("data-cursor") ?? null;
    this.older.hidden = false;
  }

  isFiltered() {
    return this.filters.some((filter) => filter.value.trim() !== "");
  }

  nothing() {
    fill(this.list, this.isFiltered()
      ? emptyState("No text matches", "Change the search and the filters, or clear them.")
      : emptyState("No texts yet", "Texts that taps print appear here: ", element("code", {}, "hcb.id_print(x)"), " in a jitted function prints one."));
  }

  tell() {
    this.told.textContent = `${count(this.total)} ${this.total === 1 ? "text" : "texts"} in all`;
  }

  toEnd() {
    if (this.follow.checked) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  onScroll() {
    const left = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight;
    if (left > 80 && this.follow.checked) this.follow.checked = false;
    else if (left < 4 && !this.follow.checked) this.follow.checked = true;
  }
}

/** What a text is, where it was not just printed. @param {string} level */
function badge(level) {
  if (level === "print") return null;
  return element("span", { class: `badge text-level ${/^(check|nonfinite|error|critical)$/.test(level) ? "bad" : level}` }, failureName(level));
}

/** The source line of a text, as a button that shows the texts of that line. @param {TextLine} line */
function place(line) {
  const made = sourcePlace(line.place || line.tap);
  if (!line.place) return made;
  return element("button", { type: "button", class: "plain", "data-place": made.textContent, "aria-label": `Show the texts of ${made.textContent}` }, made);
}

/** @param {TextLine} line */
function row(line) {
  return element("li", { class: "text-row", "data-cursor": line.cursor },
    element("div", { class: "text-meta", title: runName(line.run) }, swatch(line.run),
      element("time", {}, clock(line.time)),
      element("span", { class: "text-step" }, line.step === null ? "" : `step ${ordinal(line.step)}`),
      element("span", { class: "text-sender" }, foreign(line.process), " ", foreign(line.device)),
      place(line)),
    element("pre", { class: "text-body", dir: "auto" }, badge(line.level), shortened(line.text, 8000)));
}
