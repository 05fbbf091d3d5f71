"""The benchmark: every stage runs and tells its figures; what it races is what it says."""

import argparse
import dataclasses
import json
import math
import sys
from functools import partial

import pytest
import torch
import transformers
from helpers import SMALL

from benchmarks import speed
from engine.data.sources import find_sources
from model import GPT, ModelConfig, MultiHeadAttention

TINY = dataclasses.replace(speed.SMALL, context_length=16, num_layers=1, num_heads=2, d_model=16)
FIGURES = {
    "train": {
        "ours, GPT-2's architecture, AdamW",
        "Hugging Face GPT2LMHeadModel, AdamW",
        "ours, default recipe, Muon",
        "muon share at 64",
    },
    "attention": {
        f"{heads}, {doing}" for heads in ("list of heads", "one joined matrix") for doing in ("training", "decoding")
    },
    "decode": {"ours", "Hugging Face generate", "ours, batch of 8", "ms near token 64", "ms near token 1,000"},
    "prepare": {"ours", "tiktoken"},
    "data": {"with loading", "without", "ms a batch", "growth in MiB"},
    "cost": {
        *(f"context_length {length}" for length in (64, 256, 1024)),
        *(f"context_length {length}, windows (256,)" for length in (1024, 8192)),
        *(f"d_model {width}" for width in (128, 256, 512)),
        *(f"num_layers {layers}" for layers in (2, 4, 8)),
        *(f"vocab_size {size}" for size in (65, 4096, 50304)),
    },
}


@pytest.fixture
def measured(monkeypatch, capsys):
    """What speed.py prints: all its stages have models of 16, 24 or 8 wide, one turn, and a file in place of many."""
    take_turns = speed.Bench.take_turns
    monkeypatch.setattr(speed, "SMALL", TINY)
    monkeypatch.setattr(speed, "BATCHES", 200)
    monkeypatch.setattr(speed.Bench, "take_turns", lambda self, contestants, _=1: take_turns(self, contestants, 1))
    monkeypatch.setattr(speed, "find_sources", lambda _, *more: find_sources((argparse.__file__,), *more))

    def measured(stage: str, *flags: object) -> list[str]:
        with monkeypatch.context() as patch:
            if stage == "decode":
                narrow = {"num_layers": 1, "d_model": 24, "vocab_size": 65}
                patch.setattr(speed, "ModelConfig", lambda **sizes: ModelConfig(**sizes | narrow))
                theirs = partial(transformers.GPT2Config, n_layer=1, n_embd=24)
                patch.setattr(transformers, "GPT2Config", theirs)
            if stage == "cost":
                narrow = {"num_layers": 1, "num_heads": 1, "d_model": 8}
                patch.setattr(speed, "GPT", lambda shape: GPT(dataclasses.replace(shape, **narrow)))
            speed.main([stage, "--device", "cpu", "--batch-size", "2", *map(str, flags)])
        return capsys.readouterr().out.splitlines()

    return measured


@pytest.mark.parametrize("stage", FIGURES)
def test_each_stage_prints_a_table_and_its_figures_as_json(measured, stage):
    lines = measured(stage)
    assert lines[0].startswith("cpu (") and torch.__version__ in lines[0]
    (figures,) = json.loads(lines[-1]).values()
    assert json.loads(lines[-1]).keys() == {stage} and figures.keys() == FIGURES[stage]
    assert all(math.isfinite(figure) and (figure > 0 or name == "growth in MiB") for name, figure in figures.items())
    assert any(next(iter(figures)) in line for line in lines[1:-1])
    assert "muon share at 64" not in figures or figures["muon share at 64"] < 1


@pytest.mark.parametrize("stage", ["train", "decode"])
def test_without_its_peer_it_says_what_to_install(monkeypatch, stage):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=f"{stage}.* transformers"):
        speed.main([stage, "--device", "cpu"])


def test_nanogpt_is_raced_where_it_is_given(measured, tmp_path):
    (tmp_path / "model.py").write_text(
        """
import dataclasses, torch

@dataclasses.dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        print("number of parameters")
        self.logits = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def forward(self, inputs, targets):
        logits = self.logits(inputs)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)
"""
    )
    lines = measured("train", "--nanogpt", tmp_path)
    assert json.loads(lines[-1])["train"].keys() == FIGURES["train"] | {"nanoGPT as it ships"}


def test_one_joined_matrix_is_the_attention_of_the_list_of_heads():
    torch.manual_seed(0)
    joined, heads = speed.JoinedAttention(SMALL), MultiHeadAttention(SMALL)
    assert sum(p.numel() for p in joined.parameters()) == sum(p.numel() for p in heads.parameters())
    with torch.no_grad():
        joined.weight.copy_(heads.join_heads()[0])
        joined.projection.load_state_dict(heads.projection.state_dict())
    x, rotation = torch.randn(2, 9, SMALL.d_model), GPT(SMALL).rotation(0, 9)
    torch.testing.assert_close(joined(x, rotation), heads.loop(x, rotation), rtol=1e-5, atol=1e-5)


def test_turns_are_taken_in_rounds_after_one_to_warm_up():
    calls = []
    stage = speed.Bench(speed.BenchConfig(rounds=3), torch.device("cpu"))
    seconds = stage.take_turns({name: partial(calls.append, name) for name in "ab"})
    assert "".join(calls) == "abababab" and seconds.keys() == {"a", "b"}


def test_a_step_trains_whichever_the_optimizer():
    stage, tokens = speed.Bench(speed.BenchConfig(), torch.device("cpu")), torch.ones(2, 1, 8, dtype=torch.long)
    for make in (speed.fused_adamw, lambda model: stage.optimizer(model, torch.float32)):
        model, loss_of = GPT(SMALL), speed.mean_loss(*tokens)
        step, before = stage.step(model, loss_of, make(model), torch.float32), loss_of(model).item()
        for _ in range(20):
            step()
        assert loss_of(model).item() < before and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["train", "--nanogpt", "none"], "--nanogpt none has no model.py; give the folder of a clone"),
        (["decode", "--nanogpt", "CLONE"], "--nanogpt runs in the stage train, not in decode; leave it out"),
        (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
    ],
)
def test_a_race_that_can_not_be_run_is_refused_at_once(flags, message, capsys, tmp_path):
    (tmp_path / "model.py").write_text("")
    with pytest.raises(SystemExit, match="2"):
        speed.main([flag.replace("CLONE", str(tmp_path)) for flag in flags])
    assert message in capsys.readouterr().err
