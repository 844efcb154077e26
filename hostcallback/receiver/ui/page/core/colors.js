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
  if (index < RUNS) return color(`run-${index}`);
  const hue = (220 + index * 137.5) % 360; // far from those of the runs before
  const [lightness, range] = scheme.matches ? [0.68, 0.22] : [0.45, 0.3];
  const part = (/** @type {number} */ shift) => {
    const turned = (shift + hue / 30) % 12;
    return lightness - range * Math.max(-1, Math.min(turned - 3, 9 - turned, 1));
  };
  return `#${[0, 8, 4].map((shift) => Math.round(255 * part(shift)).toString(16).padStart(2, "0")).join("")}`;
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
