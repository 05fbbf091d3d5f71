#!/usr/bin/env bash
# Expected: tokenizer.json says how a text is split into words, so AutoTokenizer gives the ids that the file gives.
# Behavior (transformers 5.24.0, tokenizers 0.23.3): with "tokenizer_class": "GPT2Tokenizer" in tokenizer_config.json, only
# vocabulary and merges are taken from the file; words are split by GPT-2's own pattern. A file that splits numbers into
# digits, as SmolLM's does, gets other ids, without a warning. save_pretrained writes the other pattern back.
# Seen:
#   the file                  ['1', '1', 'Ġ', '1', '1', '1']
#   PreTrainedTokenizerFast   ['1', '1', 'Ġ', '1', '1', '1']
#   GPT2Tokenizer             ['11', 'Ġ', '11', '1']
#   GPT2Tokenizer, saved      ['11', 'Ġ', '11', '1']
# Why it matters: models with patterns of their own name this class, and their loaders take the file to be the truth. A
# model then reads ids that it was never trained on, and the loss is a little worse.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "transformers==5.24.0" "tokenizers==0.23.3" > /dev/null 2>&1
cat > "$folder/look.py" <<'PYTHON'
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokenizer = Tokenizer(models.BPE({**vocab, "11": 256, "<|endoftext|>": 257}, [("1", "1")]))
steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.save("tokenizer.json")
print(f"{'the file':<25}", tokenizer.encode("11 111").tokens)
for name in ("PreTrainedTokenizerFast", "GPT2Tokenizer"):
    with open("tokenizer_config.json", "w") as file:
        json.dump({"tokenizer_class": name, "eos_token": "<|endoftext|>"}, file)
    loaded = AutoTokenizer.from_pretrained(".")
    print(f"{name:<25}", loaded.tokenize("11 111"))
loaded.save_pretrained("saved")
saved = Tokenizer.from_file("saved/tokenizer.json")
print(f"{'GPT2Tokenizer, saved':<25}", saved.encode("11 111").tokens)
PYTHON
cd "$folder"
venv/bin/python look.py 2> errors.txt | tee seen.txt
diff <(sed -n 's/^#   //p' "$script") seen.txt
