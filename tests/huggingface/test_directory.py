"""Files of an export: special tokens, and nothing after an error."""

import dataclasses
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import safetensors.torch
import tokenizers
import transformers
from helpers import SMALL, random_model, read_files, save_run
from test_huggingface import qwen2_tokenizer

import huggingface
from engine.core.errors import UserError
from engine.data.tokenizer import CharTokenizer, load_tokenizer
from engine.huggingface import directory
from engine.huggingface.families import MODEL_FAMILIES


@pytest.fixture(name="run")
def fixture_run(tmp_path: Path) -> Path:
    model = random_model(dataclasses.replace(SMALL, vocab_size=3))
    return save_run(model, tmp_path / "run", CharTokenizer("abc"))


def test_characters_without_an_end_of_text_have_no_special_ids(run: Path, tmp_path: Path):
    huggingface.main(["export", str(run), str(tmp_path / "hf")])
    for name in ("config.json", "generation_config.json"):
        config = json.loads((tmp_path / "hf" / name).read_text())
        assert config["bos_token_id"] is config["eos_token_id"] is config["pad_token_id"] is None
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").pad_token is None


def test_only_an_export_is_replaced(run: Path, tmp_path: Path, capsys):
    hf = tmp_path / "hf"
    command = ["export", str(run), str(hf), "--force"]
    for _ in range(2):
        huggingface.main(command)
    assert ", ".join(sorted(path.name for path in hf.iterdir())) in capsys.readouterr().out
    (hf / "notes.txt").touch()
    for _ in range(2):
        before = read_files(hf)
        with pytest.raises(UserError, match=f"^{hf}: already exists. Choose"):
            huggingface.main(command)
        assert read_files(hf) == before
        (hf / "notes.txt").unlink(missing_ok=True)  # then with the card of another model
        (hf / "README.md").write_text("# A model")


def test_an_imported_tokenizer_that_pads_and_truncates_does_neither(tmp_path: Path):
    tokenizer = qwen2_tokenizer()
    end = tokenizer.end_of_text_name
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": tokenizer.end_of_text_id, "pad_type_id": 0, "pad_token": end}
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    document = tokenizer.document | {"padding": padding, "truncation": truncation}
    config = {"eos_token": end, "pad_token": end}
    for name, value in (("tokenizer.json", document), ("tokenizer_config.json", config)):
        (tmp_path / name).write_text(json.dumps(value))
    imported = load_tokenizer(tmp_path / "tokenizer.json")
    directory.write_tokenizer(tmp_path, imported, 64, None)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path)
    runner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert exported.pad_token is None
    for text in ("7", "7 is followed by 8."):
        ids = tokenizer.encode(text).tolist()
        assert imported.encode(text).tolist() == exported.encode(text) == ids
        assert runner.encode(text).ids == ids


@pytest.mark.parametrize("num_files", [0, 1])
def test_a_full_disk_leaves_no_export(num_files: int, run: Path, tmp_path: Path, monkeypatch):
    errors = [*[None] * num_files, safetensors.SafetensorError("No space left on device")]
    monkeypatch.setattr(safetensors.torch, "save_file", Mock(side_effect=errors))
    monkeypatch.setattr(directory, "compare_with_transformers", lambda *_: "")
    with pytest.raises(OSError, match=r"model\.safetensors: can't be written"):
        huggingface.main(["export", str(run), str(tmp_path / "hf"), "--dtype", "bfloat16"])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_model_class_that_transformers_lacks_is_exported_unchecked(
    run: Path, tmp_path: Path, monkeypatch, capsys
):
    family = dataclasses.replace(MODEL_FAMILIES["qwen3"], architecture="AbsentForCausalLM")
    monkeypatch.setitem(MODEL_FAMILIES, "qwen3", family)
    huggingface.main(["export", str(run), str(tmp_path / "hf")])
    assert "lacks AbsentForCausalLM" in capsys.readouterr().out
