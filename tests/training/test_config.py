"""Flags that have no effect are refused; files may set what a flag makes useless."""

import pytest
from helpers import ROOT

from engine.core.errors import UserError
from engine.training.config import load_config

USELESS_FLAGS = [
    "--frozen-dtype bfloat16",
    "--train-tokens",
    "--init-from base --lora-rank 2 --base moved",
    "--optimizer adamw --momentum 0.5",
    "--decay inverse_sqrt --final-learning-rate 0.5",
    "--tie-embeddings --embedding-rate 2",
    "--position learned --rope-base 500",
    "--score-examples 3",
    "--depth 2 --num-heads 4",
]


@pytest.mark.parametrize("flags", USELESS_FLAGS)
def test_a_flag_without_effect_is_refused_and_works_when_left_out(flags):
    with pytest.raises(UserError, match=r"needs.*Leave it out") as caught:
        load_config(flags.split())
    useless = str(caught.value).partition(":")[0]
    load_config(flags.partition(useless)[0].split())


def test_a_preset_may_have_what_a_flag_makes_useless():
    preset = ROOT / "config" / "shakespeare-char-cpu.toml"
    assert load_config([str(preset), "--optimizer", "adamw"]).optimizer.momentum == 0.85
    with pytest.raises(UserError, match="--momentum"):
        load_config([str(preset), "--optimizer", "adamw", "--momentum=0.5"])
