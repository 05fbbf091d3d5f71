/** The tokens of a text: a list to point at, with mouse, finger and keys. */
class TokenList extends Selection {
  constructor(container, choose) {
    super(container, choose);
    for (const type of ["pointerover", "click"]) container.addEventListener(type, (event) => this.hover(event));
  }

  clear() {
    this.items = [];
    this.container.replaceChildren();
  }

  /** Adds a token; `shared` is [count, character] if the last tokens are one character together. */
  add(label, shared, name = label) {
    const isFirst = !this.items.length || this.items.at(-1).textContent.endsWith("⏎");
    if (isFirst) this.container.append(make("div", { dir: "auto" }));  // a line, with a direction of its own
    const look = { class: label.length < 24 && "short", tabindex: -1 };
    const chip = make("span", { role: "option", "aria-selected": false, "aria-label": name, ...look }, label);
    this.container.lastChild.append(chip);
    this.items.push(chip);
    if (shared) this.group(...shared);
    return chip;
  }

  /** Shows the character of the last tokens above them. */
  group(count, text) {
    const members = this.items.slice(-count);
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

  quote(index) {
    const { textContent, dataset } = this.items[index];
    return `“${textContent}”${dataset.character ? ` of “${dataset.character}”` : ""}\u200e`;
  }

  paint(index, backgroundColor, color) {
    Object.assign(this.items[index].style, { backgroundColor, color });
  }

  hover(event) {
    if (event.type === "pointerover" && event.pointerType !== "mouse") return;
    const chip = event.target.closest("[role=option]") ?? event.target.closest(".shared")?.children[1];
    const index = this.items.indexOf(chip);
    if (index >= 0 && (index !== this.current || event.type === "click")) this.choose(index);
  }

  press(event) {
    const end = { Home: 0, End: this.items.length - 1 }[event.key];
    const arrow = readArrow(event);
    if (!arrow && end === undefined) return;
    event.preventDefault();
    const isReversed = getComputedStyle(event.target.closest("[dir=auto]")).direction === "rtl";
    const to = end ?? this.current + (isReversed ? -1 : 1) * arrow[1];
    this.choose(clamp(to, 0, this.items.length - 1));
  }
}
