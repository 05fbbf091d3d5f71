"""Directories in the layout of transformers: config, weights, tokenizer and model card."""

import contextlib
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from engine.core.errors import UserError, wrap_library_errors
from engine.core.files import check_pointer, read_json, write_json
from engine.core.values import convert
from engine.data.chats.chat import chat_format, encode_text, turn_ends
from engine.data.chats.chat_template import CHATML_TEMPLATE, PLAIN_TEMPLATE
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.data.tokenizer_training import pre_tokenizer_name
from engine.runs.checkpoint import RunState
from model import GPT

NUM_COMPARED_SEQUENCES = 4
MAX_COMPARED_TOKENS = 1024  # of a sequence
MAX_RELATIVE_ERROR = 1e-4  # of the largest logit
# Pattern of a file that is there instead of a missing one → what it is, and the way out.
OTHER_FILES = {
    "params.json": "is of Mistral's or Meta's own layout. Get the version in transformers' layout",
    "checkpoints": "is of a run, which needs no import. Use sample.py or train.py --init-from",
    "adapter_model.bin": "is not read. Load it in PEFT, and save_pretrained(…) it again",
    **dict.fromkeys(
        ("*.bin", "*.pt", "*.pth", "*.gguf"),
        "is not read. Convert it: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)",
    ),
    "model-*.safetensors": "is a shard, and model.safetensors.index.json is missing. Download it",
}
OTHER_TOKENIZERS = dict.fromkeys(
    ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt"),
    "is not read. Convert it: AutoTokenizer.from_pretrained(…).save_pretrained(…)",
)
PATH_SETTINGS = {"data", "out", "init_from"}  # which name folders of this machine
CARD_LABEL = "License and source of the text"  # no other tool writes it
EXPORT_FILE_PATTERN = re.compile(r"(.*config|tokenizer)\.json|README\.md|.*\.(safetensors|gguf)")
CARD_TEMPLATE = """---
license: FILL IN
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A language model with {parameters:,} parameters, trained from {data}.

- Validation loss: {loss}
- Trained on: {tokens:,} tokens in {step:,} steps, {seconds:,.0f} s
- License of the weights: FILL IN
- License and source of the text: FILL IN
- Intended and prohibited uses: FILL IN

All settings:

```json
{settings}
```
"""


def check_target(path: Path, force: bool) -> None:
    """Raise UserError for a path that exists, unless force replaces an earlier export."""
    names = [file.name for file in path.glob("*")]
    if not names and not path.is_file():
        return
    card = path / "README.md"
    has_card = card.is_file() and CARD_LABEL in card.read_text(encoding="utf-8", errors="replace")
    is_adapter = {*names} == {"adapter_config.json", "adapter_model.safetensors"}
    is_export = (has_card or is_adapter) and all(map(EXPORT_FILE_PATTERN.fullmatch, names))
    if not (force and is_export):
        advice = "Add --force to replace it, or choose" if is_export else "Choose"
        raise UserError(f"{path}: already exists. {advice} another directory.")


def find_directory(source: str) -> Path:
    """Return the directory, or download the model of that name. Raises UserError if none exists."""
    if Path(source).is_dir():
        return Path(source)
    if Path(source).exists():
        fix = "Give the directory of its config.json, in transformers' layout; GGUF is not read."
        raise UserError(f"{source}: must be a directory (got a file). {fix}")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "vocab.txt", "merges.txt"]
        return Path(snapshot_download(source, allow_patterns=patterns))
    except Exception as error:  # the hub's client lets many libraries' errors through
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        advice = "Check the name and the connection, or give a directory."
        raise UserError(f"{source}: download failed ({reason}). {advice}") from None


def check_exists(path: Path, fix: str, others: Mapping[str, str] = OTHER_FILES) -> None:
    """Raise UserError if a file is missing, naming one that is there instead."""
    if not path.is_file():
        for pattern, reason in others.items():
            for file in path.parent.glob(pattern):
                raise UserError(f"{path}: not found. {file.name} {reason}.")
        raise UserError(f"{path}: not found. {fix}.")


def read_tensors(directory: Path, name: str = "model.safetensors") -> dict[str, Tensor]:
    """Map a model's tensors into memory. Raises UserError if a file is missing or corrupted."""
    index_path = directory / f"{name}.index.json"
    names = {name}
    if index_path.is_file() and not (directory / name).is_file():
        index = convert(read_json(index_path), dict, str(index_path))
        weight_map = convert(index.get("weight_map"), dict[str, str], f"{index_path}: weight_map")
        names = {Path(name).name for name in weight_map.values()}
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory / name for name in names):
        check_exists(path, "Download the model again", OTHER_FILES if path.name == name else {})
        with open(path, "rb") as file:
            check_pointer(file.peek(), path)
        with wrap_library_errors(f"{path}: corrupted", safetensors.SafetensorError, advice="."):
            tensors.update(safetensors.torch.load_file(path))
    for tensor_name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.itemsize > 1 and not tensor.isfinite().all():
            problem = f"{tensor_name} must be finite (got NaN or infinity)"
            fix = "Download it again, or use another checkpoint."
            raise UserError(f"{directory}: {problem}. {fix}")
    return tensors


def read_tokenizer(directory: Path) -> Tokenizer:
    """Read a model's tokenizer. Raises UserError if it is missing or unsupported."""
    path = directory / "tokenizer.json"
    check_exists(path, "Name the model's tokenizer with --tokenizer", OTHER_TOKENIZERS)
    tokenizer = load_tokenizer(path)
    is_ours = tokenizer.chat_template in (PLAIN_TEMPLATE, CHATML_TEMPLATE)
    return tokenizer.with_chat_template(None) if is_ours else tokenizer


def is_qwen2_tokenizer(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer is like Qwen2's: transformers 5 runs any in its place as that."""
    return (
        pre_tokenizer_name(tokenizer) == "qwen2"
        and tokenizer.document["normalizer"] == {"type": "NFC"}
        and not tokenizer.document["model"].get("ignore_merges")
    )


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return config.json's special token ids. Each family has defaults, which would be wrong."""
    end_of_text = tokenizer.end_of_text_id
    bos = tokenizer.special_tokens.get(tokenizer.bos_token, end_of_text)
    return {"bos_token_id": bos, "eos_token_id": end_of_text, "pad_token_id": None}


def end_token_ids(tokenizer: Tokenizer, template: str | None) -> list[int]:
    """Return the ids that end a text, and with a template those that end an answer."""
    answer_ends = turn_ends(tokenizer, is_chat_model=bool(template)).token_ids
    ends = tokenizer.stop_token_ids
    return [*dict.fromkeys([*ends[:1], *answer_ends, *ends[1:]])]


def chat_template(tokenizer: Tokenizer, is_chat_model: bool) -> str | None:
    """Return the template of a chat model's chats, or the tokenizer's imported one."""
    if is_chat_model:
        with contextlib.suppress(UserError):  # of a template that fails
            return chat_format(tokenizer)[0].source
    return tokenizer.chat_template


def write_tokenizer(path: Path, tokenizer: Tokenizer, length: int, template: str | None) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    unset = dict.fromkeys(("padding", "truncation"))  # which an imported file may have
    write_json(path / "tokenizer.json", {**tokenizer.document, **unset})
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": None,  # collators would ignore the targets of an end of text that also pads
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
    }
    named = {**({"default": template} if template else {}), **tokenizer.other_templates}
    if named:
        templates = [{"name": name, "template": text} for name, text in named.items()]
        config["chat_template"] = templates if tokenizer.other_templates else template
    if tokenizer.end_of_text_id is not None:
        config["bos_token"] = tokenizer.bos_token
        config["eos_token"] = tokenizer.end_of_text_name
    write_json(path / "tokenizer_config.json", config)
    generation_config = {
        "do_sample": True,  # no temperature: transformers would save it with this switch only
        **special_token_ids(tokenizer),
        "eos_token_id": end_token_ids(tokenizer, template) or None,
    }
    write_json(path / "generation_config.json", generation_config)


def write_card(path: Path, name: str, state: RunState, num_parameters: int) -> None:
    """Write a model card, with FILL IN for what only a person knows."""
    settings = {key: value for key, value in state.settings.items() if key not in PATH_SETTINGS}
    data = state.settings.get("data") or [state.imported or "noise"]
    loss = (state.evaluation or {}).get("val_loss")
    card = CARD_TEMPLATE.format(
        name=name,
        parameters=num_parameters,
        data=", ".join(Path(path).name for path in data),
        loss="not known" if loss is None else f"{loss:.4f} nats per token",
        tokens=state.tokens,
        step=state.step,
        seconds=state.elapsed_seconds,
        settings=json.dumps(settings | asdict(state.model), indent=1),
    )
    path.write_text(card, encoding="utf-8")


@torch.no_grad()
def compare_with_transformers(path: Path, model: GPT, tokenizer: Tokenizer) -> str:
    """Compare token ids and logits with those of transformers on random tokens.

    Returns a report. Raises RuntimeError if they differ, as it is a bug.
    """
    if not importlib.util.find_spec("transformers"):
        return "Not checked: transformers is not installed (pip install transformers)"
    import transformers

    (architecture,) = read_json(path / "config.json")["architectures"]
    if not hasattr(transformers, architecture):
        return f"Not checked: transformers {transformers.__version__} lacks {architecture}"
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    text_ids = sorted(set(range(tokenizer.vocab_size)).difference(tokenizer.unused_ids()))
    num_tokens = min(model.config.context_length, MAX_COMPARED_TOKENS)
    sequences = np.random.default_rng(0).choice(text_ids, (NUM_COMPARED_SEQUENCES, num_tokens))
    special_ids = set(tokenizer.special_tokens.values())
    max_error = 0.0
    max_logit = 0.0
    for ids in sequences.tolist():
        text = tokenizer.decode([token for token in ids if token not in special_ids])
        hf_ids = hf_tokenizer.encode(text, split_special_tokens=True)
        own_ids = encode_text(tokenizer, text, starts=True).tolist()
        if hf_ids[: len(own_ids)] != own_ids:
            raise RuntimeError(f"the exported tokenizer has other token ids for {text!r}")
        logits = model(torch.tensor([ids]))
        hf_logits = hf_model(torch.tensor([ids])).logits
        max_error = max(max_error, (logits - hf_logits).abs().max().item())
        max_logit = max(max_logit, logits.abs().max().item())
    if not max_error <= MAX_RELATIVE_ERROR * max(1.0, max_logit):
        raise RuntimeError(f"the exported model's logits differ by up to {max_error:.2g}")
    where = f"transformers {transformers.__version__} on {sequences.size:,} random tokens"
    error = f"logits differ by at most {max_error:.1g} (largest {max_logit:.3g})"
    return f"Checked with {where}: token ids are equal, {error}"
