/** Asks the server. Every failure becomes a ServerError with a sentence for the reader. */

/** The server's refusal, or that it was not reached (`status` 0). */
export class ServerError extends Error {
  /**
   * @param {string} message
   * @param {number} status
   */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const KEY = "hostcallback-session";
const TOKEN = /^#token=([^&?]+)/;

/** What this server takes in place of the token. */
let session = stored(() => sessionStorage.getItem(KEY)) ?? "";

/**
 * The storage of this tab; a frame in a page of another site may have none.
 * @param {() => string|null|void} use
 */
function stored(use) {
  try {
    return use();
  } catch {
    return null;
  }
}

/** Takes the token out of the page's URL, if it is there, and exchanges it for the session's secret. */
async function signIn() {
  const found = TOKEN.exec(location.hash);
  if (!found) return;
  history.replaceState(null, "", location.pathname);
  const response = await fetch("api/session", { method: "POST", headers: { Authorization: `Bearer ${decodeURIComponent(found[1])}` } }).catch(() => null);
  if (!response?.ok) return;
  session = (await response.json()).session;
  stored(() => sessionStorage.setItem(KEY, session));
}

const signedIn = signIn();

// Another address of this server in the same tab loads nothing by itself.
window.addEventListener("hashchange", () => {
  if (TOKEN.test(location.hash)) location.reload();
});

/**
 * As fetch of /api/PATH, with what shows that this page may ask.
 * @param {string} path
 * @param {RequestInit} [options]
 */
export async function request(path, options = {}) {
  await signedIn;
  return fetch(`api/${path}`, { ...options, headers: { ...options.headers, Authorization: `Bearer ${session}` } });
}

/**
 * GET /api/NAME with parameters; those that are null or "" are left out, arrays are repeated.
 * @param {string} name
 * @param {Record<string, any>} [parameters]
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function ask(name, parameters = {}, signal) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") query.append(key, String(each));
    }
  }
  const text = query.toString();
  return answer(request(`${name}${text ? `?${text}` : ""}`, { signal }));
}

/**
 * POST /api/NAME.
 * @param {string} name
 * @param {any} body
 * @returns {Promise<any>}
 */
export async function send(name, body) {
  const headers = { "Content-Type": "application/json" };
  return answer(request(name, { method: "POST", headers, body: JSON.stringify(body) }));
}

/** @param {Promise<Response>} asked */
async function answer(asked) {
  let response;
  try {
    response = await asked;
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ServerError("The server was not reached.", 0);
  }
  const body = await response.json().catch(() => null);
  if (response.ok && body !== null) return body;
  throw new ServerError(sentence(response.status, body), response.status);
}

/**
 * @param {number} status
 * @param {any} body
 */
function sentence(status, body) {
  if (status === 401) return "The server does not know this page: it was started again. Open the URL that it printed.";
  return typeof body?.error === "string" ? body.error : `The server answered with status ${status}.`;
}

/** @param {unknown} error */
export function wasAborted(error) {
  return error instanceof DOMException && error.name === "AbortError";
}

export const TAPS_IN_A_REQUEST = 48;

/**
 * The series of taps, in as many requests as they need.
 * @param {number[]} taps
 * @param {Record<string, any>} parameters
 * @returns {Promise<import("./types.js").Series[]>}
 */
export async function askSeries(taps, parameters) {
  const starts = Array.from({ length: Math.ceil(taps.length / TAPS_IN_A_REQUEST) }, (_, i) => i * TAPS_IN_A_REQUEST);
  const parts = await Promise.all(starts.map((at) => ask("series", { tap: taps.slice(at, at + TAPS_IN_A_REQUEST), ...parameters })));
  return parts.flatMap((part) => part.series);
}
