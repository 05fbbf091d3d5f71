"""The size chosen for a time, steps or a depth: what follows, what is given stays, what is resumed is the same."""

import dataclasses
import itertools
import time

import pytest
from helpers import exit_code_of, newest_checkpoint, numbers_text

import train
from engine.data.mixture import open_mixture
from engine.training.sizing import (
    DEPTHS,
    MOST_EXCESS,
    SHORTEST,
    TIMED_TOKENS,
    Size,
    contexts_for,
    size_for_seconds,
    size_for_steps,
)
from prepare import PrepareConfig, prepare

REST = (1_000_000, 65, 64, 256)  # tokens of the text, vocabulary, shortest and longest context


def seconds_a_token(depth: int) -> float:
    return 3e-6 * depth**3 + 5e-6 * depth


def test_more_time_makes_larger_models_up_to_the_largest():
    rest = (10**10, *REST[1:])  # a text that does not end
    depths = [size_for_seconds(DEPTHS, lambda s=s: s, rest, seconds_a_token)[0].depth for s in (6, 60, 600, 6000, 1e9)]
    assert depths == sorted(depths) and depths[0] == 2 and depths[-1] == DEPTHS[-1] and len(set(depths)) >= 4
    size, each = size_for_seconds(DEPTHS, lambda: 40.0, REST, seconds_a_token)
    assert size.tokens == pytest.approx(40 / each) and each == pytest.approx(seconds_a_token(size.depth))


@pytest.mark.parametrize("seconds_each", [seconds_a_token, lambda depth: 1e-5 * depth**1.5])
def test_the_size_is_the_one_that_learns_most_of_those_that_were_measured(seconds_each):
    asked = []

    def measure(depth: int) -> float:
        asked.append(depth)
        return seconds_each(depth)

    size, _ = size_for_seconds(DEPTHS, lambda: 120.0, REST, measure)
    losses = {depth: Size(depth, 120 / seconds_each(depth), *REST).loss for depth in DEPTHS}
    assert losses[size.depth] <= min(losses.values()) * 1.005
    assert {size.depth, size.depth + 1} <= {*asked} and len({*asked}) == len(asked) <= 4


def test_more_steps_make_larger_models_and_a_depth_is_taken():
    depths = [size_for_steps(DEPTHS, steps, REST).depth for steps in (10, 300, 3000, 100_000)]
    assert depths == sorted(depths) and len(set(depths)) >= 3
    assert size_for_steps([7], 10, REST).depth == 7


GIVEN = [(64, 256), (64, 256, 256), (128, 128), (8192, 8192), (64, 10**6, 3), (64, 256, None, 128)]


@pytest.mark.parametrize("given", GIVEN)
def test_the_tokens_are_those_of_so_many_steps_whatever_batch_or_context_is_given(given):
    for steps in (1, 30, 1000, 10_000, 100_000):
        size = size_for_steps(DEPTHS, steps, (1_000_000, 65, *given))
        settings = size.settings()
        assert size.tokens == steps * settings["batch_size"] * settings["context_length"]
    few, many = (size_for_steps(DEPTHS, 1000, (*REST, rows)) for rows in (None, 256))  # 3 and 65 epochs
    assert few.depth < many.depth and few.settings()["dropout"] == 0 < many.settings()["dropout"]


PYTHON, SHAKESPEARE = (2_807_314, 2048, 64, 1024), (1_003_854, 65, 64, 1024)


def test_the_expected_loss_is_about_what_was_measured():
    """Runs of docs/sizing.md: depth, millions of tokens, and nats per token."""
    runs = [(2, 5.4, 2.762), (3, 2.4, 2.956), (2, 16.5, 2.491), (3, 7.6, 2.445), (3, 24.3, 2.282), (4, 12.2, 2.307)]
    expected = [Size(depth, 1e6 * millions, *PYTHON).loss for depth, millions, _ in runs]
    assert expected == pytest.approx([measured for *_, measured in runs], rel=0.015)
    for i, better in enumerate((2, 3, 3)):  # of each two in the same time
        shallow, deep = expected[2 * i : 2 * i + 2]
        assert (shallow < deep) == (runs[2 * i][0] == better)
    runs = [(3, 2.5, 1.460), (3, 4.0, 1.430), (4, 4.4, 1.421), (4, 7.0, 1.392), (5, 6.2, 1.387), (4, 13.0, 1.396)]
    expected = [Size(depth, 1e6 * millions, *SHAKESPEARE).loss for depth, millions, _ in runs]
    assert expected == pytest.approx([measured for *_, measured in runs], rel=0.015)


def test_what_follows_from_a_size_divides_over_the_processes():
    for processes in (1, 3, 8):
        settings = Size(3, 2e6, *REST, None, processes).settings()
        assert settings["batch_size"] % processes == 0 and settings["d_model"] % settings["num_heads"] == 0
    large, small = (Size(3, tokens, 10**9, *REST[1:]).settings() for tokens in (1e9, 1e6))
    assert large["batch_size"] > small["batch_size"] and large["learning_rate"] > small["learning_rate"]
    again = Size(3, 4e6, *REST).settings()  # what comes again asks for no more
    assert again["batch_size"] * again["context_length"] == small["batch_size"] * small["context_length"]
    fewer = Size(3, 1e6, 100_000, *REST[1:]).settings()["batch_size"]
    assert fewer == pytest.approx(small["batch_size"] * 0.1**0.38, abs=0.5)


def test_a_text_that_comes_again_often_is_not_to_be_learned_by_heart():
    each = [Size(4, epochs * 1e6, *REST).settings() for epochs in (0.5, 6, 12, 1000)]
    assert [one["weight_decay"] for one in each] == [0.1, 0.12, 0.34, 0.5]
    assert [one["dropout"] for one in each] == [0, 0, 0.1, 0.4]
    small, large, once = (Size(*size, *REST).settings() for size in ((1, 12e6), (12, 6e6), (20, 1e6)))
    assert [one["weight_decay"] for one in (small, large, once)] == [0.1, 0.5, 0.1]
    assert [one["dropout"] for one in (small, large, once)] == [0, 0.35, 0]


def test_dropout_is_what_was_best_for_small_texts():
    """Runs of docs/sizing.md: depth, epochs, tokens of the text, and the best dropout of those that were tried."""
    runs = [(2, 15, 9e4, 0), (2, 17, 52e3, 0.05), (3, 14, 9e4, 0.1), (3, 12, 52e3, 0.1), (3, 12.5, 109e3, 0.1)]
    runs += [(4, 8, 9e4, 0.1), (4, 10, 52e3, 0.2), (4, 25, 109e3, 0.2)]
    for tokens in (7e6, 8.7e6):  # without, the first learns less, and the second overfits
        assert Size(4, tokens, *SHAKESPEARE).settings()["dropout"] == 0.05
    for depth, epochs, text, best in runs:
        assert Size(depth, epochs * text, int(text), 1024, 64, 256).settings()["dropout"] == pytest.approx(
            best, abs=0.055
        )


def test_the_batch_is_smaller_where_decay_can_do_no_more_but_not_below_half():
    each = [Size(4, epochs * 1e6, *REST).settings() for epochs in (12, 20, 30, 1000)]
    assert [one["batch_size"] for one in each] == [8, 7, 5, 4]
    assert [one["learning_rate"] for one in each] == [0.01, 0.0094, 0.0079, 0.0071]
    assert Size(4, 30e6, *REST, 8).settings()["batch_size"] == 8  # given


def test_a_given_context_batch_and_shared_keys_are_counted_with(numbers, tmp_path, capsys):
    data = open_mixture([numbers])
    flags = ["--data", str(numbers), "--device", "cpu", "--depth", "2", "--num-kv-heads", "1", "--tie-embeddings"]
    train.main([*flags, "--minutes", "0.001", "--plan"])
    rows = capsys.readouterr().out.splitlines()[1:]
    sizes, (first, *_, last) = {row.split()[2] for row in rows}, rows
    assert first.startswith("  0.001 ") and "ends sooner" not in first and last.endswith("  ends sooner")
    shape = {"num_layers": 2, "num_heads": 2, "d_model": 128, "num_kv_heads": 1, "tie_embeddings": True}
    model = train.GPT(train.ModelConfig(vocab_size=data.tokenizer.vocab_size, **shape))
    assert sizes == {f"{model.num_parameters:,}"}
    shared = small(numbers, tmp_path / "shared", minutes=0.05, model=train.ModelConfig(num_kv_heads=2))
    assert train.train(shared, stop=lambda: True).config.depth % 2 == 0
    small_rate, rate = (Size(2, 1e6, *REST[:2], 64, 64, rows).settings()["learning_rate"] for rows in (8, 32))
    assert rate == pytest.approx(2 * small_rate) and Size(2, 1e6, *REST[:2], 64, 64, 5, 4).settings()["batch_size"] == 5
    given = small(numbers, tmp_path / "run", steps=3, model=train.ModelConfig(context_length=32))
    chosen = size_for_steps(DEPTHS, 3, (len(data.train), data.tokenizer.vocab_size, 32, 32)).settings()
    assert train.train(given, stop=lambda: True).config.batch_size == chosen["batch_size"]


def test_batches_are_of_whole_micro_batches_and_no_more_is_timed_at_once(numbers, tmp_path, monkeypatch):
    rows, forward = [], train.GPT.forward
    monkeypatch.setattr(train.GPT, "forward", lambda self, x, y: rows.append(len(x)) or forward(self, x, y))
    for given in (None, 12):
        settings = small(numbers, tmp_path / f"{given}", minutes=0.1, micro_batch_size=4)
        settings = dataclasses.replace(settings, batch_size=given) if given else settings
        config = train.train(settings, stop=lambda: True).config
        assert config.batch_size % 4 == 0 and config.batch_size == (given or config.batch_size)
    assert set(rows) == {4} and len(rows) >= 3 * (1 + 4)


def test_a_run_that_saved_nothing_is_no_model_for_the_next(numbers, tmp_path, capsys):
    first = train.train(small(numbers, tmp_path / "run", steps=3), stop=lambda: True)
    second = train.train(small(numbers, tmp_path / "run", steps=3000, resume=True), stop=lambda: True)
    assert capsys.readouterr().out.count("chosen depth") == 2
    assert (first.config.depth, second.config.depth) == (2, 3)  # a fourth layer's weights are too many for the text


@pytest.mark.parametrize("flags", ["--minutes 9 --d-model 64", "--minutes 9 --init-from {run}"])
def test_a_plan_by_minutes_is_of_what_they_choose(numbers, tmp_path, flags, capsys):
    train.train(small(numbers, tmp_path / "base", steps=1))
    flags = flags.format(run=tmp_path / "base").split()
    assert exit_code_of(lambda: train.main(["--data", str(numbers), *flags, "--plan"])) == 1
    assert "--plan tells what --minutes would choose, but the size is given; give" in capsys.readouterr().err


def test_a_plan_that_needs_the_text_says_so(tmp_path, capsys):
    flags = ["--data", str(tmp_path / "none"), "--vocab-size", "65", "--plan"]
    assert train.main([*flags, "--num-layers", "1"]) == 0  # which does not
    assert exit_code_of(lambda: train.main([*flags, "--depth", "12"])) == 1
    assert f"{tmp_path / 'none'}" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--depth", "2", "--d-model", "64"), ("--depth", "2", "--init-from", "{run}")])
def test_a_depth_beside_other_sizes_is_refused(numbers, tmp_path, flags, capsys):
    train.train(small(numbers, tmp_path / "base", steps=1))
    flags = [flag.format(run=tmp_path / "base") for flag in flags]
    assert exit_code_of(lambda: train.main(["--data", str(numbers), "--out", str(tmp_path / "run"), *flags])) == 1
    assert "--depth 2 sets all sizes, but others are given too; leave out" in capsys.readouterr().err


def test_the_tokens_are_no_more_than_teach_something():
    rest = (100_000, 1024, 64, 256)
    for depth in (2, 4, 8):
        few, many = (size_for_seconds([depth], lambda s=s: s, rest, lambda depth: 1e-4)[0] for s in (50, 1e6))
        assert few.tokens == pytest.approx(50 / 1e-4, rel=0.4) and few.tokens < few.most_tokens
        assert many.tokens == many.most_tokens and many.excess == pytest.approx(MOST_EXCESS)


def test_a_run_on_time_ends_when_more_would_overfit_and_again_when_resumed(numbers, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("engine.training.sizing.MOST_EXCESS", 0.05)  # a few steps
    settings, asked = small(numbers, tmp_path / "run", minutes=0.5), itertools.count()
    stopped = train.train(settings, stop=lambda: next(asked) >= 3)
    assert stopped.step == 3 < stopped.config.steps and " epochs; more would overfit\n" in capsys.readouterr().out
    monkeypatch.undo()
    run = train.train(dataclasses.replace(settings, resume=True))
    assert run.config == dataclasses.replace(stopped.config, resume=True)
    assert run.step == run.saved == run.config.steps and run.budget.share == 1


def test_minutes_and_steps_are_not_both_given_where_sizes_are_chosen(numbers, tmp_path, capsys):
    flags = ["--data", str(numbers), "--out", str(tmp_path / "run"), "--minutes", "1", "--steps", "2"]
    for more in ([], ["--plan"]):
        assert exit_code_of(lambda more=more: train.main([*flags, *more])) == 1
        assert "--steps 2 and --minutes 1.0 both say how long; give one of them" in capsys.readouterr().err
    train.main([*flags, "--num-layers", "1", "--d-model", "24", "--num-heads", "2"])
    said = capsys.readouterr().out
    assert "run    2 steps of 16 × " in said and " epochs), within 1 minutes, muon" in said and "\n2 steps in " in said


def test_minutes_that_are_over_before_the_start_still_make_a_run(numbers, tmp_path):
    begun = time.monotonic() - 100
    assert train.train(small(numbers, tmp_path / "late", minutes=0.1), begun=begun).val_loss is not None


def test_a_small_text_has_a_small_context(tmp_path, numbers):
    (tmp_path / "short.txt").write_text(numbers_text(60), encoding="utf-8")
    prepare(PrepareConfig(inputs=(str(tmp_path / "short.txt"),), out=tmp_path / "short", tokenizer="char"))
    data = open_mixture([tmp_path / "short"])
    longest = len(data.datasets[0].val) - 1
    assert contexts_for(data) == (SHORTEST, longest) and longest < 256
    assert Size(2, 1e8, 1000, 65, *contexts_for(data)).context == longest


def test_contexts_grow_with_all_that_is_trained_on_and_characters_need_longer_ones():
    words = [Size(2, tokens, 10**10, 4096, SHORTEST, 10**6).context for tokens in (1, 2e6, 4e6, 9e6, 1e8, 1e10)]
    assert words == [64, 128, 256, 512, 1024, 2048]
    assert [Size(2, 1e8, text, 4096, SHORTEST, 10**6).context for text in (10**5, 10**6, 10**8)] == [256, 512, 1024]
    assert [Size(2, tokens, 10**7, 65, SHORTEST, 10**6).context for tokens in (1, 3e6, 1e8)] == [64, 256, 512]


def test_a_longer_contexts_time_is_counted():
    measured = Size(2, TIMED_TOKENS, 10**12, 4096, SHORTEST, 10**6).operations
    size, each = size_for_seconds([2], lambda: 1e6, (10**12, 4096, SHORTEST, 10**6), lambda depth: 1e-4)
    assert size.context > 1024 and each == pytest.approx(1e-4 * size.operations / measured) and each > 1.5e-4


def small(numbers, out, **values) -> train.TrainConfig:
    return train.TrainConfig(data=numbers, out=out, device="cpu", eval_tokens=500, **values)


def test_what_is_given_stays_and_the_rest_is_chosen_also_when_resumed(numbers, tmp_path, capsys):
    settings = small(numbers, tmp_path / "run", steps=3, batch_size=2)
    run = train.train(dataclasses.replace(settings, optimizer=dataclasses.replace(settings.optimizer, clip_norm=0.5)))
    config = run.config
    assert config.batch_size == 2 and config.optimizer.clip_norm == 0.5 and config.depth == 2
    assert (config.model.num_layers, config.model.num_heads, config.model.d_model) == (2, 2, 128)
    assert capsys.readouterr().out.startswith("chosen depth 2, num_layers 2, ")
    resumed = train.train(small(numbers, tmp_path / "run", steps=500, batch_size=2, resume=True), stop=lambda: True)
    assert (
        resumed.config.model == config.model
        and resumed.config.optimizer.learning_rate == config.optimizer.learning_rate
    )
    assert newest_checkpoint(tmp_path / "run").state["settings"]["depth"] == 2


def test_a_depth_alone_sets_the_sizes_and_who_gives_one_of_them_gives_all(numbers, tmp_path):
    shape = train.train(small(numbers, tmp_path / "a", depth=2), stop=lambda: True).config.model
    assert (shape.num_layers, shape.num_heads, shape.d_model) == (2, 2, 128)
    given = small(numbers, tmp_path / "b", steps=3, model=train.ModelConfig(num_layers=1))
    shape = train.train(given, stop=lambda: True).config.model
    assert (shape.num_layers, shape.num_heads, shape.d_model) == (1, 2, 128)
