#!/usr/bin/env bash
# Expected: mlx-lm reads a Llama folder that transformers 5 has saved: its config.json names "rope_theta", if not at the
# top.
# Behavior (mlx-lm 0.32.2, transformers 5.24.0): transformers 5 writes base and scaling of RoPE below the new key
# "rope_parameters" only. Llama's arguments in mlx-lm do not know that key, and take their default base and no scaling.
# Seen:
#   keys at the top of config.json: ['rope_parameters']
#   mlx-lm: base 10000, scaling None
#   with the keys of transformers 4: base 500000.0, scaling llama3
# Why it matters: the model loads without a warning and writes worse text. A program that exports models has to write both
# forms.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "mlx-lm==0.32.2" "mlx[cpu]==0.32.4" "transformers==5.24.0" > /dev/null 2>&1
cat > "$folder/look.py" <<'PYTHON'
import json

from mlx_lm.models.llama import ModelArgs
from transformers import LlamaConfig

SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
LlamaConfig(rope_parameters={**SCALING, "rope_theta": 500000.0}, **sizes).save_pretrained(".")
with open("config.json") as file:
    config = json.load(file)
print("keys at the top of config.json:", [key for key in config if key.startswith("rope")])
args = ModelArgs.from_dict(config)
print(f"mlx-lm: base {args.rope_theta}, scaling {args.rope_scaling}")
args = ModelArgs.from_dict({**config, "rope_theta": 500000.0, "rope_scaling": SCALING})
print(f"with the keys of transformers 4: base {args.rope_theta}, scaling {args.rope_scaling['rope_type']}")
PYTHON
cd "$folder"
venv/bin/python look.py 2> errors.txt | tee seen.txt
diff <(sed -n 's/^#   //p' "$script") seen.txt
