/** Spreads drawing over frames: each task is done once, as many a frame as fit, and only what is on the screen. */

const BUDGET_MS = 5;

/** @type {Map<object, () => void>} */
const waiting = new Map();
let asked = false;

/**
 * Draws in one of the next frames. A later task of the same owner replaces an earlier one that has not run.
 * @param {object} owner
 * @param {() => void} task
 */
export function draw(owner, task) {
  waiting.delete(owner);
  waiting.set(owner, task);
  if (!asked) {
    asked = true;
    requestAnimationFrame(run);
  }
}

/** @param {object} owner */
export function forget(owner) {
  waiting.delete(owner);
}

function run() {
  asked = false;
  const start = performance.now();
  for (const [owner, task] of waiting) {
    waiting.delete(owner);
    task();
    if (performance.now() - start > BUDGET_MS) break;
  }
  if (waiting.size && !asked) {
    asked = true;
    requestAnimationFrame(run);
  }
}

/**
 * Calls back when an element comes near the screen or leaves it.
 * @param {(element: Element, visible: boolean) => void} onChange
 */
export function visibility(onChange) {
  return new IntersectionObserver(
    (entries) => entries.forEach((entry) => onChange(entry.target, entry.isIntersecting)),
    { rootMargin: "150px 0px" },
  );
}

/**
 * Calls `task` at most once in `pauseMs`, and never twice at a time: a call during a run is done after it.
 * A task that had nothing to do returns false; no pause follows it.
 * @param {() => Promise<boolean|void>} task
 * @param {number} pauseMs
 */
export function throttled(task, pauseMs) {
  let wanted = false;
  let busy = false;
  const loop = async () => {
    busy = true;
    await null; // so that the first run has all that is wanted at the same time
    while (wanted) {
      wanted = false;
      const start = performance.now();
      if ((await task()) === false) continue;
      const took = performance.now() - start;
      await new Promise((resolve) => setTimeout(resolve, Math.max(pauseMs - took, took)));
    }
    busy = false;
  };
  return () => {
    wanted = true;
    if (!busy) void loop();
  };
}

/**
 * Calls `task` when `pauseMs` have gone by without another call.
 * @param {() => void} task
 * @param {number} pauseMs
 */
export function debounced(task, pauseMs) {
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(task, pauseMs);
  };
}
