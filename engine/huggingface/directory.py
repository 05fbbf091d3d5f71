"""Directories in the layout of transformers: config, weights, tokenizer and model card."""

import contextlib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor

from engine.core.cli import warn
from engine.core.errors import UserError, describe_briefly, wrap_library_errors
from engine.core.files import check_pointer, write_json
from engine.data.chats.chat import chat_format, turn_ends
from engine.data.chats.chat_template import CHATML_TEMPLATE, PLAIN_TEMPLATE
from engine.data.ids import encode_prompt
from engine.data.tokenizer import Tokenizer, load_tokenizer, named_tokenizer
from engine.data.tokenizer_json import SPLIT_PATTERNS, pattern_of
from engine.huggingface.convert import model_class, to_hf_config
from engine.huggingface.families import Family
from engine.runs.checkpoint import RunState
from model import GPT, ModelConfig

NUM_COMPARED_SEQUENCES = 4
MAX_COMPARED_TOKENS = 1024  # of a sequence
MAX_RELATIVE_ERROR = 1e-4  # of the largest logit
PROBE_TEXT = "Don't: x\n    return y\t 12345 l'\u00e9t\u00e9 e\u0301  \u65e5\u672c\n\n Z9 "
# Pattern of a file that is there instead of a model → what it is, and the way out.
OTHER_FILES = {
    "params.json": "is of Mistral's or Meta's own layout. Get the version in transformers' layout",
    "checkpoints": "is of a run, which needs no import. Use sample.py or train.py --init-from",
    "adapter_model.bin": "is not read. Load it in PEFT, and save_pretrained(…) it again",
    "adapters.safetensors": "is an adapter of MLX. Fuse it by mlx_lm.fuse, and import the result",
    "lit_model.pth": "is of litgpt. Convert it there to transformers' layout",
    "ckpt.pt": "is of nanoGPT. Convert it to the layout of transformers' GPT-2",
    "model_[0-9]*.pt": "is of nanochat. Convert it there to transformers' layout",
    "stories*.bin": "is of llama2.c. Convert it there, by its export.py",
    "*.onnx": "is of ONNX, which is not read. Get the model.safetensors of the same model",
    "*.gguf": "is not read. Get the original model, in transformers' layout",
    **dict.fromkeys(
        ("*.bin", "*.pt", "*.pth"),
        "is not read. Beside its config.json, transformers can convert it: "
        "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)",
    ),
}
OTHER_TOKENIZERS = dict.fromkeys(
    ("*.model", "*.model.v*", "tekken*.json", "*.tiktoken", "vocab.json", "vocab.txt"),
    "is not read. Get the tokenizer.json of the same model",
)
FLOAT_DTYPES = {"F64", "F32", "F16", "BF16"}
# Modules that wrap others: torch.compile, DistributedDataParallel, FSDP, activation checkpointing.
WRAPPER_PATTERN = (
    r"\b(?:_orig_mod|module|_(?:fsdp|checkpoint)_wrapped_module)\.|^model\.(?=model\.|lm_head)"
)
CARD_LABEL = "License and source of the text"  # no other tool writes it
EXPORT_FILE_PATTERN = re.compile(r"(.*config|tokenizer)\.json|README\.md|.*\.(safetensors|gguf)")
CARD_TEMPLATE = """---
license: FILL IN
library_name: transformers
---

# {name}

A language model with {parameters:,} parameters, trained from {data}: {tokens:,} tokens in
{step:,} steps. Validation loss: {loss}. License and source of the text: FILL IN.
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


def refuse_other_files(paths: Iterable[Path], others: Mapping[str, str] = OTHER_FILES) -> None:
    """Raise UserError for the first of the files that is another program's."""
    names = sorted(path for path in paths if path.exists())
    for pattern, reason in others.items():
        for path in names:
            if path.match(pattern):
                raise UserError(f"{path}: {reason}.")


def find_directory(source: str) -> Path:
    """Return the directory of a model or an adapter, downloaded if it is the name of one.

    Raises UserError if it does not exist, naming what is there instead of weights.
    """
    path = Path(source)
    if not path.exists():
        path = download_model(source)
    is_adapter = (path / "adapter_config.json").is_file()
    for name in ("config.json", "*.safetensors"):
        if not any(path.glob(name)) and not is_adapter:
            refuse_other_files([path, *path.glob("*")])
            fix = "Give the directory of its config.json, in transformers' layout."
            raise UserError(f"{path}: must be a directory with {name}. {fix}")
    return path


def download_model(name: str) -> Path:
    """Download a model of Hugging Face's hub, and return its directory. Raises UserError."""
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "vocab.txt", "merges.txt"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub's client lets many libraries' errors through
        advice = "Check the name and the connection, or give a directory."
        raise UserError(f"{name}: download failed ({describe_briefly(error)}). {advice}") from None


def check_weights(path: Path) -> torch.dtype:
    """Return bfloat16 if all weights have it, else float32. Refuses quantized weights."""
    dtypes: dict[str, str] = {}
    for file in sorted(path.glob("*.safetensors")):
        with open(file, "rb") as stream:
            check_pointer(stream.peek(), file)
        errors = wrap_library_errors(f"{file}: corrupted", safetensors.SafetensorError, advice=".")
        with errors, safetensors.safe_open(file, "pt") as tensors:
            names = [*tensors.keys()]
            dtypes |= {name: tensors.get_slice(name).get_dtype() for name in names}
    for name, dtype in dtypes.items():
        if dtype not in FLOAT_DTYPES and name.endswith("weight"):
            problem = f"quantized weights are unsupported ({name} is {dtype})"
            raise UserError(f"{path}: {problem}. Use the original model.")
    return torch.bfloat16 if {*dtypes.values()} == {"BF16"} else torch.float32


def load_hf_model(path: Path | None, config: ModelConfig, family: Family, **options: Any) -> Any:
    """Load a model in transformers by our config, so that no other key of its files has effects."""
    hf_class = model_class(family, str(path))
    options["config"] = hf_class.config_class(**to_hf_config(config, family))
    return hf_class.from_pretrained(path, use_safetensors=True, local_files_only=True, **options)


def read_tensors(path: Path, config: ModelConfig, family: Family) -> dict[str, Tensor]:
    """Read a model's tensors, in float32 or bfloat16. Raises UserError unless they fit its config.

    In transformers, one that is missing would be random, and one too many without effect.
    """
    options = {"dtype": check_weights(path), "key_mapping": {WRAPPER_PATTERN: ""}}
    num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if config.num_layers * config.d_model * config.feed_forward_width > num_bytes:
        problem = f"must have the weights of {config.num_layers:,} layers (got {num_bytes:,} bytes)"
        raise UserError(f"{path}: {problem}. Correct its config.json.")
    checks = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    with wrap_library_errors(f"{path}: transformers cannot read it", Exception, advice="."):
        model, info = load_hf_model(path, config, family, **options, **checks)
    for problem, names in info.items():
        if names:
            name = sorted(names)[0]
            fix = "Correct its config.json, such as tie_word_embeddings, or download it again."
            raise UserError(f"{path}: {problem.replace('_', ' ')}, such as {name}. {fix}")
    tensors: dict[str, Tensor] = model.state_dict()
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            fix = "Download it again, or use another checkpoint."
            raise UserError(f"{path}: {name} must be finite (got NaN or infinity). {fix}")
    return tensors


def read_tokenizer(path: Path, name: str | None) -> Tokenizer:
    """Read the named tokenizer, or a model's own. Raises UserError if it is not supported."""
    source = Path(name or path)
    if not (source / "tokenizer.json").is_file():
        refuse_other_files([source, *source.glob("*")], OTHER_TOKENIZERS)
        if not name:
            problem = f"{path / 'tokenizer.json'}: not found"
            raise UserError(f"{problem}. Name the model's tokenizer with --tokenizer.")
    if name:
        return named_tokenizer(name)
    tokenizer = load_tokenizer(path / "tokenizer.json")
    warn_of_tokenizer_class(path, tokenizer)
    is_ours = tokenizer.chat_template in (PLAIN_TEMPLATE, CHATML_TEMPLATE)
    return tokenizer.with_chat_template(None) if is_ours else tokenizer


def warn_of_tokenizer_class(path: Path, tokenizer: Tokenizer) -> None:
    """Warn if the class that a model's files name gives other ids than its tokenizer.json."""
    with contextlib.suppress(Exception):  # a class that cannot be loaded, or a text that cannot be
        transformers = importlib.import_module("transformers")
        options = {"trust_remote_code": False, "local_files_only": True}
        hf_tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
        ids = encode_prompt(tokenizer, PROBE_TEXT).tolist()
        if hf_tokenizer.encode(PROBE_TEXT)[: len(ids)] != ids:
            name = f"transformers' {type(hf_tokenizer).__name__}"
            warn(f"{path}: {name} gives other token ids than tokenizer.json, which is used here")


def differences_from_qwen2(tokenizer: Tokenizer) -> list[str]:
    """List how a tokenizer differs from Qwen2's: transformers 5 runs any in its place as that."""
    document = tokenizer.document
    if pattern_of(document) != SPLIT_PATTERNS["qwen2"]:
        return [f"{tokenizer.kind} tokenizer (supported: the words of Qwen2's)"]
    has_nfc = document["normalizer"] == {"type": "NFC"}
    ignores_merges = document["model"].get("ignore_merges")
    return ["tokenizer without NFC"] * (not has_nfc) + ["ignore_merges"] * bool(ignores_merges)


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return config.json's special token ids. Each family has defaults, which would be wrong."""
    end_of_text = tokenizer.end_of_text_id
    bos = tokenizer.special_tokens.get(tokenizer.bos_token, end_of_text)
    return {"bos_token_id": bos, "eos_token_id": end_of_text, "pad_token_id": None}


def end_token_ids(tokenizer: Tokenizer, template: str | None) -> list[int]:
    """Return the ids that end a text, and with a template those that end an answer."""
    answer_ends = turn_ends(tokenizer, is_chat_model=bool(template)).token_ids
    ends = tokenizer.stop_token_ids
    if tokenizer.special_tokens.keys() >= {"<|return|>", "<|call|>"}:  # gpt-oss: ends a thought
        thought_end = tokenizer.special_tokens.get("<|end|>")
        answer_ends = tuple(end for end in answer_ends if end != thought_end)
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
    if template:
        config["chat_template"] = template
    if tokenizer.end_of_text_id is not None:
        config["bos_token"] = tokenizer.bos_token
        config["eos_token"] = tokenizer.end_of_text_name
    write_json(path / "tokenizer_config.json", config)
    generation_config = {
        "do_sample": True,
        **tokenizer.sampling,  # which transformers saves with this switch only
        **special_token_ids(tokenizer),
        "eos_token_id": end_token_ids(tokenizer, template) or None,
    }
    write_json(path / "generation_config.json", generation_config)


def write_card(path: Path, name: str, state: RunState, num_parameters: int) -> None:
    """Write a model card, with FILL IN for what only a person knows."""
    data = state.settings.get("data") or [state.imported or "noise"]
    loss = (state.evaluation or {}).get("val_loss")
    card = CARD_TEMPLATE.format(
        name=name,
        parameters=num_parameters,
        data=", ".join(Path(path).name for path in data),
        loss="not known" if loss is None else f"{loss:.4f} nats per token",
        tokens=state.tokens,
        step=state.step,
    )
    path.write_text(card, encoding="utf-8")


@torch.no_grad()
def compare_with_transformers(path: Path, model: GPT, tokenizer: Tokenizer, family: Family) -> str:
    """Compare token ids and logits with those of transformers, if it has the class.

    Returns a report. Raises RuntimeError if they differ, as it is a bug.
    """
    try:
        model_class(family, "Not checked")
    except UserError as error:
        return str(error)
    import transformers

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
        own_ids = encode_prompt(tokenizer, text).tolist()
        if hf_ids[: len(own_ids)] != own_ids:
            raise RuntimeError(f"the exported tokenizer has other token ids for {text!r}")
        logits = model(torch.tensor([ids]))
        difference = logits - hf_model(torch.tensor([ids])).logits
        max_error = max(max_error, difference.abs().max().item())
        max_logit = max(max_logit, logits.abs().max().item())
    if not max_error <= MAX_RELATIVE_ERROR * max(1.0, max_logit):
        raise RuntimeError(f"the exported model's logits differ by up to {max_error:.2g}")
    where = f"transformers {transformers.__version__} on {sequences.size:,} random tokens"
    difference = f"logits differ by at most {max_error:.1g} (largest {max_logit:.3g})"
    return f"Checked with {where}: token ids are equal, {difference}"
