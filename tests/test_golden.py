"""One real run ends where it always has: the laptop's Shakespeare preset."""

import pytest
from helpers import ROOT, logged, make_dataset

import train

FINAL_STEP = 130
EXPECTED_VAL_LOSS = 1.846  # nats per token over the whole validation split, seed 1
MAX_DIFFERENCE = 0.02


def test_laptop_shakespeare_preset_ends_at_its_known_loss(shakespeare, tmp_path):
    out = tmp_path / "run"
    data = make_dataset(tmp_path, shakespeare, tokenizer="char")
    preset = str(ROOT / "config" / "shakespeare-char-cpu.toml")
    assert train.main([preset, "--data", str(data), "--out", str(out), "--device", "cpu"]) == 0
    expected = pytest.approx(EXPECTED_VAL_LOSS, abs=MAX_DIFFERENCE)
    assert logged(out, "val_loss")[FINAL_STEP] == expected
