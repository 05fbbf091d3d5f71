/** Questions to the worker of the page, which has the model. */

const worker = new Worker(URL.createObjectURL(new Blob([$("worker").textContent], { type: "text/javascript" })));
const questions = new Map();

worker.addEventListener("message", ({ data: { id, records, error, isDone } }) => {
  const { take, resolve, reject } = questions.get(id) ?? {};
  if (records.length) take?.(records);
  if (isDone) resolve?.();
  if (error) reject?.(new Error(error));
  if (isDone || error) questions.delete(id);
});
worker.postMessage({ content: $("data").textContent, weights: $("weights").textContent });

let lastId = 0;

/** Asks a question; `take` gets the objects of the answer, in batches. Throws an Error with the worker's message. */
function ask(name, question, take, signal) {
  const id = ++lastId;
  return new Promise((resolve, reject) => {
    questions.set(id, { take, resolve, reject });
    signal?.addEventListener("abort", () => {
      questions.delete(id);
      worker.postMessage({ id });
      reject(signal.reason);
    });
    worker.postMessage({ id, name, question });
  });
}

/** Shows a status text; a problem stands out. */
function say(text, isBad = false, id = "status") {
  $(id).textContent = text;
  $(id).classList.toggle("bad", isBad);
}

/** One question at a time: a new one cancels the one before. */
class Task {
  constructor(statusId, onChange) {
    Object.assign(this, { statusId, onChange, request: null });
  }

  stop() {
    this.request?.abort();
  }

  /** Asks, and says `conclude()` at the end; returns whether the answer is complete. */
  async run(name, question, take, conclude) {
    this.stop();
    const request = new AbortController();
    this.request = request;
    this.onChange(true);
    say("Waiting for the model…", false, this.statusId);
    const isCurrent = () => request === this.request;
    const problem = await ask(name, question, (records) => isCurrent() && take(records), request.signal)
      .then(() => isCurrent() && say(conclude(), false, this.statusId))
      .catch((error) => error);
    if (!isCurrent()) return false;
    if (problem?.name === "AbortError") say("Stopped.", false, this.statusId);
    else if (problem) say(problem.message, true, this.statusId);
    this.request = null;
    this.onChange(false);
    return !problem;
  }
}
