"""Settings and weights that a run takes from a checkpoint."""

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.core.errors import UserError
from engine.core.settings import flatten
from engine.data.tokenizer import ByteTokenizer, CharTokenizer
from engine.data.tokenizer_json import CHAT_ROLES, END_OF_TURN
from engine.training.checkpoint import Checkpoint
from engine.training.config import RunConfig
from engine.training.resolve import (
    base_model_values,
    changed_settings,
    check_tokenizer,
    init_token_rows,
    split_token_ids,
)
from model import ModelConfig

CONFIG = RunConfig(model=ModelConfig(vocab_size=11), steps=100)
SETTINGS = flatten(CONFIG)
STATE = {"settings": SETTINGS, "data_sha256": "abc", "step": 60, "elapsed_seconds": 120.0}


def test_changed_settings_are_returned_unless_they_change_no_result():
    assert changed_settings(STATE, SETTINGS, "abc") == {}
    settings = SETTINGS | {"steps": 200, "data": ["b"], "clip_norm": 2.0}
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
    assert base_model_values(state, {"dropout": 0.1, "bias": False}, Path("base")) == {
        **state,
        "dropout": 0.1,
    }
    assert base_model_values(state, state, Path("base")) == state
    assert base_model_values(state, {}, Path("base"))["dropout"] == 0
    with pytest.raises(UserError, match=r"--num-layers: .*base, 3 \(got 5\)"):
        base_model_values(state, {"num_layers": 5}, Path("base"))


@pytest.mark.parametrize("num_rows", [6, 9])
def test_rows_of_new_tokens_are_the_mean_of_the_trained_rows(num_rows: int):
    names = ("token_embedding.weight", "head.weight", "blocks.0.matrix")
    tensors = {name: torch.randn(6, 2) for name in names}  # row 2 is untrained, row 5 padding
    new = [2, *range(5, num_rows)]
    expanded = dict(init_token_rows(tensors.items(), num_rows, [0, 1, 3, 4], new))
    assert torch.equal(expanded["blocks.0.matrix"], tensors["blocks.0.matrix"])
    for name in names[:2]:
        trained = tensors[name][[0, 1, 3, 4]]
        assert torch.equal(expanded[name][[0, 1, 3, 4]], trained)
        torch.testing.assert_close(expanded[name][new], trained.mean(0).expand(len(new), -1))


CHAT_NAMES = [*CHAT_ROLES.values(), END_OF_TURN]


@pytest.mark.parametrize(
    ("reserved", "is_chat_model", "learns_chats", "untrained", "new"),
    [
        (True, False, True, range(257, 261), range(257, 261)),  # of a BPE of ours
        (True, False, False, range(257, 261), []),
        (True, True, True, [], []),
        (False, False, True, [], range(257, 261)),  # also where the model has rows of padding
        (False, False, False, [], range(257, 261)),
    ],
)
def test_rows_of_chat_tokens_are_untrained_in_a_model_of_text(
    reserved: bool, is_chat_model: bool, learns_chats: bool, untrained, new, tmp_path
):
    tokenizer = ByteTokenizer().with_special(CHAT_NAMES)
    (tokenizer if reserved else ByteTokenizer()).save(tmp_path / "tokenizer.json")
    base = Checkpoint(tmp_path, {"examples": "chats" if is_chat_model else None}, {})
    num_ids = tokenizer.vocab_size if reserved else 257
    trained = sorted({*range(num_ids)} - {*untrained})
    assert split_token_ids(base, tokenizer, learns_chats) == (trained, [*new])
