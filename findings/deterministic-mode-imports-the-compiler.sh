#!/usr/bin/env bash
# Expected: torch.use_deterministic_algorithms(True) sets a flag of the dispatcher, in no time.
# Behavior (torch 2.13.0): it imports torch._dynamo and torch._inductor, hundreds of modules and seconds of a start, also
# where nothing is compiled; reading the flag imports nothing.
# Seen:
#   after reading the flag: False
#   after setting the flag: True
# Why it matters: a program that sets and restores the mode around a few operations, or in a short process, pays for the
# import of a compiler.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0" "numpy>=2" > /dev/null 2>&1
cat > "$folder/look.py" <<'PYTHON'
import sys

import torch

torch.are_deterministic_algorithms_enabled()
print("after reading the flag:", "torch._inductor" in sys.modules)
torch.use_deterministic_algorithms(True)
print("after setting the flag:", "torch._inductor" in sys.modules)
PYTHON
cd "$folder"
venv/bin/python look.py | tee seen.txt
diff <(sed -n 's/^#   //p' "$script") seen.txt
