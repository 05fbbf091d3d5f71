#!/usr/bin/env bash
# Expected: JSON has no dates, so a text in a JSON file is a text in the data set.
# Behavior (datasets 5.2.0, pyarrow 26.0.1): if all texts of a column look like dates, its values are datetime objects, by
# the inference of pyarrow's JSON reader; one other text, and they stay texts. The spelling of the file is lost.
# Seen:
#   ['2024-01-05']                           timestamp[s] datetime.datetime(2024, 1, 5, 0, 0)
#   ['2024-01-05 10:00:00']                  timestamp[s] datetime.datetime(2024, 1, 5, 10, 0)
#   ['2024-01-05', 'a text']                 string '2024-01-05'
#   ['05.01.2024']                           string '05.01.2024'
# Why it matters: answers of a task about dates are no texts any more, and "2024-01-05T00:00:00" and "2024-01-05" become
# one value. A part of the file, or one more row, changes the type.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "datasets==5.2.0" "pyarrow==26.0.1" > /dev/null 2>&1
cat > "$folder/look.py" <<'PYTHON'
import json

from datasets import load_dataset

for i, texts in enumerate((["2024-01-05"], ["2024-01-05 10:00:00"], ["2024-01-05", "a text"], ["05.01.2024"])):
    with open(f"{i}.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    rows = load_dataset("json", data_files=f"{i}.jsonl", split="train", cache_dir="cache")
    print(f"{texts!r:<40} {rows.features['text'].dtype} {rows[0]['text']!r}")
PYTHON
cd "$folder"
venv/bin/python look.py 2> errors.txt | tee seen.txt
diff <(sed -n 's/^#   //p' "$script") seen.txt
