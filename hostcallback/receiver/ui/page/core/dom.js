/** Builds elements. Foreign text reaches the page only as text nodes and attributes of this module. */

/** @typedef {Node|string|number|null|undefined|false} Child */

const SAFE_URL = /^(data:image\/(png|jpeg|webp|bmp);base64,[A-Za-z0-9+/=]*|blob:.*)$/;

/**
 * Makes an element: `element("button", {class: "small", onclick: f, aria-label: "..."}, "Text")`.
 * Attributes that are null, undefined or false are left out; names that begin with "on" take listeners.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} name
 * @param {Record<string, any>} [attributes]
 * @param {...(Child|Child[])} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "src") made.setAttribute("src", SAFE_URL.test(value) ? value : "");
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  append(made, children);
  return made;
}

/**
 * @param {Element} parent
 * @param {(Child|Child[])[]} children
 */
export function append(parent, children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : String(child));
  }
}

/**
 * Replaces what is in an element, and keeps the focus on the control with the same `data-key`.
 * @param {Element} parent
 * @param {...(Child|Child[])} children
 */
export function fill(parent, ...children) {
  const focused = document.activeElement;
  const key = focused && parent.contains(focused) ? focused.getAttribute("data-key") : null;
  parent.replaceChildren();
  append(parent, children);
  if (key !== null) {
    const again = [...parent.querySelectorAll("[data-key]")].find((found) => found.getAttribute("data-key") === key);
    if (again instanceof HTMLElement) again.focus({ preventScroll: true });
  }
}

/**
 * Fills a selection, and keeps what is chosen; returns whether that is still there. Otherwise the first one is chosen.
 * @param {HTMLSelectElement} select
 * @param {[string, string][]} options values and names
 */
export function choices(select, options) {
  const chosen = select.value;
  fill(select, options.map(([value, name]) => element("option", { value }, shortened(name, 80))));
  const isThere = options.some(([value]) => value === chosen);
  select.value = isThere ? chosen : (options[0]?.[0] ?? "");
  return isThere;
}

/**
 * The element of index.html with this id.
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} kind
 * @returns {T}
 */
export function byId(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`index.html has no ${kind.name} #${id}`);
  return found;
}

/**
 * Foreign text for one line: bounded in length, the directions of its letters kept to itself (`dir=auto`, isolated).
 * @param {string} text
 * @param {string} [className]
 */
export function foreign(text, className = "") {
  return element("bdi", { class: className || null, title: text.length > 60 ? shortened(text, 2000) : null }, shortened(text, 300));
}

/**
 * A place in a source file, `/folder/train.py:31 (step)`, as `train.py:31`; all of it is the tooltip.
 * @param {string} text
 */
export function sourcePlace(text) {
  const found = text.match(/^(?:.*[/\\])?([^/\\]*:\d+)(?: \(.*\))?$/);
  return element("span", { class: "place", title: shortened(text, 2000) }, element("bdi", {}, shortened(found ? found[1] : text, 120)));
}

/**
 * @param {string} text
 * @param {number} most
 */
export function shortened(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/**
 * What a panel shows when there is nothing: what is missing, and what to do next.
 * @param {string} title
 * @param {...Child} body
 */
export function emptyState(title, ...body) {
  return element("div", { class: "empty" }, element("h2", {}, title), element("p", {}, ...body));
}
