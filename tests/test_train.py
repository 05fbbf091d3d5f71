"""Training: exact resume, interruption, mistakes, presets, and train() as a library."""

import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    ROOT,
    TINY,
    assert_same_run,
    logged,
    newest_checkpoint,
    numbers_text,
    same_checkpoint,
    seal,
    tiny,
    train_tiny,
)
from soak import run_ranks

import sample
import train
from engine.core.cli import Interruption
from engine.core.errors import UserError
from engine.core.settings import flatten, load_settings
from engine.data.dataset import open_dataset
from engine.training.callbacks import MetricsFile
from engine.training.config import ChangeableConfig, TrainConfig, with_sizes
from engine.training.optimizer import Optimizer, OptimizerConfig
from engine.training.resolve import SETTINGS_IGNORED_ON_RESUME
from engine.training.run_dir import RunDir, list_checkpoints
from engine.training.trainer import Callback, Trainer
from model import GPT, ModelConfig
from prepare import PrepareConfig, prepare


class Signalling(Callback):
    """Sends this very process a signal when a step's record, with that key, is made."""

    def __init__(self, step: int, number: int, key: str = "train_loss"):
        self.step, self.number, self.key = step, number, key

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if trainer.step == self.step and self.key in record:
            os.kill(os.getpid(), self.number)


def interrupted(numbers: Path, out: Path, observer: Signalling, *flags: object) -> Trainer:
    """A run that an observer's signal stops, as it does one of train.main."""
    with Interruption() as interruption:
        run = train_tiny(
            numbers,
            out,
            *flags,
            callbacks=[observer],
            should_stop=lambda: bool(interruption.signal),
        )
    assert interruption.signal == observer.number
    return run


class stopped_after(Callback):
    """Says to stop after so many steps of a run, which it watches."""

    def __init__(self, steps: int):
        self.steps, self.step = steps, 0

    def on_step(self, trainer: Trainer) -> None:
        self.step = trainer.step

    def __call__(self) -> bool:
        return self.step >= self.steps


def wait_until(condition: Callable[[], Any], process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.01)


# The road.


def test_the_whole_road(run, tmp_path, monkeypatch):
    (tmp_path / "numbers.txt").write_text(numbers_text(3000), encoding="utf-8")
    assert run("prepare.py", "numbers.txt", "--vocab-size", 300).returncode == 0
    flags = [flag for flag in TINY if flag not in ("--eval-tokens", "2000")]
    named = {"env": os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}}  # each import, on standard error
    flags = ["--data", "data/numbers", "--out", "out/n", "--steps", 60, "--eval-every", 30, *flags]
    done = run("train.py", *flags, **named)
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 0 and not said, said
    assert all(
        text in done.stdout
        for text in ("Validation loss", "bits per byte", "python sample.py out/n")
    )
    out = tmp_path / "out" / "n"
    files = {".lock", "config.toml", "metrics.jsonl", "loss.png", "checkpoints"}
    files |= {"about.json", "samples.jsonl", "report.html"}
    assert {path.name for path in out.iterdir()} == files
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    losses, validation = logged(out, "train_loss"), logged(out, "val_loss")
    assert list(losses) == list(range(1, 61)) and list(validation) == [30, 60]
    assert validation[60] < losses[1] - 0.5
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-2])
    assert (
        last["tokens"] == 60 * 4 * 16
        and last["tokens_per_second"] > 0
        and last["elapsed_seconds"] > 0
    )
    assert logged(out, "val_perplexity")[60] == pytest.approx(math.exp(validation[60]))
    sampled = run("sample.py", "out/n", "--max-new-tokens", 20, "--prompt", "7 is", **named)
    for errors in (done.stderr, sampled.stderr):
        assert (
            "| torch" in errors.replace("  ", "") and "torch._dynamo" not in errors
        )  # the compiler: a second
    assert (
        sampled.returncode == 0 and sampled.stdout.startswith("7 is") and len(sampled.stdout) > 20
    )
    monkeypatch.chdir(tmp_path)
    assert (
        train.main(["out/n/config.toml", "--out", "out/again"]) == 0
    )  # the resolved settings make the same run
    assert_same_run(out, tmp_path / "out" / "again")


def test_the_built_in_corpus_is_prepared_when_it_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "library").mkdir()
    for path in sorted(Path(os.__file__).parent.glob("*.py"))[:20]:
        shutil.copy(path, tmp_path / "library")
    monkeypatch.setattr(
        "sysconfig.get_path", lambda name: str(tmp_path / "library")
    )  # the whole of it takes long
    monkeypatch.chdir(tmp_path)
    assert train.main(["--steps", "2", *TINY]) == 0
    assert open_dataset(tmp_path / "data" / "stdlib").manifest["origin"]["tokenizer"] == "bpe"
    assert newest_checkpoint(tmp_path / "out" / "stdlib").step == 2


# Interruption and resumption.


@pytest.mark.parametrize(
    ("number", "step"),
    [(signal.SIGINT, 7), (signal.SIGTERM, 10), (signal.SIGHUP, 20)],
    ids=["between saves", "at a save", "at an evaluation"],
)
def test_a_stopped_run_resumes_bit_for_bit_with_dropout(numbers, tmp_path, trained, number, step):
    flags = ["--steps", 40, "--dropout", 0.3, "--save-every", 10, "--eval-every", 20]
    stopped = interrupted(numbers, tmp_path / "stopped", Signalling(step, number), *flags)
    assert stopped.step == newest_checkpoint(tmp_path / "stopped").step == step
    resumed = trained("stopped", *flags, "--resume")
    assert_same_run(trained("whole", *flags), resumed)
    elapsed = list(logged(resumed, "elapsed_seconds").values())
    assert elapsed == sorted(elapsed)  # time goes on where it stopped


def test_a_terminated_command_says_how_to_go_on_and_that_makes_the_same_run(
    numbers, tmp_path, trained
):
    flags = ["--steps", 200, "--dropout", 0.3, "--save-every", 10, "--eval-every", 200]
    stopped = tmp_path / "stopped"
    command = [sys.executable, str(ROOT / "train.py"), *tiny(numbers, stopped, *flags)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    )
    wait_until(lambda: list_checkpoints(stopped), process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and not errors
    assert newest_checkpoint(stopped).step < 200  # it was really cut short
    python, script, *arguments = shlex.split(output.splitlines()[-1].split("Resume with: ")[1])
    assert (python, script) == ("python", command[1])
    assert train.main(arguments) == 0
    assert_same_run(trained("whole", *flags), stopped)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_main_saves_and_returns_the_signals_code(numbers, tmp_path, capsys, number):
    out = tmp_path / "run"

    def interrupt() -> None:
        wait_until(lambda: list_checkpoints(out))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    with Interruption():  # should the signal come late, it does not end the tests
        thread.start()
        code = train.main(
            tiny(numbers, out, "--steps", 100_000, "--save-every", 5, "--eval-every", 100_000)
        )
        thread.join()
    assert code == 128 + number
    step = newest_checkpoint(out).step
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"step {step:,}" in last and last.endswith(" --resume")


def test_a_second_ctrl_c_stops_at_once_and_what_was_saved_goes_on(numbers, tmp_path, trained):
    class Impatient(Callback):
        def on_step(self, trainer: Trainer) -> None:
            if trainer.step == 5:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

    flags = ["--steps", 10, "--save-every", 2]
    with pytest.raises(KeyboardInterrupt), Interruption() as interruption:
        train_tiny(
            numbers,
            tmp_path / "run",
            *flags,
            callbacks=[Impatient()],
            should_stop=lambda: bool(interruption.signal),
        )
    assert newest_checkpoint(tmp_path / "run").step == 4
    assert_same_run(trained("whole", *flags), trained("run", *flags, "--resume"))


@pytest.mark.parametrize("save_every", [1, 100])
def test_an_interruption_right_after_an_evaluation_keeps_its_validation_loss(
    numbers, tmp_path, save_every
):
    flags = ["--steps", 9, "--eval-every", 3, "--save-every", save_every]
    interrupted(numbers, tmp_path / "run", Signalling(6, signal.SIGINT, "val_loss"), *flags)
    found = newest_checkpoint(tmp_path / "run")
    assert found.step == 6 and found.state["val_loss"] == logged(tmp_path / "run", "val_loss")[6]


def test_resume_starts_at_the_beginning_when_there_is_nothing_yet(trained):
    assert_same_run(trained("fresh", "--steps", 3), trained("resumed", "--steps", 3, "--resume"))


def test_resuming_a_finished_run_tells_its_result_again_and_changes_nothing(
    trained, numbers, capsys
):
    out = trained("run", "--steps", 3, "--eval-every", 2)
    before = {
        path: path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    capsys.readouterr()
    assert train.main(tiny(numbers, out, "--steps", 3, "--eval-every", 2, "--resume")) == 0
    said = capsys.readouterr().out
    assert f"Validation loss {logged(out, 'val_loss')[3]:.4f}" in said and "A sample:" in said
    assert (out / "config.toml").read_text().replace(
        "resume = true", "resume = false"
    ).encode() == before.pop(out / "config.toml")
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_run_folder_of_an_earlier_version_is_resumed_bit_for_bit_and_sampled_from(
    trained, numbers, tmp_path, capsys
):
    flags = ["--steps", 20, "--dropout", 0.2, "--eval-every", 10, "--save-every", 10]
    out = trained("old", *flags, should_stop=stopped_after(10))
    checkpoint = out / "checkpoints" / "step-00000010"
    state = json.loads((checkpoint / "state.json").read_text())
    (state["settings"]["data"],) = state["settings"]["data"]  # there was but one dataset
    assert state["settings"].pop("mix") is None
    (checkpoint / "state.json").write_text(json.dumps(state, indent=1))
    seal(checkpoint)
    settings = (out / "config.toml").read_text()
    settings = re.sub(r"^data = \[(.*)\]$", r"data = \1", settings, flags=re.MULTILINE)
    (out / "config.toml").write_text(settings)
    assert settings.startswith('data = "')
    (out / ".lock").write_text("4711 on another")
    kept = (out / "metrics.jsonl").read_text()
    (out / "metrics.jsonl").write_text(
        re.sub(r'"loss_z_score": 0.0', '"loss_z_score": NaN', kept, count=1)
    )
    capsys.readouterr()
    sample.main([str(out), "--prompt", "7 is", "--max-new-tokens", "5", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("7 is")
    again = Path(shutil.copytree(out, tmp_path / "again"))
    assert (
        train.main([str(out / "config.toml"), "--resume"]) == 0
    )  # by its own settings, or as it was begun
    assert train.main(tiny(numbers, again, *flags, "--resume")) == 0
    whole = trained("whole", *flags)
    for resumed in (out, again):
        assert "NaN" not in (resumed / "metrics.jsonl").read_text()
        assert_same_run(whole, resumed)


# What training computes.


def test_evaluating_and_logging_more_often_does_not_disturb_training(trained):
    one = trained("one", "--steps", 8, "--dropout", 0.3, "--eval-every", 2)
    other = trained("other", "--steps", 8, "--dropout", 0.3, "--eval-every", 8, "--log-every", 8)
    assert same_checkpoint(newest_checkpoint(one), newest_checkpoint(other))


@pytest.mark.parametrize(
    ("flags", "windows"),
    [
        (("--window-warmup", 0.3), [16] * 3 + [0] * 7),
        ((), [0] * 10),  # characters
        (("--vocab-size", 600), [16] * 2 + [0] * 8),
        (("--vocab-size", 600, "--windows", 4), [4] * 10),
        (("--vocab-size", 600, "--windows", 40), [16] * 2 + [40] * 8),
    ],
)
def test_the_first_block_sees_few_tokens_early_in_a_run_but_in_no_evaluation(
    numbers, tmp_path, flags, windows
):
    seen = {True: [], False: []}

    class Watcher(Callback):
        def on_train_start(self, trainer: Trainer) -> None:
            attention = trainer.model.blocks[0].attention
            attention.register_forward_pre_hook(
                lambda layer, _: seen[layer.training].append(layer.window)
            )

    train_tiny(
        numbers, tmp_path / "run", "--steps", 10, "--eval-every", 1, *flags, callbacks=[Watcher()]
    )
    assert seen[True] == windows and set(seen[False]) == {windows[-1]}
    tuned = train_tiny(numbers, tmp_path / "tuned", "--steps", 1, "--init-from", tmp_path / "run")
    assert tuned.config.optimizer.window_warmup == 0


def test_dropout_is_drawn_anew_at_each_step(trained):
    seeds = []

    class Looking(Callback):
        def on_step(self, trainer: Trainer) -> None:
            seeds.append(torch.initial_seed())

    trained("run", "--steps", 3, "--dropout", 0.3, callbacks=[Looking()])
    assert len(set(seeds)) == 3


def test_accumulated_micro_batches_are_the_whole_batch(trained):
    whole = trained("whole", "--steps", 10)
    for size in (1, 2):
        parts = trained(f"parts-{size}", "--steps", 10, "--micro-batch-size", size)
        assert logged(parts, "train_loss") == pytest.approx(logged(whole, "train_loss"), abs=1e-5)
        assert logged(parts, "grad_norm") == pytest.approx(logged(whole, "grad_norm"), rel=1e-3)


def test_recomputed_activations_train_the_same(trained):
    recomputed = trained("recomputed", "--steps", 5, "--dropout", 0.3, "--checkpoint-activations")
    assert_same_run(trained("kept", "--steps", 5, "--dropout", 0.3), recomputed)


def test_float16_scales_its_loss_and_learns(trained):
    run = trained("half", "--steps", 30, "--dtype", "float16")
    exact = logged(trained("exact", "--steps", 30, "--dtype", "float32"), "train_loss")
    assert logged(run, "train_loss")[30] == pytest.approx(exact[30], abs=0.05)
    scale = dict(newest_checkpoint(run).optimizer())["guard.loss_scale"]
    assert scale == 2**16 * 0.5 ** logged(run, "skipped_steps")[30]


def test_evaluation_is_the_mean_over_every_token_of_the_split(trained, numbers):
    path = trained("run", "--steps", 2, "--eval-tokens", 0, "--dropout", 0.3)
    model = GPT(load_settings(TrainConfig, [str(path / "config.toml")]).model)
    model.load_state_dict(dict(newest_checkpoint(path).model()))
    model.eval()
    tokens = torch.from_numpy(open_dataset(numbers).val[:].astype(int))
    targets = tokens[1:]
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(targets), 16):
            first = min(
                start, len(targets) - 16
            )  # the last window reaches back, but only what is left counts
            left = targets[first : first + 16].clone()
            left[: start - first] = -1
            total += model(tokens[None, first : first + 16], left[None]).item()
    assert logged(path, "val_loss")[2] == pytest.approx(total / len(targets), abs=1e-5)
    bits = logged(path, "val_bits_per_byte")[2]
    assert bits == pytest.approx(
        logged(path, "val_loss")[2] / math.log(2), rel=1e-5
    )  # one byte a character here


def test_checkpoints_of_a_finished_run_are_the_newest_and_the_best(trained):
    run = trained("run", "--steps", 6, "--eval-every", 2, "--save-every", 1)
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoints(run)]
    validation = logged(run, "val_loss")
    assert steps[-2:] == [5, 6] and min(validation, key=validation.get) in steps and len(steps) <= 3


def test_a_new_best_evaluation_is_saved_before_it_is_time(trained):
    run = trained(
        "run", "--steps", 6, "--eval-every", 2, "--save-every", 100, should_stop=stopped_after(5)
    )
    losses = logged(run, "val_loss")
    assert losses[4] < losses[2]
    assert [path.name for path in list_checkpoints(run)] == ["step-00000004", "step-00000005"]


# Starting from another run.


def test_a_run_starts_with_the_weights_and_the_loss_of_another(numbers, tmp_path):
    base = train_tiny(numbers, tmp_path / "base", "--steps", 30)
    still = [
        "--init-from",
        tmp_path / "base",
        "--steps",
        1,
        "--learning-rate",
        0,
        "--num-layers",
        5,
    ]
    run = train_tiny(numbers, tmp_path / "tuned", *still[:-2])
    assert run.val_loss == pytest.approx(base.val_loss, abs=1e-6)
    assert run.config.model == base.config.model
    with pytest.raises(UserError, match="--num-layers"):
        train_tiny(numbers, tmp_path / "other", *still)
    assert not (tmp_path / "other").exists()


def test_a_dataset_of_another_tokenizer_is_refused_with_what_prepares_it_right(numbers, tmp_path):
    train_tiny(numbers, tmp_path / "base", "--steps", 1)
    prepare(PrepareConfig((str(ROOT / "README.md"),), tokenizer="byte", out=tmp_path / "bytes"))
    with pytest.raises(UserError, match="--tokenizer") as caught:
        train_tiny(tmp_path / "bytes", tmp_path / "tuned", "--init-from", tmp_path / "base")
    tokenizer = str(caught.value).split("--tokenizer ")[1]
    (tmp_path / "more.txt").write_text(numbers_text(300), encoding="utf-8")
    prepare(
        PrepareConfig(
            (str(tmp_path / "more.txt"),), tokenizer=tokenizer, out=tmp_path / "bytes", force=True
        )
    )
    train_tiny(
        tmp_path / "bytes", tmp_path / "tuned", "--init-from", tmp_path / "base", "--steps", 1
    )


def test_the_embedding_grows_by_the_tokens_of_chats(numbers, tmp_path):
    train_tiny(numbers, tmp_path / "base", "--steps", 1)
    chats = [
        [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": f"{n + 1}"}]
        for n in range(90)
    ]
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    config = PrepareConfig(
        (str(tmp_path / "chats.jsonl"),), tokenizer=str(tmp_path / "base"), chat=True
    )
    prepare(dataclasses.replace(config, out=tmp_path / "chats"))
    still = ["--init-from", tmp_path / "base", "--learning-rate", 0, "--steps", 1]
    run = train_tiny(tmp_path / "chats", tmp_path / "run", *still)
    before, after = (dict(newest_checkpoint(tmp_path / name).model()) for name in ("base", "run"))
    old, new = before["token_embedding.weight"], after["token_embedding.weight"]
    assert len(new) == run.data.tokenizer.vocab_size == len(old) + 4
    assert torch.equal(new[: len(old)], old)
    torch.testing.assert_close(new[len(old) :], old.mean(dim=0, keepdim=True).expand(4, -1))
    assert all(torch.equal(after[name], before[name]) for name in before if "blocks" in name)


def test_a_tuned_run_resumed_is_one_uninterrupted(numbers, tmp_path):
    train_tiny(numbers, tmp_path / "base", "--steps", 10)
    flags = ["--init-from", tmp_path / "base", "--steps", 8, "--eval-every", 4]
    train_tiny(numbers, tmp_path / "whole", *flags)
    train_tiny(numbers, tmp_path / "parts", *flags, should_stop=stopped_after(3))
    train_tiny(numbers, tmp_path / "parts", *flags, "--resume")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_the_loss_of_pairs_is_that_of_their_completions_and_ends(tmp_path):
    pairs = [{"a": f"{n} ", "b": "x" * (n % 5 + 1)} for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    fields = {"prompt_field": "a", "completion_field": "b", "tokenizer": "byte"}
    prepare(PrepareConfig((str(tmp_path / "pairs.jsonl"),), out=tmp_path / "pairs", **fields))
    run = train_tiny(tmp_path / "pairs", tmp_path / "run", "--steps", 20, "--eval-tokens", 0)
    examples, summed, counted = run.data.datasets[0].val, 0, 0
    for record in pairs:
        prompt, completion = record["a"].encode(), [*record["b"].encode(), 256]
        if [*prompt, *completion] not in [
            abs_ids(examples, i) for i in range(examples.num_examples)
        ]:
            continue
        with torch.no_grad():
            logits = run.model(torch.tensor([[*prompt, *completion]]))[0].log_softmax(dim=-1)
        summed -= sum(
            logits[len(prompt) - 1 + i, token].item() for i, token in enumerate(completion)
        )
        counted += len(completion)
    assert run.val_loss == pytest.approx(summed / counted, abs=1e-5)
    bits = summed / math.log(2) / (counted - examples.num_examples)  # an end has no bytes
    assert logged(tmp_path / "run", "val_bits_per_byte")[20] == pytest.approx(bits, rel=1e-5)


def abs_ids(examples: Any, index: int) -> list[int]:
    """An example's ids, whether they count or not."""
    return [token if token >= 0 else ~token for token in examples.example(index).tolist()]


# Several datasets.


@pytest.fixture(scope="module")
def both(tmp_path_factory, code) -> list[Path]:
    """Two datasets of bytes, of numbers and of code."""
    folder = tmp_path_factory.mktemp("both")
    for name, text in (("numbers", numbers_text(1500)), ("source-code", code[:60_000])):
        (folder / "text.txt").write_text(text, encoding="utf-8")
        prepare(PrepareConfig((str(folder / "text.txt"),), tokenizer="byte", out=folder / name))
    return [folder / "numbers", folder / "source-code"]


def mixing(both: list[Path], *mix: float) -> list[object]:
    """The flags of a run on both, after others."""
    return [
        "--data",
        *both,
        *(["--mix", *mix] if mix else []),
        "--steps",
        60,
        "--eval-every",
        30,
        "--dropout",
        0.1,
    ]


@pytest.fixture(scope="module")
def mixed(both, tmp_path_factory) -> Path:
    """A run on both, uninterrupted."""
    out = tmp_path_factory.mktemp("mixed") / "run"
    train_tiny(both[0], out, *mixing(both, 7, 3))
    return out


def test_a_mix_of_datasets_is_learned_and_each_has_its_losses(both, tmp_path, capsys):
    assert train.main(tiny(both[0], tmp_path / "run", *mixing(both, 7, 3))) == 0
    *_, first, last = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").open()
        if "val_loss" in line
    ]
    for name in ("numbers", "source-code"):
        assert last[f"val_loss/{name}"] < first[f"val_loss/{name}"] < math.log(256)
    losses = last["val_loss/numbers"], last["val_loss/source-code"]
    assert last["val_loss"] == pytest.approx(0.7 * losses[0] + 0.3 * losses[1])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"data   70% {both[0]}: ") and lines[1].startswith(
        f"       30% {both[1]}: "
    )
    (line,) = [line for line in lines if line.startswith("step     60")]
    assert all(f"{last[key]:.4f}" in line for key in last if key.startswith("val_loss"))
    bits = f"{last['val_bits_per_byte']:.4f} bits per byte"
    assert [
        line
        for line in lines
        if f"Validation loss {last['val_loss']:.4f} nats" in line and bits in line
    ]


def test_a_run_on_a_mix_resumed_is_one_uninterrupted(both, mixed, tmp_path):
    out = tmp_path / "parts"
    train_tiny(both[0], out, *mixing(both, 7, 3), should_stop=stopped_after(17))
    moved = [shutil.copytree(path, tmp_path / path.name) for path in both]
    assert train.main([str(out / "config.toml"), "--resume", "--data", *map(str, moved)]) == 0
    assert_same_run(mixed, out)
    assert logged(out, "val_loss/numbers") == logged(mixed, "val_loss/numbers")
    other = train_tiny(both[0], tmp_path / "other", *mixing(both, 3, 7), "--steps", 1)
    assert logged(tmp_path / "other", "batch_digest")[1] != logged(mixed, "batch_digest")[1]
    assert flatten(
        load_settings(TrainConfig, [str(tmp_path / "other" / "config.toml")])
    ) == flatten(other.config)


@pytest.mark.parametrize(
    ("order", "mix", "refused"),
    [
        ((0, 1), (7, 4), r"mix \[7.0, 3.0\] → \[7.0, 4.0\]"),
        ((0, 1), (), r"mix \[7.0, 3.0\] → None"),
        ((1, 0), (7, 3), "the text in --data"),
        ((0,), (), r"mix \[7.0, 3.0\] → None, the text in --data"),
    ],
    ids=["another mix", "no mix", "another order", "one of them"],
)
def test_a_resumed_run_may_not_change_its_mix(both, mixed, order, mix, refused):
    data = [both[index] for index in order]
    with pytest.raises(UserError, match=refused):
        train_tiny(both[0], mixed, *mixing(data, *mix), "--resume")


def test_a_plan_says_what_a_run_takes_and_makes_nothing(both, tmp_path, capsys):
    assert (
        train.main(
            tiny(both[0], tmp_path / "planned", *mixing(both, 7, 3), "--dropout", 0, "--plan")
        )
        == 0
    )
    sizes = [len(open_dataset(path).train) for path in both]
    printed = capsys.readouterr().out
    assert "60 steps of 64 tokens = 3,840" in printed
    for size, weight in zip(sizes, (0.7, 0.3), strict=True):
        assert f"{3840 * weight / size:.2f} epochs" in printed
    assert not (tmp_path / "planned").exists()


def test_mistakes_in_a_mix_are_told_in_a_line(both, tmp_path, capsys):
    for mix, message in (((1, 0), "--mix"), ((1,), "--mix")):
        with pytest.raises(SystemExit, match="2"):
            train.main(tiny(both[0], tmp_path / "run", *mixing(both, *mix)))
        said = capsys.readouterr().err
        assert said.startswith(f"error: {message}") and said.count("\n") == 1
    short = ["--context-length", 9000]  # more than what is there to validate on numbers
    with pytest.raises(UserError, match="--context-length"):
        train.main(tiny(both[0], tmp_path / "run", *mixing(both, 7, 3), *short))
    assert not (tmp_path / "run").exists()


# What a resumed run may change, and what not.

TRAINED = ["--steps", 2, "--eval-every", 2, "--log-every", 2]
OTHER_VALUES = {  # of every setting, another than in a tiny run
    "steps": 4,
    "micro_batch_size": 2,
    "eval_every": 1,
    "eval_tokens": 100,
    "save_every": 1,
    "log_every": 1,
    "device": "cpu:0",
    "dtype": "bfloat16",
    "compile": False,
    "checkpoint_activations": True,
    "parallel": "fsdp",
    "timeout": 60,
    "resume": True,
    "verify_data": True,
    "deterministic": True,
    "plan": True,
    "keep_checkpoints": 5,
    "wandb": True,
    "batch_size": 8,
    "seed": 2,
    "long_examples": "cut",
    "vocab_size": 64,
    "context_length": 32,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 4,
    "d_model": 32,
    "d_ff": 48,
    "dropout": 0.5,
    "bias": True,
    "position": "learned",
    "rope_base": 500.0,
    "norm": "layernorm",
    "norm_epsilon": 1e-3,
    "norm_placement": "post",
    "activation": "gelu",
    "qk_norm": False,
    "tie_embeddings": True,
    "scale_embeddings": True,
    "logit_softcap": 15.0,
    "optimizer": "adamw",
    "learning_rate": 0.5,
    "weight_decay": 0.0,
    "beta1": 0.5,
    "beta2": 0.5,
    "momentum": 0.5,
    "clip_norm": 0.0,
    "warmup_steps": 1,
    "embedding_rate": 2.0,
    "windows": (4,),
    "depth": 3,
    "decay": "cosine",
    "final_learning_rate": 0.5,
    "window_warmup": 0.5,
}
CHANGEABLE = {
    field.name for cls in (ChangeableConfig, OptimizerConfig) for field in dataclasses.fields(cls)
} - {"optimizer"}
FIXED = [
    field.name
    for cls in (TrainConfig, ModelConfig, OptimizerConfig)
    for field in dataclasses.fields(cls)
    if field.name not in CHANGEABLE | {"mix"}
    and not dataclasses.is_dataclass(field.default_factory)
]


@pytest.fixture(scope="module")
def short(tmp_path_factory, numbers) -> Path:
    """A run of two steps, to try to resume."""
    out = tmp_path_factory.mktemp("short") / "run"
    train_tiny(numbers, out, *TRAINED)
    return out


def changed(numbers: Path, out: Path, **values: Any) -> TrainConfig:
    """The settings of the short run, to be resumed with some others."""
    config = load_settings(TrainConfig, tiny(numbers, out, *TRAINED, "--resume"))
    for part in ("model", "optimizer"):
        names = flatten(getattr(config, part))
        inner = {name: values.pop(name) for name in list(values) if name in names}
        config = dataclasses.replace(
            config, **{part: dataclasses.replace(getattr(config, part), **inner)}
        )
    return dataclasses.replace(config, **values)


def test_a_resumed_run_may_change_where_and_how_fast_it_runs_how_long_and_what_it_reports(
    short, numbers, tmp_path
):
    out = Path(shutil.copytree(short, tmp_path / "moved"))
    data = Path(shutil.copytree(numbers, tmp_path / "data"))
    values = {name: value for name, value in OTHER_VALUES.items() if name in CHANGEABLE}
    values |= {
        "data": data,
        "out": out,
        "init_from": short,
    }  # once there is a checkpoint, that is what it goes on with
    assert values.keys() == CHANGEABLE - {"minutes"}  # which are instead of steps
    config = changed(numbers, short)
    assert [name for name in values if values[name] == flatten(config)[name]] == [
        "resume"
    ]  # all are others
    moved = {name: values.pop(name) for name in ("data", "out", "init_from")}
    run = train.train(dataclasses.replace(changed(numbers, short, **values), **moved), callbacks=())
    found = newest_checkpoint(out)
    assert run.step == found.step == 4
    (recorded,) = found.state["changes"]
    assert recorded.pop("step") == 2 and recorded["learning_rate"] == [0.014, 0.5]
    assert recorded.keys() == CHANGEABLE - SETTINGS_IGNORED_ON_RESUME - {"minutes"}


@pytest.mark.parametrize("name", FIXED)
def test_a_resumed_run_may_not_change(short, numbers, name):
    config = changed(numbers, short, **{name: OTHER_VALUES[name]})
    with pytest.raises(UserError, match=rf"--resume.* {name} |--{name}:"):
        train.train(config)
    settings = (short / "config.toml").read_text()
    assert "resume = false" in settings  # what is refused leaves them as they were


def test_all_that_a_resumed_run_may_not_change_is_told_at_once(short, numbers):
    config = changed(numbers, short, batch_size=8, seed=2, d_model=32, optimizer="adamw")
    with pytest.raises(
        UserError,
        match=r"batch_size 4 → 8, seed 1 → 2, d_model 16 → 32, optimizer 'muon' → 'adamw'",
    ):
        train.train(config)


def test_a_resumed_run_may_not_change_its_tokenizer(short, tmp_path):
    (tmp_path / "numbers.txt").write_text(numbers_text(2000), encoding="utf-8")
    prepare(
        PrepareConfig(
            inputs=(str(tmp_path / "numbers.txt"),), tokenizer="byte", out=tmp_path / "bytes"
        )
    )
    with pytest.raises(UserError, match=r"vocab_size .* → 257, the text in --data"):
        train_tiny(tmp_path / "bytes", short, "--resume")


def test_a_resumed_run_may_not_change_its_text(short, numbers, tmp_path):
    data = Path(shutil.copytree(numbers, tmp_path / "data"))
    manifest = (data / "manifest.json").read_text()
    (data / "manifest.json").write_text(manifest + "\n")
    with pytest.raises(UserError, match="--data"):
        train.train(changed(data, short))


# Mistakes.


def test_a_run_that_is_there_is_not_overwritten(short, numbers):
    before = (short / "config.toml").read_bytes()
    with pytest.raises(UserError, match="--resume"):
        train_tiny(numbers, short, *TRAINED)
    assert (short / "config.toml").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vocab-size", 5], "--vocab-size"),
        (["--micro-batch-size", 3], "--micro-batch-size"),
        (["--context-length", 100000], "100000"),
        (["--device", "cuda:99"], "--device"),
        (["--device", "tpux"], "--device"),
        (["--data", "nowhere"], "nowhere.*python prepare.py"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(numbers, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        train.main(tiny(numbers, tmp_path / "run", *flags))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name", ["steps", "batch_size", "eval_every", "save_every", "log_every", "timeout"]
)
def test_what_can_not_be_zero_is_refused(name):
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')}"):
        train.train(TrainConfig(**{name: 0}))


def test_a_mistake_ends_in_one_line(run, capsys):
    done = run("train.py", "--data", "nowhere")
    assert done.returncode == 1 and "nowhere" in done.stderr and done.stderr.count("\n") == 1
    with pytest.raises(SystemExit) as stop:
        train.main(["--stepz", "3"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1


# Presets.

PRESETS = sorted((ROOT / "config").glob("*.toml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_each_preset_builds_takes_steps_and_lowers_the_loss(path):
    fewer = ["--vocab-size", "256", "--num-layers", "1", "--warmup-steps", "0"]
    config = load_settings(TrainConfig, [str(path), *fewer])
    torch.manual_seed(0)
    config = with_sizes(config, {})
    model = GPT(config.model)
    optimizer = Optimizer(model, config.optimizer)
    windows = torch.randint(256, (2, 17))
    losses = []
    for step in range(3):
        loss = model(windows[:, :-1], windows[:, 1:]) / windows[:, 1:].numel()
        loss.backward()
        optimizer.step(step, config.steps)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05


def test_presets_have_the_sizes_that_they_tell():
    sizes = {}
    for path in PRESETS:
        shape = with_sizes(load_settings(TrainConfig, [str(path)]), {}).model
        with torch.device("meta"):
            model = GPT(dataclasses.replace(shape, vocab_size=shape.vocab_size or 65))
        sizes[path.stem] = model.num_parameters
    assert sizes["shakespeare-char"] == pytest.approx(10.7e6, rel=0.01)
    assert sizes["shakespeare-char-cpu"] <= 0.85e6
    assert sizes["gpt2-124m"] == pytest.approx(124e6, rel=0.01)
    assert sizes["124m"] == pytest.approx(162e6, rel=0.01)


# As a library.


def library(data: Path, out: Path, **values: Any) -> TrainConfig:
    """A tiny run's settings, written without a command line."""
    model = ModelConfig(num_layers=1, num_heads=2, d_model=16, context_length=16)
    return TrainConfig(data=data, out=out, batch_size=4, device="cpu", model=model, **values)


def assert_free(out: Path) -> None:
    """Nobody holds the run folder."""
    RunDir(out, resume=True).close()


def test_train_returns_the_run_in_silence_and_leaves_only_what_is_needed_to_go_on(
    numbers, tmp_path, capfd
):
    run = train.train(library(numbers, tmp_path / "run", steps=3), callbacks=())
    assert (
        isinstance(run, Trainer)
        and run.step == run.saved[0] == 3
        and 0 < run.val_loss == run.best_val_loss
    )
    assert capfd.readouterr() == ("", "")
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {".lock", "config.toml", "checkpoints"}
    weights = dict(newest_checkpoint(tmp_path / "run").model())
    assert all(torch.equal(value, weights[name]) for name, value in run.model.state_dict().items())
    assert_free(tmp_path / "run")


def test_train_stops_when_it_is_told_to_and_what_is_done_is_saved(numbers, tmp_path):
    config = library(numbers, tmp_path / "run", steps=10, save_every=4)
    assert train.train(config, callbacks=(), should_stop=lambda: True).step == 0
    assert list_checkpoints(tmp_path / "run") == []  # nothing was done
    stop = stopped_after(6)
    run = train.train(config, callbacks=[stop], should_stop=stop)
    assert run.step == run.saved[0] == newest_checkpoint(tmp_path / "run").step == 6
    assert_free(tmp_path / "run")
    assert train.train(dataclasses.replace(config, resume=True)).step == 10


class Failing(Callback):
    """Raises an error at everything but one step; remembers whether it was closed."""

    def __init__(self, error: type[BaseException] = RuntimeError, step: int | None = None):
        self.error, self.step, self.is_closed = error, step, False

    def on_step(self, trainer: Trainer) -> None:
        if self.step in (None, trainer.step):
            raise self.error("the observer\nfailed")

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if self.step is None:
            self.on_step(trainer)

    def on_train_end(self, trainer: Trainer) -> None:
        self.is_closed = True


def test_an_error_on_the_way_lets_go_of_the_folder_once_what_was_being_saved_is_there(
    numbers, tmp_path
):
    observer = Failing(SystemExit, 4)
    with pytest.raises(SystemExit, match="the observer\nfailed"):
        train.train(
            library(numbers, tmp_path / "run", steps=10, save_every=3), callbacks=[observer]
        )
    assert observer.is_closed
    assert newest_checkpoint(tmp_path / "run").step == 3
    assert_free(tmp_path / "run")


def test_an_observer_that_fails_is_told_of_and_ends_nothing(numbers, tmp_path, trained, capsys):
    run = train.train(
        library(numbers, tmp_path / "run", steps=3), callbacks=[Failing(), MetricsFile()]
    )
    told = capsys.readouterr().err.splitlines()
    assert all("RuntimeError: the observer failed" in line for line in told)
    assert run.step == newest_checkpoint(tmp_path / "run").step == 3 and len(told) >= 4
    assert logged(tmp_path / "run", "train_loss")


def test_a_start_that_is_refused_lets_go_of_the_folder(numbers, tmp_path):
    config = library(numbers, tmp_path / "run", steps=2)
    train.train(config)
    with pytest.raises(UserError, match="--resume") as caught:
        train.train(config)
    assert_free(tmp_path / "run")
    with pytest.raises(UserError, match="seed") as caught_too:
        train.train(dataclasses.replace(config, resume=True, seed=5))
    assert_free(tmp_path / "run")
    del (
        caught,
        caught_too,
    )  # as in a notebook, the errors were kept until here, and with them all that they held


# What happens to the data, the terminal and the clock meanwhile.


class Meanwhile(Callback):
    """Does something after a step."""

    def __init__(self, step: int, act: Callable[[], Any]):
        self.step, self.act = step, act

    def on_step(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            self.act()


def test_a_dataset_that_is_replaced_or_removed_on_the_way_changes_nothing_and_is_not_resumed_on(
    numbers, tmp_path, capsys
):
    data, out = Path(shutil.copytree(numbers, tmp_path / "data")), tmp_path / "run"
    (tmp_path / "other.txt").write_text(numbers_text(50))
    other = PrepareConfig((str(tmp_path / "other.txt"),), tokenizer="char", out=data, force=True)
    stop = stopped_after(4)
    train_tiny(
        data, out, "--steps", 9, callbacks=[Meanwhile(2, lambda: prepare(other))], should_stop=stop
    )
    with pytest.raises(UserError, match="--data"):
        train_tiny(data, out, "--steps", 9, "--resume")
    gone, again = stopped_after(4), tmp_path / "again"
    data = Path(shutil.copytree(numbers, tmp_path / "moved"))
    train_tiny(
        data,
        again,
        "--steps",
        9,
        callbacks=[Meanwhile(2, lambda: shutil.rmtree(data))],
        should_stop=gone,
    )
    assert (
        same_checkpoint(newest_checkpoint(out), newest_checkpoint(again))
        and newest_checkpoint(again).step == 4
    )
    train_tiny(numbers, again, "--steps", 9, "--resume")


@pytest.mark.parametrize("place", ["data", "data/run"])
def test_a_run_does_not_go_into_its_dataset(place, numbers, tmp_path):
    data = Path(shutil.copytree(numbers, tmp_path / "data"))
    with pytest.raises(SystemExit, match="2"):
        train.main(tiny(data, tmp_path / place))
    with pytest.raises(UserError, match="--out"):
        TrainConfig(data=data, out=tmp_path / place)
    assert sorted(path.name for path in data.iterdir()) == sorted(
        path.name for path in numbers.iterdir()
    )


def test_a_run_that_is_resumed_at_its_last_step_is_evaluated(trained):
    trained("run", "--steps", 9, "--eval-every", 9, should_stop=stopped_after(4))
    run = trained("run", "--steps", 4, "--eval-every", 9, "--resume")
    assert newest_checkpoint(run).state["val_loss"] == logged(run, "val_loss")[4]


def test_a_fine_tuned_run_of_two_ranks_starts_with_the_weights_of_its_base(numbers, tmp_path):
    base = train_tiny(numbers, tmp_path / "base", "--steps", 10)
    out = tmp_path / "tuned"
    flags = ["--init-from", tmp_path / "base", "--steps", 1, "--learning-rate", 0]
    arguments = tiny(numbers, out, *flags, "--timeout", 20)
    log = tmp_path / "log"
    assert run_ranks(log, 2, lambda rank: train.main(arguments)) == [0, 0], log.read_text()
    assert logged(out, "val_loss")[1] == pytest.approx(base.val_loss, abs=1e-5)


def test_a_closed_pipe_costs_nothing(numbers, tmp_path):
    command = shlex.join(
        [sys.executable, str(ROOT / "train.py"), *tiny(numbers, tmp_path / "run", "--steps", 6)]
    )
    done = subprocess.run(
        f"{command} --eval-every 2 | head -1", shell=True, capture_output=True, encoding="utf-8"
    )
    assert done.stdout.startswith("data   ") and done.stdout.count("\n") == 1 and not done.stderr
    assert newest_checkpoint(tmp_path / "run").step == 6


# Longer, shorter, colder: what a resume changes.


def test_a_resume_says_what_it_changes(numbers, trained, tmp_path, capsys):
    trained("run", "--steps", 4, "--learning-rate", 0.01)
    capsys.readouterr()
    trained("run", "--steps", 8, "--learning-rate", 0.005, "--resume")
    changes = "Resuming after step 4, steps 4 → 8, learning_rate 0.01 → 0.005"
    assert capsys.readouterr().out.splitlines()[0] == changes
    assert newest_checkpoint(tmp_path / "run").state["changes"] == [
        {"step": 4, "steps": [4, 8], "learning_rate": [0.01, 0.005]}
    ]
    with pytest.raises(UserError, match="--steps"):
        trained("run", "--steps", 5, "--resume")


def test_a_run_that_left_float16_trains_on_unscaled_and_one_that_came_to_it_scaled(
    numbers, trained, tmp_path
):
    flags = ["--steps", 6, "--save-every", 3]
    for name, first, then, scale in (
        ("left", "float16", "float32", 1),
        ("came", "float32", "float16", 2**16),
    ):
        trained(name, *flags, "--dtype", first, should_stop=stopped_after(3))
        norms = logged(trained(name, *flags, "--dtype", then, "--resume"), "grad_norm")
        assert dict(newest_checkpoint(tmp_path / name).optimizer())["guard.loss_scale"] == scale
        assert 0.2 < norms[6] / norms[3] < 5


def test_a_schedule_that_ends_before_its_warm_up_is_refused(numbers, tmp_path):
    with pytest.raises(UserError, match="--warmup-steps"):
        TrainConfig(steps=5, optimizer=OptimizerConfig(warmup_steps=5))
    assert TrainConfig(steps=1).optimizer.warmup_steps is None
