"""LoRA adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from torch import Tensor

from engine.core.cli import shell_command
from engine.core.errors import UserError, wrap_library_errors
from engine.core.files import atomic_directory, read_json, write_json
from engine.core.values import convert, from_json
from engine.huggingface.convert import FLOAT_DTYPES, convert_layout, tensor_layout
from engine.huggingface.directory import read_tensors
from engine.huggingface.families import Family
from engine.nn.lora import A_NAME, B_NAME, LORA_ALPHA, TOKEN_PARAMETERS, lora_scale
from engine.runs.checkpoint import Checkpoint, write_tensors
from engine.training.estimate import cached_meta_model
from model import ModelConfig

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
NAME_PREFIX = "base_model.model."  # of tensors
PEFT_NAME = NAME_PREFIX + "{}.lora_{}.weight"
MERGE_ADVICE = "If PEFT can merge it, import that: merge_and_unload().save_pretrained(…)."
# Key of PEFT's LoraConfig → values that an adapter may have, its default first. A key that is not
# here, is not harmless and is not in AdapterSettings must be unset.
ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}
HARMLESS_KEYS = {  # the tensors show the layers, and ALLOWED_VALUES excludes other uses
    *("auto_mapping", "inference_mode", "lora_dropout", "peft_version", "revision"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "runtime_config"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size"),
}
Rank = Annotated[int, Ge(1), Le(10**5)]
Alpha = Annotated[float, Ge(0), Le(1e9)]


@dataclass(frozen=True)
class AdapterSettings:
    """What an import reads of adapter_config.json, with PEFT's defaults."""

    r: Rank = 8
    lora_alpha: Alpha = 8
    use_rslora: bool | None = False
    rank_pattern: dict[str, Rank] | None = None  # by a regex of the end of a layer's name
    alpha_pattern: dict[str, Alpha] | None = None
    modules_to_save: list[str] | None = None
    base_model_name_or_path: str | None = None

    def rank_and_scale(self, layer: str) -> tuple[int, float]:
        """Return the rank of a layer's update, and its factor."""
        rank = find_match(self.rank_pattern, layer, self.r)
        alpha = find_match(self.alpha_pattern, layer, self.lora_alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)


def find_match(values: dict[str, Any] | None, layer: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a layer's name, as PEFT does."""
    for pattern, value in (values or {}).items():
        with wrap_library_errors(f"{CONFIG_FILE}: {pattern!r} is not a regex", re.error):
            if re.match(rf"(.*\.)?({pattern})$", layer):
                return value
    return default


def map_layers(params: Iterable[str], family: Family, problem: str, fix: str) -> dict[str, str]:
    """Map each layer that has an update to its name in transformers.

    Raises UserError for fused layers.
    """
    layers = [name.removesuffix(f".{A_NAME}") for name in params if name.endswith(A_NAME)]
    layout = tensor_layout([f"{layer}.weight" for layer in layers], family)
    if family.transposed or len(layout) < len(layers):
        raise UserError(f"{problem} for {family.model_type}. {fix}")
    names = [hf_name.removesuffix(".weight") for hf_name in layout]
    return dict(zip(layers, names, strict=True))


def convert_B(layer: str, B: Tensor, head_width: int, family: Family) -> Tensor:
    """Convert the B of an update to the family's layout, or back: see convert_layout."""
    if not layer.endswith((".query", ".key")):
        return B
    heads = [convert_layout(f"{layer}.weight", head, family) for head in B.split(head_width)]
    return torch.cat(heads)


def export_adapter(out: Path, checkpoint: Checkpoint, head_width: int, family: Family) -> str:
    """Write the updates of a LoRA run, and report which base model they need.

    Raises UserError for another run, and if it has trained other parameters too.
    """
    base = checkpoint.base
    if base is None:
        raise UserError(f"--adapter: {checkpoint.path} is not of a LoRA run. Leave it out.")
    source = base.state.imported if base.base is None else None
    base_name = source or f"{out.resolve()}-base"
    updates = dict(checkpoint.model())
    if not all(name.endswith((A_NAME, B_NAME)) for name in updates):
        raise UserError("--adapter: the run trained embeddings too. Export the merged model.")
    problem = "--adapter: unsupported"
    tensors = {}
    ranks = {}
    for layer, hf_layer in map_layers(updates, family, problem, "Export the merged model.").items():
        A = updates[f"{layer}.{A_NAME}"]
        B = updates[f"{layer}.{B_NAME}"]
        tensors[PEFT_NAME.format(hf_layer, "A")] = A
        tensors[PEFT_NAME.format(hf_layer, "B")] = convert_B(layer, B, head_width, family)
        ranks[hf_layer] = len(A)
    rank = max(ranks.values())
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "rank_pattern": {layer: value for layer, value in ranks.items() if value != rank},
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({layer.split(".")[-1] for layer in ranks}),
    }
    with atomic_directory(out) as path:
        write_tensors(path / TENSORS_FILE, tensors, {"format": "pt"})
        write_json(path / CONFIG_FILE, config)
    if source:
        return f"Its base model is {source}, as base_model_name_or_path in {CONFIG_FILE}"
    words = ("huggingface.py", "export", base.path, base_name, "--family", family.model_type)
    return f"Export its base model too: {shell_command('python', *words)}"


def read_settings(directory: Path) -> AdapterSettings:
    """Read adapter_config.json. Raises UserError for a value that changes the model."""
    source = str(directory / CONFIG_FILE)
    hf_config = convert(read_json(directory / CONFIG_FILE), dict, source)
    for key, value in hf_config.items():
        allowed = (*ALLOWED_VALUES.get(key, (None, False, [], {}, "")), None)
        if value not in allowed and key not in HARMLESS_KEYS | vars(AdapterSettings()).keys():
            problem = f"{key} must be {allowed[0]!r} (got {value!r:.60})"
            raise UserError(f"{source}: {problem}. {MERGE_ADVICE}")
    return from_json(AdapterSettings, hf_config, source, ignores_others=True)


def read_adapter(
    directory: Path, settings: AdapterSettings, config: ModelConfig, family: Family
) -> dict[str, Tensor]:
    """Return the updates of an adapter, and the embeddings and head that it has in full.

    Raises UserError for an adapter that does not fit a model of this config.
    """
    params = cached_meta_model(config, (1,)).named_parameters()
    shapes = {name: param.shape for name, param in params}
    path = directory / TENSORS_FILE
    tensors = read_tensors(directory, TENSORS_FILE)
    tensors = {name.replace(".default.", "."): value for name, value in tensors.items()}
    values = {}
    for name in TOKEN_PARAMETERS:
        (hf_name,) = tensor_layout([name], family)
        if any(map(hf_name.removesuffix(".weight").endswith, settings.modules_to_save or [])):
            shape = shapes["token_embedding.weight"]
            values[name] = take(tensors, NAME_PREFIX + hf_name, shape, path)
    problem = f"{directory}: adapters are unsupported"
    for layer, hf_layer in map_layers(shapes, family, problem, MERGE_ADVICE).items():
        names = [PEFT_NAME.format(hf_layer, letter) for letter in "AB"]
        if tensors.keys().isdisjoint(names):
            continue
        rank, scale = settings.rank_and_scale(hf_layer)
        A_name = f"{layer}.{A_NAME}"
        B_name = f"{layer}.{B_NAME}"
        values[A_name] = take(tensors, names[0], (rank, shapes[A_name][1]), path)
        B = take(tensors, names[1], (shapes[B_name][0], rank), path) * (scale / lora_scale(rank))
        values[B_name] = convert_B(layer, B, config.head_width, family)
    if tensors:
        raise UserError(f"{path}: unsupported tensor {next(iter(tensors))}. {MERGE_ADVICE}")
    if not any(name.endswith(A_NAME) for name in values):
        raise UserError(f"{path}: has no update of a layer. Save the adapter again.")
    return values


def take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], source: Path) -> Tensor:
    """Remove a tensor, and return it in float32. Raises UserError unless it has this shape."""
    value = tensors.pop(name, None)
    fix = "Save the adapter again."
    if value is None:
        problem = "is missing"
    elif not value.numel():
        problem = "is empty, as DeepSpeed ZeRO-3 saves what it has not gathered"
        fix = "Save it with stage3_gather_16bit_weights_on_model_save."
    elif value.dtype not in FLOAT_DTYPES:
        problem = f"must be of floats (got {value.dtype})"
    elif value.shape != shape:
        problem = f"must have shape {tuple(shape)} (got {tuple(value.shape)})"
        fix = f"Name its own base model with --base. {MERGE_ADVICE}"
    else:
        return value.float()
    raise UserError(f"{source}: {name} {problem}. {fix}")
