/** The tokens of a text: a list to point at, with mouse, finger and keys. */
class TokenList {
  /** Fills a container; `select` is called with the index of a token that is pointed at. */
  constructor(container, select) {
    Object.assign(this, { container, select, current: -1 });
    this.clear();
    for (const type of ["pointerover", "click"]) container.addEventListener(type, (event) => this.choose(event));
    container.addEventListener("keydown", (event) => this.press(event));
  }

  clear() {
    this.chips = [];
    this.container.replaceChildren();
  }

  /** Adds a token; `shared` is [count, character] if the last tokens are one character together. */
  add(label, shared, name = label) {
    const isFirst = !this.chips.length || this.chips.at(-1).textContent.endsWith("⏎");
    const line = isFirst ? make("div", { dir: "auto" }) : this.container.lastChild;  // each has its direction
    if (isFirst) this.container.append(line);
    const look = { class: label.length < 24 && "short", tabindex: -1 };
    const chip = make("span", { role: "option", "aria-selected": false, "aria-label": name, ...look }, label);
    line.append(chip);
    this.chips.push(chip);
    if (shared) this.group(...shared);
    return chip;
  }

  /** Shows the character of the last tokens above them. */
  group(count, text) {
    const members = this.chips.slice(-count);
    const box = make("span", { class: "shared", role: "group", "aria-label": text }, make("b", {}, text));
    members[0].before(box);
    for (const member of members) {
      box.append(member);
      member.textContent = member.textContent.replace(/^⟨(.*)⟩$/, "$1");
      member.dir = "ltr";
      member.dataset.character = text;
    }
    box.style.gridTemplateColumns = `repeat(${count}, auto)`;
  }

  /** Selects a token, without calling `select`. */
  point(index) {
    selectItem(this.container, this.chips, this.current, index);
    this.current = index;
  }

  quote(index) {
    const { textContent, dataset } = this.chips[index];
    return `“${textContent}”${dataset.character ? ` of “${dataset.character}”` : ""}\u200e`;
  }

  paint(index, backgroundColor, color) {
    Object.assign(this.chips[index].style, { backgroundColor, color });
  }

  choose(event) {
    if (event.type === "pointerover" && event.pointerType !== "mouse") return;
    const chip = event.target.closest("[role=option]") ?? event.target.closest(".shared")?.children[1];
    const index = this.chips.indexOf(chip);
    if (index >= 0 && (index !== this.current || event.type === "click")) this.select(index);
  }

  press(event) {
    const chip = event.target.closest("[role=option]");
    const end = { Home: 0, End: this.chips.length - 1 }[event.key];
    const arrow = chip && readArrow(event);
    if (!arrow && (!chip || end === undefined)) return;
    event.preventDefault();
    const isReversed = getComputedStyle(chip.closest("[dir=auto]")).direction === "rtl";
    const [down, right] = arrow ?? [0, 0];
    const to = end ?? (down ? this.findVertical(down) : this.current + (isReversed ? -right : right));
    this.select(clamp(to, 0, this.chips.length - 1));
  }

  findVertical(step) {
    const boxes = this.chips.map((chip) => chip.getBoundingClientRect());
    const here = boxes[this.current];
    const tops = boxes.map((box) => box.top).filter((top) => step * (top - here.top) > 4);
    if (!tops.length) return this.current;
    const top = step > 0 ? Math.min(...tops) : Math.max(...tops);
    const distance = (box) => Math.abs(box.top - top) < 4 ? Math.abs(box.left - here.left) : Infinity;
    return boxes.reduce((best, box, index) => distance(box) < distance(boxes[best]) ? index : best, this.current);
  }
}
