"""The benchmark: every stage prints its figures, and measures what it says."""

import dataclasses
import json
import math
from functools import partial

import pytest
import torch
from helpers import SMALL

from benchmarks import peers, speed
from engine.core.errors import UserError
from engine.nn.layers import concatenate_linear
from model import GPT, ModelConfig, MultiHeadAttention

TINY = dataclasses.replace(
    speed.SMALL_CONFIG, context_length=16, num_layers=1, num_heads=2, d_model=16
)
NUM_FIGURES = {"train": 3, "attention": 4, "decode": 5, "prepare": 2, "data": 3}
NANOGPT = """
import types
import torch

GPTConfig = types.SimpleNamespace

class GPT(torch.nn.Embedding):
    def __init__(self, config):
        super().__init__(config.vocab_size, config.vocab_size)

    def forward(self, inputs, targets):
        logits = super().forward(inputs)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)
"""


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


def test_nanogpt_is_measured_where_it_is_given(measure, tmp_path):
    (tmp_path / "model.py").write_text(NANOGPT)
    figures = json.loads(measure("train", "--nanogpt", tmp_path)[-1])["train"]
    assert len(figures) == NUM_FIGURES["train"] + 1 and any("nanoGPT" in name for name in figures)


@pytest.mark.parametrize("stage", ["train", "decode"])
def test_without_transformers_it_says_what_to_install(monkeypatch, stage):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install transformers"):
        speed.main([stage, "--device", "cpu"])


def test_joined_attention_is_the_attention_of_the_list_of_heads():
    joined, heads = peers.JoinedAttention(SMALL), MultiHeadAttention(SMALL)
    assert sum(p.numel() for p in joined.parameters()) == sum(p.numel() for p in heads.parameters())
    with torch.no_grad():
        joined.fused_qkv.weight.copy_(concatenate_linear(heads.qkv_layers())[0])
        joined.projection.load_state_dict(heads.projection.state_dict())
    x, rotation = torch.randn(2, 9, SMALL.d_model), GPT(SMALL).rotation(torch.arange(9))
    torch.testing.assert_close(joined(x, rotation), heads.loop(x, rotation), rtol=1e-5, atol=1e-5)


def test_contestants_take_turns_after_a_warmup_round():
    calls = []
    bench = speed.Bench(speed.BenchConfig(rounds=3), torch.device("cpu"))
    seconds = bench.take_turns({name: partial(calls.append, name) for name in "ab"})
    assert "".join(calls) == "abababab" and seconds.keys() == {"a", "b"}


@pytest.mark.parametrize("flags", [["train", "--nanogpt", "none"], ["--rounds", "0"]])
def test_impossible_settings_are_refused_at_once(flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        speed.main(flags)
    assert f"{flags[-2]}: " in capsys.readouterr().err


def test_a_step_trains_with_any_optimizer():
    bench = speed.Bench(speed.BenchConfig(), torch.device("cpu"))
    batch = tuple(torch.ones(2, 1, 8, dtype=torch.long))
    for make_optimizer in (peers.make_adamw, lambda model: bench.make_optimizer(model, "muon")):
        model = GPT(SMALL)
        step = bench.make_model_step(model, batch, make_optimizer(model))
        before = model(*batch).item()
        for _ in range(20):
            step()
        assert model(*batch).item() < before and all(p.grad is None for p in model.parameters())
