"""A GPT's settings and parameters ↔ config.json and tensors of a model family of transformers."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.core.errors import UserError, import_optional, wrap_library_errors
from engine.core.settings import from_values
from engine.core.values import convert
from engine.huggingface.families import MODEL_FAMILIES, Family, unsupported_settings
from engine.nn.positions import FREQUENCY_BASE, sinusoids
from engine.training.estimate import cached_meta_model
from model import GPT, ModelConfig

Tensors = dict[str, Tensor]
TO_HF_ACTIVATION = {"relu2": "relu2", "gelu": "gelu_new", "relu": "relu", "swiglu": "silu"}
FROM_HF_ACTIVATION = {hf_name: name for name, hf_name in TO_HF_ACTIVATION.items()}
FROM_HF_ACTIVATION["gelu_pytorch_tanh"] = "gelu"
FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
LAYOUT_VERSION = "5.0.0"  # of transformers
# Type of RoPE → keys of its numbers, in the order of ModelConfig.rope_scaling.
ROPE_SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def tensor_layout(names: Iterable[str], family: Family) -> dict[str, list[str]]:
    """Map each tensor of a family to its parameters. Raises UserError for an unknown parameter."""
    params_by_module: dict[str, list[str]] = {}
    for name in names:  # all queries of a block, then all keys, then all values
        params_by_module.setdefault(re.sub(r"heads\.\d+\.", "", name), []).append(name)
    layout: dict[str, list[str]] = {}
    for name, params in params_by_module.items():
        module, _, kind = name.rpartition(".")
        layer = re.search(r"\.\d+\.", module)
        hf_module = family.modules.get(re.sub(r"\.\d+\.", ".N.", module))
        if hf_module is None:
            advice = "Train without it, or add it to engine/huggingface/families.py."
            raise UserError(f"--family {family.model_type}: unsupported parameter {name}. {advice}")
        hf_module = hf_module.replace(".N.", layer[0] if layer else "")
        layout.setdefault(f"{hf_module}.{kind}", []).extend(params)
    return layout


def convert_layout(name: str, value: Tensor, family: Family) -> Tensor:
    """Convert a parameter to the family's layout, or back: each step is its own inverse.

    model.py rotates (a, b) to (a cos + b sin, b cos - a sin). A family that rotates in the other
    direction gets (a, -b), which only negates the second result: in q · k, the signs cancel.
    """
    if family.flips_rope and re.search(r"\.(query|key)\.(weight|bias)$", name):
        first_half, second_half = value.chunk(2)
        value = torch.cat((first_half, -second_half))
    is_transposed = family.transposed and name.startswith("blocks.") and value.ndim == 2
    return value.T if is_transposed else value


def to_hf(params: Mapping[str, Tensor], family: Family) -> Tensors:
    """Convert parameters to the family's tensors. Raises UserError for an unknown parameter."""
    dim = -1 if family.transposed else 0
    return {
        hf_name: torch.cat([convert_layout(name, params[name], family) for name in names], dim)
        for hf_name, names in tensor_layout(params, family).items()
    }


def has_own_head(tensors: Tensors, family: Family) -> bool:
    """Return whether there is a head of other values than the embedding."""
    embedding = tensors[family.modules["token_embedding"] + ".weight"]
    return not torch.equal(tensors["lm_head.weight"], embedding)


def from_hf(tensors: Tensors, names: Iterable[str], family: Family) -> Tensors:
    """Convert the family's tensors to the parameters of these names."""
    params = {}
    for hf_name, layout in tensor_layout(names, family).items():
        # Heads are of one size.
        pieces = tensors[hf_name].chunk(len(layout), -1 if family.transposed else 0)
        for name, piece in zip(layout, pieces, strict=True):
            params[name] = convert_layout(name, piece, family).contiguous()
    return params


def rewrite_config(config: ModelConfig, family: Family) -> ModelConfig:
    """Return an equivalent config without None, in settings of the family where possible."""
    supports = family.supported_values()
    changes: dict[str, Any] = {
        "attention": "fused",
        "scale_embeddings": False,
        "rope_base": config.rope_base or FREQUENCY_BASE,
        "num_kv_heads": config.num_groups,
        "head_dim": config.head_width,
        "d_ff": config.feed_forward_width,
        "norm_epsilon": config.epsilon,
    }
    if config.norm == "rmsnorm" and "weighted_rmsnorm" in supports["norm"]:
        changes["norm"] = "weighted_rmsnorm"
    if config.position == "sinusoidal" and "learned" in supports["position"]:
        changes["position"] = "learned"
    if config.scale_embeddings and config.tie_embeddings and "rmsnorm" not in supports["norm"]:
        changes["tie_embeddings"] = False  # the head is not scaled
    if supports.get("bias") == (True,) or (config.qkv_bias and "bias" not in supports):
        changes["bias"] = True
    if config.bias or changes.get("bias"):
        changes["qkv_bias"] = False  # bias includes it
    return replace(config, **changes)


def rewrite_params(model: GPT, config: ModelConfig) -> Tensors:
    """Compute the parameters that give the same logits under the rewritten config."""
    params: Tensors = dict(model.named_parameters())
    embedding = params["token_embedding.weight"]
    if model.config.scale_embeddings:
        params["token_embedding.weight"] = embedding * math.sqrt(config.d_model)
    if model.config.norm != config.norm:  # rmsnorm becomes weighted_rmsnorm
        params["token_embedding.weight"] = model.embedding_norm(params["token_embedding.weight"])
    if model.config.position != config.position:
        positions = torch.arange(config.context_length)
        params["position_embedding.weight"] = sinusoids(positions, config.d_model)
    if model.config.tie_embeddings != config.tie_embeddings:
        params["head.weight"] = embedding
    neutral = {  # norm weights of 1 and biases of 0 change nothing
        name: torch.full(param.shape, float(name.endswith("norm.weight")))
        for name, param in cached_meta_model(config).named_parameters()
    }
    return neutral | params


def to_hf_config(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Convert settings that the family supports, none of them None, to those of config.json."""
    hf_config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": "float32",
        "torch_dtype": "float32",  # the key before transformers 4.56
        "transformers_version": LAYOUT_VERSION,  # below 5.0.0, a fix for Mistral may change words
        **family.fixed,
    }
    for name, keys in family.settings.items():
        value = getattr(config, name)
        if name == "activation":
            value = TO_HF_ACTIVATION[value]
        elif name == "logit_softcap":
            value = value or None
        hf_config.update(dict.fromkeys(keys.split(), value))
    if config.position == "rope":
        hf_config |= rope_to_hf(config)
    if "n_positions" in hf_config:  # other readers need the older name
        hf_config["n_ctx"] = config.context_length
    width = max(config.layer_windows) or None
    if family.windows == "one for all layers":
        hf_config["sliding_window"] = width
    elif family.windows == "one width or 0 for each layer":
        hf_config["use_sliding_window"] = width is not None
        if width:
            kinds = {0: FULL_ATTENTION, width: SLIDING_ATTENTION}
            hf_config["sliding_window"] = width
            hf_config["layer_types"] = [kinds[window] for window in config.layer_windows]
    return hf_config


def rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of RoPE, for transformers 5 and for readers of the form before."""
    values = config.rope_scaling or ()
    kind = next(kind for kind, keys in ROPE_SCALING_KEYS.items() if len(keys) == len(values))
    scaling = {"rope_type": kind, **dict(zip(ROPE_SCALING_KEYS[kind], values, strict=True))}
    if kind == "llama3":
        scaling[ROPE_SCALING_KEYS[kind][-1]] = int(values[-1])
    keys: dict[str, Any] = {"rope_theta": config.rope_base}
    keys["rope_parameters"] = scaling | keys
    return keys | {"rope_scaling": scaling} if values else keys


def model_class(family: Family, source: str) -> Any:
    """Return the class of transformers of a family, and silence that library.

    Raises UserError, naming the source, if one is not installed.
    """
    transformers = import_optional("transformers", source, "hf")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not hasattr(transformers, family.architecture):
        problem = f"transformers {transformers.__version__} lacks {family.architecture}"
        raise UserError(f"{source}: {problem}. Install a newer version.")
    return getattr(transformers, family.architecture)


def from_hf_config(hf_config: Any, source: str) -> tuple[Family, ModelConfig]:
    """Convert config.json, which transformers completes, to a family and a ModelConfig.

    Raises UserError, naming the source, for what ModelConfig cannot represent.
    """
    hf_config = convert(hf_config, dict, source)
    families = {family.architecture: family for family in MODEL_FAMILIES.values()}
    names = hf_config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    family = families.get(str(name))
    if family is None:
        supported = ", ".join(families)
        raise UserError(f"{source}: architectures must be one of {supported} (got {name!r}).")
    if hf_config.get("quantization_config"):
        raise UserError(f"{source}: quantized weights are unsupported. Use the original model.")
    config_class = model_class(family, source).config_class
    with wrap_library_errors(f"{source}: transformers cannot read it", Exception, advice="."):
        hf_config = config_class(**hf_config).to_dict()
    for key, value in family.fixed.items():
        if hf_config[key] != value:
            raise UserError(f"{source}: {key} must be {value!r} (got {hf_config[key]!r}).")
    settings = {setting: values[0] for setting, values in family.supported_values().items()}
    settings["dropout"] = 0.0
    for setting, keys in family.settings.items():
        hf_values = [hf_config.get(key) for key in keys.split()]
        if setting == "activation":
            hf_values = [FROM_HF_ACTIVATION.get(str(v), f"transformers' {v}") for v in hf_values]
        if len(set(map(str, hf_values))) > 1:
            raise UserError(f"{source}: {keys} must be equal (got {hf_values}).")
        if hf_values[0] is not None:
            settings[setting] = hf_values[0]
    if settings["position"] == "rope":
        settings["rope_base"], settings["rope_scaling"] = read_rope(hf_config, source)
    settings["windows"] = read_windows(hf_config, family, source)
    config = from_values(ModelConfig, settings, source)
    for problem in unsupported_settings(config, family):
        raise UserError(f"{source}: unsupported {problem}. Use another model.")
    return family, config


def read_rope(hf_config: dict[str, Any], source: str) -> tuple[Any, list[Any] | None]:
    """Read RoPE's base and scaling. Raises UserError for kinds that are not supported."""
    rope = hf_config["rope_parameters"]
    kind = "by layer" if any(isinstance(value, dict) for value in rope.values()) else ""
    kind = kind or str(rope.get("rope_type"))
    if kind not in ROPE_SCALING_KEYS or (rope.get("partial_rotary_factor") or 1) != 1:
        kinds = ", ".join(ROPE_SCALING_KEYS)
        raise UserError(f"{source}: RoPE must be {kinds}, and of complete heads (got {rope}).")
    keys = ("rope_theta", *ROPE_SCALING_KEYS[kind])
    base, *scaling = [rope.get(key) for key in keys]
    if None in scaling:
        raise UserError(f"{source}: {kind} RoPE must have {', '.join(keys)} (got {rope}).")
    return base, scaling or None


def read_windows(hf_config: dict[str, Any], family: Family, source: str) -> list[int] | None:
    """Read the sliding windows of the layers; None if there are none."""
    width = hf_config.get("sliding_window")
    kinds = hf_config.get("layer_types") or []
    if family.windows == "none" or (width is None and SLIDING_ATTENTION not in kinds):
        return None
    if not width or {*kinds} - {FULL_ATTENTION, SLIDING_ATTENTION}:
        need = "sliding_window must be at least 1 in layer_types of full and sliding attention"
        raise UserError(f"{source}: {need} (got {width} in {kinds}).")
    if family.windows == "one for all layers":
        return [width]
    return [width if kind == SLIDING_ATTENTION else 0 for kind in kinds]
