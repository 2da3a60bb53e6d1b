// Making elements. Text goes in as text nodes and never as HTML: much of it was written by strangers.

const SVG = "http://www.w3.org/2000/svg";

// Letters that turn the direction of what follows, and control characters: shown as their numbers, as on a terminal.
const MOVERS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;
export const plain = (text) => text.replace(MOVERS, (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child instanceof Node ? child : plain(String(child)));
  }
  return element;
}

export const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const find = (id) => document.getElementById(id);

/** Puts `children` in place of what is in `element`. */
export const show = (element, ...children) => element.replaceChildren(...children.flat().filter((child) => child));

const forms = new Map();

/** A number as people here write it; – for none. */
export function number(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (!forms.has(digits)) {
    forms.set(digits, new Intl.NumberFormat("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  }
  return forms.get(digits).format(value);
}

export const percent = (value, digits = 0) =>
  value === null || value === undefined ? "–" : `${number(100 * value, digits)}\u202f%`;

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function bytes(value, ending = "", digits = null) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  for (; value >= 999.5 && unit < UNITS.length - 1; unit++) value /= 1000;
  const precise = unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${number(value, digits === null || value % 1 ? precise : digits)}\u202f${UNITS[unit]}${ending}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${number(1000 * value)}\u202fms`;
  return value < 120 ? `${number(value, value < 10 ? 1 : 0)}\u202fs` : lasting(value);
}

/** A longer time in its two largest units. */
export function lasting(value) {
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = parts.findIndex(([, size]) => value >= size);
  if (first < 0) return "0\u202fs";
  const told = [];
  let left = Math.floor(value);
  for (const [name, size] of parts.slice(first, first + 2)) {
    told.push(`${Math.floor(left / size)}\u202f${name}`);
    left %= size;
  }
  return told.join(" ");
}

/** The end of a peer id tells them apart: all begin alike. */
export const short = (id) => (id.length > 12 ? `…${id.slice(-8)}` : id);

const LIKE_AN_ID = /12D3|\bQm\w{8}|\S{40}/;

/** What a peer calls itself; the end of its id where it has no name, or one that could pass for another's id. */
export function called(id, names) {
  const name = (names?.[id] ?? "").normalize("NFKC").trim();
  return name && !LIKE_AN_ID.test(name) ? name : short(id);
}

/** A peer as a person knows it, with its whole id on demand. */
export const who = (id, names) => el("code", { title: id, class: called(id, names) === short(id) ? null : "named", dir: "auto" }, called(id, names));

export const clipped = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
