"""The sizes chosen for minutes, steps or a depth, and the laws behind them."""

import dataclasses
import itertools
import time

import pytest
import torch
from helpers import exit_code_of, numbers_text

import train
from engine.core.distributed import SINGLE_PROCESS
from engine.core.errors import UserError
from engine.core.settings import load_settings, to_toml
from engine.data.mixture import open_mixture
from engine.training import estimate, sizing
from engine.training.config import ModelSettings, TrainConfig
from engine.training.optimizer import OptimizerConfig
from engine.training.sizing import (
    DEPTHS,
    MIN_CONTEXT,
    OVERFIT_STOP,
    TIMED_TOKENS,
    Size,
    SizeLimits,
    SizeSearch,
    context_range,
    resolve_sizes,
    size_table,
)
from model import ModelConfig
from prepare import PrepareConfig, prepare

TEXT = SizeLimits(1_000_000, 65, 64, 256)
ENDLESS = dataclasses.replace(TEXT, text_tokens=10**10)
SHAKESPEARE = SizeLimits(1_003_854, 65, 64, 1024)
PYTHON = SizeLimits(2_807_314, 2048, 64, 1024)


def cubic_seconds(depth: int) -> float:
    """Seconds per token of a machine that is as slow for large models as for small ones."""
    return 3e-6 * depth**3 + 5e-6 * depth


def make_search(limits=TEXT, depths=DEPTHS, seconds=cubic_seconds, fits=lambda size: True):
    return SizeSearch(limits, depths, seconds, fits)


# Laws.


def test_expected_loss_is_near_the_measured_one():
    """Runs of docs/sizing.md: depth, millions of tokens, nats per token."""
    python = [(2, 5.4, 2.762), (3, 2.4, 2.956), (2, 16.5, 2.491), (3, 7.6, 2.445)]
    python += [(3, 24.3, 2.282), (4, 12.2, 2.307)]
    shakespeare = [(3, 2.5, 1.460), (3, 4.0, 1.430), (4, 4.4, 1.421), (4, 7.0, 1.392)]
    shakespeare += [(5, 6.2, 1.387), (4, 13.0, 1.396)]
    for limits, runs in ((PYTHON, python), (SHAKESPEARE, shakespeare)):
        for depth, millions, loss in runs:
            assert Size(depth, 1e6 * millions, limits).expected_loss == pytest.approx(loss, rel=0.015)
    for pair in (python[:2], python[2:4], python[4:]):  # in the same time
        expected = [Size(depth, 1e6 * millions, PYTHON).expected_loss for depth, millions, _ in pair]
        assert (expected[0] < expected[1]) == (pair[0][2] < pair[1][2])


def test_batches_grow_with_different_tokens_only_and_divide_over_ranks():
    small = Size(3, 1e6, ENDLESS)
    large = Size(3, 1e9, ENDLESS)
    assert large.batch_size > small.batch_size
    assert large.settings()["learning_rate"] > small.settings()["learning_rate"]
    assert Size(3, 4e6, TEXT).tokens_per_step == small.tokens_per_step
    for num_ranks in (3, 8):
        limits = dataclasses.replace(TEXT, batch_multiple=num_ranks)
        assert Size(3, 2e6, limits).batch_size % num_ranks == 0


def test_repeated_text_is_regularized():
    sizes = [Size(4, epochs * 1e6, TEXT).settings() for epochs in (0.5, 6, 12, 1000)]
    assert [size["weight_decay"] for size in sizes] == [0.1, 0.12, 0.34, 0.5]
    assert [size["dropout"] for size in sizes] == [0, 0, 0.1, 0.4]
    sizes = [Size(4, epochs * 1e6, TEXT).settings() for epochs in (12, 20, 30, 1000)]
    assert [size["batch_size"] for size in sizes] == [8, 7, 5, 4]
    assert [size["learning_rate"] for size in sizes] == [0.01, 0.0094, 0.0079, 0.0071]
    limits = dataclasses.replace(TEXT, batch_size=8)
    assert Size(4, 30e6, limits).batch_size == 8


def test_dropout_is_near_the_best_measured_one():
    """Runs of docs/sizing.md: depth, epochs, tokens of the text, best dropout."""
    runs = [(2, 15, 9e4, 0), (2, 17, 52e3, 0.05), (3, 14, 9e4, 0.1), (3, 12, 52e3, 0.1)]
    runs += [(3, 12.5, 109e3, 0.1), (4, 8, 9e4, 0.1), (4, 10, 52e3, 0.2), (4, 25, 109e3, 0.2)]
    for depth, epochs, text_tokens, best in runs:
        size = Size(depth, epochs * text_tokens, SizeLimits(int(text_tokens), 1024, 64, 256))
        assert size.dropout == pytest.approx(best, abs=0.055)


def test_context_grows_with_tokens():
    subwords = SizeLimits(10**10, 4096, MIN_CONTEXT, 10**6)
    characters = SizeLimits(10**7, 65, MIN_CONTEXT, 10**6)
    tokens = (1, 2e6, 4e6, 9e6, 1e8, 1e10)
    assert [Size(2, n, subwords).context for n in tokens] == [64, 128, 256, 512, 1024, 2048]
    assert [Size(2, n, characters).context for n in (1, 3e6, 1e8)] == [64, 256, 512]
    small_text = dataclasses.replace(subwords, text_tokens=10**5)
    assert Size(2, 1e8, small_text).context == 256


# Search.


def test_more_time_means_larger_models():
    search = make_search(ENDLESS)
    depths = [search.for_seconds(lambda s=s: s).depth for s in (6, 60, 600, 6000, 1e9)]
    assert depths == sorted(depths)
    assert depths[0] == DEPTHS[0]
    assert depths[-1] == DEPTHS[-1]
    depths = [make_search().for_steps(steps).depth for steps in (10, 300, 3000, 100_000)]
    assert depths == sorted(depths)
    assert len(set(depths)) >= 3
    assert make_search(depths=[7]).for_steps(10).depth == 7


@pytest.mark.parametrize("seconds", [cubic_seconds, lambda depth: 1e-5 * depth**1.5])
def test_few_depths_are_timed_and_the_best_of_them_is_chosen(seconds):
    timed = []
    search = make_search(seconds=lambda depth: timed.append(depth) or seconds(depth))
    size = search.for_seconds(lambda: 120.0)
    losses = {depth: Size(depth, 120 / seconds(depth), TEXT).expected_loss for depth in DEPTHS}
    assert losses[size.depth] <= min(losses.values()) * 1.005
    assert {size.depth, size.depth + 1} <= set(timed)
    assert len(set(timed)) == len(timed) <= 4


def test_time_of_a_longer_context_is_counted():
    limits = SizeLimits(10**12, 4096, MIN_CONTEXT, 10**6)
    size = make_search(limits, [2], lambda depth: 1e-4).for_seconds(lambda: 1e6)
    ratio = size.operations / Size(2, TIMED_TOKENS, limits).operations
    assert ratio > 1.5
    assert size.tokens == pytest.approx(1e10 / ratio)


def test_time_ends_early_when_more_epochs_overfit():
    limits = SizeLimits(100_000, 1024, 64, 256)
    for depth in (2, 4, 8):
        search = make_search(limits, [depth], lambda depth: 1e-4)
        short = search.for_seconds(lambda: 50.0)
        long = search.for_seconds(lambda: 1e6)
        assert short.tokens < short.max_tokens
        assert long.tokens == long.max_tokens
        assert long.overfit_pressure == pytest.approx(OVERFIT_STOP)


@pytest.mark.parametrize("limits", [{}, {"batch_size": 3}, {"min_context": 256}, {"batch_multiple": 128}])
def test_tokens_are_those_of_the_steps(limits):
    search = make_search(dataclasses.replace(TEXT, **limits))
    for steps in (1, 30, 1000, 100_000):
        size = search.for_steps(steps)
        assert size.tokens == steps * size.tokens_per_step


def test_models_that_do_not_fit_in_memory_are_neither_timed_nor_chosen():
    timed = []

    def measure(depth: int) -> float:
        timed.append(depth)
        return cubic_seconds(depth)

    search = make_search(ENDLESS, seconds=measure, fits=lambda size: size.depth <= 5)
    assert search.for_seconds(lambda: 1e9).depth == 5
    assert max(timed) == 5
    assert search.for_steps(10**6).depth == 5


# resolve_sizes().


def resolve(config: TrainConfig, data, measure=lambda config: 0.01) -> TrainConfig:
    return resolve_sizes(config, data, SINGLE_PROCESS, time.monotonic(), measure)


@pytest.fixture(scope="module")
def data(numbers):
    return open_mixture([numbers])


def test_defaults():
    sizes = resolve(TrainConfig(), None)
    assert sizes.model == ModelConfig()
    assert type(sizes.model) is ModelConfig
    assert sizes.batch_size == 16
    assert (sizes.optimizer.learning_rate, sizes.optimizer.weight_decay) == (0.014, 0.1)
    assert sizes.depth is None


def test_a_shape_leaves_the_other_sizes_at_their_defaults():
    config = resolve(TrainConfig(minutes=5, model=ModelSettings(num_layers=1)), None)
    assert config.model == ModelConfig(num_layers=1)


def test_set_sizes_stay(data, capsys):
    optimizer = OptimizerConfig(weight_decay=0.3)
    config = TrainConfig(steps=3, batch_size=2, model=ModelSettings(dropout=0.2), optimizer=optimizer)
    resolved = resolve(config, data)
    assert resolved.model.num_layers == resolved.depth == 2
    assert resolved.batch_size == 2
    assert resolved.model.dropout == 0.2
    assert resolved.optimizer.weight_decay == 0.3
    line = capsys.readouterr().out.splitlines()[0]
    assert "d_model 128" in line
    assert "batch_size" not in line
    assert resolve(resolved, data) == resolved


def test_a_resolved_config_is_read_back_from_its_file(data, tmp_path):
    config = resolve(TrainConfig(depth=3, model=ModelSettings(bias=True)), data)
    (tmp_path / "config.toml").write_text(to_toml(config))
    loaded = load_settings(TrainConfig, [str(tmp_path / "config.toml")])
    assert resolve(loaded, data) == config
    (tmp_path / "part.toml").write_text("num_kv_heads = 1\n")
    assert load_settings(TrainConfig, [str(tmp_path / "part.toml")]).model.num_layers is None


@pytest.mark.parametrize(("depth", "rate"), [(2, 3e-3), (6, 1e-3), (12, 6e-4)])
def test_adamw_has_the_rates_of_the_presets(data, depth, rate):
    """Those of transformer-2017, tutorial and gpt2-124m, which are 128, 384 and 768 wide."""
    config = resolve(TrainConfig(depth=depth, optimizer=OptimizerConfig(optimizer="adamw")), data)
    assert config.optimizer.learning_rate == pytest.approx(rate)


@pytest.mark.parametrize("flag", ["--d-model=64", "--init-from=out/base"])
def test_a_depth_next_to_other_sizes_is_refused(flag):
    config = load_settings(TrainConfig, ["--depth", "2", flag])
    with pytest.raises(UserError, match="--depth"):
        resolve(config, None)


def test_minutes_next_to_steps_choose_nothing(data):
    with pytest.raises(UserError, match="--minutes"):
        resolve(TrainConfig(minutes=1, steps=2), data)
    config = TrainConfig(minutes=1, steps=2, model=ModelSettings(num_layers=1))
    assert resolve(config, data).steps == 2


def test_impossible_shapes_are_refused_when_they_are_read(capsys):
    assert exit_code_of(lambda: load_settings(TrainConfig, ["--num-heads", "3"])) == 2
    assert "128" in capsys.readouterr().err


def test_depths_share_keys_evenly_and_weights_are_bounded_by_the_text(data):
    config = TrainConfig(minutes=100, model=ModelSettings(num_kv_heads=3))
    assert resolve(config, data).depth == 3
    assert resolve(TrainConfig(minutes=100), data, lambda config: 1e-6).depth == 3


def test_timed_config_is_complete_and_has_no_window_warmup(data):
    timed = []
    config = TrainConfig(minutes=1, micro_batch_size=4)
    resolved = resolve(config, data, lambda config: timed.append(config) or 0.01)
    assert resolved.batch_size % 4 == 0
    for config in timed:
        assert type(config.model) is ModelConfig
        assert config.batch_size % 4 == 0
        assert config.optimizer.window_warmup == 0
    assert resolved.optimizer.window_warmup is None


def test_micro_batches_shrink_before_the_depth_when_memory_is_short(data, monkeypatch):
    config = TrainConfig(steps=30_000, batch_size=64, dtype="float32")
    whole = resolve(config, data)
    assert whole.micro_batch_size is None
    hardware = estimate.Hardware(torch.float32, is_gpu=False)

    def needed(config: TrainConfig, rows: int) -> float:
        return sum(estimate.estimate_memory(config, rows, hardware).values()) / 0.9

    monkeypatch.setattr(estimate, "total_memory", lambda device: needed(whole, 16) + 1)
    smaller = resolve(config, data)
    assert smaller == dataclasses.replace(whole, micro_batch_size=16)
    monkeypatch.setattr(estimate, "total_memory", lambda device: needed(whole, 1) - 1)
    assert resolve(config, data).depth == whole.depth - 1
    monkeypatch.setattr(estimate, "total_memory", lambda device: 1.0)
    smallest = resolve(config, data)
    assert (smallest.depth, smallest.micro_batch_size) == (2, 1)


def test_minutes_that_passed_before_the_start_choose_the_smallest(data):
    config = TrainConfig(minutes=0.1)
    resolved = resolve_sizes(config, data, SINGLE_PROCESS, time.monotonic() - 100, lambda config: 0.01)
    assert resolved.depth == 2


def test_context_is_at_most_that_of_a_split(tmp_path):
    (tmp_path / "short.txt").write_text(numbers_text(60), encoding="utf-8")
    inputs = (str(tmp_path / "short.txt"),)
    prepare(PrepareConfig(inputs=inputs, out=tmp_path / "short", tokenizer="char"))
    data = open_mixture([tmp_path / "short"])
    longest = len(data.datasets[0].val) - 1
    assert longest < 256
    assert context_range(TrainConfig(), data) == (MIN_CONTEXT, longest)
    assert Size(2, 1e8, SizeLimits(1000, 65, MIN_CONTEXT, longest)).context == longest
    config = TrainConfig(model=ModelSettings(context_length=32))
    assert context_range(config, data) == (32, 32)


def test_table_has_a_row_for_each_number_of_minutes(data):
    config = TrainConfig(minutes=0.001, depth=2, model=ModelSettings(tie_embeddings=True))
    header, *rows = size_table(config, data, SINGLE_PROCESS, lambda config: 0.01).splitlines()
    assert "tokens" in header
    assert [float(row.split()[0]) for row in rows] == [0.001, *sizing.TABLE_MINUTES]
    shape = ModelConfig(data.tokenizer.vocab_size, num_layers=2, tie_embeddings=True)
    parameters = {row.split()[2] for row in rows}
    assert parameters == {f"{estimate.build_meta_model(shape).num_parameters:,}"}
    assert rows[-1].endswith("ends early")
    assert not rows[0].endswith("ends early")


# Whole runs.


def test_a_run_resumes_with_its_sizes_and_ends_when_more_would_overfit(numbers, tmp_path, monkeypatch):
    monkeypatch.setattr(sizing, "OVERFIT_STOP", 0.05)  # a few steps
    config = TrainConfig(data=numbers, out=tmp_path, device="cpu", eval_tokens=500, minutes=0.5)
    calls = itertools.count()
    interrupted = train.train(config, SINGLE_PROCESS, [], lambda: next(calls) >= 3)
    assert interrupted.step == 3 < interrupted.config.steps
    monkeypatch.undo()
    run = train.train(dataclasses.replace(config, resume=True), SINGLE_PROCESS, [])
    assert run.config == dataclasses.replace(interrupted.config, resume=True)
    assert run.step == run.config.steps


@pytest.mark.parametrize("flags", ["--d-model 64", "--init-from base"])
def test_plan_by_minutes_needs_an_open_size(numbers, flags):
    config = load_settings(TrainConfig, ["--data", str(numbers), "--minutes=9", *flags.split()])
    with pytest.raises(UserError, match="--plan"):
        train.plan(config)
