/** The chat of the live page. `look` shows the tokens of an answer; `readQuestion` returns the settings. */
class Chat {
  constructor(about, readQuestion, look) {
    Object.assign(this, { about, readQuestion, look, turns: [], ids: [], retries: 0, unanswered: null });
    this.task = new Task("talk-status", () => this.draw());
    on("send", "click", () => this.send());
    onEnter("draft", () => this.send());
    on("quit", "click", () => this.task.stop());
    on("clear", "click", () => this.clear());
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
    this.unanswered = { replaced };
    const end = this.task.run("chat", query, (records) => {
      last = records.at(-1);
      const text = records.map((record) => record.text ?? "").join("");
      if (text || last.end) this.unanswered = null;
      turns[turns.length - 1] += text;
      this.appendText(text);
    }, () => {
      if (!last.end) throw new Error(INCOMPLETE);
      this.ids[turns.length - 1] = last.ids;
      const note = last.is_shortened ? " The chat is longer than the context: its beginning is left out." : "";
      return `Done: ${last.end}.${note}`;
    });
    $("turns").scrollTop = $("turns").scrollHeight;
    await end;
    this.takeBack();
    this.draw();
  }

  appendText(text) {
    const box = $("turns");
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    box.lastChild.querySelector("p").append(text);
    say("Answering… Send the next message when it is done, or press Escape.", false, "talk-status");
    if (follows) box.scrollTop = box.scrollHeight;
  }

  /** Without an answer, returns the question to the draft, or the answer before a retry to its place. */
  takeBack() {
    if (!this.unanswered) return;
    const { replaced } = this.unanswered;
    this.unanswered = null;
    if (replaced === null) $("draft").value = [this.turns.splice(-2)[0], $("draft").value].filter(Boolean).join("\n");
    else this.turns.splice(-1, 1, replaced);
  }

  draw() {
    const top = $("turns").scrollTop;
    const isAnswering = this.task.request !== null;
    $("turns").replaceChildren(...this.turns.map((text, index) => this.makeTurn(text, index)));
    $("turns").scrollTop = top;
    $("turns").setAttribute("aria-busy", isAnswering);
    $("clear").hidden = this.turns.length === 0;
    for (const id of ["send", "clear"]) $(id).disabled = isAnswering;
    $("quit").disabled = !isAnswering;
  }

  makeTurn(text, index) {
    const isAnswer = index % 2 === 1;
    const isLast = index === this.turns.length - 1;
    const look = () => this.look(this.ids[index], `Answer ${(index + 1) / 2}`);
    const isComplete = isAnswer && !(isLast && this.task.request);
    return make("div", { class: isAnswer ? "answer" : "request" },
      make("span", { class: "muted" }, isAnswer ? this.about.settings.name : "You"), make("p", { dir: "auto" }, text),
      isComplete && make("div", { class: "row" }, makeCopyButton(text),
        isLast && makeButton("Retry", () => this.retry()), this.ids[index] && makeButton("Look inside", look)));
  }
}
