"""Training: complete runs, exact resume, interruption, mistakes, presets, train() as a library."""

import contextlib
import dataclasses
import itertools
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ROOT,
    TINY,
    Action,
    SpoilHead,
    StopAfter,
    add_scales,
    assert_same_run,
    exit_code_of,
    logged,
    make_dataset,
    newest_checkpoint,
    numbers_text,
    read_files,
    same_checkpoint,
    tiny,
    train_tiny,
    write_lines,
)

import report
import sample
import train
from engine.core.cli import Interruption
from engine.core.distributed import SINGLE_PROCESS
from engine.core.errors import UserError
from engine.core.settings import flatten, load_settings
from engine.core.values import iterate_hints
from engine.data.dataset import open_dataset
from engine.report.callback import Report
from engine.report.page import read_run
from engine.runs.checkpoint import load_model
from engine.runs.run_files import find_checkpoint, list_checkpoints
from engine.training.callbacks import MetricsFile, Terminal
from engine.training.config import (
    BUILT_IN_DATA,
    CHANGEABLE_SETTINGS,
    COMMAND_DEFAULTS,
    TrainConfig,
    make_run_config,
)
from engine.training.resolve import SETTINGS_IGNORED_ON_RESUME
from engine.training.run_dir import RunDir
from engine.training.trainer import Callback, Trainer
from model import GPT, ModelConfig
from prepare import main as prepare_command

# Evaluations at 6, 12, …, 30 and saves at 8, 16, 24: both at 24.
RUN_FLAGS = ["--steps", "30", "--dropout", "0.3", "--eval-every", "6", "--save-every", "8"]


@pytest.fixture(scope="module")
def full_run(numbers, tmp_path_factory) -> Path:
    """A run with RUN_FLAGS that was not interrupted."""
    out = tmp_path_factory.mktemp("full") / "run"
    train_tiny(numbers, out, *RUN_FLAGS)
    return out


# A complete run.


def test_text_is_prepared_trained_on_and_sampled(plain_steps, run, tmp_path, monkeypatch):
    (tmp_path / "numbers.txt").write_text(numbers_text(3000), encoding="utf-8")
    assert run("prepare.py", "numbers.txt", "--vocab-size", 300).returncode == 0
    imports = {"env": os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}}  # on standard error
    flags = [flag for flag in TINY if flag not in ("--eval-tokens", "2000")]
    flags = ["--data", "data/numbers", "--out", "out/n", "--steps", 40, "--eval-every", 20, *flags]
    process = run("train.py", *flags, **imports)
    errors = [line for line in process.stderr.splitlines() if not line.startswith("import time:")]
    assert process.returncode == 0 and not errors, errors
    assert "python sample.py out/n" in process.stdout

    out = tmp_path / "out" / "n"
    files = ".lock about.json checkpoints config.toml metrics.jsonl report.html"
    names = {*files.split(), "attention.json", "attention.jsonl", "samples.jsonl"}
    assert {path.name for path in out.iterdir()} == names
    losses = logged(out, "train_loss")
    val_losses = logged(out, "val_loss")
    assert list(losses) == list(range(1, 41)) and list(val_losses) == [20, 40]
    assert val_losses[40] < losses[1] - 0.5
    assert logged(out, "val_perplexity")[40] == pytest.approx(math.exp(val_losses[40]))
    assert logged(out, "tokens")[40] == 40 * 4 * 16
    assert logged(out, "tokens_per_second")[40] > 0 and logged(out, "elapsed_seconds")[40] > 0

    sampling = run("sample.py", "out/n", "--max-new-tokens", 20, "--prompt", "7 is", **imports)
    assert sampling.returncode == 0 and sampling.stdout.startswith("7 is")
    assert len(sampling.stdout) > 20
    for stderr in (process.stderr, sampling.stderr):  # torch's compiler takes a second to import
        assert "| torch" in stderr.replace("  ", "") and "torch._dynamo" not in stderr

    monkeypatch.chdir(tmp_path)
    assert train.main(["out/n/config.toml", "--out", "out/again"]) == 0
    assert_same_run(out, tmp_path / "out" / "again")


def test_a_missing_built_in_corpus_is_prepared(tmp_path, monkeypatch):
    (tmp_path / "library").mkdir()
    shutil.copy(os.__file__, tmp_path / "library")  # all files take long
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "library"))
    monkeypatch.chdir(tmp_path)
    assert train.main(["--steps", "2", *TINY]) == 0
    assert open_dataset(tmp_path / "data" / "pydocs").manifest["origin"]["tokenizer"] == "bpe"
    assert newest_checkpoint(tmp_path / "out" / "pydocs").step == 2


def test_a_text_is_prepared_once_until_it_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    book = Path("book.txt")
    book.write_text(numbers_text(60))
    assert train.main(["book.txt", *TINY, "--steps", "2"]) == 0
    assert "$ python prepare.py book.txt\n" in capsys.readouterr().out
    files = read_files(Path("data"))
    assert train.main(["book.txt", "--resume", "--steps", "4"]) == 0
    assert newest_checkpoint(Path("out/book")).step == 4 and read_files(Path("data")) == files
    book.write_text(numbers_text(70))
    advice = r"other text.*--force.*: python prepare\.py book\.txt,.*--data data/book$"
    with pytest.raises(UserError, match=advice):
        train.train(TrainConfig(text="book.txt", resume=True, steps=6))
    prepare_command(["book.txt", "--force"])
    assert train.main(["book.txt", *TINY, "--steps", "2", "--out", "out/new"]) == 0


def test_weights_of_at_least_two_epochs_are_averaged_at_the_end(tmp_path):
    data = make_dataset(tmp_path, numbers_text(40))
    flags = ("--final-learning-rate", 1)  # constant: weights do not depend on the length of a run
    snapshots: list[dict[str, torch.Tensor]] = []

    class Snapshot(Callback):
        def on_step(self, trainer: Trainer) -> None:
            params = trainer.model.named_parameters()
            snapshots.append({name: param.detach().clone() for name, param in params})

    train_tiny(data, tmp_path / "longer", *flags, "--steps", 90, callbacks=[Snapshot()])
    size = len(open_dataset(data).train)
    num_weights = sum(param.numel() for name, param in snapshots[0].items() if "blocks" in name)
    step_epochs = 64 / size
    interval = max(1 / 8, step_epochs)
    expected: dict[str, torch.Tensor] = {}
    num_steps = 6 * size // 64 + 1
    for step, params in enumerate(snapshots[:num_steps], 1):
        epochs = step * step_epochs
        if epochs >= 2 and (epochs % interval < step_epochs or step == num_steps):
            overfitting = math.sqrt(epochs**3 * num_weights / size) / 22
            weight = interval / (interval + min(2 * overfitting, 3))
            pairs = {name: (expected.get(name, param), param) for name, param in params.items()}
            expected = {name: torch.lerp(*pair, weight) for name, pair in pairs.items()}
    short = 2 * size // 64
    for steps, last in ((num_steps, expected), (short, snapshots[short - 1])):
        trainer = train_tiny(data, tmp_path / str(steps), *flags, "--steps", steps)
        for name, param in trainer.model.named_parameters():
            torch.testing.assert_close(param.detach(), last[name], rtol=0, atol=1e-6)

    flags = (*flags, "--steps", num_steps)
    train_tiny(data, tmp_path / "run", *flags, should_stop=StopAfter(num_steps - 5))
    train_tiny(data, tmp_path / "run", *flags, "--resume")
    assert_same_run(tmp_path / "run", tmp_path / str(num_steps))


# Interruption and resume.


@pytest.mark.parametrize(
    ("number", "step", "when"),
    [
        (signal.SIGINT, 7, "on_step"),  # between saves
        (signal.SIGINT, 24, "val_loss"),  # at a save too
        (signal.SIGUSR2, 12, "on_step"),  # the evaluation gives way
    ],
)
def test_an_interrupted_run_resumes_bit_for_bit(trained, full_run, number, step, when):
    seeds: set[int] = set()
    callbacks = [Action(step, partial(signal.raise_signal, number), when)]
    callbacks += [Action(n, lambda: seeds.add(torch.initial_seed())) for n in (1, 2, 3)]
    with Interruption() as interruption:
        out = trained(
            "run", *RUN_FLAGS, callbacks=callbacks, should_stop=lambda: bool(interruption.signal)
        )
    assert interruption.signal == number and len(seeds) == 3  # of dropout, another at each step
    checkpoint = newest_checkpoint(out)
    assert checkpoint.step == step == max(logged(out, "train_loss"))
    evaluation = checkpoint.state.evaluation or {}
    assert evaluation.get("val_loss") == logged(out, "val_loss").get(step)
    assert (not evaluation) == (when == "on_step")
    assert_same_run(full_run, trained("run", *RUN_FLAGS, "--resume"))
    elapsed = list(logged(out, "elapsed_seconds").values())
    assert elapsed == sorted(elapsed)  # the resumed clock continues


def test_a_terminated_command_prints_the_command_to_resume_with(
    numbers, tmp_path, trained, monkeypatch, capsys
):
    flags = ["--steps", 20, "--dropout", 0.3]
    out = tmp_path / "it's a run"
    callbacks = [Action(8, partial(signal.raise_signal, signal.SIGTERM)), MetricsFile()]
    with monkeypatch.context() as context:
        context.setattr(train, "default_callbacks", lambda config: callbacks)
        arguments = tiny(numbers, out, *flags, "--auto-resume")
        assert exit_code_of(lambda: train.main(arguments)) == 128 + signal.SIGTERM
    output, errors = capsys.readouterr()
    assert newest_checkpoint(out).step == 8 and not errors
    python, script, *arguments = shlex.split(output.splitlines()[-1].split("Resume with: ")[1])
    assert (python, script) == ("python", sys.argv[0]) and arguments[-1] == "--resume"
    assert "--auto-resume" not in arguments
    assert train.main(arguments) == 0
    assert_same_run(trained("full", *flags), out)


def test_without_a_path_the_newest_run_is_sampled_and_resumed(
    numbers, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert exit_code_of(lambda: train.main(["--resume"])) == 1
    assert exit_code_of(lambda: sample.main([])) == 1
    assert capsys.readouterr().err.count("error: out: contains no run. ") == 2
    for name in ("older", "a/new"):
        train_tiny(numbers, Path("out", name), "--steps", 2)
    imported = Path("out/import/checkpoints/step-00000000")
    shutil.copytree("out/older/checkpoints/step-00000002", imported, copy_function=shutil.copy)
    sample.main(["--max-new-tokens", "1"])
    assert train.main(["--resume", "--steps", "3"]) == 0
    assert newest_checkpoint(Path("out/a/new")).step == 3
    assert re.findall("run in out/: (.*)", capsys.readouterr().err) == ["out/import", "out/a/new"]


def test_a_resume_takes_unset_settings_from_the_run_and_of_a_finished_one_changes_no_result(
    numbers, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    flags = [*TINY, "--steps", "3", "--seed", "7", "--dropout", "0.1", "--dtype", "bfloat16"]
    assert train.main(["--data", str(numbers), *flags]) == 0  # --out follows --data
    out = Path("out") / numbers.name
    before = (out / "config.toml").read_text()
    files = read_files(out)
    capsys.readouterr()
    assert train.main(["--resume", "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert "raise --steps" in output and f"{logged(out, 'val_loss')[3]:.4f}" in output
    changed = {path.name for path, data in read_files(out).items() if files.get(path) != data}
    assert changed <= {"about.json", "report.html"} and newest_checkpoint(out).step == 3
    (tmp_path / "more.toml").write_text("steps = 9\nlog_every = 2\n")
    out.rename("moved")
    assert train.main(["more.toml", "--resume", "--out", "moved", "--log-every", "1"]) == 0
    changed = {"out": Path("moved"), "steps": 9}
    config = load_settings(TrainConfig, ["moved/config.toml"])
    Path("before.toml").write_text(before)
    expected = load_settings(TrainConfig, ["before.toml"])
    assert config == dataclasses.replace(expected, **changed)
    assert newest_checkpoint(Path("moved")).step == 9
    assert newest_checkpoint(Path("moved")).state.changes == [{"step": 3, "steps": [3, 9]}]


def test_a_run_whose_loss_is_not_finite_ends_in_one_line_after_its_last_checkpoint(
    numbers, tmp_path
):
    flags = ("--steps", 9, "--eval-every", 3)
    with pytest.raises(UserError, match=r"--learning-rate: [^\n]* step 3\b[^\n]*$"):
        train_tiny(numbers, tmp_path, *flags, callbacks=[MetricsFile(), SpoilHead(4, math.nan)])
    assert list(logged(tmp_path, "val_loss")) == [3, 6]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003"]


# What training computes.


def test_settings_that_change_no_result(trained, full_run):
    flags = "--eval-every 30 --log-every 30 --save-every 9 --checkpoint-activations"
    run = trained("run", *RUN_FLAGS, *flags.split())
    assert same_checkpoint(newest_checkpoint(run), newest_checkpoint(full_run))


@pytest.mark.parametrize(
    ("flags", "windows"),
    [
        ("", [0] * 10),  # characters
        ("--vocab-size 600 --windows 40", [16] * 2 + [40] * 8),
    ],
)
def test_the_first_block_has_a_short_window_early_in_a_run_and_in_no_evaluation(
    numbers, tmp_path, flags, windows
):
    windows_by_mode = {True: [], False: []}

    class Watcher(Callback):
        def on_train_start(self, trainer: Trainer) -> None:
            trainer.model.blocks[0].attention.register_forward_pre_hook(
                lambda layer, _: windows_by_mode[layer.training].append(layer.heads[0].window)
            )

    flags = ["--steps", 10, "--eval-every", 5, "--eval-tokens", 50, *flags.split()]
    train_tiny(numbers, tmp_path / "run", *flags, callbacks=[Watcher()])
    assert windows_by_mode[True] == windows and set(windows_by_mode[False]) == {windows[-1]}
    tuned = train_tiny(numbers, tmp_path / "tuned", "--steps", 1, "--init-from", tmp_path / "run")
    assert tuned.config.optimizer.window_warmup == 0


def test_float16_scales_its_loss_and_learns_also_after_a_resume_with_another_dtype(trained):
    def loss_scale(run: Path) -> float:
        return dict(newest_checkpoint(run).optimizer())["loss_scaler.loss_scale"].item()

    flags = ["--steps", 20, "--dtype"]
    half = trained("half", *flags, "float16", should_stop=StopAfter(10))
    assert loss_scale(half) == 2**16 * 0.5 ** logged(half, "skipped_steps")[10]
    exact = trained("exact", *flags, "float32", should_stop=StopAfter(10))
    assert loss_scale(trained("half", *flags, "float32", "--resume")) == 1
    assert loss_scale(trained("exact", *flags, "float16", "--resume")) <= 2**16
    losses = [logged(run, "train_loss") for run in (half, exact)]
    for step in (10, 20):
        assert losses[0][step] == pytest.approx(losses[1][step], abs=0.05)


def test_evaluation_is_the_mean_over_every_token_of_the_split(trained, numbers):
    path = trained("run", "--steps", 2, "--eval-tokens", 0, "--dropout", 0.3)
    model = load_model(newest_checkpoint(path))
    tokens = torch.from_numpy(open_dataset(numbers).val.tokens[:].astype(int))
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 16):
            first = min(start, len(tokens) - 17)  # the last window overlaps the one before
            targets = tokens[first + 1 : first + 17].clone()
            targets[: start - first] = -1
            total += model(tokens[None, first : first + 16], targets[None]).item()
    val_loss = logged(path, "val_loss")[2]
    assert val_loss == pytest.approx(total / (len(tokens) - 1), abs=1e-5)
    bits = logged(path, "val_bits_per_byte")[2]  # a character is a byte here
    assert bits == pytest.approx(val_loss / math.log(2), rel=1e-5)


# A base model.


SHORT_FLAGS = ["--steps", 2, "--eval-every", 2, "--log-every", 2]


@pytest.fixture(scope="module")
def base(numbers, tmp_path_factory) -> Path:
    """A run with SHORT_FLAGS, to start others from, or to resume with other settings."""
    out = tmp_path_factory.mktemp("base") / "run"
    train_tiny(numbers, out, *SHORT_FLAGS)
    return out


def test_a_run_starts_with_the_weights_and_sizes_of_its_base(numbers, tmp_path, base):
    flags = ["--init-from", base, "--steps", 1, "--learning-rate", 0]
    run = train_tiny(numbers, tmp_path / "tuned", *flags)
    assert run.evaluation["val_loss"] == pytest.approx(logged(base, "val_loss")[2], abs=1e-6)
    base_config = load_settings(TrainConfig, [str(base / "config.toml")])
    assert flatten(run.config.model) == flatten(base_config.model)
    with pytest.raises(UserError, match=r"--num-layers: .*run, \d \(got 5\)"):
        train_tiny(numbers, tmp_path / "refused", *flags, "--num-layers", 5)
    assert not (tmp_path / "refused").exists()


def test_a_dataset_with_another_tokenizer_is_refused_with_the_way_to_prepare_it(tmp_path, base):
    data = make_dataset(tmp_path, numbers_text(300))
    with pytest.raises(UserError, match="--tokenizer") as caught:
        train_tiny(data, tmp_path / "tuned", "--init-from", base)
    tokenizer = str(caught.value).split("--tokenizer ")[1]
    make_dataset(tmp_path, numbers_text(300), tokenizer=tokenizer, force=True)
    train_tiny(data, tmp_path / "tuned", "--init-from", base, "--steps", 1)


@pytest.mark.parametrize("form", ["pairs", "chats"])
def test_examples_for_a_base_lead_to_fine_tuning_and_then_to_a_question(
    tmp_path, base, monkeypatch, capsys, form
):
    monkeypatch.chdir(ROOT)
    flags = ["--prompt-field", "q", "--completion-field", "a"]
    records = [{"q": f"{number} is\n", "a": "followed"} for number in range(30)]
    if form == "chats":
        flags = ["--chat"]
        answer = {"role": "assistant", "content": "by"}
        questions = [{"role": "user", "content": record["q"]} for record in records]
        records = [{"messages": [question, answer]} for question in questions]
    tokenizer = base if form == "pairs" else list_checkpoints(base)[-1]
    flags += ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "data")]
    prepare_command([str(write_lines(tmp_path / "x.jsonl", records)), *flags])
    _, script, *arguments = shlex.split(capsys.readouterr().out.splitlines()[-1].split(": ")[1])
    assert script == "train.py" and "--init-from" in arguments
    arguments[arguments.index("--out") + 1] = str(tmp_path / "run")
    assert train.main([*arguments, "--steps", "1", "--device", "cpu"]) == 0
    command = capsys.readouterr().out.rpartition(": python ")[2].rstrip()
    words = subprocess.check_output(["bash", "-c", rf"printf '%s\0' {command}"]).decode()
    script, out, *flags = words.split("\0")[:-1]
    assert (script, out) == ("sample.py", str(tmp_path / "run"))
    assert flags == ["--chat"] or re.fullmatch(r"--prompt=\d+ is\n", " ".join(flags))


@pytest.mark.parametrize("padding", [0, 9])
def test_the_embedding_of_a_base_grows_by_the_tokens_of_chats(padding, tmp_path, numbers, base):
    num_trained = open_dataset(numbers).tokenizer.vocab_size
    if padding:
        base = tmp_path / "base"
        train_tiny(numbers, base, "--steps", 2, "--vocab-size", num_trained + padding)
    chats = []
    for n in range(90):
        question, answer = ({"role": r, "content": f"{n}"} for r in ("user", "assistant"))
        chats.append({"messages": [question, answer]})
    data = make_dataset(tmp_path, chats, tokenizer=str(base), chat=True)
    flags = ["--init-from", base, "--learning-rate", 0, "--steps", 1]
    run = train_tiny(data, tmp_path / "run", *flags)
    before, after = (dict(newest_checkpoint(out).model()) for out in (base, tmp_path / "run"))
    assert run.data.tokenizer.vocab_size == num_trained + 4
    for name in ("token_embedding.weight", "head.weight"):
        trained = before[name][:num_trained]
        assert len(after[name]) == num_trained + max(4, padding)
        assert torch.equal(after[name][:num_trained], trained)
        new = after[name][num_trained : num_trained + 4]
        torch.testing.assert_close(new, trained.mean(dim=0, keepdim=True).expand(4, -1))
        assert torch.equal(after[name][num_trained + 4 :], before[name][num_trained + 4 :])
    assert all(torch.equal(after[name], before[name]) for name in before if "blocks" in name)


@pytest.mark.parametrize("context_length", [8, 40])
def test_a_run_from_a_base_resumes_bit_for_bit(trained, base, context_length):
    flags = ["--init-from", base, "--steps", 8, "--eval-every", 4]
    flags += ["--context-length", context_length, "--auto-resume"]
    parts = trained("parts", *flags, should_stop=StopAfter(3))
    assert_same_run(trained("full", *flags), trained("parts", *flags))
    checkpoint = newest_checkpoint(parts)
    assert checkpoint.state.model.context_length == max(16, context_length)
    config = load_settings(TrainConfig, [str(parts / "config.toml")])
    assert config.model.context_length == context_length


def test_learned_positions_stay_in_a_run_with_shorter_rows(numbers, tmp_path):
    flags = ["--position", "learned", "--steps", 2]
    base = train_tiny(numbers, tmp_path / "base", *flags)
    flags = ["--init-from", tmp_path / "base", "--steps", 2, "--weight-decay", 0]
    tuned = train_tiny(numbers, tmp_path / "tuned", *flags, "--context-length", 5)
    positions, before = (run.model.position_embedding.weight for run in (tuned, base))
    assert tuned.batches.get(2)[0].shape == (4, 5) and len(positions) == 16
    assert torch.equal(positions[5:], before[5:]) and not torch.equal(positions[:5], before[:5])
    with pytest.raises(UserError, match=r"^--context-length: .*learned 16"):
        train_tiny(numbers, tmp_path / "longer", *flags, "--context-length", 17)


# Several datasets.


def test_a_mix_is_learned_and_each_dataset_has_its_losses_and_a_resume_keeps_it(
    tmp_path, code, capsys
):
    texts = {"numbers": numbers_text(1500), "source-code": code[:60_000]}
    datasets = [make_dataset(tmp_path, text, out=tmp_path / name) for name, text in texts.items()]
    out = tmp_path / "run"
    flags = [*tiny(datasets[0], out, "--steps", 40, "--eval-every", 20), "--data"]
    assert train.main([*flags, *map(str, datasets), "--mix", "7", "3"]) == 0
    output = capsys.readouterr().out
    for path in datasets:
        loss = logged(out, f"val_loss/{path.name}")
        assert loss[40] < loss[20] < math.log(256)
        assert f"{path.name} {loss[40]:.4f}" in output
    assert f"70% {datasets[0]}" in output
    first, second = map(str, datasets)
    for mix, refused in (
        ([first, second, "--mix", "7", "4"], "mix"),
        ([second, first, "--mix", "7", "3"], "--data"),
        ([first], "--mix"),
    ):
        assert exit_code_of(lambda mix=mix: train.main([*flags, *mix, "--resume"])) in (1, 2)
        assert refused in capsys.readouterr().err


# What a resumed run may change.

CHANGEABLE_FLAGS = """
    --steps 4 --micro-batch-size 2 --eval-every 1 --eval-tokens 100 --save-every 1 --log-every 1
    --device cpu:0 --dtype bfloat16 --no-compile --checkpoint-activations --parallel fsdp
    --timeout 60 --no-capture --verify-data --deterministic --keep-checkpoints 5 --wandb
    --learning-rate 0.5 --weight-decay 0 --beta1 0.5 --beta2 0.5 --momentum 0.5 --clip-norm 0
    --warmup-steps 1 --embedding-rate 2 --decay cosine --final-learning-rate 0.5
    --window-warmup 0.5 --score exact_match --score-examples 3 --best-by score
"""
FIXED_FLAGS = """
    --batch-size 8 --seed 2 --vocab-size 64 --context-length 32 --num-layers 1
    --num-heads 4 --num-kv-heads 1 --head-dim 4 --d-model 32 --d-ff 48 --dropout 0.5 --bias
    --position learned --rope-base 500 --norm layernorm --norm-epsilon 1e-3 --norm-placement post
    --activation gelu --no-qk-norm --tie-embeddings --scale-embeddings --logit-softcap 15
    --windows 4 --qkv-bias --rope-scaling 2 --optimizer adamw --attention loop
    --lora-rank 2 --train-tokens --init-from elsewhere --document-mask
"""


RUN_SETTINGS = dict(iterate_hints(TrainConfig)).keys() - COMMAND_DEFAULTS.keys()
FIXED_SETTINGS = RUN_SETTINGS - CHANGEABLE_SETTINGS
CHANGED_ELSEWHERE = {"minutes", "compile", "base"}


def changed_names(config: TrainConfig, run: Path) -> set[str]:
    """Return the names of the settings that are set, and differ from those of a run."""
    settings = flatten(load_settings(TrainConfig, [str(run / "config.toml")]))
    values = {name: value for name, value in flatten(config).items() if value is not None}
    return {name for name, value in values.items() if settings[name] != value}


def test_a_resumed_run_may_change_paths_speed_length_and_reports(base, numbers, tmp_path, capsys):
    out = Path(shutil.copytree(base, tmp_path / "moved"))
    data = Path(shutil.copytree(numbers, tmp_path / "data"))
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "1 2 3 4", "answer": "5"}')
    # A checkpoint to resume wins over --init-from.
    paths = ["--resume", "--init-from", base, "--score-file", questions]
    arguments = tiny(data, out, *SHORT_FLAGS, *CHANGEABLE_FLAGS.split(), *paths)
    config = load_settings(TrainConfig, arguments)
    assert changed_names(config, base) - {"resume"} == CHANGEABLE_SETTINGS - CHANGED_ELSEWHERE
    assert train.train(config, callbacks=()).step == newest_checkpoint(out).step == 4
    (changes,) = newest_checkpoint(out).state.changes
    assert changes.pop("step") == 2 and changes["learning_rate"] == [0.014, 0.5]
    assert changes.keys() == CHANGEABLE_SETTINGS - SETTINGS_IGNORED_ON_RESUME - CHANGED_ELSEWHERE
    assert "learning_rate 0.014 → 0.5" in capsys.readouterr().out


def test_a_resumed_run_may_change_nothing_else_and_each_change_is_named(base, numbers):
    names = FIXED_SETTINGS - {"mix", "frozen_dtype", "model_context"}  # tests/data/test_mixture.py
    settings = (base / "config.toml").read_bytes()
    arguments = tiny(numbers, base, *SHORT_FLAGS, *FIXED_FLAGS.split(), "--resume")
    config = load_settings(TrainConfig, arguments)
    assert names <= changed_names(config, base)
    with pytest.raises(UserError, match="--resume") as caught:
        train.train(config)
    assert [name for name in names if f" {name} " not in str(caught.value)] == []
    assert (base / "config.toml").read_bytes() == settings


@pytest.mark.parametrize(("flags", "best_step"), [(["--seed", 1], 2), (["--eval-tokens", 100], 4)])
def test_an_evaluation_on_other_tokens_or_questions_is_not_compared_with_those_before(
    numbers, tmp_path, capsys, flags, best_step
):
    train_tiny(numbers, tmp_path / "run", *SHORT_FLAGS)
    flags += ["--steps", 4, "--resume"]
    callbacks = [Terminal(), SpoilHead(3, -1)]
    run = train_tiny(numbers, tmp_path / "run", *SHORT_FLAGS, *flags, callbacks=callbacks)
    out = run.config.out
    steps = {run.best_evaluation["step"], find_checkpoint(out).step, read_run(out)["best_step"]}
    assert steps == {best_step}
    assert ("other tokens or questions" in capsys.readouterr().out) == (best_step == 4)


# Documents.


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    """A dataset of many short documents."""
    folder = tmp_path_factory.mktemp("documents")
    return make_dataset(folder, [{"text": f"{n}: {'so ' * (n % 9)}"} for n in range(400)])


def test_with_a_document_mask_a_row_has_the_loss_of_its_documents_alone(documents, tmp_path):
    flags = ["--document-mask", "--context-length", 96, "--num-kv-heads", 1, "--windows", 9, 0]
    run = train_tiny(documents, tmp_path, "--steps", 3, *flags)
    torch.manual_seed(1)
    for parameter in run.model.parameters():
        parameter.data.normal_(0, 0.3)
    inputs, targets = run.batches.get(3)
    start_id = open_dataset(documents).tokenizer.end_of_text_id
    expected = torch.zeros(())
    for row, row_targets in zip(inputs, targets, strict=True):
        starts = [0, *(row[1:] == start_id).nonzero().flatten().add(1).tolist()]
        for start, end in itertools.pairwise([*starts, len(row)]):
            logits = run.model(row[None, start:end])[0]
            expected += F.cross_entropy(logits, row_targets[start:end], reduction="sum")
    compiled = torch.compile(run.model, backend="aot_eager")
    for model in (run.model, compiled):
        loss = run.passes.compute_loss(model, inputs, targets)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    run.model.eval()
    torch.testing.assert_close(
        run.passes.compute_loss(run.model, inputs, targets), loss, rtol=1e-5, atol=0
    )
    assert run.model(inputs, targets).item() != pytest.approx(loss.item(), rel=1e-3)


# Presets.


def test_a_preset_has_its_documented_size_and_says_how_to_prepare_its_data():
    sizes = {"shakespeare-char": 10.7e6, "shakespeare-char-cpu": 0.78e6}
    sizes |= {"gpt2-124m": 124e6, "124m": 162e6}
    for path in sorted((ROOT / "config").glob("*.toml")):
        base = ["--init-from", "base"] if path.stem == "lora" else []
        typed = load_settings(TrainConfig, [str(path), *base])
        config = make_run_config(typed, {"vocab_size": 65}, SINGLE_PROCESS)
        with torch.device("meta"):
            size = GPT(config.model).num_parameters
        assert size == pytest.approx(sizes.pop(path.stem, size), rel=0.01)
        if typed.data != (BUILT_IN_DATA,):
            assert f" --out {typed.data[0]}\n" in path.read_text()
    assert not sizes


def test_a_size_that_is_set_leaves_a_line_and_another_definition_a_warning(
    numbers, tmp_path, monkeypatch, capsys
):
    paths = ["--data", str(numbers), "--out", str(tmp_path), "--device", "cpu"]
    flags = "--num-layers 1 --context-length 16 --attention loop --steps 1 --eval-tokens 100"
    assert train.main([*paths, *flags.split()]) == 0
    assert "are set: num_heads 2, d_model 128, batch_size 16\n" in capsys.readouterr().out
    load_model(newest_checkpoint(tmp_path))
    assert not capsys.readouterr().err
    monkeypatch.setattr("engine.runs.checkpoint.hash_definition", lambda: "another")
    load_model(newest_checkpoint(tmp_path))
    assert "definition" in capsys.readouterr().err


# As a library.


def test_train_returns_the_trainer_and_prints_nothing(numbers, tmp_path, capfd):
    out = tmp_path / "run"
    model = ModelConfig(num_layers=1, num_heads=2, d_model=16, context_length=16)
    config = TrainConfig(data=numbers, out=out, steps=3, batch_size=4, device="cpu", model=model)
    assert train.train(config, callbacks=(), should_stop=lambda: True).step == 0
    assert not list_checkpoints(out)
    trainer = train.train(config, callbacks=())
    assert isinstance(trainer, Trainer) and trainer.step == trainer.last_save[0] == 3
    assert 0 < trainer.evaluation["val_loss"] == trainer.best_evaluation["val_loss"]
    assert capfd.readouterr() == ("", "")
    assert {path.name for path in out.iterdir()} == {".lock", "config.toml", "checkpoints"}
    weights = dict(newest_checkpoint(out).model())
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, weights[name])
    RunDir(out, resume=True).close()  # it is unlocked


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_an_error_of_a_callback_is_a_warning_and_an_exit_waits_for_the_save(
    error, numbers, tmp_path, capsys
):
    fail = Mock(side_effect=error("the callback\nfailed"))
    out = tmp_path / "run"
    callbacks = [*(Action(step, fail) for step in (4, 5)), MetricsFile()]
    flags = ["--steps", 6, "--save-every", 3, "--log-every", 10]
    config = load_settings(TrainConfig, tiny(numbers, out, *flags))
    with pytest.raises(SystemExit) if error is SystemExit else contextlib.nullcontext():
        train.train(config, callbacks=callbacks)
    (warning,) = capsys.readouterr().err.splitlines() or [""]
    assert ("RuntimeError" in warning) == (error is RuntimeError)
    assert newest_checkpoint(out).step == (6 if error is RuntimeError else 3)
    assert (out / "metrics.jsonl").exists() == (error is RuntimeError)  # of a later callback
    RunDir(out, resume=True).close()  # it is unlocked


# What happens to the data and the terminal during a run.


def test_a_dataset_that_changes_during_a_run_has_no_effect_before_the_resume(numbers, tmp_path):
    runs = {}
    for name in ("replaced", "removed"):
        data = Path(shutil.copytree(numbers, tmp_path / f"data-{name}"))
        settings = {"tokenizer": "char", "out": data, "force": True}
        replace = partial(make_dataset, tmp_path, numbers_text(50), **settings)
        act = replace if name == "replaced" else partial(shutil.rmtree, data)
        runs[name] = tmp_path / name
        options = {"callbacks": [Action(2, act)], "should_stop": StopAfter(4)}
        train_tiny(data, runs[name], "--steps", 9, **options)
        problem = r"--data \(docs/data\.md: My text has grown\)"
        with pytest.raises(UserError, match=problem if name == "replaced" else str(data)):
            train_tiny(data, runs[name], "--steps", 9, "--resume")
    assert "\n## My text has grown\n" in (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert same_checkpoint(*map(newest_checkpoint, runs.values()))
    assert train_tiny(numbers, runs["removed"], "--steps", 9, "--resume").step == 9


def test_a_plan_has_the_tokens_and_epochs_of_the_run(full_run, numbers, tmp_path, capsys):
    assert train.main(tiny(numbers, tmp_path / "run", *RUN_FLAGS, "--plan")) == 0
    assert not (tmp_path / "run").exists()
    tokens = logged(full_run, "tokens")[30]
    epochs = tokens / len(open_dataset(numbers).train)
    planned = f"= {tokens:,} tokens ({epochs:.1f} epochs)"
    assert planned in capsys.readouterr().out


def test_a_modified_model_is_sampled_reported_resumed_and_trained_further(numbers, tmp_path):
    run = tmp_path / "run"
    flags = ["--learning-rate", 0.05, "--steps", 8]
    trainer = train_tiny(numbers, run, *flags, callbacks=[Report()], modify_model=add_scales)
    ids = torch.arange(16)[None]
    generator = sample.load(run, "cpu", "float32", modify_model=add_scales)
    torch.testing.assert_close(generator.model(ids), trainer.model.eval()(ids))
    described = report.read_fully(run, add_scales)
    assert described["attention"] and described["samples"] and not described["notes"]
    assert "modify_model" in report.read_fully(run)["notes"][0]
    further = ["--init-from", run, "--steps", 1, "--learning-rate", 0]
    start = train_tiny(numbers, tmp_path / "further", *further, modify_model=add_scales)
    assert start.evaluation["val_loss"] == trainer.evaluation["val_loss"]
    for use in (
        lambda: sample.load(run),
        lambda: train_tiny(numbers, run, *flags, "--resume"),
        lambda: train_tiny(numbers, tmp_path / "plain", *further),
    ):
        with pytest.raises(UserError, match=r"run.*modify_model"):
            use()
    train_stopped = partial(train_tiny, numbers, tmp_path / "stopped", *flags)
    train_stopped(should_stop=StopAfter(5), modify_model=add_scales)
    train_stopped("--resume", modify_model=add_scales)
    assert same_checkpoint(newest_checkpoint(tmp_path / "stopped"), newest_checkpoint(run))


def test_an_evaluation_gives_way_between_its_batches(numbers, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.data.split.EVALUATION_BATCH_TOKENS", 100)
    batches: list[int] = []
    callbacks = [Action(2, lambda: batches.append(1), "evaluation")]
    run = train_tiny(
        numbers, tmp_path, "--steps", 2, callbacks=callbacks, should_stop=lambda: len(batches) > 3
    )
    assert len(batches) == 4 and run.evaluation is None and run.model.training
    assert train_tiny(numbers, tmp_path, "--steps", 2, "--resume").evaluation["val_loss"] > 0


def test_accumulated_micro_batches_are_the_whole_batch(trained):
    whole_batch = trained("whole-batch", "--steps", 10)
    for size in (1, 2):
        run = trained(f"micro-{size}", "--steps", 10, "--micro-batch-size", size)
        for key, tolerance in (("train_loss", {"abs": 1e-5}), ("grad_norm", {"rel": 1e-3})):
            assert logged(run, key) == pytest.approx(logged(whole_batch, key), **tolerance)
