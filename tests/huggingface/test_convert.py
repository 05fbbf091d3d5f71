"""Random models of transformers, by their config.json and tensors, import as the same function.

SHAPES=300 pytest -o addopts= tests/huggingface   tries more models of each family.
"""

import dataclasses
import json
import os
import random
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
NUM_MODELS = int(os.environ.get("SHAPES", "6"))
SCALED_ROPE = LLAMA3_ROPE | {"original_max_position_embeddings": 24}


def draw_rope(draw: random.Random) -> dict[str, Any]:
    """Draw RoPE's keys: a kind of scaling, in the form of transformers 4 or 5."""
    scaling = {**draw.choice(({}, {"rope_type": "linear", "factor": 2.5}, SCALED_ROPE))}
    theta = {"rope_theta": draw.choice((500.0, 5e5))}
    form = draw.choice(("old", "oldest", "new", "without theta"))
    if form == "new":
        return {"rope_parameters": {"rope_type": "default"} | scaling | theta}
    if form == "oldest" and scaling:
        scaling["type"] = scaling.pop("rope_type")
    scaling_key = {"rope_scaling": scaling or None}
    return scaling_key if form == "without theta" else theta | scaling_key


def draw_windows(draw: random.Random, family: str, num_layers: int) -> dict[str, Any]:
    """Draw the keys of sliding windows."""
    width = {"sliding_window": draw.choice((1, 3, 9))}
    if family == "mistral":
        return draw.choice((width, {"sliding_window": None}, {}))
    if family not in ("qwen2", "qwen3"):
        return draw.choice((width, {}))  # without effect
    kinds = ["sliding_attention", "full_attention"]
    some_layers = {"layer_types": [draw.choice(kinds) for _ in range(num_layers)]}
    layers = draw.choice((some_layers, {"max_window_layers": draw.choice((0, 1))}, {}))
    uses = {"use_sliding_window": True}
    return draw.choice((width | uses | layers, width | uses, width | {"max_window_layers": 0}, {}))


def draw_hf_config(family: str, seed: int) -> dict[str, Any]:
    """Draw a config.json of a family, as transformers 4 or 5 writes it."""
    draw = random.Random(f"{family} {seed}")
    heads = draw.choice((1, 2, 3, 4))
    num_layers = draw.choice((1, 3))
    width = heads * draw.choice((4, 8, 10))
    common = {
        "architectures": [MODEL_FAMILIES[family].architecture],
        "model_type": family,
        "vocab_size": 300,
        "tie_word_embeddings": family != "nanochat" and draw.random() < 0.5,
    }
    if family == "gpt2":
        sizes = {"n_embd": width, "n_head": heads, "n_layer": num_layers, "n_positions": 40}
        activation = draw.choice(("gelu_new", "gelu_pytorch_tanh", "relu"))
        options = {"activation_function": activation, "n_inner": draw.choice((None, 70))}
        options = draw.choice(({}, options))
        return common | sizes | options | draw.choice(({}, {"layer_norm_epsilon": 1e-3}))
    sizes = {
        "hidden_size": width,
        "intermediate_size": draw.choice((32, 50)),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "max_position_embeddings": 40,
    }
    if family in ("llama", "mistral", "qwen2", "qwen3") and (family == "qwen3" or seed % 3 == 0):
        sizes["head_dim"] = draw.choice((6, 12))
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    caps = {"final_logit_softcapping": draw.choice((None, 3.0))} if family == "nanochat" else {}
    options = [biases, caps, {"rms_norm_eps": 1e-3}, draw_rope(draw)]
    options.append(draw_windows(draw, family, num_layers))
    config = common | sizes
    for option in options:
        config |= option if draw.random() < 0.7 else {}
    return config


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


@pytest.mark.parametrize("family", MODEL_FAMILIES)
@torch.no_grad()
def test_a_random_model_computes_the_same_and_returns_bit_for_bit(family: str, tmp_path: Path):
    for seed in range(NUM_MODELS):
        torch.manual_seed(seed)
        dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
        path = tmp_path / str(seed)
        hf_model = save_hf_model(path, draw_hf_config(family, seed), dtype)
        run = tmp_path / f"{seed}-run"
        huggingface.main(["import", str(path), str(run), "--tokenizer", "byte"])
        model = load_model(find_checkpoint(run))
        expected = hf_model(TOKENS).logits
        error = (model(TOKENS) - expected).abs().max()
        assert error <= 1e-4 * max(1.0, expected.abs().max().item()), path / "config.json"
        hf_family, config = huggingface.choose_family(model.config, family, qwen2_tokenizer())
        tensors = to_hf(rewrite_params(model, config), hf_family)
        assert same_tensors(tensors, expected_tensors(hf_model))
        _, again = from_hf_config(to_hf_config(config, hf_family), "")
        assert again.layer_windows == config.layer_windows
        again = dataclasses.replace(again, windows=config.windows)
        assert rewrite_config(again, hf_family) == config
