/** The worker of a model's page: it computes the answers to questions, a slice of time for each. */

const SLICE_MILLISECONDS = 40;
const waiting = new Set();  // ids of questions
let inspector;  // a promise

function decodeBase64(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

/** Posts the objects of an answer in batches, as {id, records}, until the page no longer waits for it. */
async function answer(id, name, question) {
  const model = await inspector;
  let records = [];
  let postedAt = performance.now();
  for (const record of model[name](model.parse(question))) {
    if (record) records.push(record);
    if (performance.now() - postedAt < SLICE_MILLISECONDS) continue;
    postMessage({ id, records });
    await new Promise((resolve) => setTimeout(resolve));  // lets messages in
    if (!waiting.has(id)) return;
    records = [];
    postedAt = performance.now();
  }
  postMessage({ id, records, isDone: true });
}

/** The first message has the model; others ask, with a name, or stop an answer. */
addEventListener("message", ({ data: { id, name, question, content, weights } }) => {
  const load = async () => new Inspector(JSON.parse(content), new Weights(decodeBase64(weights)));
  if (content) inspector = load();
  if (!name) return void waiting.delete(id);
  waiting.add(id);
  answer(id, name, question).catch(({ message }) => postMessage({ id, records: [], error: message }));
});
