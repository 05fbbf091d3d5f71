"""Adapters in PEFT's layout: those of our LoRA runs are exported, and PEFT merges all others."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.core.cli import shell_command
from engine.core.errors import MAX_REASON_CHARACTERS, UserError, import_optional
from engine.core.files import atomic_directory, read_json, write_json
from engine.core.values import convert
from engine.huggingface.convert import convert_layout, tensor_layout
from engine.huggingface.directory import (
    MAX_RELATIVE_ERROR,
    check_weights,
    load_hf_model,
    refuse_other_files,
)
from engine.huggingface.families import Family
from engine.nn.lora import A_NAME, B_NAME, LORA_ALPHA
from engine.runs.checkpoint import Checkpoint, write_tensors
from model import ModelConfig

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
PEFT_NAME = "base_model.model.{}.lora_{}.weight"
NUM_MERGED_TOKENS = 32  # to compare an adapter with what it is merged to
# With these, PEFT imports a module by its name, or loads files that may be pickled.
UNSAFE_KEYS = ("megatron_config", "prompt_tuning_init_state_dict_path", "adapters")
UNSAFE_INITIALIZATIONS = ("corda", "lora_ga")


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
    if family.transposed:  # its layers are fused
        problem = f"--adapter: unsupported for {family.model_type}"
        raise UserError(f"{problem}. Export the merged model.")
    layers = [name.removesuffix(f".{A_NAME}") for name in updates if name.endswith(A_NAME)]
    layout = tensor_layout([f"{layer}.weight" for layer in layers], family)
    tensors = {}
    ranks = {}
    for layer, hf_name in zip(layers, layout, strict=True):
        hf_layer = hf_name.removesuffix(".weight")
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


def read_config(path: Path) -> dict[str, Any]:
    """Read adapter_config.json. Raises UserError if PEFT could not read the adapter, or safely."""
    if not (path / TENSORS_FILE).is_file():
        refuse_other_files(path.iterdir())
        raise UserError(f"{path / TENSORS_FILE}: not found. Download the adapter again.")
    source = str(path / CONFIG_FILE)
    config: dict[str, Any] = convert(read_json(path / CONFIG_FILE), dict, source)
    unsafe = [key for key in UNSAFE_KEYS if config.get(key)]
    if config.get("init_lora_weights") in UNSAFE_INITIALIZATIONS:
        unsafe.append("init_lora_weights")
    for key in unsafe:
        raise UserError(
            f"{source}: {key} must be unset (got {config[key]!r:.60}). Merge it in PEFT."
        )
    return config


@torch.no_grad()
def merge_adapter(
    path: Path, config: ModelConfig, family: Family, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a base model with an adapter merged into them by PEFT.

    Raises UserError if PEFT cannot read it, has no use for a tensor, or merges it to another model.
    """
    peft = import_optional("peft", str(path), "hf")
    check_weights(path)
    base = load_hf_model(None, config, family, state_dict=tensors, dtype=torch.float32)
    tokens = torch.arange(NUM_MERGED_TOKENS)[None] % config.vocab_size
    tokens = tokens[:, : config.context_length]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Unexpected keyword")  # of a newer PEFT
            adapted = peft.PeftModel.from_pretrained(base, path, torch_device="cpu").eval()
        info = adapted.load_adapter(path, "default", torch_device="cpu")  # again, for its names
        expected = adapted(tokens).logits
        merged = adapted.merge_and_unload()
        difference = (merged(tokens).logits - expected).abs().max()
    except Exception as error:  # PEFT has no class of its own
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON_CHARACTERS]
        fix = "Name its own base model with --base, or merge it in PEFT."
        raise UserError(f"{path}: PEFT cannot merge it ({reason}). {fix}") from None
    for name in (*info.missing_keys, *info.unexpected_keys):
        problem = "must have" if name in info.missing_keys else "has an unsupported tensor"
        raise UserError(f"{path}: {problem} {name}. Save the adapter again.")
    if not difference <= MAX_RELATIVE_ERROR * expected.abs().max().clamp(min=1):
        problem = f"PEFT merges it to another model (logits differ by {difference:.2g})"
        raise UserError(f"{path}: {problem}. Run it in PEFT.")
    return dict(merged.state_dict())
