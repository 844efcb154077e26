/** Draws a histogram over steps as a heat map on a canvas. */

import { color, heat } from "../core/colors.js";
import { element } from "../core/dom.js";
import { count, number, ordinal, short } from "../core/format.js";

/** @typedef {import("../core/types.js").HeatmapData} HeatmapData */

const LEAST_LEFT = 58;
const GAP = 6;
const FONT = "12px system-ui, sans-serif";
const FOOT = 28;
const TOP = 8;
const RIGHT = 10;

/** The heat map; `host` gives its size. Darker (in a dark scheme: lighter) is more. */
export class Heatmap {
  /** @param {HTMLElement} host */
  constructor(host) {
    this.host = host;
    this.canvas = element("canvas", {});
    this.tip = element("div", { class: "tip", role: "status", hidden: true });
    host.replaceChildren(this.canvas, this.tip);
    /** @type {HeatmapData|null} */
    this.data = null;
    this.sizes = new ResizeObserver(() => this.data && this.show(this.data));
    this.sizes.observe(host);
    this.column = 0;
    this.row = 0;
    /** Where the area begins: right of the longest label. */
    this.left = LEAST_LEFT;
    this.canvas.addEventListener("mousemove", (event) => this.onMouse(event));
    this.canvas.addEventListener("mouseleave", () => (this.tip.hidden = true));
    /** Ends what listens on the host, which outlives the heat map. */
    this.ended = new AbortController();
    const { signal } = this.ended;
    host.addEventListener("keydown", (event) => this.onKey(event), { signal });
    host.addEventListener("blur", () => (this.tip.hidden = true), { signal });
  }

  /** @param {HeatmapData} data */
  show(data) {
    this.data = data;
    const { clientWidth: width, clientHeight: height } = this.host;
    if (!width || !data.x.length) return;
    const scale = devicePixelRatio;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const context = this.canvas.getContext("2d");
    if (!context) return;
    context.scale(scale, scale);
    context.font = FONT;
    const labels = heights(data).map(({ told }) => context.measureText(told).width);
    this.left = Math.max(LEAST_LEFT, Math.ceil(Math.max(...labels)) + GAP + 2);
    this.area = { width: width - this.left - RIGHT, height: height - TOP - FOOT };
    this.cells(context, data);
    this.axes(context, data);
  }

  destroy() {
    this.ended.abort();
    this.sizes.disconnect();
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {HeatmapData} data
   */
  cells(context, data) {
    const most = Math.max(1, ...data.counts.map((column) => Math.max(...column)));
    const { width, height } = /** @type {{width: number, height: number}} */ (this.area);
    const [low, high] = [data.edges[0], data.edges[data.edges.length - 1]];
    const y = (/** @type {number} */ edge) => TOP + height - ((edge - low) / (high - low || 1)) * height;
    const wide = width / data.x.length;
    data.counts.forEach((column, i) => {
      column.forEach((amount, j) => {
        if (!amount) return;
        context.fillStyle = `rgb(${heat(0.08 + 0.92 * Math.sqrt(amount / most)).join(",")})`;
        const top = y(data.edges[j + 1]);
        context.fillRect(this.left + i * wide, top, wide + 0.6, y(data.edges[j]) - top + 0.6);
      });
    });
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {HeatmapData} data
   */
  axes(context, data) {
    const { width, height } = /** @type {{width: number, height: number}} */ (this.area);
    context.fillStyle = color("muted");
    context.strokeStyle = color("grid");
    context.strokeRect(this.left + 0.5, TOP + 0.5, width - 1, height - 1);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const { share, told } of heights(data)) context.fillText(told, this.left - GAP, TOP + height * (1 - share));
    context.textBaseline = "top";
    const places = width > 340 ? [0, 0.25, 0.5, 0.75, 1] : width > 160 ? [0, 0.5, 1] : [0, 1];
    const last = data.x.length - 1;
    const wide = width / data.x.length;
    for (const i of new Set(places.map((share) => Math.round(share * last)))) {
      const fits = wide > 60; // below its column; else within the area
      context.textAlign = fits ? "center" : i === 0 ? "left" : i === last ? "right" : "center";
      const inside = i === 0 ? 0 : i === last ? width : (i + 0.5) * wide;
      context.fillText(Number.isInteger(data.x[i]) && data.x[i] < 1e6 ? ordinal(data.x[i]) : short(data.x[i]), this.left + (fits ? (i + 0.5) * wide : inside), TOP + height + 8);
    }
  }

  /** @param {MouseEvent} event */
  onMouse(event) {
    if (!this.data || !this.area || !this.data.x.length) return;
    const box = this.canvas.getBoundingClientRect();
    const x = (event.clientX - box.left - this.left) / this.area.width;
    const y = 1 - (event.clientY - box.top - TOP) / this.area.height;
    this.tip.hidden = x < 0 || x >= 1 || y < 0 || y >= 1;
    if (this.tip.hidden) return;
    const { edges } = this.data;
    const value = edges[0] + y * (edges[edges.length - 1] - edges[0]);
    this.column = Math.floor(x * this.data.x.length);
    this.row = Math.max(edges.findIndex((edge) => edge > value) - 1, 0);
    this.tell();
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    if (!this.data?.x.length) return;
    const moves = /** @type {Record<string, [number, number]>} */ ({
      ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1],
    });
    const move = moves[event.key];
    if (!move) return;
    this.column = clamp(this.column + move[0], this.data.x.length - 1);
    this.row = clamp(this.row + move[1], this.data.edges.length - 2);
    this.tip.hidden = false;
    this.tell();
    event.preventDefault();
  }

  tell() {
    const data = /** @type {HeatmapData} */ (this.data);
    const area = /** @type {{width: number, height: number}} */ (this.area);
    const amount = data.counts[this.column]?.[this.row] ?? 0;
    this.tip.textContent = `step ${ordinal(data.x[this.column])}: ${count(amount)} of ${number(data.edges[this.row])} to ${number(data.edges[this.row + 1])}`;
    const left = this.left + (this.column / data.x.length) * area.width;
    const room = this.host.clientWidth - this.tip.offsetWidth;
    this.tip.style.transform = `translate(${Math.round(Math.max(Math.min(left + 12, room), 0))}px, 12px)`;
  }
}

/**
 * The labels of the values, and the share of the height at which they are.
 * @param {HeatmapData} data
 */
function heights({ edges }) {
  const [low, high] = [edges[0], edges[edges.length - 1]];
  const unit = 10 ** Math.floor(Math.log10(high - low || 1) - 2);
  return [0, 0.25, 0.5, 0.75, 1].map((share) => {
    const tick = Math.round((low + (high - low) * share) / unit) * unit;
    return { share, told: short(Number(tick.toPrecision(3))) };
  });
}

/**
 * @param {number} value
 * @param {number} most
 */
function clamp(value, most) {
  return Math.min(Math.max(value, 0), most);
}
