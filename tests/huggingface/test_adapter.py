"""Adapters: PEFT reads those that are exported, and merges all others when they are imported."""

import json
import re
import shlex
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
import transformers
from helpers import make_dataset, newest_checkpoint, numbers_text, train_tiny

import huggingface
import sample
from engine.core.errors import UserError
from engine.data.chats.chat import encode_chat

TOKENS = torch.arange(32).reshape(2, 16) * 5 % 90
MODEL_FLAGS = "--num-heads 4 --num-kv-heads 2 --norm weighted_rmsnorm --no-qk-norm"
LORA_FLAGS = "--lora-rank 4 --optimizer adamw --learning-rate 0.01 --num-heads 4"
LORA = peft.LoraConfig
QV = {"target_modules": ["q_proj", "v_proj"]}
ALL = {"target_modules": "all-linear"}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base model here and in transformers' layout, one with a tied head, and a LoRA run."""
    folder = tmp_path_factory.mktemp("adapter")
    data = make_dataset(folder, numbers_text(1500))
    train_tiny(data, folder / "own", "--steps", 20, *MODEL_FLAGS.split())
    huggingface.main(["export", str(folder / "own"), str(folder / "hf-untied")])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf-untied")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder / "hf-tied")
    for name in ("untied", "tied"):
        flags = ["--tokenizer", str(folder / "own")]
        huggingface.main(["import", str(folder / f"hf-{name}"), str(folder / name), *flags])
    flags = ["--init-from", folder / "untied", "--steps", 20, *LORA_FLAGS.split()]
    train_tiny(data, folder / "lora", *flags)
    return folder


@pytest.fixture
def exported(folder, tmp_path) -> Path:
    """The LoRA run as an adapter, to be changed."""
    huggingface.main(["export", str(folder / "lora"), str(tmp_path / "ad"), "--adapter"])
    return tmp_path / "ad"


def logits_of(run: Path) -> torch.Tensor:
    """Return the logits of a run or an import here."""
    with torch.no_grad():
        return sample.load(run, "cpu", dtype="float32").model(TOKENS)


@torch.no_grad()
def peft_logits(model: torch.nn.Module) -> torch.Tensor:
    """Return the logits of a model in PEFT."""
    return model.eval()(TOKENS).logits


def import_adapter(source: Path, base: Path, *flags: object) -> Path:
    """Import an adapter beside it, and return the run folder."""
    out = source.with_name(f"{source.name}-run")
    huggingface.main(["import", str(source), str(out), "--base", str(base), *map(str, flags)])
    return out


@pytest.mark.parametrize("base", ["untied", "own", "lora"])
def test_peft_loads_an_exported_adapter_and_its_import_is_the_run(folder, tmp_path, base, capsys):
    flags = ["--init-from", folder / base, "--steps", 20, *LORA_FLAGS.split()]
    train_tiny(folder / "data", tmp_path / "run", *flags)
    huggingface.main(["export", str(tmp_path / "run"), str(tmp_path / "ad"), "--adapter"])
    for command in re.findall(r"python huggingface\.py (.*)", capsys.readouterr().out):
        huggingface.main(shlex.split(command))  # exports a base model that was trained here
    expected = logits_of(tmp_path / "run")
    assert (expected - logits_of(folder / base)).abs().max() > 0.1
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "ad")
    torch.testing.assert_close(peft_logits(model), expected, atol=1e-5, rtol=0)
    run = import_adapter(tmp_path / "ad", folder / base)
    torch.testing.assert_close(logits_of(run), expected, atol=1e-5, rtol=0)
    state = newest_checkpoint(run).state
    assert state.evaluation is state.base is None and state.tokens == 0


EMBEDDED = {"target_modules": ["embed_tokens", "q_proj"]}
TIED = {"base": "tied"}
MERGED = [
    (LORA, ALL | {"use_dora": True, "rank_pattern": {"q_proj": 3, "layers.0.mlp.*": 1}}),
    (LORA, QV | {"use_rslora": True, "lora_dropout": 0.5, "layers_to_transform": [1]}),
    (LORA, QV | {"modules_to_save": ["lm_head", "embed_tokens"]}),
    (LORA, QV | {"trainable_token_indices": [3, 4]}),
    (LORA, QV | {"init_lora_weights": "pissa"}),
    (LORA, EMBEDDED),
    (LORA, TIED | EMBEDDED),
    (LORA, TIED | {"target_modules": ["lm_head"]}),
    (LORA, TIED | QV | {"modules_to_save": ["embed_tokens"]}),
    (LORA, TIED | ALL),
    (peft.VeraConfig, QV | {"save_projection": False}),
    (peft.IA3Config, {"target_modules": ["k_proj"], "feedforward_modules": []}),
    (peft.OFTConfig, QV | {"r": 0, "oft_block_size": 4}),
    (peft.LNTuningConfig, {}),
]
REFUSED = [
    (LORA, QV | {"alora_invocation_tokens": [5, 10]}, "aLoRA does not support merging"),
    (LORA, QV | {"layer_replication": [[0, 2], [0, 2]]}, "another model|size mismatch"),
    (peft.PromptTuningConfig, {"num_virtual_tokens": 4}, "merge_and_unload"),
]


def make_adapter(out: Path, folder: Path, kind: type, settings: dict) -> tuple[torch.Tensor, str]:
    """Save an adapter with random values, and return its logits and the name of its base."""
    settings = dict(settings)
    base = settings.pop("base", "untied")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / f"hf-{base}")
    model = peft.get_peft_model(model, kind(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(0)
    for param in model.parameters():
        param.data += 0.1 * torch.randn(param.shape) * param.requires_grad
    model.save_pretrained(out)
    return peft_logits(model), base


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "settings"), MERGED, ids=str)
def test_an_adapter_of_peft_is_merged_into_its_base(folder, tmp_path, kind, settings, capsys):
    expected, base = make_adapter(tmp_path / "ad", folder, kind, settings)
    assert (expected - logits_of(folder / base)).abs().max() > 0.01
    run = import_adapter(tmp_path / "ad", folder / base)
    torch.testing.assert_close(logits_of(run), expected, atol=1e-5, rtol=0)
    state = newest_checkpoint(run).state
    token_parameters = re.search("embed|head", str(settings))
    assert state.model.tie_embeddings == (base == "tied" and not token_parameters)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "settings", "words"), REFUSED, ids=str)
def test_an_adapter_that_cannot_be_merged_is_one_line(folder, tmp_path, kind, settings, words):
    _, base = make_adapter(tmp_path / "ad", folder, kind, settings)
    with pytest.raises(UserError, match=words) as error:
        import_adapter(tmp_path / "ad", folder / base)
    assert "\n" not in str(error.value) and not (tmp_path / "ad-run").exists()


PICKLE = {"init_lora_weights": "corda", "corda_config": {"cache_file": "x.pt"}}


@pytest.mark.parametrize(
    ("config", "edit", "words"),
    [
        ({"megatron_config": {"a": 1}}, dict, "megatron_config must"),
        (PICKLE, dict, "init_lora_weights must"),
        ({"new_key": {"a": 1}}, dict, "Unexpected keyword.*new_key"),
        ({"peft_type": "NEW"}, dict, "cannot merge it"),
        ({"r": 3}, dict, "size mismatch.*--base"),
        ({"modules_to_save": ["lm_head"]}, dict, "lm_head"),
        ({}, lambda t: {name: t[name] for name in t if "A" in name}, "must have .*lora_B"),
        ({}, lambda t: {name: value.char() for name, value in t.items()}, "is I8"),
        ({}, lambda t: {name: value * float("nan") for name, value in t.items()}, "differ by nan"),
        ({}, lambda t: t | {"x.lora_A.weight": next(iter(t.values())) + 0}, "unsupported tensor x"),
    ],
)
def test_an_adapter_that_does_not_fit_is_one_line(folder, exported, config, edit, words):
    file = exported / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    tensors = edit(safetensors.torch.load_file(exported / "adapter_model.safetensors"))
    safetensors.torch.save_file(tensors, exported / "adapter_model.safetensors")
    with pytest.raises(UserError, match=words):
        import_adapter(exported, folder / "untied")
    assert not exported.with_name("ad-run").exists()


def test_adapters_of_other_formats_are_named(folder, exported):
    file = exported / "adapter_model.safetensors"
    for name, words in (("adapters.safetensors", "mlx_lm.fuse"), ("adapter_model.bin", "PEFT")):
        file = file.rename(exported / name)
        with pytest.raises(UserError, match=words):
            import_adapter(exported, folder / "untied")


@pytest.mark.parametrize("change", ["none", "only a template", "a new token"])
def test_the_tokenizer_and_the_template_of_an_adapter_win(folder, exported, change, capsys):
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf-untied")
    hf_tokenizer.chat_template = TEMPLATE
    hf_tokenizer.add_tokens(["<new>"] * (change == "a new token"))
    hf_tokenizer.save_pretrained(exported)
    if change == "only a template":
        (exported / "tokenizer.json").unlink()
        (exported / "tokenizer_config.json").unlink()
    flags = []
    if change == "a new token":
        with pytest.raises(UserError, match="token ids") as error:
            import_adapter(exported, folder / "tied")
        flags = re.findall(r"--tokenizer (.*)", str(error.value))
        flags.insert(0, "--tokenizer")
    base = newest_checkpoint(folder / "tied").path
    (base / "generation_config.json").write_text('{"top_k": 7}')
    run = import_adapter(exported, folder / "tied", *flags)
    assert "hf-untied" in capsys.readouterr().err  # the adapter names another base
    assert newest_checkpoint(run).is_chat_model
    assert sample.load(run, "cpu").sampling == {"top_k": 7}  # of its base
    expected = hf_tokenizer.apply_chat_template([{"role": "user", "content": "one"}])["input_ids"]
    assert encode_chat(sample.load(run, "cpu").tokenizer, [("user", "one")]) == expected
