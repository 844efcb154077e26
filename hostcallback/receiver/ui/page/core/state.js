/** What the views share: the overview, the runs that are shown, and the settings that the URL keeps. */

/** @typedef {import("./types.js").Overview} Overview */
/** @typedef {import("./types.js").Run} Run */

/** @type {Overview} */
export const NOTHING = {
  version: "", control: false, sources: [], runs: [], taps: [], taps_total: 0, taps_left_out: 0, errors: 0, error_kinds: 0, losses: 0,
};

/** The settings of charts; they are in the URL, so that a reload and a copied link show the same. */
export const settings = {
  filter: "", axis: "step", smooth: 0, log: false,
  /** Whether a zoom of one chart holds for all. */
  linked: false,
  /** The run that the others are measured by; "" for none. */
  baseline: "",
  /** Keys of the cards that stand first. @type {string[]} */
  pins: [],
};

export const AXES = ["step", "elapsed", "time", "message"];

export const state = {
  /** @type {Overview} */
  overview: NOTHING,
  loaded: false,
  /** @type {Set<string>} */
  hidden: new Set(),
};

/** The number of a run's colour: its place among the runs. @param {string} run */
export function runIndex(run) {
  return Math.max(state.overview.runs.findIndex((each) => each.id === run), 0);
}

/** @param {string} run */
export function runName(run) {
  return state.overview.runs.find((each) => each.id === run)?.name ?? run;
}

/** Reads the settings and the name of the tab from the URL. */
export function readAddress() {
  const [tab, query = ""] = location.hash.slice(1).split("?");
  const found = new URLSearchParams(query);
  settings.filter = found.get("filter") ?? "";
  settings.axis = AXES.includes(found.get("x") ?? "") ? String(found.get("x")) : "step";
  const smooth = Number(found.get("smooth") ?? 0);
  settings.smooth = smooth >= 0 && smooth < 1 ? smooth : 0;
  settings.log = found.get("log") === "1";
  settings.linked = found.get("linked") === "1";
  settings.baseline = found.get("baseline") ?? "";
  settings.pins = found.getAll("pin");
  state.hidden = new Set(found.getAll("hide"));
  return tab;
}

/** Writes them. @param {string} tab */
export function writeAddress(tab) {
  const query = new URLSearchParams();
  if (settings.filter) query.set("filter", settings.filter);
  if (settings.axis !== "step") query.set("x", settings.axis);
  if (settings.smooth) query.set("smooth", String(settings.smooth));
  if (settings.log) query.set("log", "1");
  if (settings.linked) query.set("linked", "1");
  if (settings.baseline) query.set("baseline", settings.baseline);
  for (const pin of settings.pins) query.append("pin", pin);
  for (const run of state.hidden) query.append("hide", run);
  const text = query.toString();
  history.replaceState(null, "", `#${tab}${text ? `?${text}` : ""}`);
}

/** The runs for a selection, after one for all of them. @param {string} [all] @returns {[string, string][]} */
export function runChoices(all) {
  const runs = state.overview.runs.map((run) => /** @type {[string, string]} */ ([run.id, run.name]));
  return all ? [["", all], ...runs] : runs;
}
