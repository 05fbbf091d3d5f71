"""The sizes chosen for minutes, steps or a depth, and the laws behind them."""

import dataclasses
import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from engine.core.distributed import SINGLE_PROCESS
from engine.core.settings import load_settings, to_toml
from engine.data.batches import open_mixture
from engine.runs.checkpoint import Checkpoint, RunState
from engine.training import estimate, sizing
from engine.training.config import ModelSettings, RunConfig, TrainConfig
from engine.training.optimizer import OptimizerSettings
from engine.training.resolve import resolve
from engine.training.sizing import MAX_OVERFITTING, Size, SizeSearch
from model import ModelConfig


def make_search(
    text_tokens=10**6,
    vocab_size=65,
    split_tokens=10**7,
    row_length=lambda context: context,
    **settings,
):
    """Make the search for a text of ``text_tokens`` tokens."""
    split = range(split_tokens)
    data = SimpleNamespace(
        train=range(text_tokens),
        splits=[split],
        tokenizer=SimpleNamespace(vocab_size=vocab_size),
        row_length=row_length,
    )
    return SizeSearch(TrainConfig(**settings), data, SINGLE_PROCESS)


SHAKESPEARE = make_search(1_003_854)
PYTHON = make_search(2_807_314, 2048)


def choose(search: SizeSearch, seconds: float, power: float, timed: list | None = None) -> Size:
    """Search on a machine that does 1e10 · depth^power operations per second."""

    def measure(config: RunConfig, data: object) -> float:
        depth = config.model.num_layers
        if timed is not None and depth not in timed[-1:]:  # again with fewer threads
            timed.append(depth)
        size = search.make_size(depth, 1e6)
        return size.step_tokens * size.operations / (1e10 * depth**power)

    return search.for_time(time.monotonic() + seconds, measure)


# Laws.


def test_expected_loss_is_near_the_measured_one():
    """Runs of docs/experiments.md: depth, millions of tokens, nats per token."""
    python = [(2, 5.4, 2.762), (3, 2.4, 2.956), (2, 16.5, 2.491), (3, 7.6, 2.445)]
    python += [(3, 24.3, 2.282), (4, 12.2, 2.307)]
    shakespeare = [(3, 2.5, 1.460), (3, 4.0, 1.430), (4, 4.4, 1.421), (4, 7.0, 1.392)]
    shakespeare += [(5, 6.2, 1.387), (4, 13.0, 1.396)]
    for search, runs in ((PYTHON, python), (SHAKESPEARE, shakespeare)):
        for depth, millions, loss in runs:
            size = search.make_size(depth, 1e6 * millions)
            assert size.loss == pytest.approx(loss, rel=0.015)
    for first, second in (python[:2], python[2:4], python[4:]):  # in the same time
        losses = [PYTHON.make_size(d, 1e6 * millions).loss for d, millions, _ in (first, second)]
        assert (losses[0] < losses[1]) == (first[2] < second[2])


def test_batches_grow_with_different_tokens_only():
    search = make_search(10**10)
    small = search.make_size(3, 1e6)
    large = search.make_size(3, 1e9)
    for name in ("batch_size", "learning_rate"):
        assert large.settings[name] > small.settings[name]
    assert make_search().make_size(3, 4e6).step_tokens == small.step_tokens


def test_repeated_text_is_regularized():
    search = make_search(split_tokens=257)
    sizes = [search.make_size(4, epochs * 1e6).settings for epochs in (0.5, 6, 12, 1000)]
    assert [size["weight_decay"] for size in sizes] == [0.1, 0.12, 0.34, 0.5]
    assert [size["dropout"] for size in sizes] == [0, 0, 0.1, 0.4]
    sizes = [search.make_size(4, epochs * 1e6).settings for epochs in (12, 20, 30, 1000)]
    assert [size["batch_size"] for size in sizes] == [8, 7, 5, 4]
    assert [size["learning_rate"] for size in sizes] == [0.01, 0.0094, 0.0079, 0.0071]


CONTEXTS = [
    ({"text_tokens": 10**10, "vocab_size": 4096}, (1, 1.5e6, 6e6, 1e10), [64, 128, 512, 2048]),
    ({"text_tokens": 10**7}, (1, 3e6, 1e8), [64, 256, 512]),
    ({"text_tokens": 10**5, "vocab_size": 4096}, (1e8,), [256]),
    ({"split_tokens": 101}, (1e8,), [100]),
    ({"model": ModelSettings(context_length=32)}, (1e8,), [32]),
]


@pytest.mark.parametrize(("arguments", "tokens", "contexts"), CONTEXTS)
def test_context_grows_with_tokens(arguments, tokens, contexts):
    search = make_search(**arguments)
    assert [search.make_size(2, n).settings["context_length"] for n in tokens] == contexts


def test_batches_depend_on_the_rows_of_examples_and_not_on_the_context():
    short = make_search(model=ModelSettings(context_length=32))
    pairs = make_search(model=ModelSettings(context_length=256), row_length=lambda context: 32)
    assert pairs.make_size(2, 1e6) == short.make_size(2, 1e6)


# Search.


def test_more_time_or_steps_mean_larger_models():
    search = make_search(10**10)
    depths = [choose(search, seconds, 0.4).depth for seconds in (6, 600, 60_000, 1e9)]
    assert depths == sorted(depths)
    assert (depths[0], depths[-1]) == (2, 24)
    depths = [make_search().for_steps(steps).depth for steps in (10, 300, 3000, 100_000)]
    assert depths == sorted(depths)
    assert len(set(depths)) >= 3
    assert make_search(depth=7).for_steps(10).depth == 7


@pytest.mark.parametrize("power", [0.0, 0.4, 1.0])
def test_few_depths_are_timed_and_the_best_of_them_is_chosen(power):
    timed: list[int] = []
    search = make_search()
    size = choose(search, 600.0, power, timed)
    speeds = {depth: 1e10 * depth**power for depth in search.depths}
    assert size.loss <= search.best_size(600.0, speeds).loss * 1.005
    assert {size.depth, size.depth + 1} <= set(timed)
    assert len(set(timed)) == len(timed) <= 5


def test_time_of_a_longer_context_is_counted():
    search = make_search(10**12, 4096, depth=2)
    size = choose(search, 1e6, 0.0)
    assert size.operations > 1.5 * search.make_size(2, 1e6).operations
    assert size.tokens * size.operations == pytest.approx(1e16)


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_time_ends_early_when_more_epochs_overfit(depth):
    search = make_search(100_000, 1024, depth=depth)
    assert choose(search, 1.0, 0.0).overfitting < 0.9 * MAX_OVERFITTING
    assert choose(search, 1e9, 0.0).overfitting == pytest.approx(MAX_OVERFITTING)


@pytest.mark.parametrize(
    ("step_seconds", "weight_decay", "limit"), [(9.0, 0.1, 2), (0.1, 0.32, 6.36), (1e-4, 0.5, 20)]
)
def test_a_run_ends_where_more_epochs_do_not_help_however_fast_it_is(
    step_seconds, weight_decay, limit
):
    search = make_search(100_000, 1024, depth=2, minutes=2)
    sizes = search.choose(time.monotonic(), lambda run_config, data: step_seconds)
    tokens = sizes["steps"] * sizes["batch_size"] * sizes["context_length"]
    assert sizes["weight_decay"] == pytest.approx(weight_decay, abs=0.02)
    assert search.make_size(2, tokens).overfitting == pytest.approx(limit, rel=0.05)


@pytest.mark.parametrize("settings", [{}, {"batch_size": 3}, {"micro_batch_size": 4}])
def test_tokens_are_those_of_the_steps(settings):
    for steps in (1, 30, 1000, 100_000):
        size = make_search(**settings).for_steps(steps)
        assert size.tokens == steps * size.step_tokens
        assert size.settings["batch_size"] % settings.get("micro_batch_size", 1) == 0


# resolve().


def run_settings(config: TrainConfig, data, measure=lambda config: 0.01):
    """Return the settings of a run of the config; ``measure`` returns the seconds of a step."""
    measure_on = lambda run_config, data: measure(run_config)  # noqa: E731
    return resolve(config, data, SINGLE_PROCESS, time.monotonic(), None, None, measure_on)[0]


@pytest.fixture(scope="module")
def data(numbers):
    return open_mixture([numbers])


def test_defaults_of_a_run_with_a_shape(data):
    config = run_settings(TrainConfig(model=ModelSettings(num_layers=2)), data)
    assert config.model == ModelConfig(vocab_size=data.tokenizer.vocab_size)
    assert (config.batch_size, config.micro_batch_size) == (16, 0)
    assert (config.steps, config.eval_every, config.save_every) == (1200, 500, 500)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay) == (0.014, 0.1)
    assert (optimizer.embedding_rate, optimizer.warmup_steps, optimizer.window_warmup) == (3, 10, 0)


def test_a_run_without_length_and_size_takes_two_minutes(data):
    config = run_settings(TrainConfig(), data)
    assert config.minutes == 2
    assert config == run_settings(TrainConfig(minutes=2), data)
    assert (config.eval_every, config.save_every) == (None, None)


@pytest.mark.parametrize(
    "settings",
    [
        *({"steps": 7}, {"depth": 2}, {"model": ModelSettings(d_model=64)}),
        {"init_from": Path("base")},
        {"init_from": Path("base"), "auto_resume": True, "steps": 3},  # its first start
    ],
    ids=str,
)
def test_a_run_with_a_length_or_a_size_has_no_minutes(settings, data):
    base = None
    if "init_from" in settings:
        base = Checkpoint(Path("base"), RunState(ModelConfig(vocab_size=20)), {})
    config = TrainConfig(**settings)
    resolved, _ = resolve(config, data, SINGLE_PROCESS, 0.0, None, base, lambda *_: 0.01)
    assert resolved.minutes is None
    assert resolved.steps == (settings.get("steps") or 1200)


def test_set_sizes_stay(data, capsys):
    groups = {"model": ModelSettings(dropout=0.2), "optimizer": OptimizerSettings(weight_decay=0.3)}
    resolved = run_settings(TrainConfig(steps=3, batch_size=2, **groups), data)
    assert resolved.model.num_layers == resolved.model.num_heads == 2
    values = (resolved.batch_size, resolved.model.dropout, resolved.optimizer.weight_decay)
    assert values == (2, 0.2, 0.3)
    line = capsys.readouterr().out.splitlines()[0]
    assert "d_model 128" in line
    assert "batch_size" not in line


def test_a_resolved_config_is_read_back_from_its_file(data, tmp_path):
    config = run_settings(TrainConfig(depth=3, model=ModelSettings(bias=True)), data)
    (tmp_path / "config.toml").write_text(to_toml(config))
    loaded = load_settings(TrainConfig, [str(tmp_path / "config.toml")])
    assert run_settings(loaded, data) == config
    (tmp_path / "part.toml").write_text("num_kv_heads = 1\n")
    assert load_settings(TrainConfig, [str(tmp_path / "part.toml")]).model.num_layers is None


@pytest.mark.parametrize(("depth", "rate"), [(2, 3e-3), (6, 1e-3), (12, 6e-4)])
def test_adamw_has_the_rates_of_the_presets(data, depth, rate):
    """Those of transformer-2017, tutorial and gpt2-124m, which are 128, 384 and 768 wide."""
    config = TrainConfig(depth=depth, optimizer=OptimizerSettings(optimizer="adamw"))
    assert run_settings(config, data).optimizer.learning_rate == pytest.approx(rate)


def test_depths_share_keys_evenly_and_weights_are_bounded_by_the_text(data):
    config = TrainConfig(minutes=100, model=ModelSettings(num_kv_heads=3))
    assert run_settings(config, data).model.num_layers == 3
    fast = run_settings(TrainConfig(minutes=100), data, lambda config: 1e-6)
    assert fast.model.num_layers == 3


def test_timed_config_is_complete_and_has_no_window_warmup(data):
    timed = []
    config = TrainConfig(minutes=1, micro_batch_size=4)
    resolved = run_settings(config, data, lambda config: timed.append(config) or 0.01)
    assert timed and resolved.batch_size % 4 == 0
    for run_config in timed:
        assert run_config.batch_size % 4 == 0 and run_config.micro_batch_size == 4
        assert run_config.optimizer.window_warmup == 0


@pytest.mark.parametrize("size", [{"depth": 2}, {"model": ModelSettings(num_layers=2)}])
def test_a_batch_that_does_not_fit_in_memory_is_split(data, size, monkeypatch):
    config = TrainConfig(**size, steps=30_000, batch_size=4, dtype="float32")
    resolved = run_settings(config, data)
    assert resolved.micro_batch_size == 0
    needed = sum(estimate.estimate_memory(resolved, 2, SINGLE_PROCESS).values()) / 0.9
    for memory, rows in ((needed + 1, 2), (1.0, 1)):
        monkeypatch.setattr(estimate, "usable_memory", lambda device, memory=memory: memory)
        assert run_settings(config, data) == dataclasses.replace(resolved, micro_batch_size=rows)


# Whole runs.


def test_a_run_resumes_with_its_sizes_and_ends_when_more_would_overfit(
    numbers, tmp_path, monkeypatch
):
    monkeypatch.setattr(sizing, "MAX_OVERFITTING", 0.05)  # a few steps
    config = TrainConfig(data=numbers, out=tmp_path, device="cpu", eval_tokens=500, minutes=3)
    calls = itertools.count()
    interrupted = train.train(config, SINGLE_PROCESS, [], lambda: next(calls) >= 3)
    assert interrupted.step == 3 < interrupted.config.steps
    monkeypatch.undo()
    run = train.train(dataclasses.replace(config, resume=True), SINGLE_PROCESS, [])
    assert run.config == interrupted.config
    assert run.step == run.config.steps


def test_little_of_a_run_on_a_gpu_goes_by_with_timing_sizes(graphs, data, monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr("engine.training.sizing.time", SimpleNamespace(monotonic=lambda: now[0]))
    timed = []

    def measure(config: RunConfig) -> float:
        timed.append(config)
        now[0] += 7
        return 1e-4

    run_config = run_settings(TrainConfig(minutes=1, compile=True), data, measure)
    assert [config.compile for config in timed] == [False, True] and run_config.compile
    assert timed[0].model == timed[1].model
    run_settings(TrainConfig(minutes=2, compile=True), data, measure)
    assert [config.compile for config in timed[2:]] == [False, False, True]


@pytest.mark.parametrize("flags", [{}, {"batch_size": 6, "micro_batch_size": 2}], ids=str)
def test_a_timed_step_captures_nothing(graphs, data, monkeypatch, flags):
    now = [0.0]
    capture = graphs._capture
    step = train.train_step

    def capture_slowly(*arguments):
        now[0] += 100
        return capture(*arguments)

    def step_in_a_second(trainer):
        now[0] += 1
        return step(trainer)

    monkeypatch.setattr(graphs, "_capture", capture_slowly)
    monkeypatch.setattr(train, "train_step", step_in_a_second)
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: now[0]))
    config = run_settings(TrainConfig(model=ModelSettings(d_model=8), **flags), data)
    assert train.measure_step_seconds(SINGLE_PROCESS, config, data) == 1
    assert now[0] > 300
