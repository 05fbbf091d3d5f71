"""Models of transformers, by their config.json and tensors, import as the same function."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from helpers import same_tensors
from test_huggingface import LLAMA3_ROPE, qwen2_tokenizer

import huggingface
from engine.huggingface.convert import (
    from_hf_config,
    rewrite_config,
    rewrite_params,
    to_hf,
    to_hf_config,
)
from engine.huggingface.families import MODEL_FAMILIES
from engine.runs.checkpoint import load_model
from engine.runs.run_files import find_checkpoint

transformers.logging.set_verbosity_error()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = {"hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 50, "num_key_value_heads": 2, "max_position_embeddings": 40}
GPT2_SIZES = {"n_embd": 40, "n_head": 4, "n_layer": 3, "n_positions": 40}
SCALED_ROPE = LLAMA3_ROPE | {"original_max_position_embeddings": 24}
WINDOW = {"sliding_window": 3}
USED = WINDOW | {"use_sliding_window": True}
LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
TIED = {"tie_word_embeddings": True}
# Keys of config.json, as transformers 4 or 5 writes them.
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", TIED | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.5}}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "rope_scaling": SCALED_ROPE}),
    ("llama", WINDOW | {"rope_parameters": SCALED_ROPE | {"rope_theta": 500.0}, "head_dim": 6}),
    ("mistral", WINDOW | {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    ("mistral", TIED | {"sliding_window": None, "head_dim": 12}),
    ("mistral", {"num_key_value_heads": 4}),
    ("qwen2", WINDOW | {"max_window_layers": 0}),
    ("qwen2", TIED | USED | {"max_window_layers": 1}),
    ("qwen2", USED | LAYERS),
    ("qwen3", TIED | USED | LAYERS | {"head_dim": 12}),
    ("qwen3", {"head_dim": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("qwen3", USED | {"head_dim": 10, "rope_scaling": None}),
    ("nanochat", {"final_logit_softcapping": 3.0}),
    ("nanochat", {"final_logit_softcapping": None, "num_key_value_heads": 4}),
    ("gpt2", TIED),
    ("gpt2", TIED | {"activation_function": "relu", "layer_norm_epsilon": 1e-3}),
    ("gpt2", {"activation_function": "gelu_pytorch_tanh", "n_inner": 70}),
]


def save_hf_model(path: Path, hf_config: dict[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    """Write a config.json, and random weights of a model that transformers makes by it.

    Weights of bfloat16 are in two files, and those of GPT-2 in float16 are as in old files.
    """
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf_config))
    config = transformers.AutoConfig.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.2)
        param.data = param.data.to(dtype).float()
    state = {name: value.to(dtype).contiguous() for name, value in expected_tensors(model).items()}
    files = {name: "model.safetensors" for name in state}
    if dtype == torch.bfloat16:
        files = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(state)}
        (path / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": files})
        )
    for file in set(files.values()):
        tensors = {name: value for name, value in state.items() if files[name] == file}
        if hf_config["model_type"] == "gpt2" and dtype == torch.float16:
            tensors = {name.removeprefix("transformer."): tensors[name] for name in tensors}
            tensors["h.0.attn.bias"] = torch.ones(1, 1, 40, 40, dtype=torch.uint8)
        safetensors.torch.save_file(tensors, path / file)
    return model


def expected_tensors(hf_model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model, without a copy of tied embeddings."""
    is_tied = hf_model.config.tie_word_embeddings
    state = hf_model.state_dict()
    return {name: state[name] for name in state if not (is_tied and name == "lm_head.weight")}


TOKENS = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("number", "family", "keys"), [(i, *c) for i, c in enumerate(CONFIGS)])
@torch.no_grad()
def test_a_model_computes_the_same_and_returns_bit_for_bit(number, family, keys, tmp_path: Path):
    architecture = MODEL_FAMILIES[family].architecture
    sizes = GPT2_SIZES if family == "gpt2" else SIZES
    hf_config = {"architectures": [architecture], "model_type": family, "vocab_size": 300} | sizes
    hf_config |= {"tie_word_embeddings": False} | keys
    torch.manual_seed(number)
    hf_model = save_hf_model(tmp_path / "hf", hf_config, DTYPES[number % 3])
    huggingface.main(["import", str(tmp_path / "hf"), str(tmp_path / "run"), "--tokenizer", "byte"])
    model = load_model(find_checkpoint(tmp_path / "run"))
    expected = hf_model(TOKENS).logits
    error = (model(TOKENS) - expected).abs().max()
    assert error <= 1e-4 * max(1.0, expected.abs().max().item())
    hf_family, config = huggingface.choose_family(model.config, family, qwen2_tokenizer())
    tensors = to_hf(rewrite_params(model, config), hf_family)
    assert same_tensors(tensors, expected_tensors(hf_model))
    _, again = from_hf_config(to_hf_config(config, hf_family), "")
    assert again.layer_windows == config.layer_windows
    again = dataclasses.replace(again, windows=config.windows)
    assert rewrite_config(again, hf_family) == config
