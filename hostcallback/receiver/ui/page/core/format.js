/** Writes numbers, times and amounts as people read them. */

/** @param {number|string|null|undefined} value */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "inf" : "−inf";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return minus(value.toLocaleString("en"));
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return minus(value.toExponential(3));
  return minus(String(Number(value.toPrecision(size >= 1000 ? 6 : 5))));
}

/** @param {string} text */
const minus = (text) => text.replaceAll("-", "−");

/** @param {number|null|undefined} value */
export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en");
}

/**
 * 12,345 as 12.3 k: for axes and narrow columns.
 * @param {number|null|undefined} value
 */
export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [unit, name] of /** @type {[number, string][]} */ ([[1e9, "G"], [1e6, "M"], [1e3, "k"]])) {
    if (size >= unit) return minus(`${Number((value / unit).toPrecision(4))}${name}`);
  }
  return number(value);
}

/** @param {number|null|undefined} value */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, name] of /** @type {[number, string][]} */ ([[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])) {
    if (value >= unit) return `${(value / unit).toFixed(1)} ${name}`;
  }
  return `${Math.round(value)} B`;
}

/** @param {number|null|undefined} sec */
export function duration(sec) {
  if (sec === null || sec === undefined) return "–";
  if (sec < 0.001) return `${Math.round(sec * 1e6)} µs`;
  if (sec < 1) return `${Math.round(sec * 1e3)} ms`;
  if (sec < 60) return `${sec < 10 ? sec.toFixed(1) : Math.round(sec)} s`;
  if (sec < 3600) return `${Math.floor(sec / 60)} min ${Math.round(sec % 60)} s`;
  if (sec < 86400) return `${Math.floor(sec / 3600)} h ${Math.round((sec % 3600) / 60)} min`;
  return `${Math.floor(sec / 86400)} d ${Math.round((sec % 86400) / 3600)} h`;
}

/**
 * The time of day, with the date where it is not today's.
 * @param {number|null|undefined} unixSec
 */
export function clock(unixSec) {
  if (unixSec === null || unixSec === undefined) return "–";
  const then = new Date(unixSec * 1000);
  const time = then.toLocaleTimeString("en-GB");
  return then.toDateString() === new Date().toDateString() ? time : `${isoDate(then)} ${time}`;
}

/** @param {Date} day */
const isoDate = (day) =>
  `${day.getFullYear()}-${String(day.getMonth() + 1).padStart(2, "0")}-${String(day.getDate()).padStart(2, "0")}`;

/** @param {number|null|undefined} unixSec */
export function ago(unixSec) {
  if (unixSec === null || unixSec === undefined) return "–";
  const sec = Date.now() / 1000 - unixSec;
  return sec < 2 ? "now" : `${duration(Math.round(sec))} ago`;
}

const FAILURES = /** @type {Record<string, string>} */ ({
  check: "failed check", "tap exception": "exception in a tap function", nonfinite: "not finite", loss: "messages lost",
});

/** What the server's name of a kind of failure means; other names stay. @param {string} kind */
export function failureName(kind) {
  return FAILURES[kind] ?? kind;
}

/**
 * @param {number} amount
 * @param {string} one
 * @param {string} [several]
 */
export function plural(amount, one, several = `${one}s`) {
  return `${count(amount)} ${amount === 1 ? one : several}`;
}
