"""Settings and weights that a run takes from a checkpoint."""

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.core.errors import UserError
from engine.data.tokenizer import ByteTokenizer, CharTokenizer
from engine.training.resolve import (
    changed_settings,
    check_tokenizer,
    expand_vocab_rows,
    merge_base_model_config,
)
from model import ModelConfig

SETTINGS = {"steps": 100, "minutes": None, "seed": 1, "bias": False, "data": "a"}
STATE = {"settings": SETTINGS, "data_sha256": "abc", "step": 60, "elapsed_seconds": 120.0}


def test_changed_settings_are_returned_unless_they_change_no_result():
    assert changed_settings(STATE, SETTINGS, "abc") == {}
    settings = SETTINGS | {"steps": 200, "data": "b", "clip_norm": 2.0}
    expected = {"steps": (100, 200), "clip_norm": (1.0, 2.0)}
    assert changed_settings(STATE, settings, "abc") == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 2, "bias": True}, r"--resume.*seed 1 → 2, bias False → True.*--data"),
        ({"optimizer": "adamw"}, "--resume.*optimizer"),
        ({"steps": 59}, "--steps.*60"),
        ({"steps": None, "minutes": 1.9}, "--minutes.*2"),
    ],
)
def test_settings_that_do_not_continue_a_run_are_refused(settings, message):
    data_sha256 = "other data" if "seed" in settings else "abc"
    with pytest.raises(UserError, match=message):
        changed_settings(STATE, SETTINGS | settings, data_sha256)
    minutes = changed_settings(STATE, SETTINGS | {"steps": None, "minutes": 2.0}, "abc")["minutes"]
    assert minutes == (None, 2.0)


def test_a_tokenizer_must_extend_that_of_the_base(tmp_path):
    CharTokenizer("ab").save(tmp_path / "tokenizer.json")
    check_tokenizer(tmp_path, CharTokenizer("ab"), Path("data"))
    with pytest.raises(UserError, match=r"^data: .*python prepare.py"):
        check_tokenizer(tmp_path, ByteTokenizer(), Path("data"))


def test_a_base_determines_all_model_settings_but_dropout():
    base = ModelConfig(vocab_size=11, num_layers=3, num_heads=2, d_model=8, dropout=0.3)
    state = dataclasses.asdict(base)
    merged = merge_base_model_config(state, ModelConfig(dropout=0.1), Path("base"))
    assert merged == dataclasses.replace(base, dropout=0.1)
    assert merge_base_model_config(state, base, Path("base")) == base
    with pytest.raises(UserError, match=r"--num-layers: .*base, 3 \(got 5\)"):
        merge_base_model_config(state, dataclasses.replace(base, num_layers=5), Path("base"))


def test_rows_of_new_tokens_are_the_mean_of_the_old_rows():
    tensors = {"embedding": torch.randn(3, 2), "matrix": torch.randn(3, 2)}
    expanded = dict(expand_vocab_rows(tensors.items(), {"embedding": 5, "matrix": 3}))
    assert torch.equal(expanded["matrix"], tensors["matrix"])
    assert torch.equal(expanded["embedding"][:3], tensors["embedding"])
    mean = tensors["embedding"].mean(0)
    torch.testing.assert_close(expanded["embedding"][3:], torch.stack([mean, mean]))
