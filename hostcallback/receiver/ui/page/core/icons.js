/** The icons of buttons, as SVG elements. */

const PATHS = {
  plus: "M8 3v10M3 8h10",
  minus: "M3 8h10",
  reset: "M3.5 8a4.5 4.5 0 1 0 1.6-3.4M3.5 2.8v2.6h2.6",
  expand: "M9.5 3H13v3.5M6.5 13H3V9.5M13 3 9 7M3 13l4-4",
  shrink: "M13 7H9V3M3 9h4v4M9 7l4-4M7 9l-4 4",
  pin: "M6 2.5h4M8 2.5v0M6.6 2.5v4L4.5 9h7L9.4 6.5v-4M8 9v4.5",
  more: "M8 3.5v.1M8 8v.1M8 12.5v.1",
  power: "M8 2.5v5M4.6 4.6a4.8 4.8 0 1 0 6.8 0",
};

/** @param {keyof typeof PATHS} name */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const made = document.createElementNS(space, "svg");
  made.setAttribute("viewBox", "0 0 16 16");
  made.setAttribute("class", "icon");
  made.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", PATHS[name]);
  made.append(path);
  return made;
}
