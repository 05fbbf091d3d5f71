/** The chat with the model. `look` shows the tokens of an answer; `readQuestion` returns the settings. */
class Chat {
  constructor(about, readQuestion, look) {
    Object.assign(this, { about, readQuestion, look, turns: [], ids: [], retries: 0 });
    this.task = new Task("talk-status", () => this.draw());
    on("send", "click", () => this.send());
    onEnter("draft", () => this.send());
    on("quit", "click", () => this.task.stop());
    on("clear", "click", () => this.clear());
    on("save-chat", "click", () => this.save());
  }

  clear() {
    this.restore({});
    say("", false, "talk-status");
    $("draft").focus();
  }

  restore({ turns = [], ids = [], retries = 0 }) {
    Object.assign(this, { turns, ids, retries });
    this.draw();
  }

  /** Saves the chat as a line that prepare.py --chat reads. */
  save() {
    const messages = this.turns.map((content, i) => ({ role: i % 2 ? "assistant" : "user", content }));
    const url = URL.createObjectURL(new Blob([`${JSON.stringify({ messages })}\n`], { type: "application/jsonl" }));
    make("a", { href: url, download: "chat.jsonl" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  }

  /** Sends the draft. */
  send() {
    const text = $("draft").value;
    if (this.task.request || !text.trim() || !$("form").reportValidity()) return;
    $("draft").value = "";
    this.turns.push(text, "");
    this.retries = 0;
    this.answer(null);
  }

  retry() {
    if (!$("form").reportValidity()) return;
    const [replaced] = this.turns.splice(-1, 1, "");
    this.retries++;
    this.answer(replaced);
    $("draft").focus();
  }

  /** Gets the last answer; without one, what it replaces returns. */
  async answer(replaced) {
    const { turns } = this;
    const query = { ...this.readQuestion(), turns: turns.slice(0, -1) };
    query.seed = (query.seed + this.retries) % 2 ** 53;
    let last = {};
    let isAnswered = false;
    const end = this.task.run("chat", query, (records) => {
      last = records.at(-1);
      isAnswered = true;
      const text = records.map((record) => record.text ?? "").join("");
      turns[turns.length - 1] += text;
      this.appendText(text);
    }, () => {
      this.ids[turns.length - 1] = last.ids;
      const note = last.isShortened ? " The chat is longer than the context: its beginning is left out." : "";
      return `Done: ${last.end}.${note}`;
    });
    $("turns").scrollTop = $("turns").scrollHeight;
    await end;
    if (!isAnswered) this.takeBack(replaced);
    this.draw();
  }

  appendText(text) {
    const box = $("turns");
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    box.lastChild.querySelector("p").append(text);
    say("Answering… Send the next message when it is done, or press Escape.", false, "talk-status");
    if (follows) box.scrollTop = box.scrollHeight;
  }

  /** Returns an unanswered question to the draft, or the answer before a retry to its place. */
  takeBack(replaced) {
    if (replaced === null) $("draft").value = [this.turns.splice(-2)[0], $("draft").value].filter(Boolean).join("\n");
    else this.turns.splice(-1, 1, replaced);
  }

  draw() {
    const top = $("turns").scrollTop;
    const isAnswering = this.task.request !== null;
    $("turns").replaceChildren(...this.turns.map((text, index) => this.makeTurn(text, index)));
    $("turns").scrollTop = top;
    $("turns").setAttribute("aria-busy", isAnswering);
    for (const id of ["clear", "save-chat"]) $(id).hidden = this.turns.length === 0;
    for (const id of ["send", "clear", "save-chat"]) $(id).disabled = isAnswering;
    $("quit").disabled = !isAnswering;
  }

  /** Makes a turn. One that is complete may be edited, to correct what is saved and what is answered next. */
  makeTurn(text, index) {
    const isAnswer = index % 2 === 1;
    const isLast = index === this.turns.length - 1;
    const isComplete = !(isLast && this.task.request);
    const name = isAnswer ? this.about.settings.name : "You";
    const look = this.ids[index] && makeButton("Look inside",
      () => this.look(this.ids[index], `Answer ${(index + 1) / 2}`));
    const input = ({ target }) => {
      this.turns[index] = target.innerText;
      this.ids[index] = undefined;
      look?.remove();
    };
    const editing = isComplete && { contenteditable: "plaintext-only", role: "textbox", "aria-multiline": "true",
      "aria-label": `${name}, to correct`, input };
    return make("div", { class: isAnswer ? "answer" : "request" },
      make("span", { class: "muted" }, name), make("p", { dir: "auto", ...editing }, text),
      isAnswer && isComplete && make("div", { class: "row" }, makeCopyButton(() => this.turns[index]),
        isLast && makeButton("Retry", () => this.retry()), look));
  }
}
