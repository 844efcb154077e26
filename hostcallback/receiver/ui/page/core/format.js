/** Writes numbers, times and amounts as people read them. */

/** @param {number|string|{real: number|string, imag: number|string}|null|undefined} value */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "object") return complex(value, number);
  if (typeof value === "string") return value;
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "inf" : "−inf";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return minus(value.toLocaleString("en"));
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return minus(value.toExponential(3));
  return minus(String(Number(value.toPrecision(size >= 1000 ? 6 : 5))));
}

/**
 * The number of a step, a call or an iteration: without commas, as reports and lists of steps have it.
 * @param {number|null|undefined} value
 */
export function ordinal(value) {
  return number(value).replaceAll(",", "");
}

/**
 * A complex number, as Python writes it.
 * @param {{real: number|string, imag: number|string}} value
 * @param {(part: number|string) => string} told
 */
export function complex({ real, imag }, told = String) {
  const rest = told(imag);
  return `${told(real)}${/^[-−]/.test(rest) ? "" : "+"}${rest}j`;
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

/**
 * The labels of an axis: one unit for all, and as many decimals as their distance needs.
 * @param {(number|null)[]} ticks those that are null have no label
 * @param {boolean} [log] whether the scale is logarithmic: each label is then by itself
 */
export function tickNumbers(ticks, log = false) {
  if (log) return ticks.map((tick) => (tick === null ? "" : tick > 0 && tick < 1e-3 ? minus(shortExponential(tick, tick)) : short(tick)));
  const known = /** @type {number[]} */ (ticks.filter((tick) => tick !== null));
  const most = Math.max(0, ...known.map(Math.abs));
  const apart = Math.min(...known.slice(1).map((tick, i) => Math.abs(tick - known[i])).filter((gap) => gap > 0), most || 1);
  const [unit, name] = /** @type {[number, string][]} */ ([[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    .find(([size]) => most >= size && decimals(apart, size) <= 2) ?? [1, ""];
  return ticks.map((tick) => {
    if (tick === null) return "";
    if (tick === 0) return "0";
    const digits = decimals(apart, unit);
    // Powers of ten on a log scale, and what has more digits than a label has room for.
    if (Math.abs(tick) < 1e-3 || most >= 1e12 || digits > 5) return minus(shortExponential(tick, apart));
    return minus((tick / unit).toLocaleString("en", { minimumFractionDigits: most / apart < 1e3 ? digits : 0, maximumFractionDigits: digits })) + name;
  });
}

/**
 * How many decimals a distance has, in a unit.
 * @param {number} apart
 * @param {number} unit
 */
function decimals(apart, unit) {
  for (let digits = 0; digits < 6; digits++) {
    const shown = (apart / unit) * 10 ** digits;
    if (shown >= 0.99 && Math.abs(shown - Math.round(shown)) < 1e-6 * shown) return digits;
  }
  return Math.max(0, -Math.floor(Math.log10(apart / unit)));
}

/**
 * @param {number} value
 * @param {number} apart the distance to the next one
 */
function shortExponential(value, apart) {
  const digits = Math.min(4, decimals(apart, 10 ** Math.floor(Math.log10(Math.abs(value)) + 1e-9)));
  return value.toExponential(digits).replace("e+", "e");
}

/**
 * The labels of an axis of time: the time of day, and below it the date, on the first and on each of another day.
 * @param {(number|null)[]} ticks Unix seconds
 */
export function tickTimes(ticks) {
  const known = /** @type {number[]} */ (ticks.filter((tick) => tick !== null));
  const apart = known.length > 1 ? known[1] - known[0] : 1;
  let day = "";
  return ticks.map((tick) => {
    if (tick === null) return "";
    const then = new Date(tick * 1000);
    const date = then.toLocaleDateString("en-GB", { day: "numeric", month: "short", ...(apart > 200 * 86400 && { year: "numeric" }) });
    if (apart >= 86400) return date;
    const time = then.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(apart < 60 && { second: "2-digit" }),
      ...(apart < 1 && { fractionalSecondDigits: /** @type {1|2|3} */ (Math.min(3, decimals(apart, 1) || 1)) }) });
    const label = date === day ? time : `${time}\n${date}`;
    day = date;
    return label;
  });
}

/** The labels of an axis of seconds. @param {(number|null)[]} ticks */
export function tickDurations(ticks) {
  return ticks.map((tick) => (tick === null ? "" : tick === 0 ? "0" : duration(tick).replace(".0 s", " s")));
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

/** Seconds with three digits, such as 1.25 ms. @param {number|null} sec */
export function seconds(sec) {
  if (sec === null) return "–";
  const [size, unit] = sec >= 1 ? [1, "s"] : sec >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${Number((sec / size).toPrecision(3))} ${unit}`;
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
