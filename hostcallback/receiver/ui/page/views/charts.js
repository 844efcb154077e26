/** The charts: a card for each tap, drawn while it is on the screen. */

import { Card } from "../charts/card.js";
import { askSeries, send, TAPS_IN_A_REQUEST } from "../core/api.js";
import { onScheme } from "../core/colors.js";
import { byId, element, emptyState, fill, foreign } from "../core/dom.js";
import { count } from "../core/format.js";
import { debounced, throttled, visibility } from "../core/frames.js";
import { runIndex, settings, state } from "../core/state.js";

/**
 * @typedef {import("../core/types.js").Tap} Tap
 * @typedef {import("../core/types.js").Series} Series
 * @typedef {{overviewNeeded: () => void, watch: (taps: number[]) => void, failed: (error: unknown) => void, saved: () => void}} Page
 */

const CARDS_AT_ONCE = 60;
const REFRESH_MS = 500;
const SLOW_REFRESH_MS = 2000;
const ASKED_MS = 100;
const PIXELS_IN_A_POINT = 1;
const AROUND = 10;
/** Kinds of taps that other tabs show. */
const UNDRAWN = ["text", "time", "check"];

/** The tab "Charts". */
export class Charts {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    this.grid = byId("cards", HTMLElement);
    this.more = byId("more-cards", HTMLElement);
    this.shown = CARDS_AT_ONCE;
    this.active = false;
    /** @type {Map<string, Card>} */
    this.cards = new Map();
    /** @type {WeakMap<Element, Card>} */
    this.byElement = new WeakMap();
    this.seen = visibility((target, visible) => this.onVisible(target, visible));
    this.refresh = throttled(() => this.load(), REFRESH_MS);
    /** Arrays and heat maps follow the program slowly, and the reader at once. */
    this.refreshSlow = throttled(() => this.loadSlow(), SLOW_REFRESH_MS);
    this.refreshAsked = throttled(() => this.loadSlow(), ASKED_MS);
    /** Names of the sections that are folded away. @type {Set<string>} */
    this.folded = new Set();
    this.watchSoon = debounced(() => this.watch(), 200);
    this.controls();
    onScheme(() => this.redraw());
  }

  controls() {
    const filter = byId("filter", HTMLInputElement);
    const smooth = byId("smooth", HTMLInputElement);
    const log = byId("log", HTMLInputElement);
    const axis = byId("axis", HTMLSelectElement);
    const linked = byId("linked", HTMLInputElement);
    const told = byId("smooth-value", HTMLElement);
    filter.value = settings.filter;
    smooth.value = String(settings.smooth);
    told.textContent = settings.smooth.toFixed(2);
    log.checked = settings.log;
    axis.value = settings.axis;
    linked.checked = settings.linked;
    const ask = debounced(() => this.page.overviewNeeded(), 200);
    filter.addEventListener("input", () => {
      settings.filter = filter.value.trim();
      this.shown = CARDS_AT_ONCE;
      this.page.saved();
      ask();
    });
    const looks = () => {
      [settings.smooth, settings.log, settings.linked] = [Number(smooth.value), log.checked, linked.checked];
      told.textContent = settings.smooth.toFixed(2);
      this.page.saved();
      this.redraw();
    };
    for (const input of [smooth, log, linked]) input.addEventListener("input", looks);
    axis.addEventListener("change", () => {
      settings.axis = axis.value;
      this.page.saved();
      this.cards.forEach((card) => card.zoom(null));
    });
  }

  /** The tab is shown, or is not. @param {boolean} active */
  setActive(active) {
    this.active = active;
    this.watchSoon();
    if (active) this.refreshAll();
  }

  /** The overview was read. */
  update() {
    const groups = grouped(state.overview.taps);
    const ordered = sections([...groups].slice(0, this.shown));
    const keys = new Set(ordered.flatMap(([, some]) => some));
    for (const [key, card] of this.cards) {
      if (!keys.has(key)) this.remove(key, card);
    }
    let place = 0;
    const headings = ordered.map(([name, some]) => {
      const heading = name && this.heading(name, some.length);
      if (heading) this.put(heading, place++);
      for (const key of some) this.place(key, /** @type {Tap[]} */ (groups.get(key)), place++, this.folded.has(name));
      return heading;
    });
    for (const each of this.grid.querySelectorAll(".section")) {
      if (!headings.includes(each)) each.remove();
    }
    this.fillMore(groups.size);
    this.watchSoon();
  }

  /**
   * The heading of the cards whose names begin alike; a click folds them away.
   * @param {string} name
   * @param {number} amount
   */
  heading(name, amount) {
    const known = [...this.grid.querySelectorAll(".section")].find((each) => each.getAttribute("data-section") === name);
    const made = known ?? element("h2", { class: "section", "data-section": name });
    const isOpen = !this.folded.has(name);
    fill(made, element("button", { type: "button", class: "plain", "data-key": "fold", "aria-expanded": String(isOpen), onclick: () => {
      if (!this.folded.delete(name)) this.folded.add(name);
      this.update();
    } }, element("span", { class: "turn", "aria-hidden": "true" }, isOpen ? "▾" : "▸"), foreign(name), " ", element("span", { class: "muted" }, count(amount))));
    return made;
  }

  /**
   * @param {Element} made
   * @param {number} index
   */
  put(made, index) {
    if (this.grid.children[index] !== made) this.grid.insertBefore(made, this.grid.children[index] ?? null);
  }

  /**
   * @param {string} key
   * @param {Tap[]} taps
   * @param {number} index
   * @param {boolean} folded
   */
  place(key, taps, index, folded) {
    let card = this.cards.get(key);
    if (!card) {
      card = new Card(key, taps, { changed: (one) => this.changed(one, true), toggle: (tap, enabled) => this.toggle(tap, enabled),
        zoomed: (one) => this.zoomed(one), pin: (one) => this.pin(one) });
      this.cards.set(key, card);
      this.byElement.set(card.element, card);
      this.seen.observe(card.element);
    }
    const grown = card.taps.length !== taps.length;
    card.folded = folded;
    card.update(taps);
    if (grown) this.changed(card, true);
    this.put(card.element, index);
  }

  /** Shows the messages around a step in all charts. @param {number} step */
  showStep(step) {
    if (settings.axis === "step") this.cards.forEach((card) => card.kind === "scalar" && card.zoom([step - AROUND, step + AROUND]));
  }

  /** @param {Card} card whose range all others take, if they are linked */
  zoomed(card) {
    if (settings.linked) this.cards.forEach((each) => each !== card && each.kind === "scalar" && each.zoom(card.view));
  }

  /** @param {Card} card */
  pin(card) {
    settings.pins = settings.pins.includes(card.key) ? settings.pins.filter((key) => key !== card.key) : [...settings.pins, card.key];
    this.page.saved();
    this.update();
  }

  /**
   * @param {string} key
   * @param {Card} card
   */
  remove(key, card) {
    this.seen.unobserve(card.element);
    card.destroy();
    this.cards.delete(key);
  }

  /** @param {number} groups */
  fillMore(groups) {
    const { taps, taps_total: total, taps_left_out: leftOut } = state.overview;
    const rest = groups - Math.min(groups, this.shown);
    const known = total - (settings.filter ? 0 : leftOut);
    const unsent = known - taps.length;
    fill(this.more,
      rest > 0 && element("button", { type: "button", "data-key": "more", onclick: () => this.showMore() }, `Show ${count(Math.min(rest, CARDS_AT_ONCE))} more of ${count(rest)}`),
      unsent > 0 && element("p", { class: "hint" }, `${count(taps.length)} of ${count(known)} taps are listed. Narrow the filter to find others.`),
      leftOut > 0 && element("p", { class: "hint" }, `About ${count(leftOut)} further taps are left out: there are too many. hcb cat and hcb convert have all of them.`),
      groups === 0 && state.loaded && this.nothing());
  }

  showMore() {
    this.shown += CARDS_AT_ONCE;
    this.update();
  }

  nothing() {
    if (settings.filter) {
      return emptyState("No tap matches the filter", `No tap has “${settings.filter.slice(0, 80)}” in its name. Change the filter, or clear it.`);
    }
    if (state.overview.taps.some((tap) => tap.kind === "text")) return emptyState("Only texts so far", "The taps of this source print text: see the tab Texts.");
    return emptyState("No charts yet", "Nothing has been recorded. A chart appears here with the first number that a program sends: ",
      element("code", {}, "hcb.metrics({\"loss\": loss}, step=i)"), " in a jitted function.");
  }

  /**
   * @param {Element} target
   * @param {boolean} visible
   */
  onVisible(target, visible) {
    const card = this.byElement.get(target);
    if (!card || card.visible === visible) return;
    card.setVisible(visible);
    this.watchSoon();
  }

  watch() {
    const cards = this.active ? [...this.cards.values()].filter((card) => card.visible) : [];
    this.page.watch(cards.flatMap((card) => card.shownTaps().map((tap) => tap.id)));
  }

  /**
   * @param {Card} card
   * @param {boolean} asked whether the reader waits for it
   */
  changed(card, asked) {
    card.stale = true;
    if (card.kind === "scalar") this.refresh();
    else if (asked) this.refreshAsked();
    else this.refreshSlow();
  }

  /** The counts of watched taps. @param {[number, number, number|null][]} changes */
  onChange(changes) {
    const news = new Map(changes.map(([id, amount, last]) => [id, { amount, last }]));
    for (const card of this.cards.values()) {
      let grown = false;
      for (const tap of card.taps) {
        const found = news.get(tap.id);
        if (!found || found.amount === tap.count) continue;
        [tap.count, tap.last] = [found.amount, found.last];
        grown = true;
      }
      if (grown && (card.at < 0 || card.kind === "scalar")) this.changed(card, false);
    }
  }

  refreshAll() {
    for (const card of this.cards.values()) card.stale = true;
    this.refresh();
    this.refreshAsked();
  }

  redraw() {
    for (const card of this.cards.values()) {
      card.update(card.taps);
      card.draw();
    }
  }

  /** Cards on the screen that wait for data. @param {boolean} scalars */
  waiting(scalars) {
    if (!this.active || document.hidden) return [];
    return [...this.cards.values()].filter((card) => card.visible && card.stale && (card.kind === "scalar") === scalars);
  }

  async load() {
    const cards = this.waiting(true);
    if (!cards.length) return false;
    const whole = cards.filter((card) => !card.view);
    for (const card of cards) card.stale = false;
    try {
      for (const some of chunks(whole)) await loadSeries(some, null);
      for (const card of cards) {
        if (card.view) await loadSeries([card], card.view);
      }
    } catch (error) {
      cards.forEach((card) => (card.stale = true));
      this.page.failed(error);
    }
  }

  async loadSlow() {
    const cards = this.waiting(false);
    if (!cards.length) return false;
    for (const card of cards) {
      card.stale = false;
      try {
        await card.load();
      } catch (error) {
        this.page.failed(error);
      }
    }
  }

  /**
   * @param {Tap} tap
   * @param {boolean} enabled
   */
  async toggle(tap, enabled) {
    try {
      await send("rules", { tap: tap.name, run: tap.run, enabled });
      tap.enabled = enabled;
      this.cards.forEach((card) => card.taps.includes(tap) && card.update(card.taps));
    } catch (error) {
      this.page.failed(error);
    }
    this.page.overviewNeeded();
  }
}

/**
 * @param {Card[]} cards
 * @param {[number, number]|null} view
 */
export async function loadSeries(cards, view) {
  const taps = cards.flatMap((card) => card.shownTaps().map((tap) => tap.id));
  if (!taps.length) return;
  const width = Math.max(...cards.map((card) => card.width));
  const points = Math.min(Math.max(Math.ceil(width / PIXELS_IN_A_POINT / 100) * 100, 200), 2000);
  const margin = view ? (view[1] - view[0]) * 0.01 : 0;
  const range = view ? { from: view[0] - margin, to: view[1] + margin } : {};
  const series = await askSeries(taps, { points, axis: settings.axis, ...range });
  const found = new Map(series.map((each) => [each.tap, each]));
  for (const card of cards) {
    if (card.view !== view) continue; // zoomed meanwhile: another answer is under way
    card.takeSeries(card.taps.flatMap((tap) => found.get(tap.id) ?? []));
  }
}

/**
 * The taps of each card, those of all runs together.
 * @param {Tap[]} taps
 */
export function grouped(taps) {
  /** @type {Map<string, Tap[]>} */
  const groups = new Map();
  for (const tap of taps) {
    if (UNDRAWN.includes(tap.kind)) continue;
    const key = `${tap.title} ${tap.kind}`;
    const group = groups.get(key);
    if (group) group.push(tap);
    else groups.set(key, [tap]);
  }
  for (const group of groups.values()) group.sort((a, b) => runIndex(a.run) - runIndex(b.run));
  return groups;
}

/**
 * The cards in the order in which they stand: pinned ones, numbers, those whose names begin alike, then arrays.
 * @param {[string, Tap[]][]} cards
 * @returns {[string, string[]][]}
 */
function sections(cards) {
  const prefix = (/** @type {Tap} */ tap) => (tap.title.includes("/") ? tap.title.split("/")[0] : "");
  const sizes = new Map();
  for (const [, [tap]] of cards) sizes.set(prefix(tap), (sizes.get(prefix(tap)) ?? 0) + 1);
  const found = new Map(["Pinned", ""].map((name) => [name, /** @type {string[]} */ ([])]));
  const arrays = [];
  for (const [key, [tap]] of cards) {
    const name = settings.pins.includes(key) ? "Pinned" : sizes.get(prefix(tap)) > 1 ? prefix(tap) : "";
    if (name || tap.kind === "scalar") found.set(name, [...(found.get(name) ?? []), key]);
    else arrays.push(key);
  }
  const several = [...found.values()].some((keys) => keys.length);
  return [...found, /** @type {[string, string[]]} */ ([several ? "Arrays and pictures" : "", arrays])].filter(([, keys]) => keys.length);
}

/**
 * Cards in groups of a request.
 * @param {Card[]} cards
 */
function chunks(cards) {
  /** @type {Card[][]} */
  const made = [];
  let size = TAPS_IN_A_REQUEST;
  for (const card of cards) {
    if (size + card.taps.length > TAPS_IN_A_REQUEST) {
      made.push([]);
      size = 0;
    }
    made[made.length - 1].push(card);
    size += card.taps.length;
  }
  return made;
}
