"""The models and optimizers that ours are measured against."""

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.core.errors import UserError
from model import ModelConfig, MultiHeadAttention


def make_adamw(model: nn.Module) -> torch.optim.AdamW:
    """Make PyTorch's fastest AdamW."""
    return torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1, fused=True)


def make_hf_gpt2(config: ModelConfig) -> Any:
    """Make transformers' GPT-2 of the same sizes. Raises UserError if it is not installed."""
    if not importlib.util.find_spec("transformers"):
        raise UserError("train, decode: need transformers. Install it: pip install transformers")
    transformers = importlib.import_module("transformers")
    hf_config = transformers.GPT2Config(
        **gpt2_sizes(config),
        n_positions=config.context_length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = transformers.GPT2LMHeadModel(hf_config)
    model.generation_config.pad_token_id = 0
    return model


def make_nanogpt(clone: Path, config: ModelConfig, device: torch.device) -> tuple[Any, Any]:
    """Make the model and the optimizer of a clone of nanoGPT, of the same sizes."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", clone / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    sizes = gpt2_sizes(config)
    context_length = config.context_length
    nanogpt_config = module.GPTConfig(**sizes, block_size=context_length, dropout=0.0, bias=True)
    with contextlib.redirect_stdout(sys.stderr):
        model = module.GPT(nanogpt_config).to(device)
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device.type)
    return torch.compile(model) if device.type == "cuda" else model, optimizer


def gpt2_sizes(config: ModelConfig) -> dict[str, Any]:
    """Return the sizes of a model as GPT-2's settings."""
    return {
        "vocab_size": config.vocab_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.d_model,
    }


class JoinedAttention(MultiHeadAttention):
    """The same attention with one query-key-value matrix instead of one for each head."""

    fused_qkv: Any
    heads: Any

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        layers: list[Any] = self.qkv_layers()
        weight = torch.cat([layer.weight for layer in layers])
        self.fused_qkv = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.fused_qkv.weight.data.copy_(weight)
        for head in self.heads:  # only their number and norms are used
            head.query = head.key = head.value = nn.Identity()
