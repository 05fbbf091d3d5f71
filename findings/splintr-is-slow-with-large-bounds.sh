#!/usr/bin/env bash
# Expected: a bound that no word reaches, such as \p{L}{1,64} for \p{L}+, changes the speed of a tokenizer little.
# Behavior (splintr-rs 0.22.0, tokenizers 0.23.3): up to a bound of 10, splintr is tens of times as fast as tokenizers; with
# 64 it is several times slower. Ids are right. Nothing warns.
# Seen:
#   {1,9}: same ids, at least 10 times as fast as tokenizers: True
#   {1,64}: same ids, slower than tokenizers: True
#   {1,64} takes at least 50 times as long as {1,9}: True
# Why it matters: bounds like these are what one writes to keep a hostile text from being one endless word. The faster
# library is then the slower one.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "splintr-rs==0.22.0" "tokenizers==0.23.3" "numpy>=2" > /dev/null 2>&1
cat > "$folder/look.py" <<'PYTHON'
import time

import splintr
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

TEXT = "the quick brown fox jumps over " * 5000


def measure(bound):
    """Return the seconds of splintr and of tokenizers."""
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    split = pre_tokenizers.Split(Regex(rf"\s?\p{{L}}{bound}|.|\n"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    fast = splintr.from_json_bytes(tokenizer.to_str().encode())
    assert list(fast.encode("warm up")) == tokenizer.encode("warm up").ids
    start = time.perf_counter()
    ids = fast.encode(TEXT)
    middle = time.perf_counter()
    assert list(ids) == tokenizer.encode(TEXT).ids
    return middle - start, time.perf_counter() - middle


short, short_reference = measure("{1,9}")
long, long_reference = measure("{1,64}")
print(f"{{1,9}}: same ids, at least 10 times as fast as tokenizers: {short_reference > 10 * short}")
print(f"{{1,64}}: same ids, slower than tokenizers: {long > long_reference}")
print(f"{{1,64}} takes at least 50 times as long as {{1,9}}: {long > 50 * short}")
PYTHON
cd "$folder"
venv/bin/python look.py 2> errors.txt | tee seen.txt
diff <(sed -n 's/^#   //p' "$script") seen.txt
