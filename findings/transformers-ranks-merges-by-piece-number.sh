#!/usr/bin/env bash
# Expected: AutoTokenizer converts tokenizer.model to the same tokenizer; SentencePiece merges the pair with the highest
# score first.
# Behavior (transformers 5.24.0, sentencepiece 0.2.3, Mistral 7B's file in mistral-common 1.13.1): the converter ranks
# merges by the number of the piece. Mistral's and Llama 2's pieces of spaces have low numbers and the lowest score, so
# that they are merged first instead of last. Nor is a space put before a text that begins with one.
# Seen:
#   piece 260 '▁▁▁▁' has score -1000000000.0, piece 261 '▁t' -2.0
#   '    return' sentencepiece ['▁▁▁▁', '▁return']
#                transformers  ['▁▁▁▁', 'return']
#   ' Hello'     sentencepiece ['▁', '▁Hello']
#                transformers  ['▁Hello']
#   'Hello you'  sentencepiece ['▁Hello', '▁you']
#                transformers  ['▁Hello', '▁you']
# Why it matters: indented code gets ids that the model has hardly seen. The published tokenizer.json of the same models
# has the right ids, so a folder without it behaves differently from one with it.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "transformers==5.24.0" "tokenizers==0.23.3" "sentencepiece==0.2.3" protobuf > /dev/null 2>&1
"$folder/venv/bin/pip" download -q --no-deps -d "$folder" "mistral-common==1.13.1" > /dev/null 2>&1
unzip -q -p "$folder"/mistral_common-*.whl mistral_common/data/tokenizer.model.v1 > "$folder/tokenizer.model"
cat > "$folder/look.py" <<'PYTHON'
import json

import sentencepiece
from transformers import AutoTokenizer

pieces = sentencepiece.SentencePieceProcessor(model_file="tokenizer.model")
with open("tokenizer_config.json", "w") as file:
    json.dump({"tokenizer_class": "LlamaTokenizer"}, file)
with open("config.json", "w") as file:
    json.dump({"model_type": "llama"}, file)
loaded = AutoTokenizer.from_pretrained(".")
(spaces, low), (letter, high) = ((pieces.id_to_piece(i), pieces.get_score(i)) for i in (260, 261))
print(f"piece 260 {spaces!r} has score {low}, piece 261 {letter!r} {high}")
for text in ("    return", " Hello", "Hello you"):
    print(f"{text!r:<12} sentencepiece {pieces.encode(text, out_type=str)}")
    print(f"{'':<12} transformers  {loaded.tokenize(text)}")
PYTHON
cd "$folder"
venv/bin/python look.py 2> errors.txt | tee seen.txt
diff <(sed -n 's/^#   //p' "$script") seen.txt
