"""GGUF, the file that llama.cpp reads: from the tensors and settings of Hugging Face's form."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.core.errors import UserError
from engine.data.chat import end_of_turn
from engine.data.huggingface_tokenizer import pre_tokenizer_name, to_huggingface
from engine.data.tokenizer import PATTERNS, Tokenizer

# The activations that llama.cpp computes in each kind of model, whatever a file might say.
ACTIVATIONS = {"llama": "silu", "qwen3": "silu", "gpt2": "gelu_new", "apertus": "xielu", "arcee": "relu2"}
INTERLEAVED = ("llama", "arcee")  # whose RoPE rotates neighbours there, and the halves of a head in Hugging Face's form


def check(settings: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Raise UserError, with the remedy, for a model that llama.cpp would not compute exactly as it is."""
    if not importlib.util.find_spec("gguf"):
        raise UserError("--gguf needs a package: pip install gguf")
    kind = settings["model_type"]
    activation = settings.get("hidden_act", settings.get("activation_function"))
    if settings.get("sliding_window"):
        raise UserError(f"llama.cpp has no windows in {kind} models; train without --windows, or leave --gguf out")
    if kind not in ACTIVATIONS:
        raise UserError(f"llama.cpp knows no {kind} models; train without --logit-softcap, or see --family")
    if activation != ACTIVATIONS[kind]:
        raise UserError(f"llama.cpp computes {ACTIVATIONS[kind]} in {kind} models, not {activation}; train with that")
    if settings.get("mlp_bias"):
        raise UserError(f"llama.cpp's {kind} models have no biases in feed-forward layers; train with --no-bias")
    if pre_tokenizer_name(tokenizer) is None:
        known = " or ".join(f"--pattern {name}" for name in PATTERNS if name != "pairs")
        advice = f"prepare the text with --tokenizer bpe and {known}, or with --tokenizer gpt2"
        raise UserError(f"llama.cpp cuts text in other ways than this {tokenizer.kind} tokenizer; {advice}")


def write(
    path: Path,
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
    tokenizer: Tokenizer,
    template: str | None,
    dtype: str,
) -> None:
    """Write the model, its tokenizer and its chats' template; dtype, bf16 or f32, is that of its matrices."""
    import gguf

    kind = settings["model_type"]
    architecture = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    writer = gguf.GGUFWriter(path, kind)
    heads, layers = _add_shape(writer, settings)
    _add_tokenizer(writer, tokenizer, settings["vocab_size"])
    if template:
        writer.add_chat_template(template)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if dtype == "bf16" else gguf.LlamaFileType.ALL_F32)
    names = gguf.get_tensor_name_map(architecture, layers)
    embedding = "transformer.wte.weight" if kind == "gpt2" else "model.embed_tokens.weight"
    for name, tensor in ({"lm_head.weight": tensors[embedding]} | tensors).items():
        if ".act_fn." in name:
            continue
        if kind in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            tensor = interleaved(tensor, heads[".k_proj." in name])
        if kind == "gpt2" and ".h." in name and tensor.ndim == 2:
            tensor = tensor.T
        bf16 = dtype == "bf16" and tensor.ndim == 2 and ".wpe." not in name
        into = gguf.GGMLQuantizationType.BF16 if bf16 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            names.get_name(name, (".weight", ".bias")),
            gguf.quants.quantize(tensor.contiguous().numpy(), into),
            raw_dtype=into,
        )
    if kind == "apertus":
        for which in ("alpha_p", "alpha_n", "beta", "eps"):
            values = [float(tensors[f"model.layers.{layer}.mlp.act_fn.{which}"]) for layer in range(layers)]
            getattr(writer, f"add_xielu_{which}")(values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(tensor: Tensor, heads: int) -> Tensor:
    """A query's or key's rows as neighbours (0, 1), (2, 3), … that were pairs (0, K/2), (1, K/2 + 1), …."""
    halves = tensor.view(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _add_shape(writer: Any, settings: dict[str, Any]) -> tuple[tuple[int, int], int]:
    """Say the model's sizes; returns its heads, of queries and of keys, and its layers."""

    def said(*keys: str) -> Any:
        return next(settings[key] for key in keys if key in settings)

    heads, width = said("num_attention_heads", "n_head"), said("hidden_size", "n_embd")
    grouped, layers = settings.get("num_key_value_heads", heads), said("num_hidden_layers", "n_layer")
    writer.add_context_length(said("max_position_embeddings", "n_positions"))
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(said("intermediate_size", "n_inner"))
    writer.add_head_count(heads)
    if "rms_norm_eps" not in settings:
        writer.add_layer_norm_eps(settings["layer_norm_epsilon"])
        return (heads, grouped), layers
    head_dim = settings.get("head_dim", width // heads)
    writer.add_head_count_kv(grouped)
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    writer.add_rope_freq_base(settings["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(settings["vocab_size"])
    return (heads, grouped), layers


def _add_tokenizer(writer: Any, tokenizer: Tokenizer, size: int) -> None:
    import gguf

    model = json.loads(to_huggingface(tokenizer).to_str())["model"]
    texts, kinds = [f"[PAD{number}]" for number in range(size)], [gguf.TokenType.UNUSED] * size
    for known, kind in ((model["vocab"], gguf.TokenType.NORMAL), (tokenizer.special_tokens, gguf.TokenType.CONTROL)):
        for text, number in known.items():
            texts[number], kinds[number] = text, kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(tokenizer))
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_add_bos_token(False)
    writer.add_bos_token_id(tokenizer.end_of_text)
    writer.add_eos_token_id(tokenizer.end_of_text)
    if (end := end_of_turn(tokenizer)) is not None:
        writer.add_eot_token_id(end)
