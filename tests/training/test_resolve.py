"""Settings and weights that a run takes from a checkpoint."""

import dataclasses
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.core.settings import flatten
from engine.data.tokenizer import ByteTokenizer
from engine.data.tokenizer_json import CHAT_ROLES, END_OF_TURN
from engine.training.checkpoint import Checkpoint
from engine.training.config import RunConfig
from engine.training.resolve import base_model_values, changed_settings, split_token_ids
from model import ModelConfig

CONFIG = RunConfig(model=ModelConfig(vocab_size=11), steps=100)
SETTINGS = flatten(CONFIG)
STATE = {"settings": SETTINGS, "data_sha256": "abc", "step": 60, "elapsed_seconds": 120.0}


def test_a_resumed_run_is_as_long_as_its_checkpoint_or_longer():
    for shorter, flag in (
        ({"steps": 59}, "--steps"),
        ({"steps": None, "minutes": 1.9}, "--minutes"),
    ):
        with pytest.raises(UserError, match=flag):
            changed_settings(STATE, SETTINGS | shorter, "abc")
    minutes = changed_settings(STATE, SETTINGS | {"steps": None, "minutes": 2.0}, "abc")["minutes"]
    assert minutes == (None, 2.0)


def test_a_base_determines_all_model_settings_but_dropout():
    base = ModelConfig(vocab_size=11, num_layers=3, num_heads=2, d_model=8, dropout=0.3)
    state = dataclasses.asdict(base)
    values = base_model_values(state, {"dropout": 0.1, "bias": False}, Path("base"))
    assert values == {**state, "dropout": 0.1}
    assert base_model_values(state, {}, Path("base"))["dropout"] == 0
    with pytest.raises(UserError, match=r"--num-layers: .*base, 3 \(got 5\)"):
        base_model_values(state, {"num_layers": 5}, Path("base"))


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
