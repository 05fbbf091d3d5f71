"""Models and tokenizers in Hugging Face's form, and back, compute the same.

SHAPES=50 pytest -o addopts= tests/test_huggingface.py   tries more shapes of each family.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from helpers import (
    VARIANTS,
    decode,
    make_dataset,
    numbers_text,
    random_model,
    save_run,
    train_sentencepiece,
)
from hf_versions import check_export
from tokenizers.processors import TemplateProcessing

import huggingface
import sample
from engine.core.errors import UserError
from engine.data.chats.chat import CHATML_TOKENS, encode_chat, special_token_names, turn_ends
from engine.data.dataset import open_dataset
from engine.data.tokenizer import ByteTokenizer, Tokenizer, from_document, load_tokenizer
from engine.data.tokenizer_json import (
    BYTE_LEVEL,
    BYTE_LEVEL_WORDS,
    EXTENSION_KEY,
    SPLIT_PATTERNS,
    split_by,
    with_extension,
)
from engine.data.tokenizer_training import train_bpe_tokenizer
from engine.generation.text_stream import TextStream
from engine.huggingface import directory as hf_directory
from engine.huggingface.convert import rewrite_params, to_hf
from engine.huggingface.families import MODEL_FAMILIES
from engine.huggingface.gguf import PRE_TOKENIZERS, pre_tokenizer_name
from engine.runs.checkpoint import load_model
from engine.runs.run_files import find_checkpoint
from model import Head, ModelConfig

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
NUM_SHAPES = int(os.environ.get("SHAPES", "2"))
LLAMA_OPTIONS = {"tie", "grouped", "weighted", "scaled", "rope"}
UNNORMED = {"activation": "swiglu", "qk_norm": False}
LEARNED = {"position": "learned", "norm": "layernorm", "activation": "gelu", "qk_norm": False}
SUPPORTED = {  # settings of each family, and the options that it supports beside them
    "llama": (UNNORMED, LLAMA_OPTIONS | {"bias"}),
    "qwen3": ({"activation": "swiglu"}, LLAMA_OPTIONS | {"head_dim", "windows"}),
    "qwen2": (UNNORMED | {"qkv_bias": True}, LLAMA_OPTIONS | {"head_dim", "windows"}),
    "mistral": (UNNORMED, LLAMA_OPTIONS | {"head_dim", "window"}),
    "nanochat": ({"activation": "relu2"}, {"rope", "grouped", "scaled", "cap", "activation"}),
    "gpt2": (LEARNED, {"bias", "tie", "scaled", "activation", "sinusoidal"}),
}


def draw_config(family: str, seed: int) -> ModelConfig:
    """Draw a small model of odd sizes. Each pair of seeds has every option of the family once."""
    draw = random.Random(f"{family} {seed}")
    draw_option = random.Random(f"{family} {seed // 2}")
    settings, options = SUPPORTED[family]
    heads = draw.choice((1, 2, 3, 5))
    groups = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    choices = {
        "bias": {"bias": True},
        "tie": {"tie_embeddings": True},
        "grouped": {"num_kv_heads": groups, "rope_base": 500.0, "norm_epsilon": 1e-3},
        "weighted": {"norm": "weighted_rmsnorm"},
        "scaled": {"scale_embeddings": True},
        "rope": {"rope_scaling": draw.choice(((2.5,), (8.0, 1.0, 4.0, 16.0)))},
        "cap": {"logit_softcap": 3.0},
        "activation": {"activation": draw.choice(("relu2", "gelu", "relu"))},
        "sinusoidal": {"position": "sinusoidal"},
        "head_dim": {"head_dim": draw.choice((4, 12))},
        # With a window of 1, transformers' cache forgets nothing.
        "window": {"windows": (draw.choice((2, 5, 12)),)},
        "windows": {"windows": draw.choice(((5,), (4, 0), (0, 2), (7, 7, 0), (0, 9, 0)))},
    }
    for name, choice in choices.items():
        if (draw_option.random() < 0.5) == seed % 2 and name in options:
            settings = settings | choice
    return ModelConfig(
        vocab_size=777,
        context_length=draw.choice((24, 33)),
        num_layers=draw.choice((1, 3)),
        num_heads=heads,
        d_model=heads * draw.choice((6, 10, 16)),
        d_ff=draw.choice((None, 70)),
        **settings,
    )


@functools.cache
def qwen2_tokenizer() -> Tokenizer:
    """Return a small tokenizer like Qwen2's."""
    document = train_bpe_tokenizer([numbers_text(300)], 400, "qwen2").document
    model = document["model"] | {"ignore_merges": False}
    return from_document(document | {"model": model, "normalizer": {"type": "NFC"}})


def run_command(*arguments: object) -> None:
    huggingface.main([str(argument) for argument in arguments])


@torch.no_grad()
def export_random_model(family: str, seed: int, dtype: str, path: Path) -> None:
    """Export a model of the family, and write what is expected of it for check_export()."""
    model = random_model(draw_config(family, seed), seed)
    tokenizer = qwen2_tokenizer()
    run = save_run(model, path.with_name(f"{path.name}-run"), tokenizer, "chats")
    run_command("export", run, path, "--family", family, "--dtype", dtype)
    text = "7 is followed by 8.\n9 is"
    ids = torch.tensor([[*tokenizer.encode(text).tolist(), tokenizer.end_of_text_id]])
    (continued,) = decode(model, ids[:, :4].tolist(), 12, temperature=0)
    continued = torch.tensor([[*ids[0, :4].tolist(), *continued]])
    expected = {"ids": ids, "logits": model(ids), "continued": continued}
    safetensors.torch.save_file(expected, path.with_suffix(".safetensors"), {"text": text})


def contents(directory: Path) -> dict[str, bytes]:
    """Read the files of an export but the card, and of the tokenizer what computes."""
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    tokenizer = json.loads(files["tokenizer.json"])
    tokenizer["model"].pop(EXTENSION_KEY, None)
    return {**files, "README.md": b"", "tokenizer.json": json.dumps(tokenizer).encode()}


@pytest.fixture(scope="module", name="words")
def fixture_words() -> Tokenizer:
    """A BPE that splits text as GPT-2 does, which llama.cpp supports."""
    text = "def two(words): return words + 12345, 'named', they've\n\n"
    return train_bpe_tokenizer([text] * 9 + [numbers_text(300)], 400, "gpt2")


# Export, and import again.


@pytest.mark.parametrize("family", MODEL_FAMILIES)
def test_an_export_computes_the_same_and_an_import_of_it_exports_the_same_files(
    family: str, tmp_path: Path, capsys, monkeypatch
):
    for seed in range(NUM_SHAPES):
        dtype = "bfloat16" if seed % 2 else "float32"
        out, back, again = (tmp_path / f"{name}{seed}" for name in ("hf", "b", "again"))
        export_random_model(family, seed, dtype, out)
        assert "Checked with transformers" in capsys.readouterr().out
        files = contents(out)
        hf_config = json.loads(files["config.json"])
        assert hf_config["architectures"] == [MODEL_FAMILIES[family].architecture]
        rope = hf_config.get("rope_parameters", {})  # before transformers 5, other keys have it
        assert hf_config.get("rope_theta") == rope.get("rope_theta")
        assert rope.get("factor") == hf_config.get("rope_scaling", {}).get("factor")
        assert hf_config["dtype"] == hf_config["torch_dtype"] == dtype
        tensors = safetensors.torch.load(files["model.safetensors"])
        assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{dtype}"}
        check_export(out)
        run_command("import", out, back)
        with monkeypatch.context() as patch:
            patch.setattr(hf_directory, "compare_with_transformers", lambda *_: "")
            run_command("export", back, again, "--family", family, "--dtype", dtype)
        assert contents(again) == files, hf_config


def test_the_check_finds_a_wrong_export(tmp_path: Path, monkeypatch):
    run = save_run(random_model(draw_config("llama", 3)), tmp_path / "run")
    family = dataclasses.replace(MODEL_FAMILIES["llama"], flips_rope=False)
    monkeypatch.setitem(MODEL_FAMILIES, "llama", family)
    with pytest.raises(RuntimeError, match="logits differ"):
        run_command("export", run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
CAPPED = {"logit_softcap": 9.0, "activation": "relu2"}


@pytest.mark.parametrize(
    ("settings", "flags", "problem", "fix"),
    [
        ({"norm_placement": "post"}, "", "norm_placement post", "Train without"),
        (CAPPED, "--family llama", "logit_softcap 9", "--family nanochat"),
        ({"windows": (4, 0)}, "--family mistral", "windows", "--family qwen3"),
        ({"windows": (4, 3)}, "--family qwen3", "windows", "Train without"),
        ({"qkv_bias": True}, "", "qk_norm True", "Train without"),
        ({"qkv_bias": True}, "--family qwen2", "byte tokenizer", "Train without"),
        (
            {"qk_norm": False, "qkv_bias": True, "head_dim": 16},
            "--gguf f32 --family qwen2",
            "--head-dim",
            "without",
        ),
        ({"windows": (4,)}, "--gguf f32", "--windows", "without"),
        ({"rope_scaling": (8.0, 1.0, 4.0, 32.0)}, "--gguf f32", "llama3 in qwen3", "without"),
        ({"activation": "relu2"}, "--gguf f32", "activation relu2", "without"),
        (CAPPED, "--gguf f32 --family nanochat", "--family nanochat", "without"),
        ({}, "--gguf f32", "byte tokenizer", "--tokenizer bpe"),
    ],
)
def test_unsupported_models_are_refused_with_a_fix(settings, flags, problem, fix, tmp_path: Path):
    config = dataclasses.replace(VARIANTS["default"], vocab_size=400, **settings)
    tokenizer = qwen2_tokenizer() if problem == "--head-dim" else ByteTokenizer()
    run = save_run(random_model(config), tmp_path / "run", tokenizer)
    with pytest.raises(UserError, match=f"{problem}.*{fix}"):
        run_command("export", run, tmp_path / "hf", *flags.split())
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_loop_is_exported_unless_the_definition_was_edited(words, tmp_path, monkeypatch):
    settings = {"attention": "loop", "qk_norm": False, "vocab_size": 400}
    config = dataclasses.replace(VARIANTS["default"], **settings)
    run = save_run(random_model(config), tmp_path / "run", words)
    run_command("export", run, tmp_path / "same")
    card = (tmp_path / "same" / "README.md").read_text()
    assert "trained from a, b:" in card and "/" not in card
    attention = Head.attention
    monkeypatch.setattr(Head, "attention", lambda *inputs: attention(*inputs).square())
    with pytest.raises(UserError, match=r"Head\.attention"):
        run_command("export", run, tmp_path / "edited")
    assert not (tmp_path / "edited").exists()


@dataclasses.dataclass(frozen=True)
class ForkedConfig(ModelConfig):
    """A fork's settings: a switch that is off by default, and has no parameters."""

    parallel_blocks: bool = False


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "nanochat"])
def test_a_new_setting_that_is_on_and_a_new_parameter_are_refused_by_name(family: str):
    model = random_model(draw_config(family, 1))
    off = ForkedConfig(**dataclasses.asdict(model.config))
    choose_family = functools.partial(huggingface.choose_family, tokenizer=qwen2_tokenizer())
    _, config = choose_family(off, "auto")
    for name in ("auto", family):
        with pytest.raises(UserError, match="parallel_blocks"):
            choose_family(dataclasses.replace(off, parallel_blocks=True), name)
    model.blocks[0].attention.gate = torch.nn.Linear(3, 3, bias=False)
    parameter = r"blocks\.0\.attention\.gate\.weight"
    with pytest.raises(UserError, match=rf"--family {family}: .*{parameter}"):
        to_hf(rewrite_params(model, config), MODEL_FAMILIES[family])


# Directories of transformers.


GPT2 = {"architectures": ["GPT2LMHeadModel"]}
NANOCHAT = {"architectures": ["NanoChatForCausalLM"]}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}
SLIDING = {"layer_types": ["sliding_attention"] * 2}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
BAD_CONFIGS = {
    "unknown architecture": ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    "another width": ({"intermediate_size": 81}, "mismatched keys.*_proj"),
    "more layers": ({"num_hidden_layers": 3}, r"missing keys.*model.layers.2"),
    "many layers": ({"num_hidden_layers": 9000}, "9,000 layers"),
    "fewer layers": ({"num_hidden_layers": 1}, r"model\.layers\.1\."),
    "dynamic RoPE": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    "RoPE of a fraction": ({"partial_rotary_factor": 0.5}, "complete heads"),
    "no factor": ({"rope_parameters": {"rope_type": "linear"}}, "linear.*factor"),
    "RoPE by layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attent"),
    "zero epsilon": ({"rms_norm_eps": 0.0}, "norm_epsilon: must be"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
    "window of 0": ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_win"),
    "no window": (QWEN3 | SLIDING | {"use_sliding_window": False}, "sliding_window must be"),
    "exact GELU": (NANOCHAT | {"hidden_act": "gelu"}, "activation.*gelu"),
    "one bias, one missing": ({"attention_bias": True, "mlp_bias": None}, "mlp_bias"),
    "unscaled attention": (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights"),
    "tied nanochat": (NANOCHAT | {"hidden_act": "relu2", "tie_word_embeddings": True}, "tie_embed"),
}


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a model."""
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    edit(tensors)
    safetensors.torch.save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def convert_tensors(directory: Path, dtype: torch.dtype) -> None:
    """Convert the tensors of a model to a dtype."""
    edit_tensors(directory, lambda t: t.update({name: t[name].to(dtype) for name in t}))


def write_index(directory: Path, index: Any) -> None:
    """Name the file of the tensors in an index, and remove it."""
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


BAD_FILES = {
    "a pickle": (lambda d: (d / "model.safetensors").rename(d / "model.bin"), "save_pretrained"),
    "half the weights": (lambda d: os.truncate(d / "model.safetensors", 9000), "model.safetensors"),
    "no index": (
        lambda d: (d / "model.safetensors").rename(d / "model-1.safetensors"),
        "model.safet",
    ),
    "NaN": (lambda d: edit_tensors(d, lambda t: t["lm_head.weight"].fill_(math.nan)), "head.*NaN"),
    "no shard": (lambda d: write_index(d, {"weight_map": {"a": "/etc/x"}}), "a directory with"),
    "a list": (lambda d: (d / "config.json").write_text("[1]"), "config.json"),
    "integers": (lambda d: convert_tensors(d, torch.int8), "quantized.*is I8.*original"),
    "no head": (
        lambda d: edit_tensors(d, lambda t: t.pop("lm_head.weight")),
        "lm_head.*tie_word_emb",
    ),
    "an adapter": (lambda d: (d / "adapter_config.json").write_text('{"r": 4}'), "adapter_model"),
    "a corrupted adapter": (lambda d: (d / "adapter_config.json").write_text("["), "adapter_model"),
    "no config": (lambda d: (d / "config.json").unlink(), "directory of its config.json"),
}
OTHER_FILES = {
    "params.json": "own layout",
    "ckpt.pt": "nanoGPT",
    "lit_model.pth": "litgpt",
    "model_000650.pt": "nanochat",
    "stories15M.bin": "llama2.c",
    "model.onnx": "ONNX",
    "model.gguf": "original model",
    "checkpoints": "no import",
    "x.model.v3": "tokenizer.json",
    "tekken_2.json": "tokenizer.json",
    "qwen.tiktoken": "tokenizer.json",
    "vocab.json": "tokenizer.json",
}


@pytest.fixture(scope="module")
def hf_llama(tmp_path_factory) -> Path:
    """A directory of a small llama, only to be copied."""
    path = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(vocab_size=300, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", [*BAD_CONFIGS, *BAD_FILES])
def test_an_unsupported_directory_is_refused(name: str, hf_llama: Path, tmp_path: Path):
    shutil.copytree(hf_llama, tmp_path, dirs_exist_ok=True)
    if name in BAD_CONFIGS:
        changes, message = BAD_CONFIGS[name]
        config = json.loads((hf_llama / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
    else:
        damage, message = BAD_FILES[name]
        damage(tmp_path)
    with pytest.raises((UserError, FileNotFoundError), match=message):
        run_command("import", tmp_path, tmp_path / "run", "--tokenizer", "byte")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change", ["_orig_mod.", "module.", "model.", "inside", "float64", "head", "only a head"]
)
def test_a_wrapped_model_and_a_head_of_its_own_compute_the_same(
    change: str, hf_llama: Path, tmp_path: Path, capsys
):
    hf = shutil.copytree(hf_llama, tmp_path / "hf")
    expected = transformers.AutoModelForCausalLM.from_pretrained(hf)
    if "head" in change:  # of other values than the embedding, or as save_model of safetensors
        config = json.loads((hf / "config.json").read_text()) | {"tie_word_embeddings": True}
        (hf / "config.json").write_text(json.dumps(config))
        if change == "only a head":
            edit_tensors(hf, lambda tensors: tensors.pop("model.embed_tokens.weight"))
            expected = transformers.AutoModelForCausalLM.from_pretrained(hf)
    elif change == "float64":
        convert_tensors(hf, torch.float64)
    else:
        old, new = (".0.", ".0._orig_mod.") if change == "inside" else ("^", change)
        edit_tensors(hf, lambda t: [t.update({re.sub(old, new, n): t.pop(n)}) for n in [*t]])
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)  # left by an import that failed
    run_command("import", hf, tmp_path / "run", "--tokenizer", "byte")
    model = load_model(find_checkpoint(tmp_path / "run"))
    ids = torch.arange(40)[None]
    torch.testing.assert_close(model(ids), expected(ids).logits, rtol=0, atol=1e-5)
    assert ("lm_head.weight differs" in capsys.readouterr().err) == (change == "head")
    assert model.config.tie_embeddings == (change == "only a head")


def test_a_missing_or_large_tokenizer_is_refused(words: Tokenizer, hf_llama: Path, tmp_path: Path):
    file = tmp_path / "tokenizer.json"
    words.save(file)
    with pytest.raises(UserError, match="--tokenizer"):
        run_command("import", hf_llama, tmp_path / "run")
    with pytest.raises(UserError, match=r"--base: .*Leave it out"):
        run_command("import", hf_llama, tmp_path / "run", "--base", tmp_path)
    slow = shutil.copytree(hf_llama, tmp_path / "slow")
    (slow / "tokenizer.model").touch()
    with pytest.raises(UserError, match=r"tokenizer.model: is not read.*tokenizer.json"):
        run_command("import", slow, tmp_path / "run")
    with pytest.raises(UserError, match=r"--tokenizer.*400.*300"):
        run_command("import", hf_llama, tmp_path / "run", "--tokenizer", file)
    words.save(slow / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer.json.*resize_token_embeddings\(400\)"):
        run_command("import", slow, tmp_path / "run")


def test_the_defaults_of_sampling_are_kept_and_inherited(hf_llama: Path, tmp_path: Path, capsys):
    hf = shutil.copytree(hf_llama, tmp_path / "hf")
    ByteTokenizer().save(hf / "tokenizer.json")
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    (hf / "generation_config.json").write_text(json.dumps(values | {"max_new_tokens": 64}))
    run_command("import", hf, tmp_path / "run")
    assert "temperature 0.6, top_k 20, top_p 0.95" in capsys.readouterr().out
    assert sample.load(tmp_path / "run", "cpu").sampling == values
    data = make_dataset(tmp_path, numbers_text(100), tokenizer=str(tmp_path / "run"))
    assert open_dataset(data).tokenizer.sampling == values  # which a fine-tuned model has
    run_command("export", tmp_path / "run", tmp_path / "again")
    exported = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert exported.items() >= values.items() and exported["do_sample"]
    for sampling in ("nonsense", "[1]", '{"temperature": -5}', '{"top_k": "x"}', "[" * 10**5):
        document = with_extension(ByteTokenizer().document, sampling=sampling)
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))
        with pytest.raises(UserError, match="sampling"):
            load_tokenizer(tmp_path / "tokenizer.json")
    (hf / "generation_config.json").write_text(json.dumps({"temperature": "hot"}))
    with pytest.raises(UserError, match=r"generation_config.json: temperature: must be .*hot"):
        run_command("import", hf, tmp_path / "other")


def test_a_class_that_gives_other_ids_than_the_file_is_named(words, hf_llama, tmp_path, capsys):
    hf = shutil.copytree(hf_llama, tmp_path / "hf")
    steps = [split_by(r"\p{N}"), BYTE_LEVEL_WORDS]
    document = words.document | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    (hf / "tokenizer.json").write_text(json.dumps(document))
    model = random_model(dataclasses.replace(VARIANTS["default"], vocab_size=410))
    run_command("export", save_run(model, tmp_path / "run", from_document(document)), hf / "x")
    for name, has_warning in (("PreTrainedTokenizerFast", False), ("GPT2Tokenizer", True)):
        file = hf / "x" / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": name}))
        capsys.readouterr()
        run_command("import", hf / "x", tmp_path / name)
        assert ("other token ids than tokenizer.json" in capsys.readouterr().err) == has_warning


def test_an_import_is_replaced_only_by_force(hf_llama: Path, tmp_path: Path):
    command = ("import", hf_llama, tmp_path / "run", "--tokenizer", "byte")
    run_command(*command)
    with pytest.raises(UserError, match="--force"):
        run_command(*command)
    run_command(*command, "--force")
    run = save_run(random_model(VARIANTS["default"]), tmp_path / "own")
    with pytest.raises(UserError, match=r"has checkpoints\. Choose"):
        run_command("import", hf_llama, run, "--tokenizer", "byte", "--force")


@pytest.mark.parametrize("name", OTHER_FILES)
def test_a_file_of_another_program_is_named(name: str, hf_llama: Path, tmp_path: Path):
    words = OTHER_FILES[name]
    source = shutil.copytree(hf_llama, tmp_path / "model")
    file = source / name
    file.write_bytes(b"\xce")
    if words != "tokenizer.json":
        (source / "config.json").unlink()
    out = tmp_path / "run"
    for path in (file, source):
        is_tokenizer = words == "tokenizer.json"
        arguments = (hf_llama, out, "--tokenizer", path) if is_tokenizer else (path, out)
        with pytest.raises(UserError, match=words):
            run_command("import", *arguments)


# GGUF.


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *itertools.product(("llama", "gpt2"), ("q8_0", "q4_0")),
        *(("llama", "f16"), ("qwen3", "bf16"), ("qwen2", "f32")),
    ],
)
def test_gguf_has_every_tensor(family: str, dtype: str, words: Tokenizer, tmp_path: Path, capsys):
    gguf = pytest.importorskip("gguf")
    if family == "qwen2":
        words = qwen2_tokenizer()
    activation = MODEL_FAMILIES[family].supports["activation"][0]
    settings = {"bias": family in ("gpt2", "llama"), "activation": activation, "windows": None}
    settings |= {"rope_scaling": None, "vocab_size": 410, "context_length": 96}
    config = draw_config(family, 1)
    if dtype in ("q8_0", "q4_0"):
        settings["d_model"] = 32 * config.num_heads
    if family == "qwen2":
        settings["head_dim"] = None
    model = random_model(dataclasses.replace(config, **settings))
    run = save_run(model, tmp_path / "run", words)
    run_command("export", run, tmp_path / "hf", "--family", family, "--gguf", dtype)
    reader = gguf.GGUFReader(tmp_path / "hf" / f"hf-{dtype}.gguf")
    tensors = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], model.config.num_layers)
    expected = {names.get_name(name, (".weight", ".bias")): tensors[name] for name in tensors}
    assert {tensor.name for tensor in reader.tensors} == expected.keys()
    head = "output.weight" if "lm_head.weight" in tensors else "token_embd.weight"
    for tensor in reader.tensors:
        value = expected[tensor.name]
        if family == "gpt2" and tensor.name.startswith("blk.") and value.ndim == 2:
            value = value.T
        if family == "llama" and re.search("attn_[qk]", tensor.name):  # pairs side by side
            heads = model.config.num_heads if "attn_q" in tensor.name else model.config.num_groups
            value = value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
        kind = dtype.upper()
        if value.ndim == 1 or tensor.name == "position_embd.weight":
            kind = "F32"
        elif dtype in ("q8_0", "q4_0") and value.shape[1] % 32:
            kind = "F16"
        elif dtype == "q4_0" and tensor.name == head:
            kind = "Q8_0"
        assert tensor.tensor_type.name == kind
        quantized = gguf.quants.quantize(value.contiguous().numpy(), tensor.tensor_type)
        assert tensor.data.tobytes() == quantized.tobytes(), tensor.name
    values = {key: field.contents() for key, field in reader.fields.items()}
    file_type = gguf.LlamaFileType(values["general.file_type"]).name
    assert file_type == ("ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}")
    assert values["general.architecture"] == family
    assert values["tokenizer.ggml.pre"] == ("qwen2" if family == "qwen2" else "gpt-2")
    assert values[f"{family}.attention.head_count"] == model.config.num_heads
    assert values[f"{family}.block_count"] == model.config.num_layers
    assert len(values["tokenizer.ggml.tokens"]) == 410
    assert values["tokenizer.ggml.eos_token_id"] == words.end_of_text_id
    num_float16 = [tensor.tensor_type.name for tensor in reader.tensors].count("F16")
    has_warning = f"--gguf {dtype}: {num_float16} tensor" in capsys.readouterr().err
    assert has_warning == (num_float16 > 0 and dtype != "f16")


def test_a_pre_tokenizer_of_llama_cpp_gives_the_same_ids_or_none(words: Tokenizer):
    def named(regexes: list[str], ignore_merges: bool, **changes: Any) -> str | None:
        steps = [*map(split_by, regexes), BYTE_LEVEL]
        document = words.document | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
        model = document["model"] | {"ignore_merges": ignore_merges}
        return pre_tokenizer_name(document | {"model": model} | changes)

    llama3 = [SPLIT_PATTERNS["llama3"]]
    assert (named(llama3, True), named(llama3, False)) == ("llama-bpe", "dbrx")
    deepseek = [regex.replace(r"\n", "\n") for regex in PRE_TOKENIZERS["deepseek-v3"]]
    assert named(deepseek, False) == "deepseek-v3"
    qwen2 = [SPLIT_PATTERNS["qwen2"]]
    assert named(qwen2, True) == named(qwen2, True, normalizer={"type": "NFC"}) == "qwen2"
    assert named(qwen2, True, normalizer={"type": "NFKC"}) is None
    vocab = words.document["model"]["vocab"] | {"qqqq": words.vocab_size}  # which no merge makes
    model = words.document["model"] | {"vocab": vocab}
    assert named(qwen2, True, model=model | {"ignore_merges": False}) == "qwen2"
    assert named(qwen2, True, model=model | {"ignore_merges": True}) is None


@pytest.mark.parametrize("scaling", [(2.0,), (8.0, 1.0, 4.0, 32.0)], ids=["linear", "llama3"])
def test_gguf_has_the_scaling_of_rope(scaling: tuple[float, ...], words, tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    changes = {"vocab_size": 410, "qk_norm": False, "rope_scaling": scaling, "head_dim": 16}
    config = dataclasses.replace(VARIANTS["default"], **changes)
    run = save_run(random_model(config), tmp_path / "run", words)
    run_command("export", run, tmp_path / "hf", "--family", "llama", "--gguf", "f32")
    reader = gguf.GGUFReader(tmp_path / "hf" / "hf-f32.gguf")
    values = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    if len(scaling) == 1:
        assert values["llama.rope.scaling.type"] == "linear"
        assert values["llama.rope.scaling.factor"] == 2 and "rope_freqs.weight" not in tensors
        return
    hf_config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    scaled = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(hf_config).inv_freq
    plain = 10_000.0 ** (-torch.arange(8) / 8)
    torch.testing.assert_close(tensors["rope_freqs.weight"], plain / scaled, rtol=1e-5, atol=0)
    assert "llama.rope.scaling.type" not in values


@pytest.mark.parametrize(
    ("dtype", "scale", "problem"),
    [("q8_0", 1, "q8_0: .*32 weights.*f16"), ("f16", 1e6, "f16: .*token_embd.*--gguf bf16")],
)
def test_weights_that_a_type_does_not_represent_are_refused(
    dtype: str, scale: float, problem: str, words: Tokenizer, tmp_path: Path
):
    pytest.importorskip("gguf")
    sizes = {"vocab_size": 410, "d_ff": 70, "norm": "weighted_rmsnorm"}
    model = random_model(dataclasses.replace(VARIANTS["default"], **sizes))
    model.token_embedding.weight.data.mul_(scale)
    run = save_run(model, tmp_path / "run", words)
    with pytest.raises(UserError, match=f"--gguf {problem}"):
        run_command("export", run, tmp_path / "hf", "--gguf", dtype)
    assert not (tmp_path / "hf").exists()


# A model's own conventions, chats, and the hub.


@pytest.mark.parametrize("kind", ["SentencePiece", "byte-level"])
@torch.no_grad()
def test_an_import_keeps_what_begins_and_ends_its_texts(
    kind: str, words: Tokenizer, tmp_path: Path
):
    hf, run, back = (tmp_path / name for name in ("hf", "run", "back"))
    hf.mkdir()
    names = ["<s>", "</s>", "<|eot|>"]
    tokenizer = words.with_special([*names, "<think>"])
    if kind == "SentencePiece":
        tokenizer = train_sentencepiece([numbers_text(300)]).with_special(names[2:])
    bos, end, eot = (tokenizer.special_tokens[name] for name in names)
    document = json.loads(tokenizer.content)
    for token in document["added_tokens"]:
        token["special"] = token["content"] != "<think>"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if kind == "byte-level":
        template = TemplateProcessing("<s> $0", special_tokens=[("<s>", bos)])
        document["post_processor"] = json.loads(template.__getstate__())
    (hf / "tokenizer.json").write_text(json.dumps(document))
    names_file = "tokenizer_config.json" if kind == "byte-level" else "special_tokens_map.json"
    (hf / names_file).write_text(json.dumps(config))
    ids = {"bos_token_id": bos, "eos_token_id": end}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "vocab_size": tokenizer.vocab_size}
    torch.manual_seed(0)
    hf_model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ids))
    hf_model.generation_config.eos_token_id = [end, eot]
    row = hf_model.lm_head.weight[tokenizer.encode("7")[-1]]
    hf_model.lm_head.weight[[i for i in range(tokenizer.vocab_size) if i != eot]] *= 0.5
    hf_model.lm_head.weight[eot] = row * 1.1
    hf_model.save_pretrained(hf)
    run_command("import", hf, run)
    generator = sample.load(run)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    for text in ("7 is followed by 8.", "9 is", "is", "1"):
        inputs = hf_tokenizer(text, return_tensors="pt")
        prompt = inputs.input_ids[0].tolist()
        assert generator.encode_prompt(text) == prompt and prompt[0] == bos
        options = {"do_sample": False, "suppress_tokens": generator.tokenizer.unused_ids()}
        hf_ids = hf_model.generate(**inputs, max_new_tokens=20, **options)[0, len(prompt) :]
        stream = TextStream(generator.tokenizer, prompt)
        expected = "".join(map(stream.push, hf_ids.tolist()))
        assert generator.generate(text, max_new_tokens=20, temperature=0) == expected
    assert generator.encode_prompt("") == [bos]
    records = [{"text": f"{number} is followed"} for number in range(400)]
    dataset = open_dataset(make_dataset(tmp_path, records, tokenizer=str(run)))
    splits = (dataset.train, dataset.val)
    tokens = np.concatenate([split.read(0, len(split))[0] for split in splits])
    starts = [0, *np.flatnonzero(tokens == end)[:-1] + 1]
    assert (tokens[starts] == bos).all() and (tokens == bos).sum() == len(records)
    has_gguf = kind != "SentencePiece" and find_spec("gguf")
    run_command("export", run, back, *(["--gguf", "f32"] if has_gguf else []))
    exported = transformers.AutoTokenizer.from_pretrained(back)
    assert exported("7 is").input_ids == hf_tokenizer("7 is").input_ids
    assert (exported.bos_token, exported.eos_token) == ("<s>", "</s>")
    names_of_files = ("config.json", "generation_config.json")
    written = [json.loads((back / name).read_text()) for name in names_of_files]
    assert [values["bos_token_id"] for values in written] == [bos, bos]
    assert [values["eos_token_id"] for values in written] == [end, [end, eot]]
    again = transformers.AutoModelForCausalLM.from_pretrained(back)
    again.generation_config.do_sample = False
    again.save_pretrained(tmp_path / "again")
    if has_gguf:
        fields = __import__("gguf").GGUFReader(back / "back-f32.gguf").fields
        values = {key.split(".")[-1]: field.contents() for key, field in fields.items()}
        assert values["add_bos_token"] and values["bos_token_id"] == bos
        assert (values["eos_token_id"], values["eot_token_id"]) == (end, eot)
        kinds = [values["token_type"][tokenizer.special_tokens[n]] for n in (*names, "<think>")]
        assert kinds == [3, 3, 3, 4]


def test_a_model_whose_chats_fail_is_imported_with_a_warning(words, tmp_path, capsys):
    run, hf, back, again = (tmp_path / name for name in ("run", "hf", "back", "again"))
    save_run(random_model(dataclasses.replace(VARIANTS["default"], vocab_size=410)), run, words)
    run_command("export", run, hf)
    (hf / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    capsys.readouterr()
    run_command("import", hf, back)
    output = capsys.readouterr()
    assert f"{hf}: " in output.err and "--chat\n" not in output.out
    assert find_checkpoint(back).is_chat_model
    run_command("export", back, again)
    exported = json.loads((again / "tokenizer_config.json").read_text())
    assert exported["chat_template"] == "{% if %}"


@pytest.mark.parametrize("kind", ["ours", "ChatML", "imported"])
def test_the_chat_template_gives_the_tokens_that_were_learned(
    kind: str, words: Tokenizer, tmp_path: Path, capsys
):
    if kind == "ChatML":
        words = words.with_special(CHATML_TOKENS)
    elif kind == "imported":  # its template is replaced by that of the chats that are learned
        names = special_token_names(words, chat=True)
        words = words.with_chat_template(TEMPLATE).with_special(names)
    model = random_model(dataclasses.replace(VARIANTS["default"], vocab_size=410))
    for examples, is_chat_model in ((None, kind == "imported"), ("chats", True)):
        run, hf, back = (tmp_path / f"{name}-{examples}" for name in ("run", "hf", "back"))
        save_run(model, run, words, examples)
        run_command("export", run, hf, *(["--gguf", "f32"] if find_spec("gguf") else []))
        assert ("chat_template" in (hf / "tokenizer_config.json").read_text()) == is_chat_model
        capsys.readouterr()
        run_command("import", hf, back)
        assert find_checkpoint(back).is_chat_model == is_chat_model
        assert (f"sample.py {back} --chat\n" in capsys.readouterr().out) == is_chat_model
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    assert hf_tokenizer.eos_token_id == words.end_of_text_id
    if kind == "imported":
        return
    turns = [("system", "words"), ("user", "named two?"), ("assistant", "return they've")]
    turns += [("user", "12345")]
    messages = [{"role": role, "content": text} for role, text in turns]
    ids = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == encode_chat(words, turns)
    generation_config = json.loads((hf / "generation_config.json").read_text())
    assert generation_config["eos_token_id"] == [
        words.end_of_text_id,
        *turn_ends(words, True).token_ids,
    ]
    reader = pytest.importorskip("gguf.gguf_reader")
    field = reader.GGUFReader(hf / "hf-chats-f32.gguf").fields["tokenizer.chat_template"]
    assert field.contents() == hf_tokenizer.chat_template


def test_a_model_of_the_hub_is_imported_by_name(hf_llama: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "cache" / "models--someone--small"
    shutil.copytree(hf_llama, model / "snapshots" / ("0" * 40))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    run_command("import", "someone/small", tmp_path / "run", "--tokenizer", "byte")
    assert find_checkpoint(tmp_path / "run").state.imported == "someone/small"
    with pytest.raises(UserError, match="someone/else: download failed"):
        run_command("import", "someone/else", tmp_path / "other")
