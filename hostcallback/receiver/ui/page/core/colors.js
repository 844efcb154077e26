/** The colours of canvases, from the style sheet, for the scheme (light or dark) that is in force. */

const RUNS = 8;

/** @type {Map<string, string>} */
let cache = new Map();
const scheme = matchMedia("(prefers-color-scheme: dark)");
/** @type {Set<() => void>} */
const listeners = new Set();
scheme.addEventListener("change", () => {
  cache = new Map();
  listeners.forEach((listener) => listener());
});

/** @param {() => void} listener called when the scheme changes */
export function onScheme(listener) {
  listeners.add(listener);
}

/** @param {string} name a custom property of style.css without dashes, such as "accent" */
export function color(name) {
  let value = cache.get(name);
  if (value === undefined) {
    value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    cache.set(name, value);
  }
  return value;
}

/** Whether the scheme is dark. */
export const dark = () => scheme.matches;

/** @param {number} index place of the run among the runs */
export function runColor(index) {
  return color(`run-${index % RUNS}`);
}

/**
 * The colour with an opacity. The colours of runs are six-digit.
 * @param {string} hex
 * @param {number} opacity from 0 to 1
 */
export function faded(hex, opacity) {
  return `${hex}${Math.round(opacity * 255).toString(16).padStart(2, "0")}`;
}

/**
 * The colour of a share of a scale from nothing (0) to most (1), for heat maps.
 * @param {number} share
 * @returns {[number, number, number]}
 */
export function heat(share) {
  const stops = scheme.matches ? DARK : LIGHT;
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  const part = place - low;
  const [from, to] = [stops[low], stops[low + 1]];
  return /** @type {[number, number, number]} */ (from.map((value, i) => Math.round(value + (to[i] - value) * part)));
}

const LIGHT = [[247, 249, 253], [203, 219, 247], [140, 172, 236], [77, 119, 215], [38, 70, 160], [18, 34, 92]];
const DARK = [[21, 26, 34], [27, 46, 92], [43, 84, 170], [88, 140, 232], [160, 199, 255], [236, 245, 255]];
