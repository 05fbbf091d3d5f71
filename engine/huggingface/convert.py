"""A GPT's settings and parameters ↔ config.json and tensors of a model family of transformers."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.core.errors import UserError
from engine.core.settings import from_values
from engine.core.values import Count, convert, from_json
from engine.huggingface.families import MODEL_FAMILIES, Family
from model import ModelConfig

Tensors = dict[str, Tensor]
TO_HF_ACTIVATION = {"relu2": "relu2", "gelu": "gelu_new", "relu": "relu", "swiglu": "silu"}
FROM_HF_ACTIVATION = {hf_name: name for name, hf_name in TO_HF_ACTIVATION.items()}
FROM_HF_ACTIVATION["gelu_pytorch_tanh"] = "gelu"
FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REQUIRED_SETTINGS = {"vocab_size", "context_length", "num_layers", "num_heads", "d_model"}
# Type of RoPE → keys of its numbers, in the order of ModelConfig.rope_scaling.
ROPE_SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# Modules that wrap others: torch.compile, DistributedDataParallel, FSDP, activation checkpointing.
WRAPPER_PATTERN = re.compile(r"\b(_orig_mod|module|_(fsdp|checkpoint)_wrapped_module)\.")
HF_CONSTANT_BUFFERS = re.compile(r".*(attn\.(masked_)?bias|rotary_emb\.inv_freq)")  # of old files


@dataclass(frozen=True)
class WindowSettings:
    """The sliding windows of config.json, with the defaults of transformers."""

    sliding_window: Count | None = 4096
    use_sliding_window: bool = False
    max_window_layers: Count = 28
    layer_types: list[str] | None = None


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


def read_names(tensors: Tensors, family: Family, source: str) -> Tensors:
    """Return tensors by the family's names, without the prefixes of modules that wrap the model.

    Raises UserError, naming the source, for quantized weights.
    """
    tensors = {WRAPPER_PATTERN.sub("", name): value for name, value in tensors.items()}
    embedding = family.modules["token_embedding"] + ".weight"
    outer = next((n.removesuffix(embedding) for n in tensors if n.endswith(embedding)), "")
    prefix = embedding.split(".")[0] + "."  # old files omit it
    renamed = {}
    for name, value in tensors.items():
        if value.dtype not in FLOAT_DTYPES and not HF_CONSTANT_BUFFERS.fullmatch(name):
            problem = f"quantized weights are unsupported ({name} is {value.dtype})"
            raise UserError(f"{source}: {problem}. Use the original model.".replace("torch.", ""))
        name = name.removeprefix(outer)
        renamed[name if name.startswith((prefix, "lm_head.")) else prefix + name] = value
    return renamed


def has_own_head(tensors: Tensors, family: Family) -> bool:
    """Return whether there is a head of other values than the embedding."""
    head = tensors.get("lm_head.weight")
    embedding = tensors.get(family.modules["token_embedding"] + ".weight")
    return head is not None and embedding is not None and not torch.equal(head, embedding)


def from_hf(
    tensors: Tensors, meta_params: Mapping[str, Tensor], family: Family, source: str
) -> Tensors:
    """Convert the family's tensors to parameters of these shapes, in float32 or bfloat16.

    Raises UserError, naming the source, for a tensor that is missing, unknown, or of another shape.
    """
    tensors = dict(tensors)
    params = {}
    expected = to_hf(meta_params, family)
    for hf_name, names in tensor_layout(meta_params, family).items():
        if hf_name not in tensors:
            fix = "Correct its config.json, such as tie_word_embeddings, or download it again."
            raise UserError(f"{source}: {hf_name} is missing. {fix}")
        value = tensors.pop(hf_name)
        if value.dtype in (torch.float16, torch.float64):
            value = value.float()  # bfloat16 would round it
        shape = tuple(expected[hf_name].shape)
        if value.shape != shape:
            got = f"got {tuple(value.shape)}"
            raise UserError(f"{source}: {hf_name} must have shape {shape}, by config.json ({got}).")
        pieces = value.chunk(len(names), -1 if family.transposed else 0)  # heads are of one size
        for name, piece in zip(names, pieces, strict=True):
            params[name] = convert_layout(name, piece, family).contiguous()
    if "head.weight" not in meta_params:
        tensors.pop("lm_head.weight", None)  # a copy of the tied embedding
    for name in tensors:
        if not HF_CONSTANT_BUFFERS.fullmatch(name):
            raise UserError(f"{source}: unsupported tensor {name}, by its config.json.")
    return params


def to_hf_config(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Convert settings that the family supports, none of them None, to those of config.json."""
    hf_config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": "float32",
        "torch_dtype": "float32",  # the key before transformers 4.56
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


def from_hf_config(hf_config: Any, source: str) -> tuple[Family, ModelConfig]:
    """Convert config.json to a family and a ModelConfig. A null unsets a default of the family.

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
    hf_config = family.defaults | hf_config
    for key, value in family.fixed.items():
        if hf_config.get(key, value) != value:
            raise UserError(f"{source}: {key} must be {value!r} (got {hf_config[key]!r}).")
    supported_values = family.supported_values()
    settings = {setting: values[0] for setting, values in supported_values.items()}
    for setting, keys in family.settings.items():
        hf_values = [hf_config[key] for key in keys.split() if hf_config.get(key) is not None]
        if setting == "activation":
            hf_values = [FROM_HF_ACTIVATION.get(str(v), f"transformers' {v}") for v in hf_values]
        if setting == "bias" and any(hf_values) and len(hf_values) < len(keys.split()):
            hf_values.append(False)  # of the missing key: the next check refuses them
        if len(set(map(str, hf_values))) > 1:
            raise UserError(f"{source}: {keys} must be equal (got {hf_values}).")
        if hf_values:
            settings[setting] = hf_values[0]
        elif setting in REQUIRED_SETTINGS:
            raise UserError(f"{source}: {keys} is missing.")
    for setting, values in supported_values.items():
        if settings[setting] not in values:
            allowed = " or ".join(map(str, values))
            raise UserError(f"{source}: {setting} must be {allowed} (got {settings[setting]!r}).")
    if settings["position"] == "rope":
        settings["rope_base"], settings["rope_scaling"] = read_rope(hf_config, source)
    num_layers = from_values(ModelConfig, settings, source).num_layers
    settings["windows"] = read_windows(hf_config, family, num_layers, source)
    return family, from_values(ModelConfig, settings, source)


def read_rope(hf_config: dict[str, Any], source: str) -> tuple[Any, list[Any] | None]:
    """Read RoPE's base and scaling, in the old or the new form. Raises UserError for others."""
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"{source}: RoPE's parameters must be one object (got {rope!r}).")
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    defaults = {
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": hf_config["max_position_embeddings"],
    }
    rope = defaults | hf_config | rope
    if kind not in ROPE_SCALING_KEYS or (rope.get("partial_rotary_factor") or 1) != 1:
        kinds = ", ".join(ROPE_SCALING_KEYS)
        raise UserError(f"{source}: RoPE must be {kinds}, and of complete heads (got {kind}).")
    keys = ("rope_theta", *ROPE_SCALING_KEYS[kind])
    values = [rope.get(key) for key in keys]
    if None in values:
        raise UserError(f"{source}: {kind} RoPE must have {', '.join(keys)} (got {values}).")
    base, *scaling = values
    return base, scaling or None


def read_windows(
    hf_config: dict[str, Any], family: Family, num_layers: int, source: str
) -> list[int] | None:
    """Read the sliding windows of the layers; None if there are none."""
    if family.windows == "none":
        return None
    settings = from_json(WindowSettings, hf_config, source, ignores_others=True)
    width = settings.sliding_window
    if width == 0:
        raise UserError(f"{source}: sliding_window must be at least 1, or null (got 0).")
    if family.windows == "one for all layers":
        return [width] if width else None
    width = width if settings.use_sliding_window else None
    windows = {FULL_ATTENTION: 0} | ({SLIDING_ATTENTION: width} if width else {})
    layer_types = settings.layer_types
    if layer_types is None:
        first = settings.max_window_layers
        return [width if layer >= first else 0 for layer in range(num_layers)] if width else None
    if len(layer_types) != num_layers or not windows.keys() >= {*layer_types}:
        need = f"list {num_layers} of {' or '.join(windows)}"
        raise UserError(f"{source}: layer_types must {need} (got {layer_types}).")
    return [windows[kind] for kind in layer_types] if width else None
