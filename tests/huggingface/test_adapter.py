"""Adapters in PEFT's layout: the same logits there and here, in both directions."""

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from helpers import make_dataset, numbers_text, train_tiny

import huggingface
import sample
from engine.core.errors import UserError

TOKENS = torch.arange(32).reshape(2, 16) * 5 % 90
MODEL_FLAGS = "--num-heads 4 --num-kv-heads 2 --norm weighted_rmsnorm --no-qk-norm"
LORA_FLAGS = "--lora-rank 4 --optimizer adamw --learning-rate 0.01 --num-heads 4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base model here and in transformers' layout, and a LoRA run on it."""
    folder = tmp_path_factory.mktemp("adapter")
    data = make_dataset(folder, numbers_text(1500))
    train_tiny(data, folder / "own", "--steps", 20, *MODEL_FLAGS.split())
    huggingface.main(["export", str(folder / "own"), str(folder / "hf")])
    huggingface.main(["import", str(folder / "hf"), str(folder / "base")])
    flags = ["--init-from", folder / "base", "--steps", 20, *LORA_FLAGS.split()]
    train_tiny(data, folder / "lora", *flags)
    return folder


def logits_of(run: Path) -> torch.Tensor:
    """Return the logits of a run or an import here."""
    with torch.no_grad():
        return sample.load(run, "cpu", dtype="float32").model(TOKENS)


def load_hf(folder: Path) -> torch.nn.Module:
    """Return the base model in transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "hf").eval()


def test_peft_loads_an_exported_adapter_and_its_import_is_the_run(folder, tmp_path):
    huggingface.main(["export", str(folder / "lora"), str(tmp_path / "adapter"), "--adapter"])
    model = peft.PeftModel.from_pretrained(load_hf(folder), tmp_path / "adapter").eval()
    expected = logits_of(folder / "lora")
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, expected, atol=1e-5, rtol=0)
    assert (expected - logits_of(folder / "base")).abs().max() > 0.1
    source = [str(tmp_path / "adapter"), str(tmp_path / "back"), "--base", str(folder / "base")]
    huggingface.main(["import", *source])
    assert torch.equal(logits_of(tmp_path / "back"), expected)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "hf")


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"], "r": 2, "lora_alpha": 7},
        {"target_modules": "all-linear", "r": 8, "lora_alpha": 16, "use_rslora": True},
    ],
)
def test_an_adapter_of_peft_is_imported_onto_its_base(folder, tmp_path, settings):
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    model = peft.get_peft_model(load_hf(folder), config).eval()
    model.save_pretrained(tmp_path / "adapter")
    source = [str(tmp_path / "adapter"), str(tmp_path / "run"), "--base", str(folder / "base")]
    huggingface.main(["import", *source])
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(logits_of(tmp_path / "run"), expected, atol=1e-4, rtol=1e-4)
    merged = str(tmp_path / "merged")
    huggingface.main(["export", str(tmp_path / "run"), merged])  # compares with transformers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 3}, r"must have shape \(3, 16\)"),
        ({"r": "x"}, r"\.r: must be"),
    ],
)
def test_another_kind_of_adapter_is_one_line(folder, tmp_path, change, words):
    out = tmp_path / "adapter"
    huggingface.main(["export", str(folder / "lora"), str(out), "--adapter"])
    config = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=words):
        huggingface.main(["import", str(out), str(tmp_path / "x"), "--base", str(folder / "base")])
    with pytest.raises(UserError, match="--base"):
        huggingface.main(["import", str(out), str(tmp_path / "x")])
    assert not (tmp_path / "x").exists()
