"""The sizes chosen for minutes, steps or a depth, and the laws behind them."""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.core.distributed import SINGLE_PROCESS
from engine.data.batches import open_mixture
from engine.nn.bounds import set_default_sizes
from engine.runs.checkpoint import Checkpoint, RunState
from engine.training import sizing
from engine.training.config import TrainConfig
from engine.training.optimizer import OptimizerConfig
from engine.training.resolve import resolve
from engine.training.sizing import SizeSearch
from model import ModelConfig


def make_search(
    text_tokens=10**6, vocab_size=65, split_tokens=10**7, row_tokens=None, model=(), **settings
):
    """Make the search for a text of ``text_tokens`` tokens."""
    data = SimpleNamespace(
        train=range(text_tokens),
        splits=[range(split_tokens)],
        tokenizer=SimpleNamespace(vocab_size=vocab_size),
        row_length=lambda context: row_tokens or context,
    )
    settings = {"micro_batch_size": 1, **settings}  # else large models are built, to fit in memory
    config = TrainConfig(model=ModelConfig(**dict(model)), **settings)
    return SizeSearch(config, data, SINGLE_PROCESS)


SHAKESPEARE = make_search(1_003_854)
PYTHON = make_search(2_807_314, 2048)


def make_measure(search: SizeSearch, speed: float, power: float, timed: list[int]):
    """Make a function that times steps with speed · depth^power operations per second."""

    def measure(config: TrainConfig, data: object) -> float:
        depth = config.model.num_layers
        if depth not in timed[-1:]:  # again with fewer threads
            timed.append(depth)
        size = search.make_size(depth, 1e6)
        return size.step_tokens * size.operations / (speed * depth**power)

    return measure


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


ROWS_OF_32 = {"model": {"context_length": 256}, "row_tokens": 32}
BPE = {"text_tokens": 10**10, "vocab_size": 4096}
SMALL = {"text_tokens": 10**5, "vocab_size": 1024, "minutes": 2}
SETTINGS = ["depth", "context_length", "batch_size", "learning_rate"]
SETTINGS += ["weight_decay", "dropout", "steps"]
SIZES = [  # settings → values of SETTINGS, and tokens; steps are those where a run in minutes ends
    ({"steps": 10}, (2, 64, 3, 0.0031, 0.1, 0.0, 0, 1_920)),
    ({"steps": 30_000}, (10, 512, 2, 0.0071, 0.5, 0.4, 0, 30_720_000)),
    ({"steps": 1000, "split_tokens": 101}, (2, 100, 20, 0.0099, 0.1, 0.0, 0, 2_000_000)),
    ({"steps": 1000, "micro_batch_size": 6}, (2, 256, 6, 0.0087, 0.1, 0.0, 0, 1_536_000)),
    ({"steps": 1000, **ROWS_OF_32}, (2, 32, 64, 0.01, 0.1, 0.0, 0, 2_048_000)),
    ({"steps": 300, **BPE}, (2, 64, 24, 0.0087, 0.1, 0.0, 0, 460_800)),
    ({"minutes": 0.1, **BPE}, (2, 64, 8, 0.005, 0.1, 0.0, 10**9, 28_258)),
    ({"minutes": 1e8, **BPE}, (24, 2048, 33, 0.057, 0.1, 0.4, 4_519_249, 93_665_133_913)),
    ({"minutes": 100, "model": {"num_kv_heads": 3}}, (6, 256, 8, 0.01, 0.1, 0.05, 2827, 3_646_265)),
    ({"depth": 2, "speed": 1e8, **SMALL}, (2, 64, 6, 0.0043, 0.1, 0.0, 2057, 9_762)),
    ({"depth": 2, "speed": 1e12, **SMALL}, (2, 256, 2, 0.005, 0.5, 0.05, 7159, 3_665_147)),
    ({"speed": 1e12, **SMALL}, (5, 128, 3, 0.0043, 0.5, 0.25, 3818, 1_466_059)),
]


@pytest.mark.parametrize(("settings", "expected"), SIZES, ids=str)
def test_sizes(settings, expected, monkeypatch, capsys):
    monkeypatch.setattr(sizing, "time", SimpleNamespace(monotonic=lambda: 0.0))
    search = make_search(**{name: x for name, x in settings.items() if name != "speed"})
    sizes = search.choose(0.0, make_measure(search, settings.get("speed", 1e10), 0.4, []))
    tokens = re.findall(r"([\d,]+) tokens", capsys.readouterr().out)[0].replace(",", "")
    actual = [*(sizes.get(name, 0) for name in SETTINGS), int(tokens)]
    assert actual == pytest.approx([*expected], rel=1e-6)
    assert sizes["num_layers"] == sizes["num_heads"] == sizes["d_model"] / 64 == expected[0]


@pytest.mark.parametrize("power", [0.0, 0.4, 1.0])
def test_few_depths_are_timed_and_the_best_of_them_is_chosen(power):
    timed: list[int] = []
    search = make_search()
    measure = make_measure(search, 1e10, power, timed)
    size = search.for_time(time.monotonic() + 600, measure)
    speeds = {depth: 1e10 * depth**power for depth in search.depths}
    assert size.loss <= search.best_size(600.0, speeds).loss * 1.005
    assert {size.depth, size.depth + 1} <= set(timed)
    assert len(set(timed)) == len(timed) <= 5


# resolve().


def run_settings(config: TrainConfig, data, measure=lambda config: 0.01):
    """Return the settings of a run of the config; ``measure`` returns the seconds of a step."""
    measure_on = lambda run_config, data: measure(run_config)  # noqa: E731
    return resolve(config, data, SINGLE_PROCESS, time.monotonic(), 0, None, measure_on)[0]


@pytest.fixture(scope="module")
def data(numbers):
    return open_mixture([numbers])


def test_defaults_of_a_run_with_a_shape(data):
    config = run_settings(TrainConfig(model=ModelConfig(num_layers=2)), data)
    assert config.model == set_default_sizes(ModelConfig(vocab_size=data.tokenizer.vocab_size))
    assert (config.batch_size, config.micro_batch_size) == (16, 0)
    assert (config.steps, config.eval_every, config.save_every) == (1200, 500, 500)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay) == (0.014, 0.1)
    assert (optimizer.embedding_rate, optimizer.beta2) == (2.1, 0.99)
    assert (optimizer.warmup_steps, optimizer.window_warmup) == (10, 0)


def test_only_a_run_without_length_and_size_takes_two_minutes(data):
    config = run_settings(TrainConfig(), data)
    assert config.minutes == 2
    assert config == run_settings(TrainConfig(minutes=2), data)
    assert (config.eval_every, config.save_every) == (None, None)
    base = Checkpoint(Path("base"), RunState(ModelConfig(vocab_size=20)), {})
    first_start = {"init_from": base.path, "auto_resume": True, "steps": 3}
    for settings in ({"steps": 7}, {"depth": 2}, {"init_from": base.path}, first_start):
        config = TrainConfig(**settings)
        start = base if "init_from" in settings else None
        resolved, _ = resolve(config, data, SINGLE_PROCESS, 0.0, 0, start, lambda *_: 0.01)
        assert resolved.minutes is None and resolved.steps == (settings.get("steps") or 1200)


def test_set_sizes_stay(data, capsys):
    groups = {"model": ModelConfig(dropout=0.2), "optimizer": OptimizerConfig(weight_decay=0.3)}
    resolved = run_settings(TrainConfig(steps=3, batch_size=2, **groups), data)
    assert resolved.model.num_layers == resolved.model.num_heads == 2
    values = (resolved.batch_size, resolved.model.dropout, resolved.optimizer.weight_decay)
    assert values == (2, 0.2, 0.3)
    line = capsys.readouterr().out.splitlines()[0]
    assert "d_model 128" in line
    assert "batch_size" not in line


def test_adamw_has_the_rates_of_the_presets(data):
    """Those of transformer-2017, tutorial and gpt2-124m, which are 128, 384 and 768 wide."""
    for depth, rate in ((2, 3e-3), (6, 1e-3), (12, 6e-4)):
        config = TrainConfig(depth=depth, optimizer=OptimizerConfig(optimizer="adamw"))
        assert run_settings(config, data).optimizer.learning_rate == pytest.approx(rate)
