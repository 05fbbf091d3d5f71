/** Attention: a grid of all heads, and one head as a map. Both pages use it. */

const LIGHT = [247, 247, 245];  // the ground of maps, in both themes
const DARK = [8, 81, 156];
// A byte of weights is 255 times the square root of a weight, and so is its color: alpha, blue, green, red.
const SHADES = Uint32Array.from({ length: 256 }, (_, level) => {
  const [red, green, blue] = LIGHT.map((light, i) => Math.round(light + (DARK[i] - light) * level / 255));
  return 0xff000000 + (blue << 16) + (green << 8) + red;
});
const shadeToken = (level) => level ? mixColors(LIGHT, DARK, level / 255) : ["", ""];
const GRID_LABEL = "Heads: layers down, heads across";
const MAX_GRID_HEIGHT = 420;  // pixels, unless the heads would be too small to see
const MAX_MAP_PIXELS = 600;
const MAX_CELL_PIXELS = 24;

/** The weights of heads, as lower triangles of size × size. */
class Triangles {
  /** `levels` are bytes, or base64 of them. */
  constructor(levels = "", size = 0) {
    const isText = typeof levels === "string";
    this.bytes = isText ? Uint8Array.from(atob(levels), (letter) => letter.charCodeAt(0)) : levels;
    this.size = size;
  }

  has(row) {
    return row >= 0 && row < this.size;
  }

  /** The level, 0 to 255, of a weight; 0 outside of the triangle. */
  level(head, row, column) {
    if (!this.has(row) || column < 0 || column > row) return 0;
    return this.bytes[head * this.size * (this.size + 1) / 2 + row * (row + 1) / 2 + column];
  }

  weight(head, row, column) {
    return (this.level(head, row, column) / 255) ** 2;
  }

  row(head, row) {
    return Array.from({ length: row + 1 }, (_, column) => this.weight(head, row, column));
  }
}

/** Sizes a canvas in pixels of CSS; returns its context, scaled to them. */
function prepareCanvas(canvas, width, height) {
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  canvas.style.width = `${width}px`;
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  return context;
}

/** Draws a head's weights, a pixel each. */
function drawThumbnail(canvas, triangles, head) {
  const { size } = triangles;
  const pixels = new ImageData(size, size);
  const colors = new Uint32Array(pixels.data.buffer);
  for (let row = 0; row < size; row++) {
    for (let column = 0; column <= row; column++) {
      colors[row * size + column] = SHADES[triangles.level(head, row, column)];
    }
  }
  Object.assign(canvas, { width: size, height: size });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

/** A grid of heads in a frame: layers down, heads across. With `toggle` each has a switch. */
class HeadGrid extends Selection {
  constructor(frame, layers, heads, choose, { toggle, maxHeight = MAX_GRID_HEIGHT, label = GRID_LABEL }) {
    super(make("div", { class: "heads", role: "grid", "aria-label": label }), choose);
    Object.assign(this, { frame, layers, heads, toggle, maxHeight, habits: [], off: new Set(), bits: [] });
    this.container.style.gridTemplateColumns = `auto repeat(${heads}, auto)`;
    const numbers = Array.from({ length: heads }, (_, i) => make("span", { role: "columnheader" }, i + 1));
    const addRow = (name, cells) => this.container.append(make("div", { role: "row" }, name, cells));
    addRow(make("span", { role: "columnheader" }, "layer"), numbers);
    for (let layer = 0; layer < layers; layer++) {
      const cells = numbers.map((_, head) => this.makeCell(layer * heads + head));
      addRow(make("span", { role: "rowheader" }, layer + 1), cells);
      this.items.push(...cells);
    }
    frame.append(this.container);
    new ResizeObserver(() => this.resize()).observe(frame);
    this.resize();
    this.select(0);
  }

  makeCell(index) {
    const change = ({ target }) => {
      target.checked ? this.off.delete(index) : this.off.add(index);
      this.describe(index);
      this.toggle();
    };
    const click = ({ target }) => target.type === "checkbox" || this.choose(index);
    const label = `${this.name(index)} on`;
    const input = make("input", { type: "checkbox", checked: true, tabindex: -1, "aria-label": label, change });
    const content = [make("canvas"), make("span", { class: "bits" }), this.toggle && input];
    return make("div", { role: "gridcell", click }, content);
  }

  name(index) {
    return `layer ${Math.floor(index / this.heads) + 1}, head ${index % this.heads + 1}`;
  }

  /** What is known of a head: its name, its habit and what it is worth. */
  describe(index) {
    const cell = this.items[index];
    const isOff = this.off.has(index);
    const [title, score] = this.habits[index] ?? [];
    const bits = this.bits[index] === undefined ? "" : formatSigned(this.bits[index]);
    const parts = [title && `${title} ${score.toFixed(2)}`, bits && `without it ${bits} bits per token`, isOff && "off"]
      .filter(Boolean).join(", ");
    const text = `${this.name(index)}${parts && `: ${parts}`}`;
    Object.assign(cell, { title: text, ariaLabel: text });
    cell.classList.toggle("is-off", isOff);
    if (this.toggle) cell.lastChild.checked = !isOff;
    cell.querySelector(".bits").textContent = bits;
    return text;
  }

  show(triangles, habits) {
    this.habits = habits;
    this.items.forEach((cell, index) => {
      drawThumbnail(cell.querySelector("canvas"), triangles, index);
      this.describe(index);
    });
  }

  press(event) {
    const [down, right] = readArrow(event) ?? [0, 0];
    const to = this.current + down * this.heads + right;
    if (to !== this.current && to in this.items) this.choose(to);
    if (event.key !== " " || !this.toggle) return;
    event.preventDefault();
    this.items[this.current].lastChild.click();
  }

  resize() {
    const width = (this.frame.clientWidth - 40) / this.heads - 3;
    const size = Math.floor(Math.max(this.toggle ? 22 : 14, Math.min(96, width, this.maxHeight / this.layers)));
    for (const { children: [canvas, bits] } of this.items) {
      Object.assign(canvas.style, { width: `${size}px`, height: `${size}px` });
      bits.hidden = size < 40;
    }
  }
}

const formatSigned = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(Math.abs(value) < 0.1 ? 3 : 2)}`;

/** One head as a map of tokens by tokens, to point at. */
class HeadMap {
  /** `move` is called with the row, and the column or undefined, that are pointed at. */
  constructor(canvas, move) {
    Object.assign(this, { canvas, move, image: make("canvas") });
    for (const type of ["pointermove", "pointerdown"]) canvas.addEventListener(type, (event) => this.hover(event));
  }

  draw(triangles, head, row, column) {
    if (this.triangles !== triangles || this.head !== head) drawThumbnail(this.image, triangles, head);
    const { size } = triangles;
    const side = Math.min(this.canvas.parentNode.clientWidth, MAX_MAP_PIXELS, MAX_CELL_PIXELS * size);
    const cell = side / size;
    Object.assign(this, { triangles, head, row, column, size, cell });
    const context = prepareCanvas(this.canvas, side, side);
    Object.assign(context, { imageSmoothingEnabled: false, strokeStyle: css("--c1"), lineWidth: 2 });
    context.drawImage(this.image, 0, 0, side, side);
    context.strokeRect(column * cell, row * cell, cell, cell);
  }

  hover(event) {
    const [row, column] = [event.offsetY, event.offsetX].map((at) => Math.floor(at / this.cell));
    const isSame = row === this.row && column === this.column;
    if (!isSame && row >= column && column >= 0 && row < this.size) this.move(row, column);
  }
}

/** The attention of a text: the grid of heads, and the chosen one as a map. */
class AttentionView {
  /** `point` is called with a token; `load(head)` calls `show()`, now or later; `toggle` makes switches. */
  constructor(list, layers, heads, { point, load, toggle }) {
    Object.assign(this, { list, point, load, start: 0, head: 0, triangles: new Triangles() });
    this.grid = new HeadGrid($("heads"), layers, heads, (index) => this.choose(index), { toggle });
    this.map = new HeadMap($("map"), (row, column) => this.point(this.start + row, this.start + column));
    dark.addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(list.container);
  }

  choose(index) {
    this.grid.select(index);
    this.load(index);
  }

  showHeads(triangles, habits) {
    this.grid.show(triangles, habits);
    const best = new Map();
    habits.forEach((habit, index) => {
      if (habit && habit[1] > (best.get(habit[0])?.score ?? 0)) best.set(habit[0], { score: habit[1], index });
    });
    $("habits").replaceChildren(...[...best].map(([title, { score, index }]) =>
      makeButton(`${title}: ${this.grid.name(index)} (${score.toFixed(2)})`, () => this.choose(index))));
  }

  /** Shows the weights of a head, whose number in the triangles is `head`, of tokens from `start` on. */
  show(triangles, head, start) {
    Object.assign(this, { triangles, head, start });
    this.draw();
  }

  /** The level, 0 to 255, with which the selected token looks at a token; 0 if that is unknown. */
  level(index) {
    return this.triangles.level(this.head, this.list.current - this.start, index - this.start);
  }

  draw(column) {
    const { list, start, triangles } = this;
    const row = list.current - start;
    if (!triangles.has(row)) return;
    const weights = triangles.row(this.head, row);
    const at = typeof column === "number" ? column - start : weights.indexOf(Math.max(...weights));
    this.map.draw(triangles, this.head, row, at);
    const [from, to] = [list.current, start + at].map((index) => `${list.quote(index)} (token ${index + 1})`);
    $("looks").textContent = `${this.grid.describe(this.grid.current)}. ${from} looks at ${to} with weight `
      + `${weights[at].toFixed(2)}.`;
  }
}
