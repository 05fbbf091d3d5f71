#!/usr/bin/env bash
# Expected: transformers.js splits words by the pattern of tokenizer.json as the library tokenizers does.
# Behavior (@huggingface/transformers 4.3.1): it turns the possessive `\s++$` of cl100k_base (GPT-4's tokenizer) into `\s+$`
# and matches with the flag m, so that `$` matches at the end of each line, too. Without `$`, the ids are right.
# Seen:
#   "a\n\nb" with \s++$         ["a","Ċ","Ċ","b"]
#   "a\n\nb" with \s+(?![\s\S]) ["a","ĊĊ","b"]
# Why it matters: tiktoken and tokenizers give a, ĊĊ, b. Every empty line of a prompt gets other ids in a browser than in
# training, where the token of two line ends is one of the most frequent.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --ignore-scripts --prefix . @huggingface/transformers@4.3.1 > /dev/null 2>&1
cat > look.mjs <<'JAVASCRIPT'
import { PreTrainedTokenizer } from "@huggingface/transformers";

// The bytes of GPT-2's alphabet, and one merge: two line ends.
const printable = [[33, 126], [161, 172], [174, 255]];
const isPrintable = (byte) => printable.some(([first, last]) => byte >= first && byte <= last);
let others = 256;
const alphabet = Array.from({ length: 256 }, (_, byte) => String.fromCharCode(isPrintable(byte) ? byte : others++));
const vocab = Object.fromEntries([...alphabet, "ĊĊ"].map((token, id) => [token, id]));
for (const end of [String.raw`\s++$`, String.raw`\s+(?![\s\S])`]) {
  const pattern =
    String.raw`'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|` +
    end + String.raw`|\s*[\r\n]|\s+(?!\S)|\s`;
  const split = { type: "Split", pattern: { Regex: pattern }, behavior: "Isolated", invert: false };
  const bytes = { type: "ByteLevel", add_prefix_space: false, trim_offsets: true, use_regex: false };
  const tokenizer = new PreTrainedTokenizer({
    version: "1.0", added_tokens: [], normalizer: null, post_processor: null,
    pre_tokenizer: { type: "Sequence", pretokenizers: [split, bytes] },
    decoder: { type: "ByteLevel", add_prefix_space: true, trim_offsets: true, use_regex: true },
    model: { type: "BPE", vocab, merges: [["Ċ", "Ċ"]], dropout: null, unk_token: null },
  }, {});
  console.log(`"a\\n\\nb" with ${end.padEnd(13)} ${JSON.stringify(tokenizer.tokenize("a\n\nb"))}`);
}
JAVASCRIPT
node look.mjs 2> errors.txt | tee seen.txt
diff <(sed -n 's/^#   //p' "$script") seen.txt
