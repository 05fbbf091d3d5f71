"""Activation checkpointing and compilation: the same results, and no name changes."""

import pytest
import torch
from helpers import VARIANTS, random_model, tiny

import train
from engine.nn.acceleration import checkpoint_activations


@pytest.fixture(autouse=True)
def forget_compiled():
    """Remove what a test compiled."""
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", VARIANTS)
def test_checkpointed_activations_give_the_same_gradients_in_less_memory(name):
    model = random_model(VARIANTS[name])
    names = list(model.state_dict())
    tokens = torch.randint(37, (2, 3, 16))
    results = []
    num_kept = []
    for _ in range(2):
        sizes = []

        def record(x: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
            loss = model(*tokens)
        num_kept.append(sum(sizes))
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        checkpoint_activations(model)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert num_kept[1] < num_kept[0] / 2
    assert list(model.state_dict()) == names


def test_training_continues_without_a_compiler_and_warns_once(
    tmp_path, numbers, monkeypatch, capfd
):
    (tmp_path / "compile.toml").write_text("compile = true\n")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "/bin/false"))  # as CXX sets it
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    flags = tiny(numbers, tmp_path / "out", "--steps", 2, "--num-layers", 1)
    assert train.main([str(tmp_path / "compile.toml"), *flags]) == 0
    output, errors = capfd.readouterr()
    assert "2 steps in" in output
    assert errors.startswith("warning: ") and "/bin/false" in errors and errors.count("\n") == 1
