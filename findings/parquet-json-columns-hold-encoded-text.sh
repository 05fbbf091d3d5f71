#!/usr/bin/env bash
# Expected: a text that datasets or DuckDB wrote to a Parquet file is read from it as the same text.
# Behavior (datasets 5.2.0, duckdb 2.0.1, pyarrow 26.0.1): a column of texts and lists, as chats have, becomes the feature
# Json; it is written with Parquet's logical type JSON, as is a JSON column of DuckDB. pyarrow, pandas and DuckDB return the
# encoding of each value: a text comes with quotation marks and escapes. datasets alone decodes it.
# Seen:
#   feature: Json(decode=True)
#   type in the file: extension<arrow.json>
#   datasets 'a "b"'
#   pyarrow  '"a \\"b\\""'
#   pandas   '"a \\"b\\""'
#   duckdb   '"a \\"b\\""'
#   written by duckdb, read by pyarrow: '"a \\"b\\""'
# Why it matters: a program that reads Parquet with pyarrow trains on quotation marks and backslashes, and finds a text
# where it looks for the parts of a message. Nothing fails.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "datasets==5.2.0" "duckdb==2.0.1" "pyarrow==26.0.1" > /dev/null 2>&1
cat > "$folder/look.py" <<'PYTHON'
import json

import duckdb
import pandas
import pyarrow.parquet
from datasets import load_dataset

with open("rows.jsonl", "w") as file:
    for content in ('a "b"', [{"type": "text", "text": "c"}]):
        file.write(json.dumps({"content": content}) + "\n")
rows = load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache")
rows.to_parquet("rows.parquet")
table = pyarrow.parquet.read_table("rows.parquet")
print("feature:", rows.features["content"])
print("type in the file:", table.schema.field("content").type)
loaded = load_dataset("parquet", data_files="rows.parquet", split="train", cache_dir="cache")
print(f"datasets {loaded[0]['content']!r}")
print(f"pyarrow  {table.to_pylist()[0]['content']!r}")
print(f"pandas   {pandas.read_parquet('rows.parquet').content[0]!r}")
cells = duckdb.sql("select content from 'rows.parquet'").fetchall()
print(f"duckdb   {cells[0][0]!r}")
duckdb.sql("""copy (select to_json('a "b"') as content) to 'duckdb.parquet'""")
table = pyarrow.parquet.read_table("duckdb.parquet")
print(f"written by duckdb, read by pyarrow: {table.to_pylist()[0]['content']!r}")
PYTHON
cd "$folder"
venv/bin/python look.py 2> errors.txt | tee seen.txt
diff <(sed -n 's/^#   //p' "$script") seen.txt
