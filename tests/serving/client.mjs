// Asks a server everything that openai for JavaScript has for it; prints the answers as JSON.
import { createRequire } from "node:module";
import process from "node:process";

const [folder, baseURL] = process.argv.slice(2);
const { default: OpenAI } = await import(createRequire(`${folder}/`).resolve("openai"));
const client = new OpenAI({ baseURL, apiKey: "secret", maxRetries: 0 });
const [model] = (await client.models.list()).data;
const body = { model: model.id, max_tokens: 20, seed: 2 };
const chat = { ...body, messages: [{ role: "user", content: "Hello" }], frequency_penalty: 1 };

async function read(stream, textOf) {
  let text = "";
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices.length ? textOf(chunk.choices[0]) ?? "" : "";
    usage = chunk.usage ?? usage;
  }
  return { text, usage };
}

const options = { stream: true, stream_options: { include_usage: true } };
const whole = await client.completions.create({ ...body, prompt: "The cat" });
const answer = await client.chat.completions.create(chat);
const failure = await client.chat.completions.create({ ...chat, temperature: 3 }).catch((error) => error);
console.log(JSON.stringify({
  model: (await client.models.retrieve(model.id)).id,
  text: { text: whole.choices[0].text, usage: whole.usage },
  ids: (await client.completions.create({ ...body, prompt: [...Buffer.from("The cat")] })).choices[0].text,
  stop: (await client.completions.create({ ...body, prompt: "The cat", stop: whole.choices[0].text[5] })).choices[0],
  texts: await read(await client.completions.create({ ...body, ...options, prompt: "The cat" }), (choice) => choice.text),
  answer: { text: answer.choices[0].message.content, usage: answer.usage },
  answers: await read(await client.chat.completions.create({ ...chat, ...options }), (choice) => choice.delta.content),
  failure: [failure.constructor.name, failure.status, failure.param],
}));
