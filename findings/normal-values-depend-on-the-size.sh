#!/usr/bin/env bash
# Expected: with the same seed, a tensor of 40 normal values begins with the values of a tensor of 20, as torch.rand has it.
# Behavior (torch 2.13.0, CPU): from 16 elements on, values are drawn in blocks of 16, and the last block is drawn again to
# end with the tensor; below 16, another method is used. A larger tensor can share few values, or none.
# Seen:
#   rand : the first 15 of 40 share 15, the first 20 share 20, the first 32 share 32
#   randn: the first 15 of 40 share 0, the first 20 share 4, the first 32 share 24
# Why it matters: one more token in a vocabulary changes random weights of other tokens, and a tensor that is drawn in two
# pieces, as a sharded model may, has other weights than one drawn at once.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0" "numpy>=2" > /dev/null 2>&1
cat > "$folder/look.py" <<'PYTHON'
import torch

for draw in (torch.rand, torch.randn):
    counts = []
    for size in (15, 20, 32):
        few = draw(size, generator=torch.Generator().manual_seed(0))
        many = draw(40, generator=torch.Generator().manual_seed(0))
        counts.append(f"{size}{' of 40' if size == 15 else ''} share {(few == many[:size]).sum()}")
    print(f"{draw.__name__:<5}: the first {', the first '.join(counts)}")
PYTHON
cd "$folder"
venv/bin/python look.py 2> errors.txt | tee seen.txt
diff <(sed -n 's/^#   //p' "$script") seen.txt
