/** Starts the page: tabs, runs, the overview, and the stream of changes. */

import { ask, ServerError, wasAborted } from "./core/api.js";
import { swatch } from "./charts/card.js";
import { onScheme } from "./core/colors.js";
import { byId, element, fill, foreign } from "./core/dom.js";
import { count, plural } from "./core/format.js";
import { ChangeStream } from "./core/events.js";
import { throttled } from "./core/frames.js";
import { readAddress, settings, state, writeAddress } from "./core/state.js";
import { Charts } from "./views/charts.js";
import { Control } from "./views/control.js";
import { Compare } from "./views/difference.js";
import { Devices } from "./views/devices.js";
import { Errors, toldErrors } from "./views/errors.js";
import { Runs } from "./views/runs.js";
import { Texts } from "./views/texts.js";
import { TimeView } from "./views/times.js";

/** @typedef {import("./core/types.js").Change} Change */

const OVERVIEW_MS = 500;
const RUNS_AS_BUTTONS = 12;

let tab = readAddress();
/** @type {ReturnType<typeof setTimeout>|undefined} */
let hideBanner;
/** How many different errors, and how often they occurred. @type {[number, number]|null} */
let errorsSeen = null;

const refreshOverview = throttled(loadOverview, OVERVIEW_MS);
const stream = new ChangeStream(onChange, onConnection);
const page = {
  overviewNeeded: refreshOverview,
  watch: (/** @type {number[]} */ taps) => stream.watch(taps),
  failed,
  saved: () => writeAddress(tab),
  toggleRun,
  pinRun,
  showStep: (/** @type {string} */ name, /** @type {number} */ step) => {
    show(name);
    (name === "charts" ? charts : texts).showStep(step);
  },
  say: (/** @type {string} */ text) => (byId("said", HTMLElement).textContent = text),
};
const charts = new Charts(page);
const errors = new Errors(page);
const texts = new Texts(page);
const views = /** @type {Record<string, {setActive: (active: boolean) => void}>} */ ({
  errors, charts, runs: new Runs(page), texts, time: new TimeView(page), devices: new Devices(page), compare: new Compare(page), control: new Control(page),
});
const tabs = /** @type {HTMLButtonElement[]} */ ([...document.querySelectorAll("[role=tab]")]);

/**
 * Shows a tab. Its name is in the URL.
 * @param {string} name
 */
function show(name) {
  tab = name;
  for (const button of tabs) {
    const active = button.dataset.tab === name;
    button.setAttribute("aria-selected", String(active));
    button.tabIndex = active ? 0 : -1;
    byId(`panel-${button.dataset.tab}`, HTMLElement).hidden = !active;
    if (active) button.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  for (const [key, view] of Object.entries(views)) view.setActive(key === name);
  document.title = name === "errors" || !settings.filter ? "hostcallback" : `${settings.filter} – hostcallback`;
  writeAddress(name);
}

/** @param {KeyboardEvent} event */
function onTabKey(event) {
  const at = tabs.indexOf(/** @type {HTMLButtonElement} */ (event.target));
  const to = /** @type {Record<string, number>} */ ({ ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 })[event.key];
  if (at < 0 || to === undefined) return;
  const next = tabs[(to + tabs.length) % tabs.length];
  next.focus();
  show(String(next.dataset.tab));
  event.preventDefault();
}

async function loadOverview() {
  try {
    state.overview = await ask("overview", { filter: settings.filter });
  } catch (error) {
    failed(error);
    return;
  }
  const first = !state.loaded;
  state.loaded = true;
  trouble(null);
  showHead();
  showErrors([state.overview.error_kinds, state.overview.errors]);
  charts.update();
  texts.update();
  for (const key of ["compare", "control", "runs"]) {
    if (tab === key) /** @type {any} */ (views[key]).update();
  }
  if (first) show(views[tab] ? tab : state.overview.errors ? "errors" : "charts");
}

function showHead() {
  const { version, sources } = state.overview;
  byId("version", HTMLElement).textContent = version;
  const words = /** @type {Record<string, string>} */ ({ live: "live", ended: "ended", lost: "lost" });
  fill(byId("sources", HTMLElement), sources.slice(0, 4).map((source) =>
    element("span", { class: `source-state ${source.state}`, title: source.message || null },
      element("span", { class: "dot", "aria-hidden": "true" }), foreign(source.name), element("span", { class: "muted" }, ` ${words[source.state] ?? source.state}`),
      source.state === "lost" && source.message ? element("span", { class: "muted" }, `: ${source.message.slice(0, 120)}`) : null)),
    sources.length > 4 && element("span", { class: "muted" }, `and ${count(sources.length - 4)} more`));
  showRuns();
}

function showRuns() {
  const { runs } = state.overview;
  const box = byId("runs", HTMLElement);
  box.hidden = runs.length < 2;
  fill(box, runs.slice(0, RUNS_AS_BUTTONS).map((run) => {
    return element("button", { type: "button", class: "run", "aria-pressed": String(!state.hidden.has(run.id)), "data-key": `run ${run.id}`,
      title: `${run.id}, ${plural(run.messages, "message")}`, onclick: () => toggleRun(run.id) }, swatch(run.id), foreign(run.name), run.live && element("span", { class: "live", title: "live" }, "●"));
  }), runs.length > RUNS_AS_BUTTONS && element("button", { type: "button", class: "plain muted", "data-key": "all runs", onclick: () => show("runs") }, `and ${count(runs.length - RUNS_AS_BUTTONS)} more`));
}

/** @param {string} run */
function toggleRun(run) {
  if (!state.hidden.delete(run)) state.hidden.add(run);
  showRun();
}

/** The others are measured by this run; by none if it is so already. @param {string} run */
function pinRun(run) {
  settings.baseline = settings.baseline === run ? "" : run;
  showRun();
}

function showRun() {
  writeAddress(tab);
  showRuns();
  charts.update();
  charts.refreshAll();
  charts.redraw();
  /** @type {Runs} */ (views.runs).update();
}

/** The badge counts different errors, its tooltip how often they occurred. @param {[number, number]} counts */
function showErrors(counts) {
  const [kinds, times] = counts;
  const badge = byId("error-count", HTMLElement);
  const told = toldErrors(kinds, times);
  badge.hidden = kinds === 0;
  badge.textContent = count(kinds);
  badge.setAttribute("aria-label", told);
  badge.title = told;
  if (errorsSeen !== null && kinds > errorsSeen[0] && tab !== "errors") {
    page.say(`A new error: ${told} in the tab Errors.`);
    badge.classList.add("new");
  }
  errorsSeen = counts;
}

/** @param {Change} change */
function onChange(change) {
  if (change.overview) refreshOverview();
  if (change.taps?.length) charts.onChange(change.taps);
  if (change.texts !== undefined) texts.onTotal(change.texts);
  if (change.errors !== undefined && change.errors.join() !== errorsSeen?.join()) showErrors(change.errors);
  if (change.errors !== undefined) errors.onChange();
  if (change.devices) /** @type {Devices} */ (views.devices).onChange();
  if (change.devices) /** @type {Runs} */ (views.runs).onChange();
  if (change.devices) /** @type {TimeView} */ (views.time).onChange();
}

/**
 * @param {boolean} connected
 * @param {boolean} again
 */
function onConnection(connected, again) {
  const banner = byId("connection", HTMLElement);
  clearTimeout(hideBanner);
  document.body.classList.toggle("lost", !connected);
  if (!connected) {
    banner.className = "banner lost";
    banner.textContent = "The connection to the server is lost. What is shown is the last state; the page tries again.";
    banner.hidden = false;
  } else if (again) {
    banner.className = "banner regained";
    banner.textContent = "The connection is back.";
    hideBanner = setTimeout(() => (banner.hidden = true), 3000);
    refreshOverview();
    views[tab]?.setActive(true);
  }
}

/** Shows why the server refused. The stream tells when the server is not reached, a view when it has no answer. @param {unknown} error */
function failed(error) {
  if (wasAborted(error) || (error instanceof ServerError && [0, 404].includes(error.status))) return;
  trouble(error instanceof Error ? error.message : String(error));
}

/** @param {string|null} text */
function trouble(text) {
  const box = byId("trouble", HTMLElement);
  box.hidden = text === null;
  box.textContent = text === null ? "" : text.slice(0, 500);
}

for (const button of tabs) {
  button.addEventListener("click", () => show(String(button.dataset.tab)));
  button.addEventListener("keydown", onTabKey);
}
document.querySelectorAll("form").forEach((form) => form.addEventListener("submit", (event) => event.preventDefault()));
document.addEventListener("visibilitychange", () => !document.hidden && views[tab]?.setActive(true));
window.addEventListener("hashchange", () => {
  const name = readAddress();
  if (views[name] && name !== tab) show(name);
});
onScheme(() => state.loaded && showHead());
stream.open();
refreshOverview();
