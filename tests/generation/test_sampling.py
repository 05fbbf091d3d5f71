"""Sampling: which tokens may be drawn, how often, and by which random numbers."""

import math

import pytest
import torch
from reference import filter_logits, sample_token
from torch.utils._python_dispatch import TorchDispatchMode

from engine.generation.sampling import (
    NOT_FINITE,
    penalize_frequency,
    penalize_repetition,
    row_seeds,
)

INF = math.inf


def draw(logits: torch.Tensor, seed: int = 0, **options) -> torch.Tensor:
    """Draw a token for each row: the prompts are equal."""
    draws = [(row_seed, 7) for row_seed in row_seeds(seed, [[1]] * len(logits))]
    return torch.tensor(sample_token(logits, draws, **options))


def kept_ids(logits: torch.Tensor, **options) -> list[list[int]]:
    weights, ids = filter_logits(logits, **options)
    return [sorted(row[w > 0].tolist()) for row, w in zip(ids, weights, strict=True)]


def is_like(counts: torch.Tensor, probs: torch.Tensor) -> bool:
    """Return whether counts pass a chi-square test at about four standard deviations."""
    expected = counts.sum() * probs
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(counts) - 1
    return statistic < freedom + 4 * math.sqrt(2 * freedom) + 8


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.5, 0.2, 0.2]),
        ({"temperature": 0.5}, [0.01 / 0.34, 0.25 / 0.34, 0.04 / 0.34, 0.04 / 0.34]),
        ({"temperature": 0}, [0, 1, 0, 0]),
        ({"temperature": 1e-45}, [0, 1, 0, 0]),
        ({"top_p": 0}, [0, 1, 0, 0]),
        ({"top_p": 1e-30}, [0, 1, 0, 0]),
        ({"top_p": 0.7}, [0, 5 / 7, 2 / 7, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0, 1, 0, 0]),  # of the three's 0.9, not of all
        ({"min_p": 0.19, "temperature": 2.0, "top_k": 3}, [0, 0.4415, 0.2792, 0.2792]),
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_filtered_distribution(options, expected):
    logits = torch.tensor([[0.1, 0.5, 0.2, 0.2]]).log().expand(4000, 4)
    counts = draw(logits, **options).bincount(minlength=4)
    is_possible = torch.tensor(expected) > 0
    assert not counts[~is_possible].any()
    assert is_like(counts[is_possible], torch.tensor(expected)[is_possible])


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 400}], ids=str)
def test_draws_of_rows_steps_and_ids_are_independent(options):
    torch.manual_seed(0)
    logits = torch.randn(500)
    weights, ids = filter_logits(logits[None], **options)
    probs = torch.zeros(500).scatter(0, ids[0], weights[0] / weights.sum())
    seeds = row_seeds(3, [[number] for number in range(100)])
    draws = [(seed, step) for seed in seeds for step in range(100)]
    drawn = torch.tensor(sample_token(logits.expand(len(draws), 500), draws, **options))
    likely = probs > 5e-4
    assert is_like(drawn.bincount(minlength=500)[likely], probs[likely] / probs[likely].sum())
    is_low = (drawn.view(100, 100) < 250).long()
    p = torch.stack((probs[250:].sum(), probs[:250].sum()))
    for earlier in (is_low.roll(1, 0), is_low.roll(1, 1)):  # another row, the step before
        counts = (2 * is_low + earlier).flatten().bincount(minlength=4)
        assert is_like(counts, torch.outer(p, p).flatten())


@pytest.mark.parametrize("options", [{}, {"top_p": 0.95}, {"top_k": 60}, {"min_p": 0.1}], ids=str)
def test_a_row_does_not_depend_on_other_rows(options):
    torch.manual_seed(1)
    logits = torch.randn(9, 5000) * torch.tensor([[0.0], *[[2.0]] * 8])  # the first needs all ids
    draws = [(seed, 7) for seed in row_seeds(0, [[1]] * 9)]
    rows = [(logits[i : i + 1], draws[i : i + 1]) for i in range(9)]
    alone = [torch.tensor(sample_token(*row, **options)) for row in rows]
    assert draw(logits, **options).equal(torch.cat(alone))


def test_seeds_depend_on_the_prompt_and_on_equal_ones_before():
    first, second, third = row_seeds(1, [[5], [5], [6]])
    assert len({first, second, third}) == 3
    assert row_seeds(1, [[6], [9, 9], [5], [7], [5]])[::2] == [third, first, second]
    assert row_seeds(2, [[5]]) != [first] and row_seeds(1, [[5, 0]]) != [first]


@pytest.mark.parametrize(
    ("logits", "options", "expected"),
    [
        ([0.0] * 3, {"top_p": 0.67}, [0, 1, 2]),
        ([0.0] * 25, {"top_p": 7 / 25}, [*range(7)]),  # 7 / 25 * 25 is above 7
        ([0.0, 2.0, 2.0, 2.0], {"top_k": 2}, [1, 2]),
        ([3.0, 5.0, 5.0], {"temperature": 0}, [1]),
        ([-INF, 1.0, -INF, 1.0], {"top_k": 3}, [1, 3]),
        ([-INF, 1.0, -INF, 1.0], {"top_p": 0.99}, [1, 3]),
        ([1e37, -3e38, 1e37], {"temperature": 1e-3}, [0, 2]),
        ([-0.0, 0.0, -1.0], {"top_k": 1}, [0]),
    ],
    ids=str,
)
def test_the_fewest_likely_tokens_are_kept_and_the_lowest_of_equal_ids(logits, options, expected):
    for dtype in (torch.float32, torch.float64):
        assert kept_ids(torch.tensor([logits], dtype=dtype), **options) == [expected]


@pytest.mark.parametrize("size", [3, 255, 256, 257, 5000, 200_000])
def test_filters_follow_the_definition_in_any_vocabulary(size):
    """Equal tokens are the hardest case for the sum of their probabilities."""
    logits = torch.zeros(1, size)
    assert kept_ids(logits, top_p=1.0) == [[*range(size)]]
    for top_p in (0.1, 0.5, 0.9, 1 - 1e-5):
        (ids,) = kept_ids(logits, top_p=top_p)
        assert ids == [*range(len(ids))]
        assert (len(ids) - 1) / size < top_p <= len(ids) / size * (1 + 1e-6)


def test_filters_are_those_of_transformers_in_their_order():
    import transformers as hf

    options = {"temperature": 1.3, "top_k": 90, "top_p": 0.9, "min_p": 0.02}
    classes = {
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
    }
    torch.manual_seed(2)
    logits = expected = torch.randn(20, 700) * 3
    tokens = torch.randint(logits.shape[1], (20, 40))
    expected = hf.RepetitionPenaltyLogitsProcessor(0.7)(tokens, expected)
    for name, processor in classes.items():
        expected = processor(options[name])(tokens, expected)
    weights, ids = filter_logits(penalize_repetition(logits, tokens, 0.7), **options)
    probs = torch.zeros_like(logits).scatter(1, ids, weights / weights.sum(1, keepdim=True))
    assert torch.allclose(probs, expected.softmax(dim=-1), atol=1e-6)
    assert torch.equal(probs > 0, expected > -INF)


@pytest.mark.parametrize("value", [math.nan, INF, -INF])
@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 2, "top_p": 0.5}], ids=str)
def test_a_row_of_logits_that_are_not_finite_has_no_token(value, options):
    logits = torch.zeros(2, 5)
    logits[1, 2 if value != -INF else slice(None)] = value
    first, second = draw(logits, **options)
    assert first >= 0 and second == NOT_FINITE


def test_penalties_of_new_tokens_are_those_of_openai():
    logits = torch.zeros(3, 4)
    penalized = penalize_frequency(logits, [[1, 1, 3], [], [0]], 0.5, -2.0)
    assert penalized.tolist() == [[0, 1, 0, 1.5], [0, 0, 0, 0], [1.5, 0, 0, 0]]


def test_sums_without_a_reproducible_kernel_are_allowed_while_tokens_are_drawn():
    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            modes[str(function)] = torch.are_deterministic_algorithms_enabled()
            return function(*arguments, **(keywords or {}))

    modes: dict[str, bool] = {}
    torch.use_deterministic_algorithms(True)
    try:
        with Recorder():
            sample_token(torch.rand(2, 9), [(1, 2), (3, 4)], top_p=0.5)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not modes["aten.cumsum.default"]
