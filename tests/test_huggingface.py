"""huggingface.py: models and tokenizers to Hugging Face's form and back, computing the same.

SHAPES=50 pytest -o addopts= tests/test_huggingface.py   tries so many shapes of each family, in a minute and a half
"""

import dataclasses
import http.server
import itertools
import json
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from helpers import VARIANTS, numbers_text, randomised, train_tiny

import huggingface
from engine.core.cli import explain
from engine.data.chat import CHATML, encode_chat, end_of_turn, special_names
from engine.data.tokenizer import ByteTokenizer, Tokenizer, from_state, train_bpe
from engine.generation.generate import generate
from engine.huggingface import directory as hub
from engine.huggingface.families import FAMILIES
from engine.training.checkpoint import load_model, write_checkpoint
from engine.training.run_dir import find_checkpoint
from model import GPT, ModelConfig
from prepare import PrepareConfig, prepare

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
BYTES = ByteTokenizer()
SHAPES = int(os.environ.get("SHAPES", "6"))
ROPE = {"position": "rope", "norm": "rmsnorm", "norm_placement": "pre", "logit_softcap": 0.0}
SQUARED = ROPE | {"activation": "relu2"}
# What a family is made for, and what else it holds, may be folded into it, or not.
CAN_HOLD = {
    "llama": (ROPE | {"qk_norm": False}, {"bias", "tie", "grouped", "weighted", "scaled"}),
    "qwen3": (ROPE, {"tie", "grouped", "weighted", "scaled", "any head", "windows"}),
    "mistral": (
        ROPE | {"qk_norm": False},
        {"tie", "grouped", "weighted", "scaled", "any head", "window"},
    ),
    "apertus": (SQUARED, {"tie", "grouped", "weighted", "scaled"}),
    "arcee": (SQUARED | {"qk_norm": False}, {"bias", "tie", "grouped", "weighted", "scaled", "activation"}),
    "nanochat": (SQUARED, {"grouped", "scaled", "cap", "activation"}),
    "gpt2": (
        {"position": "learned", "norm": "layernorm", "activation": "gelu", "qk_norm": False},
        {"bias", "tie", "scaled", "activation", "sinusoidal"},
    ),
}


def odd_shape(family: str, seed: int) -> ModelConfig:
    """A small model of odd sizes that the family can hold, with every setting that it allows at random."""
    draw = random.Random(f"{family} {seed}")
    settings, allowed = CAN_HOLD[family]
    heads, head_dim = draw.choice((1, 2, 3, 5)), draw.choice((6, 10, 16))
    settings = settings | {
        "vocab_size": 777,
        "context_length": draw.choice((24, 33)),
        "num_layers": draw.choice((1, 3)),
    }
    settings |= {"num_heads": heads, "d_model": heads * head_dim, "d_ff": draw.choice((None, 70))}
    if "grouped" in allowed:
        settings["num_kv_heads"] = draw.choice([None, *(n for n in range(1, heads + 1) if heads % n == 0)])
        settings |= {"rope_base": draw.choice((None, 500.0)), "norm_epsilon": draw.choice((None, 1e-3))}
    choices = {
        "bias": {"bias": True},
        "tie": {"tie_embeddings": True},
        "weighted": {"norm": "weighted_rmsnorm"},
        "scaled": {"scale_embeddings": True},
        "cap": {"logit_softcap": 3.0},
        "activation": {"activation": draw.choice(("relu2", "gelu", "relu"))},
        "sinusoidal": {"position": "sinusoidal"},
        "any head": {"head_dim": draw.choice((4, 12))},
        "window": {"windows": (draw.choice((2, 5, 12)),)},  # with 1, transformers' cache forgets nothing
        "windows": {"windows": draw.choice(((5,), (4, 0), (0, 2), (7, 7, 0), (0, 9, 0)))},
    }
    for name, setting in choices.items():
        if name in allowed and draw.random() < 0.5:
            settings |= setting
    return ModelConfig(**settings)


def save_run(model: GPT, out: Path, tokenizer: Tokenizer = BYTES, examples: str | None = None) -> Path:
    """A run folder with one checkpoint of a model."""
    state = {"step": 1, "model": dataclasses.asdict(model.config), "settings": {"data": "data/none"}, "val_loss": 2.5}
    state |= {
        "documents": 2,
        "examples": examples,
        "elapsed_seconds": 1.0,
        "best_val_loss": 2.5,
        "data_sha256": "",
        "tokens": 64,
    }
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    write_checkpoint(out / "checkpoints" / "step-00000001", state, tensors, {}, tokenizer.save)
    return out


def refusal(*arguments: object) -> str:
    """The one line by which huggingface.py refuses arguments."""
    with pytest.raises(ValueError) as caught:
        huggingface.main([str(argument) for argument in arguments])
    said = explain(caught.value)
    assert "\n" not in said
    return said


def loaded(directory: Path) -> transformers.PreTrainedModel:
    """The model in a directory; every weight must have its place, and every place its weight."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(found[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@torch.no_grad()
def continued(model: torch.nn.Module, tokens: torch.Tensor, steps: int = 8) -> list[int]:
    """Greedy continuation by whole forward passes."""
    for _ in range(steps):
        logits = model(tokens)
        logits = logits if isinstance(logits, torch.Tensor) else logits.logits
        tokens = torch.cat((tokens, logits[:, -1:].argmax(dim=-1)), dim=1)
    return tokens[0].tolist()


def written(directory: Path) -> dict[str, bytes]:
    """What the files of an export say, but for the card."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.name != "README.md"}


@pytest.fixture(scope="module", name="words")
def fixture_words() -> Tokenizer:
    """A BPE that cuts text as GPT-2 does, which llama.cpp knows."""
    return train_bpe(
        ["def two(words): return words + 12345, 'said', they've\n\n"] * 9 + [numbers_text(300)], 400, "gpt2"
    )


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_family_computes_the_same_of_odd_shapes(family: str, tmp_path: Path, capsys, monkeypatch):
    tokens = torch.randint(777, (2, 16), generator=torch.Generator().manual_seed(1))
    shapes = {odd_shape(family, seed) for seed in range(200)}
    assert len(shapes) >= 50
    for number, shape in enumerate(sorted(shapes, key=str)[:: len(shapes) // SHAPES][:SHAPES]):
        model = randomised(shape, number)
        run, out = save_run(model, tmp_path / f"run{number}"), tmp_path / f"hf{number}"
        huggingface.main(["export", str(run), str(out), "--family", family])
        assert "the logits differ by at most" in capsys.readouterr().out
        theirs = loaded(out)
        assert type(theirs).__name__ == FAMILIES[family].architecture
        logits = model(tokens)
        assert (theirs(tokens).logits - logits).abs().max() <= 1e-4 * max(1.0, logits.abs().max().item()), shape
        prompt = tokens[:1, :5]
        greedy = theirs.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert greedy[0].tolist() == continued(model, prompt), shape
        huggingface.main(["import", str(out), str(tmp_path / f"back{number}")])
        again = tmp_path / f"again{number}"
        with monkeypatch.context() as patch:
            patch.setattr(hub, "check", lambda *_: "")  # its files are compared with those that were checked
            huggingface.main(["export", str(tmp_path / f"back{number}"), str(again), "--family", family])
        assert written(out) == written(again), shape


@torch.no_grad()
def test_without_the_sign_of_the_rotation_the_export_finds_itself_wrong(tmp_path: Path, monkeypatch):
    run = save_run(randomised(odd_shape("llama", 3)), tmp_path / "run")
    monkeypatch.setitem(FAMILIES, "llama", dataclasses.replace(FAMILIES["llama"], turns_back=False))
    assert "logits differ by up to" in refusal("export", run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


SMALL = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
SMOL = {
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}
LOCAL = {"num_hidden_layers": 3, "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2}
MADE_ELSEWHERE = {
    "gpt2 124M's width": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, vocab_size=5000)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "smollm2": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | SMOL)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL | LOCAL, head_dim=20)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=None)),
    "mistral with windows": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL | LOCAL)),
    "nanochat": lambda: transformers.NanoChatForCausalLM(transformers.NanoChatConfig(**SMALL)),
}


@pytest.mark.parametrize("name", MADE_ELSEWHERE)
@torch.no_grad()
def test_a_model_made_by_transformers_continues_identically(name: str, tmp_path: Path):
    torch.manual_seed(0)
    theirs = MADE_ELSEWHERE[name]().eval()
    for parameter in theirs.parameters():  # weights of norms and biases that begin as 1 and 0 would hide mistakes
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20MB")
    huggingface.main(["import", str(tmp_path / "hf"), str(tmp_path / "run"), "--tokenizer", "byte"])
    model = load_model(find_checkpoint(tmp_path / "run"), ModelConfig, GPT)
    tokens = torch.randint(256, (1, 24))
    assert (theirs(tokens).logits - model(tokens)).abs().max() <= 1e-4 * model(tokens).abs().max()
    assert continued(theirs, tokens) == continued(model, tokens)


@torch.no_grad()
def test_an_old_file_of_gpt2_has_half_precision_no_prefix_and_constants(tmp_path: Path):
    config = transformers.GPT2Config(vocab_size=300, n_positions=32, n_embd=24, n_layer=2, n_head=3)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    old = {name.removeprefix("transformer."): value.half() for name, value in theirs.state_dict().items()}
    old = {name: value.clone() for name, value in old.items() if name != "lm_head.weight"}
    old |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32, dtype=torch.uint8) for layer in range(2)}
    safetensors.torch.save_file(old, tmp_path / "hf" / "model.safetensors")
    huggingface.main(["import", str(tmp_path / "hf"), str(tmp_path / "run"), "--tokenizer", "byte"])
    model = load_model(find_checkpoint(tmp_path / "run"), ModelConfig, GPT)
    tokens = torch.randint(256, (1, 24))
    assert (theirs.half().float()(tokens).logits - model(tokens)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("settings", "flags", "said"),
    [
        ({"norm_placement": "post"}, (), r"^qwen3 can't hold norm_placement post \(instead of pre\); no family does"),
        ({"position": "learned"}, (), r"can't hold position learned \(instead of rope\)"),
        (
            {"logit_softcap": 15.0, "activation": "relu2"},
            ("--family", "apertus"),
            r"can't hold logit_softcap 15.0 .*; take --family nanochat$",
        ),
        (
            {"windows": (4, 0), "activation": "relu2"},
            ("--family", "apertus"),
            r"^apertus can't hold windows \(4, 0\) \(instead of None\); no family does",
        ),
        (
            {"windows": (4, 0)},
            ("--family", "mistral"),
            r"can't hold qk_norm True .*, windows \(4, 0\) \(instead of one for all layers\); take --family qwen3$",
        ),
        (
            {"windows": (4, 3)},
            ("--family", "qwen3"),
            r"^qwen3 can't hold windows \(4, 3\) \(instead of one in some layers, 0 in others\); no family does",
        ),
        (
            {"windows": (4,)},
            ("--gguf", "f32"),
            r"^llama.cpp has no windows in qwen3 models; train without --windows, or leave --gguf out$",
        ),
        ({"bias": True}, (), r"^llama can't hold qk_norm True \(instead of False\); no family does"),
        (
            {},
            ("--gguf", "f32"),
            r"^llama.cpp cuts text in other ways than this byte tokenizer; prepare .* --pattern gpt2",
        ),
        (
            {"logit_softcap": 5.0, "activation": "relu2"},
            ("--gguf", "f32"),
            r"^llama.cpp knows no nanochat models; train without --logit-softcap",
        ),
    ],
)
def test_what_no_family_holds_is_refused_with_the_nearest_that_does(settings, flags, said, tmp_path: Path):
    run = save_run(randomised(dataclasses.replace(VARIANTS["default"], vocab_size=257, **settings)), tmp_path / "run")
    assert re.search(said, refusal("export", run, tmp_path / "hf", *flags))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def spoil(directory: Path, **changes: object) -> None:
    """Change what a config.json says."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
BAD_DIRECTORIES = {
    "an unknown architecture": (
        lambda d: spoil(d, architectures=["MambaForCausalLM"]),
        "'MambaForCausalLM' is unknown",
    ),
    "no architecture": (lambda d: spoil(d, architectures=None), "architecture None is unknown"),
    "architectures of no names": (lambda d: spoil(d, architectures="x"), "architecture 'x' is unknown"),
    "another width": (lambda d: spoil(d, intermediate_size=81), r"gate_proj.weight has shape \(80, 48\); its config"),
    "more layers": (lambda d: spoil(d, num_hidden_layers=3), "model.layers.2.* is missing"),
    "very many layers": (lambda d: spoil(d, num_hidden_layers=9000), "9,000 layers can't be made of 21 tensors"),
    "fewer layers": (lambda d: spoil(d, num_hidden_layers=1), "has model.layers.1.*, which its config.json leaves no"),
    "heads that do not fit": (lambda d: spoil(d, num_attention_heads=7), "config.json"),
    "text for a number": (lambda d: spoil(d, hidden_size="wide"), "config.json: .*invalid"),
    "no size": (lambda d: spoil(d, num_hidden_layers=None), "does not say num_hidden_layers"),
    "a scaled RoPE": (lambda d: spoil(d, rope_parameters=LLAMA3), r"its RoPE is scaled \(llama3\)"),
    "an odd RoPE": (lambda d: spoil(d, rope_parameters=7), r"its RoPE is scaled \(7\)"),
    "another activation": (lambda d: spoil(d, hidden_act="mish"), "the activation 'mish' can't be held here"),
    "one bias": (lambda d: spoil(d, mlp_bias=True), "'mlp_bias': True} must be equal"),
    "layers of another kind": (
        lambda d: spoil(d, **QWEN3, layer_types=["full_attention", "chunked_attention"]),
        "its layer_types must be 2 of full_attention and sliding_attention to be held here",
    ),
    "too few kinds of layers": (lambda d: spoil(d, **QWEN3, layer_types=["full_attention"]), "must be 2 of full_att"),
    "a kind that is none": (lambda d: spoil(d, **QWEN3, max_window_layers="all"), "must be 2 of full_attention"),
    "an odd window": (lambda d: spoil(d, **QWEN3, max_window_layers=0, sliding_window="x"), "config.json: .*windows"),
    "a pickle": (pickled, "pytorch_model.bin is pickled, and a pickle can run anything; if you trust it, convert it"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has no model.safetensors; give one that has"),
    "half the weights": (lambda d: os.truncate(d / "model.safetensors", 9000), "model.safetensors is damaged"),
    "no settings": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "settings that are none": (lambda d: (d / "config.json").write_text("[1]"), "config.json is damaged"),
    "no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json is damaged: not valid JSON"),
}


@pytest.mark.parametrize("name", BAD_DIRECTORIES)
def test_a_directory_that_can_not_be_held_is_refused_in_one_line(name: str, tmp_path: Path):
    damage, said = BAD_DIRECTORIES[name]
    MADE_ELSEWHERE["llama"]().save_pretrained(tmp_path / "hf")
    damage(tmp_path / "hf")
    assert re.search(said, refusal("import", tmp_path / "hf", tmp_path / "run", "--tokenizer", "byte"))
    assert not (tmp_path / "run").exists()


EXACT = {"gpt2": {"activation_function": "gelu"}, "llama": {"hidden_act": "gelu"}, "nanochat": {"hidden_act": "gelu"}}


@pytest.mark.parametrize("name", EXACT)
def test_the_exact_gelu_is_not_taken_for_the_one_by_tanh(name: str, tmp_path: Path):
    small = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=12, vocab_size=300))
    (small if name == "gpt2" else MADE_ELSEWHERE[name]()).save_pretrained(tmp_path / "hf")
    spoil(tmp_path / "hf", **EXACT[name])
    said = refusal("import", tmp_path / "hf", tmp_path / "run", "--tokenizer", "byte")
    assert "the activation 'gelu' can't be held here; " in said


def test_what_the_kind_of_model_itself_can_not_hold_is_refused(tmp_path: Path):
    MADE_ELSEWHERE["nanochat"]().save_pretrained(tmp_path / "hf")
    spoil(tmp_path / "hf", tie_word_embeddings=True)
    said = refusal("import", tmp_path / "hf", tmp_path / "run", "--tokenizer", "byte")
    assert said.endswith("config.json: with tie_embeddings True it can't be held here")


def test_a_missing_or_large_tokenizer_is_said(words: Tokenizer, tmp_path: Path):
    MADE_ELSEWHERE["llama"]().save_pretrained(tmp_path / "hf")
    said = refusal("import", tmp_path / "hf", tmp_path / "run")
    assert re.search("has no tokenizer.json; give the tokenizer that it was trained with: --tokenizer", said)
    words.save(tmp_path / "tokenizer.json")
    said = refusal("import", tmp_path / "hf", tmp_path / "run", "--tokenizer", tmp_path / "tokenizer.json")
    assert re.search(r"tokenizer.json has 400 tokens, but the model only 300; give --tokenizer NAME", said)
    assert re.search("is no directory, nor a name on", refusal("import", tmp_path / "none", tmp_path / "run"))


# GGUF.


IN_LLAMA_CPP = [name for name in FAMILIES if name not in ("nanochat", "mistral")]


@pytest.mark.parametrize(
    ("family", "dtype"), [*((name, "f32") for name in IN_LLAMA_CPP), ("apertus", "bf16"), ("gpt2", "bf16")]
)
def test_gguf_has_every_tensor(family: str, dtype: str, words: Tokenizer, tmp_path: Path):
    reader = pytest.importorskip("gguf.gguf_reader")
    plain = {"bias": family == "gpt2", "activation": FAMILIES[family].holds["activation"][0], "windows": None}
    shape = dataclasses.replace(odd_shape(family, 1), vocab_size=410, **plain)
    run = save_run(randomised(shape), tmp_path / "run", words)
    huggingface.main(["export", str(run), str(tmp_path / "hf"), "--family", family, "--gguf", dtype])
    found = reader.GGUFReader(tmp_path / "hf" / f"hf-{dtype}.gguf")
    expected = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    expected = {name: value for name, value in expected.items() if "act_fn" not in name}
    names = gguf_names(family, shape.num_layers)
    embedding = next(value for name, value in expected.items() if name.endswith(("wte.weight", "embed_tokens.weight")))
    expected = {"output.weight": embedding} | {names(name): value for name, value in expected.items()}
    assert {tensor.name for tensor in found.tensors} == expected.keys()
    for tensor in found.tensors:
        value = expected[tensor.name]
        if family == "gpt2" and tensor.name.startswith("blk.") and value.ndim == 2:
            value = value.T
        if family in ("llama", "arcee") and (
            "attn_q." in tensor.name or "attn_k." in tensor.name
        ):  # pairs side by side
            heads = shape.num_heads if "attn_q." in tensor.name else shape.num_groups
            value = value.view(heads, 2, -1, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        half = dtype == "bf16" and value.ndim == 2 and tensor.name != "position_embd.weight"
        assert tensor.tensor_type.name == ("BF16" if half else "F32")
        stored = torch.from_numpy(tensor.data.copy())
        stored = stored.view(torch.bfloat16) if half else stored
        assert torch.equal(stored, value.to(stored.dtype)), tensor.name
    said = {key: field.contents() for key, field in found.fields.items()}
    assert said["general.architecture"] == family and said["tokenizer.ggml.pre"] == "gpt-2"
    assert len(said["tokenizer.ggml.tokens"]) == shape.vocab_size
    assert said["tokenizer.ggml.eos_token_id"] == words.end_of_text


def gguf_names(family: str, layers: int) -> Callable[[str], str]:
    """GGUF's name of a tensor of Hugging Face's, as the gguf package knows it."""
    import gguf

    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    table = gguf.get_tensor_name_map(number, layers)
    return lambda name: table.get_name(name, (".weight", ".bias"))


@pytest.mark.parametrize("family", IN_LLAMA_CPP)
def test_llama_cpp_continues_as_we_do(family: str, words: Tokenizer, tmp_path: Path):
    llama_cpp = pytest.importorskip("llama_cpp")
    plain = {"bias": family == "gpt2", "activation": FAMILIES[family].holds["activation"][0], "windows": None}
    model = randomised(dataclasses.replace(odd_shape(family, 2), vocab_size=410, context_length=96, **plain))
    run = save_run(model, tmp_path / "run", words)
    huggingface.main(["export", str(run), str(tmp_path / "hf"), "--family", family, "--gguf", "f32"])
    theirs = llama_cpp.Llama(str(tmp_path / "hf" / "hf-f32.gguf"), n_ctx=96, verbose=False)
    text = "def words(they, 98765):\n\t\treturn \u65e5\u672c + they've  said\r\n"
    prompt = words.encode(text).tolist()
    assert theirs.tokenize(text.encode(), add_bos=False) == prompt
    greedy = itertools.islice(theirs.generate(prompt[:20], temp=0.0, repeat_penalty=1.0), 64)
    assert list(greedy) == [int(ids) for ids in generate(model, torch.tensor(prompt[:20]), 64, temperature=0)]


def test_a_run_on_several_datasets_is_compared_on_the_first_and_its_card_names_them(numbers, tmp_path, capsys):
    (tmp_path / "more.txt").write_text(numbers_text(300), encoding="utf-8")
    more = PrepareConfig((str(tmp_path / "more.txt"),), tokenizer=str(numbers), out=tmp_path / "more")
    prepare(more)
    train_tiny(numbers, tmp_path / "run", "--data", numbers, more.out, "--mix", 2, 1, "--steps", 1)
    huggingface.main(["export", str(tmp_path / "run"), str(tmp_path / "hf")])
    assert f"({numbers}'s validation split)" in capsys.readouterr().out
    assert f"trained from {numbers}, {more.out}." in (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")


def test_a_long_context_is_compared_in_part(tmp_path: Path, monkeypatch):
    seen, forward = [], GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, tokens: seen.append(tokens.shape[1]) or forward(self, tokens))
    shape = dataclasses.replace(VARIANTS["default"], vocab_size=257, context_length=5000)
    huggingface.main(["export", str(save_run(randomised(shape), tmp_path / "run")), str(tmp_path / "hf")])
    assert seen == [1024] * 4


# Chats, and the hub.


def test_a_model_of_chats_or_of_text_that_spells_special_tokens_is_compared_on_it(tmp_path, capsys):
    turns = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "<|end|> said"}]
    chats = "".join(
        json.dumps({"messages": [*turns, turns[0] | {"content": str(n)}, turns[1]]}) + "\n" for n in range(40)
    )
    (tmp_path / "chats.jsonl").write_text(chats, encoding="utf-8")
    (tmp_path / "text.txt").write_text("<|endoftext|> it spells. " * 200, encoding="utf-8")
    for name, more in (("chats.jsonl", {"chat": True}), ("text.txt", {})):
        data = tmp_path / name.partition(".")[0]
        prepare(PrepareConfig((str(tmp_path / name),), tokenizer="byte", out=data, **more))
        train_tiny(data, tmp_path / f"run-{name}", "--steps", 1, "--context-length", 64)
        huggingface.main(["export", str(tmp_path / f"run-{name}"), str(tmp_path / f"hf-{name}")])
        assert f"({data}'s validation split) the logits differ by at most" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["ours", "ChatML", "another's template, of no roles"])
def test_the_chat_template_makes_the_tokens_that_were_learned(kind: str, words: Tokenizer, tmp_path: Path):
    if kind == "ChatML":
        words = words.with_special(CHATML)
    elif kind != "ours":
        words = from_state(words.state() | {"special_tokens": {words.end_name: words.end_of_text}})
        words.chat_template = "{{ messages }}"
        words = words.with_special(special_names(words, chat=True))
    model = randomised(dataclasses.replace(VARIANTS["default"], vocab_size=410))
    for name, examples in (("text", None), ("hf", "chats")):
        huggingface.main(
            ["export", str(save_run(model, tmp_path / f"run-{name}", words, examples)), str(tmp_path / name)]
        )
    assert "chat_template" not in (tmp_path / "text" / "tokenizer_config.json").read_text(encoding="utf-8")
    huggingface.main(["import", str(tmp_path / "hf"), str(tmp_path / "back")])
    assert find_checkpoint(tmp_path / "back").talks
    huggingface.main(["export", str(tmp_path / "back"), str(tmp_path / "again")])
    assert written(tmp_path / "hf") == written(tmp_path / "again")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    turns = [("system", "words"), ("user", "said two?"), ("assistant", "return they've"), ("user", "12345")]
    messages = [{"role": role, "content": text} for role, text in turns]
    expected = list(itertools.chain(*encode_chat(words, turns)))
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == expected
    assert theirs.eos_token_id == words.end_of_text
    ends = json.loads((tmp_path / "hf" / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    assert ends == [words.end_of_text, end_of_turn(words)]
    reader = pytest.importorskip("gguf.gguf_reader")
    huggingface.main(["export", str(tmp_path / "run-hf"), str(tmp_path / "gguf"), "--gguf", "f32"])
    said = reader.GGUFReader(tmp_path / "gguf" / "gguf-f32.gguf").fields["tokenizer.chat_template"].contents()
    assert said == theirs.chat_template


@pytest.fixture(name="hub")
def fixture_hub(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A folder whose models a local server offers as Hugging Face's hub does."""
    folder = tmp_path / "hub"

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            api = re.fullmatch(r"/api/models/([^?]*?)(/revision/main|/tree/0*)?(\?.*)?", self.path)
            name, _, file = self.path.partition("?")[0].strip("/").partition("/resolve/")
            path = folder / (api[1] if api else name + "/" + file.partition("/")[2])
            if not path.exists():
                self.send_error(404)
                return
            names = [one.name for one in path.iterdir()] if api else []
            tree = [
                {"type": "file", "oid": "0" * 40, "size": (path / one).stat().st_size, "path": one} for one in names
            ]
            model = {"id": path.name, "sha": "0" * 40, "siblings": [{"rfilename": one} for one in names]}
            said = json.dumps(tree if "/tree/" in self.path else model).encode()
            content = said if api else path.read_bytes()
            self.send_response(200)
            headers = {"Content-Length": len(content), "ETag": f'"{hash(content)}"', "X-Repo-Commit": "0" * 40}
            for key, value in headers.items():
                self.send_header(key, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    yield folder
    server.shutdown()
    server.server_close()


def test_a_model_comes_from_the_hub_by_its_name(hub: Path, words: Tokenizer, tmp_path: Path):
    model = randomised(dataclasses.replace(odd_shape("llama", 1), vocab_size=400))
    run = save_run(model, tmp_path / "run", words)
    huggingface.main(["export", str(run), str(hub / "someone" / "small")])
    huggingface.main(["import", "someone/small", str(tmp_path / "back")])
    back = load_model(find_checkpoint(tmp_path / "back"), ModelConfig, GPT)
    tokens = torch.randint(400, (1, 16))
    with torch.no_grad():
        assert (back(tokens) - model(tokens)).abs().max() < 1e-4
    said = refusal("import", "someone/else", tmp_path / "other")
    assert re.search(r"^someone/else could not be downloaded \(.*; check the name and the connection", said)
