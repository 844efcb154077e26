/** Saves what a card shows: its data as CSV, its picture as PNG or SVG. */

import { askSeries } from "../core/api.js";
import { color } from "../core/colors.js";
import { element } from "../core/dom.js";
import { complex } from "../core/format.js";
import { runName } from "../core/state.js";

/** @typedef {import("./card.js").Card} Card */

const POINTS = 10_000;
const SCALE = 2;
const HEAD = 26;
const FOOT = 22;
const FONT = "12px system-ui, sans-serif";

/**
 * What a card of a kind can be saved as.
 * @param {string} kind
 * @returns {[string, (card: Card) => Promise<void>][]}
 */
export function downloads(kind) {
  return kind === "scalar" ? [["CSV", saveCsv], ["PNG", savePng], ["SVG", saveSvg]] : [["CSV", saveCsv], ["PNG", savePng]];
}

/**
 * @param {Card} card
 * @param {string} ending
 * @param {Blob|null} content
 */
function save(card, ending, content) {
  if (!content) return;
  const href = URL.createObjectURL(content);
  const name = card.taps[0].title.replace(/[^A-Za-z0-9_-]+/g, "-").slice(0, 80) || "chart";
  element("a", { href, download: `${name}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

/** @param {any} value */
const field = (value) => (/[",\n\r]|^[=+@\t]/.test(String(value)) ? `"${(/^[=+@\t]/.test(value) ? "'" : "") + String(value).replaceAll('"', '""')}"` : String(value ?? ""));

/** @param {Card} card */
async function saveCsv(card) {
  const rows = card.kind === "scalar" ? await seriesRows(card) : card.kind === "histogram" ? countRows(card) : valueRows(card);
  save(card, "csv", new Blob([rows.map((row) => `${row.map(field).join(",")}\n`).join("")], { type: "text/csv" }));
}

/** With more points than the chart has. @param {Card} card */
async function seriesRows(card) {
  const [from, to] = card.view ?? [null, null];
  const taps = card.shownTaps();
  const series = /** @type {any[]} */ (await askSeries(taps.map((tap) => tap.id), { points: POINTS, axis: card.look.axis, from, to }));
  return [["run", series[0]?.axis ?? "x", "mean", "min", "max"], ...series.flatMap((/** @type {any} */ one, /** @type {number} */ i) =>
    one.x.map((/** @type {number} */ x, /** @type {number} */ at) => [runName(taps[i].run), x, one.mean[at], one.min[at], one.max[at]]))];
}

/** @param {Card} card */
function countRows(card) {
  return [["run", "step", "from", "to", "count"], ...card.shownTaps().flatMap((tap) => {
    const { x, edges, counts } = card.data.get(tap.id) ?? { x: [] };
    return x.flatMap((/** @type {number} */ step, /** @type {number} */ i) => counts[i].map((/** @type {number} */ amount, /** @type {number} */ j) => [runName(tap.run), step, edges[j], edges[j + 1], amount]));
  })];
}

/** @param {Card} card */
function valueRows(card) {
  return [["run", "step", "index", "value"], ...card.shownTaps().flatMap((tap) => {
    const data = card.data.get(tap.id);
    const values = [data?.values ?? []].flat(Infinity);
    return values.map((value, index) => [runName(tap.run), data.step, index, value !== null && typeof value === "object" ? complex(value) : value]);
  })];
}

/** @param {Card} card */
async function savePng(card) {
  const box = card.body.getBoundingClientRect();
  const canvas = element("canvas", { width: Math.round(box.width * SCALE), height: Math.round((box.height + HEAD + FOOT) * SCALE) });
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.scale(SCALE, SCALE);
  context.fillStyle = color("card");
  context.fillRect(0, 0, box.width, box.height + HEAD + FOOT);
  context.imageSmoothingEnabled = false;
  for (const each of /** @type {NodeListOf<HTMLCanvasElement>} */ (card.body.querySelectorAll("canvas, img"))) {
    const { left, top, width, height } = each.getBoundingClientRect();
    context.drawImage(each, left - box.left, top - box.top + HEAD, width, height);
  }
  context.font = FONT;
  context.fillStyle = color("text");
  context.fillText(card.taps[0].title, 8, 17);
  let left = 8;
  for (const { run, paint } of legend(card)) {
    context.fillStyle = paint;
    context.fillRect(left, box.height + HEAD + 6, 9, 9);
    context.fillStyle = color("text");
    context.fillText(run, left + 14, box.height + HEAD + 15);
    left += 30 + context.measureText(run).width;
  }
  save(card, "png", await new Promise((resolve) => canvas.toBlob(resolve)));
}

/** @param {Card} card */
function legend(card) {
  return card.shownTaps().map((tap) => ({ run: runName(tap.run), paint: card.lines().find((line) => line.label === runName(tap.run))?.color ?? color("muted") }));
}

/** @param {Card} card */
async function saveSvg(card) {
  const drawn = card.chart?.drawn();
  if (!drawn) return;
  const { width, height, lines, ticks } = drawn;
  const escape = (/** @type {any} */ text) => String(text).replace(/[&<>"]/g, (found) => `&#${found.charCodeAt(0)};`);
  const text = (/** @type {number} */ x, /** @type {number} */ y, /** @type {string} */ anchor, /** @type {any} */ told) => `<text x="${x}" y="${y}" text-anchor="${anchor}">${escape(told)}</text>`;
  let left = 8;
  const names = lines.map(({ label, color: paint }) => {
    const made = `<rect x="${left}" y="${height + HEAD + 6}" width="9" height="9" fill="${paint}"/>${text(left + 14, height + HEAD + 15, "start", label)}`;
    left += 30 + 7 * label.length;
    return made;
  });
  const made = [`<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height + HEAD + FOOT}" font-family="sans-serif" font-size="12" fill="${color("text")}">`,
    `<rect width="100%" height="100%" fill="${color("card")}"/>`, text(8, 17, "start", card.taps[0].title), `<g transform="translate(0 ${HEAD})">`,
    ...ticks.map((/** @type {{x: number, y: number, told: string, grid: string}} */ { x, y, told, grid }) => `<path d="${grid}" stroke="${color("grid")}"/>${text(x, y, grid.includes("V") ? "middle" : "end", told)}`),
    ...lines.map(({ points, color: paint, dashed }) => `<polyline fill="none" stroke="${paint}" stroke-width="1.75"${dashed ? ' stroke-dasharray="6 4"' : ""} points="${points.map((point) => point.map((at) => Number(at.toFixed(2))).join()).join(" ")}"/>`),
    "</g>", ...names, "</svg>"];
  save(card, "svg", new Blob([made.join("\n")], { type: "image/svg+xml" }));
}
