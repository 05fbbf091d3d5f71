#!/usr/bin/env bash
# Expected: the converter of ctranslate2 carries Llama 3's RoPE scaling over, or refuses it: its specification has a field
# for it.
# Behavior (ctranslate2 4.8.5, transformers 5.24.0): the conversion succeeds without a warning, and the logits are those of
# the same weights without scaling. Linear scaling is computed.
# Seen:
#   default: largest difference to transformers below 0.001: True
#   linear: largest difference to transformers below 0.001: True
#   llama3: largest difference to transformers below 0.001: False
#   llama3: largest difference to transformers without scaling below 0.001: True
# Why it matters: Llama 3.1 and 3.2 have this scaling. Their converted models load and answer, but are other models.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "ctranslate2==4.8.5" "transformers==5.24.0" "tokenizers==0.23.3" "torch==2.13.0" > /dev/null 2>&1
cat > "$folder/look.py" <<'PYTHON'
import ctranslate2
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROPE = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
IDS = torch.arange(64, 164)[None]


def build(name):
    """Return a random Llama with this RoPE; its weights are the same for all."""
    rope = {**ROPE[name], "rope_theta": 500000.0}
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(vocab_size=258, bos_token_id=256, eos_token_id=257, rope_parameters=rope, **sizes)
    model = LlamaForCausalLM(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
    return model


@torch.no_grad()
def logits(name):
    return build(name)(IDS).logits.numpy()


vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokenizer = Tokenizer(models.BPE({**vocab, "<s>": 256, "</s>": 257}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
special_tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
for name in ROPE:
    build(name).save_pretrained("model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens).save_pretrained("model")
    ctranslate2.converters.TransformersConverter("model").convert("converted", force=True)
    generator = ctranslate2.Generator("converted", compute_type="float32")
    converted = np.array(generator.forward_batch([IDS[0].tolist()]))
    is_equal = abs(converted - logits(name)).max() < 1e-3
    print(f"{name}: largest difference to transformers below 0.001: {is_equal}")
is_plain = abs(converted - logits("default")).max() < 1e-3
print(f"llama3: largest difference to transformers without scaling below 0.001: {is_plain}")
PYTHON
cd "$folder"
venv/bin/python look.py 2> errors.txt | tee seen.txt
diff <(sed -n 's/^#   //p' "$script") seen.txt
