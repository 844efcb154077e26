/** The devices and processes: rates, queues, losses, time in taps, and who is silent. */

import { swatch } from "../charts/card.js";
import { byId, element, emptyState, fill, foreign } from "../core/dom.js";
import { ago, bytes, count, duration, short } from "../core/format.js";
import { LiveView } from "../core/live_view.js";
import { runIndex, runName, state } from "../core/state.js";

/** @typedef {import("../core/types.js").Device} Device */

const SILENT_SEC = 10;

/** The tab "Devices". */
export class Devices extends LiveView {
  /** @param {{failed: (error: unknown) => void}} page */
  constructor(page) {
    super("devices", page);
    this.body = byId("device-body", HTMLElement);
    /** @type {Set<string>} */
    this.open = new Set();
    /** @type {Device[]} */
    this.devices = [];
  }

  /** @param {{devices: Device[]}} answer */
  take({ devices }) {
    const order = (/** @type {Device} */ device) => `${runIndex(device.run)} ${device.process} ${device.device}`;
    this.devices = devices.sort((a, b) => order(a).localeCompare(order(b), "en", { numeric: true }));
    this.show();
  }

  show() {
    if (!this.devices.length) {
      fill(this.body, emptyState("No devices yet", "A device appears here with its first message."));
      return;
    }
    const several = state.overview.runs.length > 1;
    const heads = ["Process and device", "State", "Messages a second", "Queue", "Backlog", "Drops", "Stalls", "Time in taps"];
    fill(this.body, element("table", { class: "devices" },
      element("thead", {}, element("tr", {}, heads.map((head, i) => element("th", { scope: "col", class: i > 1 ? "number" : null }, head)))),
      element("tbody", {}, this.devices.flatMap((device) => this.rows(device, several)))));
  }

  /**
   * @param {Device} device
   * @param {boolean} several
   */
  rows(device, several) {
    const key = JSON.stringify([device.run, device.process, device.device]);
    const isOpen = this.open.has(key);
    const cells = [
      cell("State", health(device)),
      cell("Messages a second", short(rounded(device.rate)), true),
      cell("Queue", bytes(device.queue_bytes), true),
      cell("Backlog", count(device.backlog), true),
      cell("Drops", count(device.drops), true, Boolean(device.drops)),
      cell("Stalls", count(device.stalls), true, false, Boolean(device.stalls)),
      cell("Time in taps", duration(device.seconds_in_taps), true),
    ];
    const row = element("tr", {}, element("th", { scope: "row" }, this.name(device, key, isOpen, several)), cells);
    return isOpen ? [row, taps(device)] : [row];
  }

  /**
   * @param {Device} device
   * @param {string} key
   * @param {boolean} isOpen
   * @param {boolean} several
   */
  name(device, key, isOpen, several) {
    return element("button", { type: "button", class: "plain", "aria-expanded": String(isOpen), "data-key": key, disabled: !device.taps.length,
      onclick: () => this.toggle(key) }, element("span", { class: "turn", "aria-hidden": "true" }, device.taps.length ? (isOpen ? "▾" : "▸") : ""),
      swatch(device.run), foreign(device.process), " ", foreign(device.device, "muted"), several && element("span", { class: "run-of" }, foreign(runName(device.run))));
  }

  /** @param {string} key */
  toggle(key) {
    if (!this.open.delete(key)) this.open.add(key);
    this.show();
  }
}

/** @param {number|null} rate */
function rounded(rate) {
  return rate === null ? null : rate >= 100 ? Math.round(rate) : Math.round(rate * 10) / 10;
}

/**
 * @param {string} label shown on narrow screens, where rows are cards
 * @param {any} content
 * @param {boolean} [isNumber]
 * @param {boolean} [isBad]
 * @param {boolean} [isWarning]
 */
function cell(label, content, isNumber = false, isBad = false, isWarning = false) {
  const marks = [isNumber && "number", isBad && "bad", isWarning && "warning"].filter(Boolean).join(" ");
  return element("td", { "data-label": label, class: marks || null }, content);
}

/** @param {Device} device */
function health(device) {
  const silent = device.silent_sec;
  if (silent === null || silent === undefined) return element("span", { class: "pill" }, "no message yet");
  if (!device.live) return element("span", { class: "pill", title: `last message ${ago(device.last_message)}` }, "ended");
  if (silent < SILENT_SEC) return element("span", { class: "pill ok" }, "sending");
  return element("span", { class: "pill warning" }, `silent for ${duration(silent)}`);
}

/** @param {Device} device */
function taps(device) {
  const sorted = [...device.taps].sort((a, b) => (b.seconds ?? 0) - (a.seconds ?? 0));
  return element("tr", { class: "device-taps" }, element("td", { colspan: "8" }, element("table", {},
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Tap"), element("th", { scope: "col", class: "number" }, "Messages"), element("th", { scope: "col", class: "number" }, "Time in its function"))),
    element("tbody", {}, sorted.map((tap) => element("tr", {}, element("td", {}, foreign(tap.name)),
      element("td", { class: "number" }, count(tap.messages)), element("td", { class: "number" }, duration(tap.seconds))))))));
}
