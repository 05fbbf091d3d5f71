"use strict";  // in all scripts of a page, which are one element

/** What both pages need: elements, numbers, colors, copying. */

const $ = (id) => document.getElementById(id);
const on = (id, type, action) => $(id).addEventListener(type, action);
const dark = matchMedia("(prefers-color-scheme: dark)");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clamp = (value, min, max) => Math.max(min, Math.min(max, value));

/** Makes an element. Functions are listeners, objects styles; text stays text, and empty children are left out. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (typeof value === "object") Object.assign(element.style, value);
    else if (value || value === 0 || (value === false && name.startsWith("aria-"))) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child || child === 0));
  return element;
}

const makeButton = (content, click, attributes) => make("button", { type: "button", click, ...attributes }, content);
const makeNote = (text) => make("p", { class: "muted" }, text);

/** Makes rows of a table, of texts or elements; the first column is of headings. */
function makeRows(rows) {
  return rows.map(([first, ...cells]) =>
    make("tr", {}, make("th", { scope: "row" }, first), cells.map((cell) => make("td", {}, cell))));
}

function makeTable(head, rows, label = "table") {
  const headings = head.map((text) => make("th", { scope: "col" }, text));
  const top = headings.length > 0 && make("thead", {}, make("tr", {}, headings));
  return make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label },
    make("table", {}, top, make("tbody", {}, makeRows(rows))));
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const formatCount = (value) => Math.round(value).toLocaleString("en");
const formatNoun = (count, noun) => `${formatCount(count)} ${noun}${count === 1 ? "" : "s"}`;
const formatLoss = (value) => value.toFixed(4);
const formatPercent = (value) => (value === 0 ? "–" : value < 0.0001 ? "<0.01%" : `${(100 * value).toFixed(2)}%`);

function formatAmount(value) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (size >= 1e4) return compact.format(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(5)));
}

/** Formats seconds: "48 s", "6 min 13 s", "2 h 5 min". */
function formatSeconds(seconds) {
  const rounded = Math.round(seconds);
  if (rounded < 100) return `${rounded} s`;
  const minutes = Math.floor(rounded / 60);
  return minutes < 100 ? `${minutes} min ${rounded % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Mixes two colors of red, green and blue; returns it with the ink that is best read on it. */
function mixColors(low, high, strength) {
  const mixed = low.map((value, i) => value + (high[i] - value) * Math.min(1, strength));
  const [red, green, blue] = mixed.map((value) => ((value / 255 + 0.055) / 1.055) ** 2.4);
  const isLight = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179;
  return [`rgb(${mixed.map(Math.round).join(" ")})`, isLight ? "#000000" : "#ffffff"];
}

/** Reads a color such as "#16181b" as red, green and blue. */
const readColor = (name) => [1, 3, 5].map((at) => parseInt(css(name).slice(at, at + 2), 16));

/** Makes a button that copies the text that `read` returns. */
function makeCopyButton(read) {
  const button = makeButton("Copy", async () => {
    const isCopied = await navigator.clipboard?.writeText(read()).then(() => true, () => false);
    button.textContent = isCopied ? "Copied" : "Select and copy the text";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return button;
}

/** Items of a container, one of which is selected. A subclass has press(), which gets the keys. */
class Selection {
  /** `choose` is called with the index of an item that a person chooses. */
  constructor(container, choose) {
    Object.assign(this, { container, choose, items: [], current: -1 });
    container.addEventListener("keydown", (event) => this.press(event));
  }

  /** Selects an item, without calling `choose`; it gets the tab stop and, if it was inside, the focus. */
  select(index) {
    const { container, items } = this;
    const hasFocus = container.contains(document.activeElement);
    for (const [item, isSelected] of [[items[this.current], false], [items[index], true]]) {
      item?.setAttribute("aria-selected", isSelected);
      item?.setAttribute("tabindex", isSelected ? 0 : -1);
    }
    if (hasFocus) items[index]?.focus();
    this.current = index;
  }
}

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** Returns the rows and columns that an arrow key moves by, and keeps the page from scrolling. */
function readArrow(event) {
  if (!(event.key in ARROWS) || event.ctrlKey || event.metaKey || event.altKey) return null;
  event.preventDefault();
  return ARROWS[event.key];
}

/** Keeps a value for reloads of this tab, as far as the browser allows. */
function storeState(key, value) {
  try {
    sessionStorage.setItem(key, JSON.stringify(value));
  } catch { /* full, or switched off */ }
}

function readState(key) {
  try {
    return JSON.parse(sessionStorage.getItem(key)) ?? {};
  } catch {
    return {};
  }
}
