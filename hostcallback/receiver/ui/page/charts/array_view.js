/** Shows the array of one message: its statistics, and its values as a picture or a table. */

import { element, fill } from "../core/dom.js";
import { count, number, ordinal } from "../core/format.js";

/** @typedef {import("../core/types.js").ArrayData} ArrayData */

const ROWS = 64;
const COLUMNS = 64;

/**
 * @param {HTMLElement} host
 * @param {ArrayData} data
 * @param {string} name of the tap, for the picture's alternative text
 * @param {(at: number) => void} onChoose a message of the strip was chosen
 */
export function showArray(host, data, name, onChoose) {
  const shape = `${data.dtype}[${data.shape.join(", ")}]`;
  if (data.image) {
    fill(host, body(data, shape, name), strip(data, onChoose));
    return;
  }
  fill(host,
    element("dl", { class: "stats" },
      stat("type", shape), ...["mean", "std", "min", "max", "zeros", "nonfinite"].map((key) =>
        stat(key === "nonfinite" ? "not finite" : key, number(/** @type {any} */ (data.stats)?.[key]), key === "nonfinite" && Number(data.stats?.nonfinite) > 0))),
    body(data, shape, name),
  );
}

/**
 * Small pictures over the steps.
 * @param {ArrayData} data
 * @param {(at: number) => void} onChoose
 */
function strip(data, onChoose) {
  if (data.strip.length < 2) return null;
  return element("div", { class: "strip-of-pictures" }, data.strip.map(([at, step, image]) => element("button", { type: "button", class: "plain", "data-key": `strip ${at}`,
    "aria-pressed": String(at === data.at), title: `step ${ordinal(step)}`, "aria-label": `step ${ordinal(step)}`, onclick: () => onChoose(at) }, element("img", { src: image ?? "", alt: "" }))));
}

/**
 * @param {string} name
 * @param {string} value
 * @param {boolean} [isBad]
 */
function stat(name, value, isBad = false) {
  return element("div", { class: isBad ? "bad" : null }, element("dt", {}, name), element("dd", {}, value));
}

/**
 * @param {ArrayData} data
 * @param {string} shape
 * @param {string} name
 */
function body(data, shape, name) {
  if (data.image) {
    return element("div", { class: "picture" }, element("img", { src: data.image, alt: `${name}, ${shape}, as a picture` }));
  }
  if (data.values === null || data.values === undefined) {
    return element("p", { class: "hint" }, "The array is too large for a table; its statistics are above.");
  }
  const rows = asRows(data.values, data.shape);
  const shown = rows.slice(0, ROWS).map((row) => row.slice(0, COLUMNS));
  const cut = rows.length > ROWS || rows.some((row) => row.length > COLUMNS);
  return element("div", { class: "values", tabindex: "0", role: "region", "aria-label": `values of ${name}` },
    element("table", {}, element("tbody", {}, shown.map((row, i) => element("tr", {}, element("th", { scope: "row" }, i), row.map(cell))))),
    cut && element("p", { class: "hint" }, `The first ${Math.min(rows.length, ROWS)} of ${count(rows.length)} rows are shown, with at most ${COLUMNS} columns.`));
}

/** @param {any} value */
function cell(value) {
  const parts = value !== null && typeof value === "object" ? [value.real, value.imag] : [value];
  const isBad = parts.some((part) => typeof part === "string" || (typeof part === "number" && !Number.isFinite(part)));
  return element("td", { class: isBad ? "bad" : null }, typeof value === "boolean" ? String(value) : number(value));
}

/**
 * Two axes of any number of them: the last one along a row, the others stacked.
 * @param {any} values
 * @param {number[]} shape
 * @returns {any[][]}
 */
function asRows(values, shape) {
  if (shape.length === 0) return [[values]];
  if (shape.length === 1) return [values];
  return shape.length === 2 ? values : values.flatMap((/** @type {any} */ part) => asRows(part, shape.slice(1)));
}
