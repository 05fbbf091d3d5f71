#!/usr/bin/env bash
# Expected: a completion model of Vercel's AI SDK sends the prompt that it is given to /v1/completions.
# Behavior (ai 6.0.326, @ai-sdk/openai-compatible 2.0.92): the prompt becomes a dialog between "user:" and "assistant:", and
# a stop text is added.
# Seen:
#   /v1/completions
#   "user:\nOnce upon a\n\nassistant:\n"
#   stop: ["\nuser:"]
# Why it matters: a base model that should continue a text is asked a question in a form that it never saw. The answer looks
# like a bad model's.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --ignore-scripts --prefix . ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7 > /dev/null 2>&1
cat > look.mjs <<'JAVASCRIPT'
import { generateText } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

// No server: this function gets the request and answers it.
const answer = async (url, request) => {
  const body = JSON.parse(request.body);
  console.log(new URL(url).pathname);
  console.log(JSON.stringify(body.prompt));
  console.log("stop:", JSON.stringify(body.stop));
  const choices = [{ index: 0, text: " time", finish_reason: "stop", logprobs: null }];
  const usage = { prompt_tokens: 1, completion_tokens: 1, total_tokens: 2 };
  return Response.json({ id: "1", object: "text_completion", created: 0, model: "m", choices, usage });
};
const provider = createOpenAICompatible({ name: "local", baseURL: "http://localhost/v1", fetch: answer });
await generateText({ model: provider.completionModel("m"), prompt: "Once upon a" });
JAVASCRIPT
node look.mjs 2> errors.txt | tee seen.txt
diff <(sed -n 's/^#   //p' "$script") seen.txt
