"""Model families of transformers: how each names the settings and the weights of a GPT."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from model import ModelConfig

# Field of ModelConfig → keys of config.json that have its value.
LLAMA_KEYS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "activation": "hidden_act",
    "norm_epsilon": "rms_norm_eps",
    "bias": "attention_bias",
    "tie_embeddings": "tie_word_embeddings",
}
ANY_HEAD_KEYS = {**LLAMA_KEYS, "head_dim": "head_dim"}
GPT2_KEYS = {
    "vocab_size": "vocab_size",
    "context_length": "n_positions",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "d_model": "n_embd",
    "d_ff": "n_inner",
    "activation": "activation_function",
    "norm_epsilon": "layer_norm_epsilon",
    "dropout": "resid_pdrop embd_pdrop attn_pdrop",
    "tie_embeddings": "tie_word_embeddings",
}
# Module of model.py → module of transformers; N is a layer's number. Heads are concatenated.
LLAMA_MODULES = {
    "token_embedding": "model.embed_tokens",
    "blocks.N.attention_norm": "model.layers.N.input_layernorm",
    "blocks.N.attention.query": "model.layers.N.self_attn.q_proj",
    "blocks.N.attention.key": "model.layers.N.self_attn.k_proj",
    "blocks.N.attention.value": "model.layers.N.self_attn.v_proj",
    "blocks.N.attention.query_norm": "model.layers.N.self_attn.q_norm",
    "blocks.N.attention.key_norm": "model.layers.N.self_attn.k_norm",
    "blocks.N.attention.projection": "model.layers.N.self_attn.o_proj",
    "blocks.N.feed_forward_norm": "model.layers.N.post_attention_layernorm",
    "blocks.N.feed_forward.gate": "model.layers.N.mlp.gate_proj",
    "blocks.N.feed_forward.expand": "model.layers.N.mlp.up_proj",
    "blocks.N.feed_forward.contract": "model.layers.N.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
NANOCHAT_MODULES = {
    **LLAMA_MODULES,
    "blocks.N.feed_forward.expand": "model.layers.N.mlp.fc1",
    "blocks.N.feed_forward.contract": "model.layers.N.mlp.fc2",
}
GPT2_MODULES = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "blocks.N.attention_norm": "transformer.h.N.ln_1",
    "blocks.N.attention.query": "transformer.h.N.attn.c_attn",
    "blocks.N.attention.key": "transformer.h.N.attn.c_attn",
    "blocks.N.attention.value": "transformer.h.N.attn.c_attn",
    "blocks.N.attention.projection": "transformer.h.N.attn.c_proj",
    "blocks.N.feed_forward_norm": "transformer.h.N.ln_2",
    "blocks.N.feed_forward.expand": "transformer.h.N.mlp.c_fc",
    "blocks.N.feed_forward.contract": "transformer.h.N.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
# Settings that convert.py converts without a table, and dropout, which inference does not have.
FREE_SETTINGS = {"num_kv_heads", "head_dim", "windows", "rope_base", "rope_scaling", "dropout"}


@dataclass(frozen=True)
class Family:
    """How a model class of transformers represents a GPT (models/…/modeling_….py there)."""

    architecture: str
    model_type: str
    # Setting → its supported values. Settings that are neither here nor in ``settings`` must have
    # the default of ModelConfig.
    supports: dict[str, tuple]
    settings: dict[str, str] = field(default_factory=lambda: ANY_HEAD_KEYS)
    modules: dict[str, str] = field(default_factory=lambda: LLAMA_MODULES)
    fixed: dict[str, Any] = field(default_factory=dict)  # other keys, with their only value
    windows: Literal["none", "one for all layers", "one width or 0 for each layer"] = "none"
    flips_rope: bool = True  # its RoPE rotates in the other direction than model.py
    transposed: bool = False  # matrices of the blocks are (input, output)

    def supported_values(self, config_class: type[ModelConfig] = ModelConfig) -> dict[str, tuple]:
        """Map each setting that is restricted to the values that it may have."""
        free = self.settings.keys() | FREE_SETTINGS
        restricted = [field for field in fields(config_class) if field.name not in free]
        return {field.name: (field.default,) for field in restricted} | self.supports


GATED_RMS: dict[str, tuple] = {"norm": ("weighted_rmsnorm",), "activation": ("swiglu",)}
# By the value of --family. "auto" takes the first that supports the model: more programs run it.
MODEL_FAMILIES: dict[str, Family] = {
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "qwen2",
        {**GATED_RMS, "qk_norm": (False,), "bias": (False,), "qkv_bias": (True,)},
        settings={name: key for name, key in ANY_HEAD_KEYS.items() if name != "bias"},
        windows="one width or 0 for each layer",
    ),
    "llama": Family(
        "LlamaForCausalLM",
        "llama",
        {**GATED_RMS, "qk_norm": (False,)},
        settings={**ANY_HEAD_KEYS, "bias": "attention_bias mlp_bias"},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "qwen3",
        {**GATED_RMS, "bias": (False,)},
        windows="one width or 0 for each layer",
    ),
    "mistral": Family(
        "MistralForCausalLM",
        "mistral",
        {**GATED_RMS, "qk_norm": (False,), "bias": (False,)},
        windows="one for all layers",
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "gpt2",
        {
            "position": ("learned",),
            "norm": ("layernorm",),
            "activation": ("gelu", "relu", "relu2"),
            "qk_norm": (False,),
            "bias": (True,),
        },
        settings=GPT2_KEYS,
        modules=GPT2_MODULES,
        fixed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        flips_rope=False,
        transposed=True,
    ),
    "nanochat": Family(
        "NanoChatForCausalLM",
        "nanochat",
        {"activation": ("relu2", "gelu", "relu"), "bias": (False,), "tie_embeddings": (False,)},
        settings={**LLAMA_KEYS, "logit_softcap": "final_logit_softcapping"},
        modules=NANOCHAT_MODULES,
        flips_rope=False,
    ),
}


def unsupported_settings(config: ModelConfig, family: Family) -> list[str]:
    """List the settings that a family cannot represent, and what it supports instead."""
    supported = family.supported_values(type(config))
    if "num_kv_heads" not in family.settings:
        supported["num_kv_heads"] = (None, config.num_heads)
    if "head_dim" not in family.settings and config.head_width * config.num_heads != config.d_model:
        supported["head_dim"] = ("d_model / num_heads",)
    if family.model_type == "llama" and config.d_model % config.num_heads:
        supported["num_heads"] = (f"a divisor of {config.d_model}",)
    widths = set(config.layer_windows)
    represents_windows = {
        "none": widths == {0},
        "one for all layers": len(widths) == 1,
        "one width or 0 for each layer": len(widths - {0}) <= 1,
    }
    if not represents_windows[family.windows]:
        supported["windows"] = (family.windows,)
    return [
        f"{name} {getattr(config, name)} (supported: {' or '.join(map(str, values))})"
        for name, values in supported.items()
        if getattr(config, name) not in values
    ]
