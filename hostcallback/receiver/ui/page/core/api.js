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
  return answer(fetch(`api/${name}${text ? `?${text}` : ""}`, { signal, credentials: "same-origin" }));
}

/**
 * POST /api/NAME.
 * @param {string} name
 * @param {any} body
 * @returns {Promise<any>}
 */
export async function send(name, body) {
  const headers = { "Content-Type": "application/json" };
  return answer(fetch(`api/${name}`, { method: "POST", headers, body: JSON.stringify(body), credentials: "same-origin" }));
}

/** @param {Promise<Response>} request */
async function answer(request) {
  let response;
  try {
    response = await request;
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
