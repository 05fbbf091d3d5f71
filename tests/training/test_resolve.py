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

SETTINGS = {"steps": 100, "minutes": None, "seed": 1, "bias": False, "dtype": "", "data": "a"}
STATE = {"settings": SETTINGS, "data_sha256": "abc", "step": 60, "elapsed_seconds": 120.0}


def changes_of(may_change: set[str] = frozenset({"steps", "minutes", "data"}), **settings) -> dict:
    return changed_settings(STATE, SETTINGS | settings, set(may_change), "abc")


def test_changed_settings_are_returned_unless_they_change_no_result():
    assert changes_of() == {}
    assert changes_of(steps=200, data="b") == {"steps": (100, 200)}
    assert changes_of({"new", "steps"}, new=1) == {"new": (None, 1)}


@pytest.mark.parametrize(
    ("name", "value"), [("bias", 0), ("bias", None), ("bias", ""), ("dtype", None), ("seed", True)]
)
def test_values_that_are_equal_in_python_only_are_changes(name, value):
    assert changes_of({name}, **{name: value}) == {name: (SETTINGS[name], value)}


def test_settings_and_data_that_must_not_change_are_refused_together():
    with pytest.raises(UserError, match=r"--resume.*seed 1 → 2, bias False → True") as caught:
        changed_settings(STATE, SETTINGS | {"seed": 2, "bias": True}, set(), "other data")
    assert "--data" in str(caught.value)


def test_fewer_steps_or_minutes_than_are_done_are_refused():
    with pytest.raises(UserError, match=r"--steps.*60"):
        changes_of(steps=59)
    with pytest.raises(UserError, match=r"--minutes.*2"):
        changes_of(steps=None, minutes=1.9)
    assert changes_of(steps=None, minutes=2.0)["minutes"] == (None, 2.0)


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
