"""Activation checkpointing: the same gradients in less memory, and no name changes."""

import pytest
import torch
from helpers import VARIANTS, random_model

from engine.nn.acceleration import checkpoint_activations


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
