"""Adapters in PEFT's layout: the same logits there and here, in both directions."""

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
from peft.tuners.lora.config import CordaConfig

import huggingface
import sample
from engine.core.errors import UserError
from engine.data.chats.chat import encode_chat
from engine.huggingface import adapter

TOKENS = torch.arange(32).reshape(2, 16) * 5 % 90
MODEL_FLAGS = "--num-heads 4 --num-kv-heads 2 --norm weighted_rmsnorm --no-qk-norm"
LORA_FLAGS = "--lora-rank 4 --optimizer adamw --learning-rate 0.01 --num-heads 4"
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


def make_adapter(out: Path, base: Path, **settings: object) -> torch.nn.Module:
    """Save an adapter of PEFT with random values, and return its model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    settings = {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 6, **settings}
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(0)
    for name, param in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            param.data += 0.1 * torch.randn(param.shape)
    model.save_pretrained(out)
    return model


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
    assert torch.equal(logits_of(run), expected)
    state = newest_checkpoint(run).state
    assert state.evaluation is state.best_evaluation is None and state.tokens == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 2, "lora_alpha": 7, "lora_dropout": 0.5, "fan_in_fan_out": True},
        {**ALL, "use_rslora": True, "exclude_modules": ["down_proj"], "qalora_group_size": 4},
        {"target_modules": r".*\.1\..*(q|o)_proj", "megatron_core": None, "target_parameters": []},
        {"layers_to_transform": [1], "layers_pattern": "layers", "init_lora_weights": False},
        {"init_lora_weights": "gaussian", "corda_config": CordaConfig()},
        {**ALL, "init_lora_weights": "eva", "rank_pattern": {"q_proj": 3, "layers.0.mlp.*": 1}},
        {"init_lora_weights": "orthogonal", "use_rslora": True, "alpha_pattern": {"v_proj": 11}},
        {**ALL, "init_lora_weights": "mica", "alpha_pattern": {r"layers\.1\..*": 9, "up_proj": 3}},
        {**ALL, "rank_pattern": {"^model.layers.1.self_attn.k_proj": 2, "k_proj": 40}},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["lm_head", "embed_tokens"], "rank_pattern": {"q_proj": 2}},
        {"base": "tied", "modules_to_save": ["embed_tokens"]},
        {"base": "tied", "modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
def test_an_adapter_of_peft_is_imported_onto_its_base(folder, tmp_path, settings, capsys):
    base = settings.pop("base", "untied")
    expected = peft_logits(make_adapter(tmp_path / "ad", folder / f"hf-{base}", **settings))
    run = import_adapter(tmp_path / "ad", folder / base)
    torch.testing.assert_close(logits_of(run), expected, atol=1e-5, rtol=0)
    assert (expected - logits_of(folder / base)).abs().max() > 0.01
    assert "warning" not in capsys.readouterr().err
    huggingface.main(["export", str(run), str(tmp_path / "merged")])  # compares with transformers
    if "modules_to_save" not in settings:
        huggingface.main(["export", str(run), str(tmp_path / "again"), "--adapter"])
        again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "again")
        torch.testing.assert_close(peft_logits(again), expected, atol=1e-5, rtol=0)


CHANGED_KEYS = {
    **{"bias": "all", "task_type": "SEQ_CLS", "megatron_config": {"a": 1}},
    **{"alora_invocation_tokens": [3, 4], "layer_replication": [[0, 1], [0, 1]]},
    **{"target_parameters": ["q_proj.weight"], "trainable_token_indices": [3]},
    **{"ensure_weight_tying": True, "lora_bias": True, "use_dora": True, "use_qalora": True},
    **{"arrow_config": {}, "kasa_config": {}, "monteclora_config": {}, "velora_config": {}},
    **{"use_bdlora": {}},
}
INITIALIZATIONS = ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga")
CHANGES = [*CHANGED_KEYS.items(), *(("init_lora_weights", name) for name in INITIALIZATIONS)]


def test_every_key_of_peft_is_known():
    values = {key: allowed[0] for key, allowed in adapter.ALLOWED_VALUES.items()}
    values |= {**vars(adapter.AdapterSettings()), **dict.fromkeys(CHANGED_KEYS.keys() - values)}
    defaults = peft.LoraConfig().to_dict() | {"runtime_config": None}
    assert defaults.keys() == values.keys() | adapter.HARMLESS_KEYS
    for key, value in values.items():
        assert value == defaults[key] or not (value or defaults[key]), key


def test_the_advice_for_what_is_refused_works(folder, tmp_path):
    model = make_adapter(tmp_path / "ad", folder / "hf-untied", use_dora=True)
    with pytest.raises(UserError, match=r"merge_and_unload\(\).save_pretrained"):
        import_adapter(tmp_path / "ad", folder / "untied")
    expected = peft_logits(model)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    source = [str(tmp_path / "merged"), str(tmp_path / "run")]
    huggingface.main(["import", *source, "--tokenizer", str(folder / "untied")])
    torch.testing.assert_close(logits_of(tmp_path / "run"), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("config", "edit", "words"),
    [
        *((peft.LoraConfig(**{key: x}).to_dict(), dict, f"{key} must be") for key, x in CHANGES),
        ({"peft_type": "IA3"}, dict, "peft_type must be"),
        ({"new_key": {"a": 1}}, dict, "new_key must be"),
        ({"r": 0}, dict, r"\.r: must be at least 1 "),
        ({"r": 10**12}, dict, r"\.r: must be at most"),
        ({"r": 3}, dict, r"must have shape \(3, 16\).*--base"),
        ({"rank_pattern": {"(": 2}}, dict, "not a regex"),
        ({"modules_to_save": ["lm_head"]}, dict, "lm_head.weight is missing"),
        ({}, lambda t: {}, "no update"),
        ({}, lambda t: {name: t[name] for name in t if "A" in name}, "lora_B.weight is missing"),
        ({}, lambda t: {name: t[name] for name in t if "B" in name}, "lora_A.weight is missing"),
        ({}, lambda t: {name: value[:0] for name, value in t.items()}, "empty.*ZeRO-3"),
        ({}, lambda t: {name: value.char() for name, value in t.items()}, "int8"),
        ({}, lambda t: {name: value + 0j for name, value in t.items()}, "complex64"),
        ({}, lambda t: t | {"lm_head.lora_A.weight": next(iter(t.values())) + 0}, "tensor lm_head"),
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
    run = import_adapter(exported, folder / "tied", *flags)
    assert "hf-untied" in capsys.readouterr().err  # the adapter names another base
    assert newest_checkpoint(run).is_chat_model
    expected = hf_tokenizer.apply_chat_template([{"role": "user", "content": "one"}])["input_ids"]
    assert encode_chat(sample.load(run, "cpu").tokenizer, [("user", "one")]) == expected
