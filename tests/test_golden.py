"""One real run ends where it always has: the first steps of the laptop's Shakespeare preset."""

import pytest
from helpers import ROOT, logged, make_dataset

import train

NUM_STEPS = 40
EXPECTED_LOSSES = {1: 4.174, 20: 2.427, 40: 2.184}  # nats per token, seed 1
EXPECTED_VAL_LOSS = 2.180
MAX_DIFFERENCE = 0.02


def test_laptop_shakespeare_preset_has_its_known_losses(shakespeare, tmp_path):
    out = tmp_path / "run"
    data = make_dataset(tmp_path, shakespeare, tokenizer="char")
    preset = str(ROOT / "config" / "shakespeare-char-cpu.toml")
    flags = ["--data", data, "--out", out, "--device", "cpu", "--log-every", 1]
    flags += ["--steps", NUM_STEPS, "--eval-every", NUM_STEPS, "--eval-tokens", 50_000]
    assert train.main([preset, *map(str, flags)]) == 0
    losses = {step: logged(out, "train_loss")[step] for step in EXPECTED_LOSSES}
    assert losses == pytest.approx(EXPECTED_LOSSES, abs=MAX_DIFFERENCE)
    val_loss = logged(out, "val_loss")[NUM_STEPS]
    assert val_loss == pytest.approx(EXPECTED_VAL_LOSS, abs=MAX_DIFFERENCE)
