"""LoRA adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from torch import Tensor

from engine.core.errors import UserError
from engine.core.files import atomic_directory, read_json, write_json
from engine.core.values import from_json
from engine.huggingface.convert import convert_layout, tensor_layout
from engine.huggingface.directory import EXPORT_METADATA, read_tensors
from engine.huggingface.families import Family
from engine.nn.lora import A_NAME, B_NAME, LORA_ALPHA, add_lora, lora_scale
from engine.nn.specs import draw_initial_values
from engine.runs.checkpoint import Checkpoint, write_tensors
from model import GPT

NEUTRAL_SETTINGS: dict[str, tuple[Any, ...]] = {  # which an adapter may have
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": ([], None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}


@dataclass(frozen=True)
class AdapterSettings:
    """What an import reads of adapter_config.json."""

    r: Annotated[int, Ge(1), Le(10**5)]
    lora_alpha: Annotated[float, Ge(0), Le(1e9)]
    use_rslora: bool | None = False


def map_names(updates: Iterable[str], family: Family) -> dict[str, str]:
    """Map each matrix of an update to its name in PEFT. Raises UserError for fused layers."""
    names = {}
    for name in updates:
        layer, _, letter = name.rpartition(".lora.")
        (hf_name,) = tensor_layout([f"{layer}.weight"], family)
        names[name] = f"base_model.model.{hf_name.removesuffix('weight')}lora_{letter}.weight"
    if family.transposed or len({*names.values()}) < len(names):
        raise UserError(f"--adapter: unsupported for {family.model_type}. Export the merged model.")
    return names


def convert_update(name: str, value: Tensor, head_width: int, family: Family) -> Tensor:
    """Convert a matrix of an update to the family's layout, or back: see convert_layout."""
    if not name.endswith(B_NAME) or not re.search(r"\.(query|key)\.", name):
        return value
    weight_name = name.removesuffix(B_NAME) + "weight"
    heads = [convert_layout(weight_name, head, family) for head in value.split(head_width)]
    return torch.cat(heads)


def export_adapter(out: Path, checkpoint: Checkpoint, head_width: int, family: Family) -> str:
    """Write the updates of a LoRA run, and report which base model they need.

    Raises UserError for another run, and if it has trained other parameters too.
    """
    if checkpoint.base is None:
        raise UserError(f"--adapter: {checkpoint.path} is not of a LoRA run. Leave it out.")
    base = checkpoint.base.state.imported or str(checkpoint.base.path)
    updates = dict(checkpoint.model())
    if not all(name.endswith((A_NAME, B_NAME)) for name in updates):
        raise UserError("--adapter: the run trained embeddings too. Export the merged model.")
    names = map_names(updates, family)
    tensors = {
        names[name]: convert_update(name, value, head_width, family)
        for name, value in updates.items()
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": len(next(value for name, value in updates.items() if name.endswith(A_NAME))),
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    with atomic_directory(out) as path:
        write_tensors(path / "adapter_model.safetensors", tensors, EXPORT_METADATA)
        write_json(path / "adapter_config.json", config)
    return f"Its base model is {base}, as base_model_name_or_path in adapter_config.json"


def read_adapter(path: Path, model: GPT, family: Family) -> dict[str, Tensor]:
    """Add LoRA to a model without values, and return the updates of an adapter for it.

    Layers without an update get initial values. Raises UserError for an adapter that does not fit.
    """
    source = str(path / "adapter_config.json")
    hf_config = read_json(path / "adapter_config.json")
    settings = from_json(AdapterSettings, hf_config, source, ignores_others=True)
    for key, values in NEUTRAL_SETTINGS.items():
        if hf_config.get(key) not in values:
            raise UserError(f"{source}: {key} must be {values[0]!r} (got {hf_config.get(key)!r}).")
    rank = settings.r
    scale = settings.lora_alpha / (rank**0.5 if settings.use_rslora else rank)
    add_lora(model, rank)
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    initial = dict(draw_initial_values(params, model.specs, model.seed))
    tensors = read_tensors(path, "adapter_model.safetensors")
    remaining = {name.replace(".default.", "."): value for name, value in tensors.items()}
    updates = {}
    for name, hf_name in map_names(initial, family).items():
        value = remaining.pop(hf_name, initial[name]).float()
        if value.shape != initial[name].shape:
            shape = tuple(initial[name].shape)
            problem = f"{hf_name} must have shape {shape} (got {tuple(value.shape)})"
            raise UserError(f"{source}: {problem}. Name its own base model with --base.")
        value = convert_update(name, value, model.config.head_width, family)
        updates[name] = value * (scale / lora_scale(rank)) if name.endswith(B_NAME) else value
    if remaining:
        raise UserError(f"{source}: unsupported tensor {next(iter(remaining))}.")
    return updates
