"""GGUF, the file format of llama.cpp, from a model in the layout of transformers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from engine.core.cli import count_noun, warn
from engine.core.errors import UserError, import_optional
from engine.data.tokenizer import Tokenizer
from engine.data.tokenizer_json import SPLIT_PATTERNS, is_byte_level, pattern_of, text_vocab
from engine.huggingface.convert import ROPE_SCALING_KEYS
from engine.huggingface.directory import end_token_ids, special_token_ids
from engine.huggingface.families import Family
from engine.nn.positions import angles
from model import ModelConfig

# The activation that llama.cpp computes in each architecture, whatever the file says.
LLAMA_CPP_ACTIVATIONS = {"qwen2": "swiglu", "llama": "swiglu", "qwen3": "swiglu", "gpt2": "gelu"}
_SPACES_PATTERN = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIXES_PATTERN = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER_PATTERN = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER_PATTERN = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# llama.cpp's name of a pre-tokenizer → the regexes that split text, one after another.
PRE_TOKENIZERS = {
    "gpt-2": [SPLIT_PATTERNS["gpt2"]],
    "llama-bpe": [SPLIT_PATTERNS["llama3"]],
    "dbrx": [SPLIT_PATTERNS["llama3"]],
    "qwen2": [SPLIT_PATTERNS["qwen2"]],
    "smollm": [SPLIT_PATTERNS["smollm"]],
    "gpt-4o": [
        rf"{_UPPER_PATTERN}*{_LOWER_PATTERN}+{_SUFFIXES_PATTERN}"
        rf"|{_UPPER_PATTERN}+{_LOWER_PATTERN}*{_SUFFIXES_PATTERN}"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES_PATTERN}"
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES_PATTERN}",
    ],
}
IGNORES_MERGES = ("llama-bpe",)  # for words that are tokens
# Method of GGUFWriter → keys of config.json that have its value.
SIZE_KEYS = {
    "add_context_length": "n_positions max_position_embeddings",
    "add_embedding_length": "n_embd hidden_size",
    "add_block_count": "n_layer num_hidden_layers",
    "add_feed_forward_length": "n_inner intermediate_size",
    "add_head_count": "n_head num_attention_heads",
    "add_head_count_kv": "num_key_value_heads",
    "add_layer_norm_eps": "layer_norm_epsilon",
    "add_layer_norm_rms_eps": "rms_norm_eps",
    **dict.fromkeys(("add_rope_dimension_count", "add_key_length", "add_value_length"), "head_dim"),
    "add_vocab_size": "vocab_size",
}


def check_supported(config: ModelConfig, family: Family, tokenizer: Tokenizer) -> None:
    """Raise UserError for a model that llama.cpp would not compute exactly as it is."""
    import_optional("gguf", "--gguf", "gguf")
    name = family.model_type
    has_other_width = config.head_width * config.num_heads != config.d_model
    problems = {
        f"--family {name} (supported: {', '.join(LLAMA_CPP_ACTIVATIONS)})": name
        not in LLAMA_CPP_ACTIVATIONS,
        f"--windows {config.windows}": any(config.layer_windows),
        f"RoPE scaling llama3 in {name}": len(config.rope_scaling or ()) > 1 and name != "llama",
        f"--activation {config.activation}": config.activation != LLAMA_CPP_ACTIVATIONS.get(name),
        "--head-dim in qwen2 (supported: --family llama)": name == "qwen2" and has_other_width,
    }
    for problem, is_present in problems.items():
        if is_present:
            raise UserError(f"--gguf: unsupported {problem}. Train without it.")
    if tokenizer.text_start not in ([], [tokenizer.special_tokens.get(tokenizer.bos_token)]):
        names = tokenizer.decode_bytes(tokenizer.text_start).decode()
        raise UserError(f"--gguf: a text must begin with at most bos_token (got {names}). Omit it.")
    if pre_tokenizer_name(tokenizer.document) is None:
        problem = f"llama.cpp splits no text as this {tokenizer.kind} tokenizer does"
        raise UserError(f"--gguf: {problem}. Prepare the text with --tokenizer bpe.")


def pre_tokenizer_name(document: dict[str, Any]) -> str | None:
    """Return llama.cpp's name of a pre-tokenizer with the same ids; None if it has none.

    It applies no normalization. NFC is accepted, as nearly all texts have it.
    """
    normalizer = document.get("normalizer") or {}
    forms = {step.get("type") for step in normalizer.get("normalizers", [normalizer])}
    if not is_byte_level(document) or not forms <= {None, "NFC"}:
        return None
    *splits, last = document["pre_tokenizer"].get("pretokenizers", [{}])
    regexes = [split.get("pattern", {}).get("Regex", "") for split in splits]
    regexes = [regex.replace("\r", r"\r").replace("\n", r"\n") for regex in regexes]
    if pattern := pattern_of(document):
        regexes = [pattern]
    elif last.get("use_regex", True):  # the words are split again
        return None
    names = [name for name, patterns in PRE_TOKENIZERS.items() if patterns == regexes]
    ignores = bool(document["model"].get("ignore_merges"))
    same = [name for name in names if (name in IGNORES_MERGES) == ignores]
    if names and not same and makes_every_token(document):
        return names[0]
    return same[0] if same else None


def makes_every_token(document: dict[str, Any]) -> bool:
    """Return whether the merges alone make every token of a byte-level BPE."""
    unset = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    model = document["model"] | {"ignore_merges": False}
    changed = document | unset | {"added_tokens": [], "model": model}
    runner = tokenizers.Tokenizer.from_str(json.dumps(changed))
    encodings = runner.encode_batch_fast([*text_vocab(document)])
    return all(len(encoding.ids) == 1 for encoding in encodings)


def write(
    path: Path,
    hf_config: dict[str, Any],
    tensors: dict[str, Tensor],
    tokenizer: Tokenizer,
    template: str | None,
    dtype: str,
) -> None:
    """Write a model, with most matrices in this dtype. Raises UserError if none can be."""
    import gguf

    writer = gguf.GGUFWriter(path, hf_config["model_type"])
    for method, keys in SIZE_KEYS.items():
        for key in hf_config.keys() & set(keys.split()):
            getattr(writer, method)(hf_config[key])
    if "rope_parameters" in hf_config:
        writer.add_rope_freq_base(hf_config["rope_parameters"]["rope_theta"])
    scaling = hf_config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_divisors(hf_config))
    _add_tokenizer(writer, tokenizer, hf_config["vocab_size"])
    # llama.cpp has a key for the end of a turn, one for the end of a message, and knows some names.
    setters = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, number in zip(setters, end_token_ids(tokenizer, template), strict=False):
        add(number)
    if template:
        writer.add_chat_template(template)
    amount = "ALL" if dtype == "f32" else "MOSTLY"
    writer.add_file_type(gguf.LlamaFileType[f"{amount}_{dtype.upper()}"])
    _add_tensors(writer, hf_config, tensors, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(
    writer: Any, hf_config: dict[str, Any], tensors: dict[str, Tensor], dtype: str
) -> None:
    """Add the tensors, each in the type that llama.cpp's converter and quantizer choose."""
    import gguf

    types = gguf.GGMLQuantizationType
    architecture = hf_config["model_type"]
    num_layers = hf_config["n_layer" if architecture == "gpt2" else "num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], num_layers)
    head = "output.weight" if "lm_head.weight" in tensors else "token_embd.weight"
    counts: Counter[str] = Counter()  # of tensors, by type
    for name, tensor in tensors.items():
        gguf_name = names.get_name(name, (".weight", ".bias"))
        assert gguf_name is not None
        array = _rearrange(name, tensor, hf_config).numpy()
        # Of a q4_0 file llama.cpp stores the head in Q6_K, which gguf.quants cannot write.
        kind = "q8_0" if dtype == "q4_0" and gguf_name == head else dtype
        tensor_type = types[kind.upper()]
        if array.ndim == 1 or gguf_name == "position_embd.weight":
            tensor_type = types.F32
        elif array.shape[1] % gguf.GGML_QUANT_SIZES[tensor_type][0]:
            tensor_type = types.F16
        max_weight = np.abs(array).max()
        if tensor_type.name not in ("F32", "BF16") and max_weight > np.finfo(np.float16).max:
            problem = f"float16 does not represent the weights of {gguf_name} (got {max_weight:g})"
            raise UserError(f"--gguf {dtype}: {problem}. Use --gguf bf16.")
        counts[tensor_type.name] += 1
        array = gguf.quants.quantize(array, tensor_type)
        writer.add_tensor(gguf_name, array, raw_dtype=tensor_type)
    if not counts[dtype.upper()]:
        problem = "no matrix has rows of a multiple of 32 weights"
        raise UserError(f"--gguf {dtype}: {problem}. Use --gguf f16.")
    if dtype != "f16" and counts["F16"]:
        number = count_noun(counts["F16"], "tensor")
        warn(f"--gguf {dtype}: {number} in float16, as rows are not a multiple of 32 weights")


def _rope_divisors(hf_config: dict[str, Any]) -> np.ndarray:
    """Return the divisor of each frequency of RoPE in Llama 3.1, float32 (head_dim / 2,)."""
    scaling = tuple(hf_config["rope_scaling"][key] for key in ROPE_SCALING_KEYS["llama3"])
    options = (torch.ones(()), hf_config["head_dim"], hf_config["rope_theta"])
    divisors: np.ndarray = (angles(*options) / angles(*options, scaling)).numpy()
    return divisors


def _rearrange(name: str, tensor: Tensor, hf_config: dict[str, Any]) -> Tensor:
    """Order a tensor's rows and columns as llama.cpp has them."""
    architecture = hf_config["model_type"]
    if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        # Its RoPE rotates the pairs (0, 1), (2, 3), …; transformers' (0, K/2), (1, K/2 + 1), …
        key = "num_key_value_heads" if ".k_proj." in name else "num_attention_heads"
        halves = tensor.unflatten(0, (hf_config[key], 2, -1))
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    if architecture == "gpt2" and ".h." in name and tensor.ndim == 2:
        tensor = tensor.T
    return tensor.contiguous()


def _add_tokenizer(writer: Any, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Add the tokens, padded to the model's vocabulary, the merges and the start of a text."""
    import gguf

    bpe = tokenizer.document["model"]
    texts = [f"[PAD{number}]" for number in range(vocab_size)]
    kinds = [gguf.TokenType.UNUSED] * vocab_size
    for text, number in bpe["vocab"].items():
        texts[number] = text
        kinds[number] = gguf.TokenType.NORMAL
    for text, number in tokenizer.special_tokens.items():
        texts[number] = text
        is_markup = text in tokenizer.markup
        kinds[number] = gguf.TokenType.USER_DEFINED if is_markup else gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(tokenizer.document))
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    writer.add_token_merges(merges)
    writer.add_add_bos_token(bool(tokenizer.text_start))
    writer.add_bos_token_id(special_token_ids(tokenizer)["bos_token_id"])
