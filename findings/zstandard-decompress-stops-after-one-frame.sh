#!/usr/bin/env bash
# Expected: decompress of Python's zstandard package returns all that was compressed, as those of gzip, bz2 and lzma do: a
# file may consist of several frames, as parallel and appending writers make them.
# Behavior (zstandard 0.25.0): decompress, read_to_iter and decompressobj return the first frame and no error. stream_reader
# and open return all of them.
# Seen:
#   gzip.decompress        b'one two'
#   bz2.decompress         b'one two'
#   lzma.decompress        b'one two'
#   zstandard.decompress   b'one '
#   zstd read_to_iter      b'one '
#   zstd decompressobj     b'one '
#   zstd stream_reader     b'one two'
#   zstandard.open         b'one two'
# Why it matters: a shard of text that was compressed on several cores loses all but its beginning, which is a valid file
# of whole lines. decompress(..., allow_extra_data=False) raises.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "zstandard==0.25.0" > /dev/null 2>&1
cat > "$folder/look.py" <<'PYTHON'
import bz2
import gzip
import io
import lzma

import zstandard

for module in (gzip, bz2, lzma, zstandard):
    data = module.compress(b"one ") + module.compress(b"two")
    print(f"{module.__name__ + '.decompress':<22} {module.decompress(data)}")
decompressor = zstandard.ZstdDecompressor()
print(f"{'zstd read_to_iter':<22} {b''.join(decompressor.read_to_iter(data))}")
print(f"{'zstd decompressobj':<22} {decompressor.decompressobj().decompress(data)}")
print(f"{'zstd stream_reader':<22} {decompressor.stream_reader(io.BytesIO(data)).read()}")
print(f"{'zstandard.open':<22} {zstandard.open(io.BytesIO(data)).read()}")
PYTHON
cd "$folder"
venv/bin/python look.py 2> errors.txt | tee seen.txt
diff <(sed -n 's/^#   //p' "$script") seen.txt
