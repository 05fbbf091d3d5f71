"""The benchmark: every stage prints its figures, and measures what it says."""

import dataclasses
import json
import math

import pytest
import torch

from benchmarks import speed
from model import ModelConfig

TINY = dataclasses.replace(
    speed.SMALL_CONFIG, context_length=16, num_layers=1, num_heads=2, d_model=16
)
NUM_FIGURES = {"train": 3, "attention": 4, "decode": 5, "prepare": 6, "data": 3}


@pytest.fixture
def measure(monkeypatch, capsys, tmp_path):
    """Runs a stage on tiny models and files, in one round; returns the lines that it prints."""
    take_turns = speed.Bench.take_turns
    monkeypatch.setattr(speed, "SMALL_CONFIG", TINY)
    monkeypatch.setattr(speed, "NUM_LOADED_BATCHES", 200)
    monkeypatch.setattr(
        speed.Bench, "take_turns", lambda self, contestants, _=1: take_turns(self, contestants, 1)
    )
    monkeypatch.setattr(speed.sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "code.py").write_text("def f(x): return x + 1\n" * 100)

    def measure(stage: str, *flags: object) -> list[str]:
        with monkeypatch.context() as patch:
            if stage == "decode":
                narrow = {"num_layers": 1, "d_model": 24}
                patch.setattr(
                    speed,
                    "ModelConfig",
                    lambda *sizes, **settings: ModelConfig(*sizes, **settings | narrow),
                )
            speed.main([stage, "--device", "cpu", "--batch-size", "2", *map(str, flags)])
        return capsys.readouterr().out.splitlines()

    return measure


@pytest.mark.parametrize("stage", NUM_FIGURES)
def test_each_stage_prints_a_table_and_its_figures_as_json(measure, stage):
    lines = measure(stage)
    assert torch.__version__ in lines[0]
    (figures,) = json.loads(lines[-1]).values()
    assert json.loads(lines[-1]).keys() == {stage} and len(figures) == NUM_FIGURES[stage]
    assert all(0 < figure < math.inf for figure in figures.values())
    assert any(next(iter(figures)) in line for line in lines[1:-1])
