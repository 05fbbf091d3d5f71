/** Questions to the server of the live page, or to the worker of a saved page, which has the model. */

const saved = document.getElementById("weights");
const PLACE = saved ? "The model is in this file, and computes here." : "Only this machine can open this page.";
const token = encodeURIComponent(new URLSearchParams(location.search).get("token") ?? "");  // letters of a header
const WAITING = "Waiting for the model, which answers one page at a time…";
const INCOMPLETE = "The answer is incomplete; see the terminal.";
const BATCH_MILLISECONDS = 40;  // to draw each object alone would block the page

/** Sends a question; `take` gets the objects of the answer, in batches. Throws an Error with the server's message. */
async function askServer(name, question, take, signal) {
  const failWith = (text) => (error) => {
    throw error.name === "AbortError" ? error : new Error(text);
  };
  const headers = { "Content-Type": "application/json", "X-Token": token };
  const answer = await fetch(`/${name}`, { method: "POST", headers, body: JSON.stringify(question), signal })
    .catch(failWith("The server does not answer. Start sample.py --page again."));
  if (!answer.ok) {
    const { error } = await answer.json().catch(failWith("The server failed; see the terminal."));
    throw new Error(error.message);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let timer = 0;
  const records = [];
  const flush = () => {
    timer = clearTimeout(timer);
    if (records.length) take(records.splice(0));
  };
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(failWith(INCOMPLETE));
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      records.push(...lines.map((line) => JSON.parse(line)));
      timer ||= setTimeout(flush, BATCH_MILLISECONDS);
    }
  } finally {
    flush();
  }
}

/** Starts the worker of a saved page; returns a function that asks it, as askServer() asks the server. */
function startWorker() {
  const source = new Blob([$("worker").textContent], { type: "text/javascript" });
  const worker = new Worker(URL.createObjectURL(source));
  const questions = new Map();
  worker.addEventListener("message", ({ data: { id, records, error, isDone } }) => {
    const { take, resolve, reject } = questions.get(id) ?? {};
    if (records.length) take?.(records);
    if (isDone) resolve?.();
    if (error) reject?.(new Error(error));
    if (isDone || error) questions.delete(id);
  });
  worker.postMessage({ content: $("content").textContent, weights: saved.textContent });
  let id = 0;
  return (name, question, take, signal) => new Promise((resolve, reject) => {
    questions.set(++id, { take, resolve, reject });
    const stop = (stopped) => {
      questions.delete(stopped);
      worker.postMessage({ id: stopped });
      reject(signal.reason);
    };
    signal?.addEventListener("abort", stop.bind(null, id));
    worker.postMessage({ id, name, question });
  });
}

const ask = saved ? startWorker() : askServer;

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
    say(WAITING, false, this.statusId);
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
