"""Training, through the real command: the whole road, exact resume, interruption, mistakes, many processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import train
from engine.checkpoint import list_checkpoints, newest_checkpoint
from engine.optimizer import Optimizer
from engine.settings import load_settings
from engine.shards import open_dataset
from model import GPT
from prepare import PrepareConfig, prepare

TINY = "--num-layers 2 --num-heads 2 --d-model 16 --context-length 16 --batch-size 4 --warmup-steps 2 --log-every 1"
TINY = [*TINY.split(), "--eval-tokens", "2000", "--device", "cpu"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A small dataset of characters."""
    folder = tmp_path_factory.mktemp("data")
    text = "".join(f"{number} is followed by {number + 1}.\n" for number in range(2000))
    (folder / "numbers.txt").write_text(text, encoding="utf-8")
    prepare(PrepareConfig(inputs=(str(folder / "numbers.txt"),), tokenizer="char", out=folder / "numbers"))
    return folder / "numbers"


@pytest.fixture
def trained(tmp_path, data, monkeypatch, capsys):
    """Trains in this process, which spares importing torch anew; returns the run folder."""

    def trained(name: str, *flags: object, code: int = 0) -> Path:
        arguments = ["train.py", "--data", data, "--out", tmp_path / name, *TINY, *flags]
        monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
        assert train.main() == code
        return tmp_path / name

    return trained


def records(run: Path, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(newest_checkpoint(run, print).model())


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit: weights, optimizer, and every logged loss."""
    a, b = newest_checkpoint(one, print), newest_checkpoint(other, print)
    assert a.step == b.step
    for mine, others in ((a.model(), b.model()), (a.optimizer(), b.optimizer())):
        mine, others = dict(mine), dict(others)
        assert mine.keys() == others.keys()
        assert all(torch.equal(mine[name], others[name]) for name in mine)
    for key in ("train_loss", "val_loss", "grad_norm", "learning_rate"):
        assert records(one, key) == records(other, key)


def test_the_whole_road(run, tmp_path):
    text = "".join(f"{number} is followed by {number + 1}.\n" for number in range(3000))
    (tmp_path / "numbers.txt").write_text(text, encoding="utf-8")
    assert run("prepare.py", "numbers.txt", "--vocab-size", 300).returncode == 0
    flags = [flag for flag in TINY if flag not in ("--eval-tokens", "2000")]
    done = run("train.py", "--data", "data/numbers", "--out", "out/n", "--steps", 60, "--eval-every", 30, *flags)
    assert done.returncode == 0, done.stderr
    assert (
        "Validation loss" in done.stdout and "bits per byte" in done.stdout and "python sample.py out/n" in done.stdout
    )
    out = tmp_path / "out" / "n"
    assert {path.name for path in out.iterdir()} == {".lock", "config.toml", "metrics.jsonl", "loss.png", "checkpoints"}
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    losses, validation = records(out, "train_loss"), records(out, "val_loss")
    assert list(losses) == list(range(1, 61)) and list(validation) == [30, 60]
    assert validation[60] < losses[1] - 0.5
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-2])
    assert last["tokens"] == 60 * 4 * 16 and last["tokens_per_second"] > 0 and last["elapsed_seconds"] > 0
    sampled = run("sample.py", "out/n", "--max-new-tokens", 20, "--prompt", "7 is")
    assert sampled.returncode == 0 and sampled.stdout.startswith("7 is") and len(sampled.stdout) > 20
    again = run("train.py", "out/n/config.toml", "--out", "out/again")  # the resolved settings make the same run
    assert again.returncode == 0
    assert_same_run(out, tmp_path / "out" / "again")


def test_the_built_in_corpus_is_prepared_when_it_is_not_there(run, tmp_path):
    done = run("train.py", "--steps", 2, *TINY)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data" / "stdlib" / "manifest.json").exists() and (tmp_path / "out" / "stdlib").exists()


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_resumes_bit_for_bit_with_dropout(number, code, trained, tmp_path, data):
    flags = ["--steps", "150", "--dropout", "0.3", "--save-every", "20", "--eval-every", "50"]
    whole = trained("whole", *flags)
    stopped = tmp_path / "stopped"
    command = [sys.executable, str(ROOT / "train.py"), "--data", str(data), "--out", str(stopped), *TINY, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    wait_for(lambda: (stopped / "checkpoints" / "step-00000040").exists(), process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in errors
    assert not list(stopped.glob("checkpoints/step-00000150"))  # it was really cut short
    assert "Go on with: python" in output and output.rstrip().endswith("--resume")
    trained("stopped", *flags, "--resume")
    assert_same_run(whole, stopped)


def test_an_interruption_right_after_a_save_keeps_its_validation_loss(trained, monkeypatch):
    evaluate_and_save = train.evaluate_and_save

    def then_interrupt(run):
        evaluate_and_save(run)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(train, "evaluate_and_save", then_interrupt)
    run = trained("run", "--steps", 6, "--eval-every", 3, code=130)
    found = newest_checkpoint(run, print)
    assert found.step == 3 and found.state["val_loss"] == records(run, "val_loss")[3]


def test_resume_starts_at_the_beginning_when_there_is_nothing_yet(trained):
    assert_same_run(trained("fresh", "--steps", 3), trained("resumed", "--steps", 3, "--resume"))


def test_evaluating_and_logging_more_often_does_not_disturb_training(trained):
    one = trained("one", "--steps", 8, "--dropout", 0.3, "--eval-every", 1)
    other = trained("other", "--steps", 8, "--dropout", 0.3, "--eval-every", 8, "--log-every", 8)
    weights = final_weights(other)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in final_weights(one).items())


def test_accumulated_micro_batches_are_the_whole_batch(trained):
    whole = trained("whole", "--steps", 10)
    for size in (1, 2):
        parts = trained(f"parts-{size}", "--steps", 10, "--micro-batch-size", size)
        assert records(parts, "train_loss") == pytest.approx(records(whole, "train_loss"), abs=1e-5)
        assert records(parts, "grad_norm") == pytest.approx(records(whole, "grad_norm"), rel=1e-3)


def test_float16_scales_its_loss_and_learns(trained):
    run = trained("half", "--steps", 30, "--dtype", "float16")
    exact = records(trained("exact", "--steps", 30, "--dtype", "float32"), "train_loss")
    assert records(run, "train_loss")[30] == pytest.approx(exact[30], abs=0.05)
    scale = dict(newest_checkpoint(run, print).optimizer())["guard.loss_scale"]
    assert scale == 2**16 * 0.5 ** records(run, "skipped_steps")[30]


def test_a_plan_says_what_a_run_takes_and_makes_nothing(run, tmp_path, data):
    said = run("train.py", "--data", data, "--out", "planned", "--plan", *TINY)
    assert said.returncode == 0 and "run    400 steps of 64 tokens" in said.stdout and "epochs" in said.stdout
    assert not (tmp_path / "planned").exists()


def test_evaluation_is_the_mean_over_every_token_of_the_split(trained, data):
    path = trained("run", "--steps", 2, "--eval-tokens", 0)
    dataset = open_dataset(data)
    model = GPT(load_settings(train.TrainConfig, [str(path / "config.toml")]).model)
    model.load_state_dict(final_weights(path))
    tokens = torch.from_numpy(dataset.val[:].astype(int))
    total, scored = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(tokens) - 17, 16):
            total += model(tokens[None, start : start + 16], tokens[None, start + 1 : start + 17]).item() * 16
            scored += 16
        rest = len(tokens) - 1 - scored  # the last window reaches back, but scores only what is left
        targets = tokens[None, -16:].clone()
        targets[:, : 16 - rest] = -1
        total += model(tokens[None, -17:-1], targets).item() * rest
    assert records(path, "val_loss")[2] == pytest.approx(total / (scored + rest), abs=1e-5)
    bits = records(path, "val_bits_per_byte")[2]
    assert bits == pytest.approx(records(path, "val_loss")[2] / 0.6931472, rel=1e-5)  # one byte a character here


def test_a_run_that_is_there_is_not_overwritten(trained):
    trained("run", "--steps", 2)
    with pytest.raises(ValueError, match=r"already holds checkpoints; go on with --resume, or choose another --out"):
        trained("run", "--steps", 2)


def test_resuming_with_settings_that_change_the_run_is_refused_by_name(trained):
    trained("run", "--steps", 2)
    with pytest.raises(ValueError, match=r"--resume can't change seed 1 → 2, d_model 16 → 32, learning_rate"):
        trained("run", "--steps", 4, "--resume", "--seed", 2, "--d-model", 32, "--learning-rate", 0.5)
    run = trained("run", "--steps", 4, "--resume", "--micro-batch-size", 2, "--eval-every", 2)
    assert newest_checkpoint(run, print).step == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vocab-size", 5], "--vocab-size 5 is too small"),
        (["--micro-batch-size", 3], "--micro-batch-size 3 does not divide 4; try one of 1, 2, 4"),
        (["--context-length", 100000], "too few for one window of context_length 100000"),
        (["--device", "cuda:99"], "--device cuda:99 can't be used here"),
        (["--device", "tpux"], "--device tpux can't be used here"),
        (["--data", "nowhere"], "nowhere holds no dataset; make it with: python prepare.py INPUT --out nowhere"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(trained, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        trained("run", *flags)
    assert not (tmp_path / "run").exists()


def test_mistakes_end_in_one_line(run):
    for flags in (["--data", "nowhere"], ["--stepz", "3"]):
        done = run("train.py", *flags)
        assert done.returncode in (1, 2) and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.toml")), ids=lambda path: path.stem)
def test_each_preset_builds_takes_steps_and_lowers_the_loss(path):
    config = load_settings(train.TrainConfig, [str(path), "--vocab-size", "256", "--warmup-steps", "0"])
    torch.manual_seed(0)
    model = GPT(config.model)
    optimizer = Optimizer(model, config.optimizer)
    windows = torch.randint(256, (2, 17))
    losses = []
    for step in range(3):
        loss = model(windows[:, :-1], windows[:, 1:])
        loss.backward()
        optimizer.step(step, config.steps)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05


def test_each_preset_says_what_it_is():
    sizes = {}
    for path in (ROOT / "config").glob("*.toml"):
        model = load_settings(train.TrainConfig, [str(path)]).model
        with torch.device("meta"):
            sizes[path.stem] = GPT(train.dataclasses.replace(model, vocab_size=model.vocab_size or 65)).num_parameters()
    assert sizes["shakespeare-char"] == pytest.approx(10.7e6, rel=0.01)
    assert sizes["shakespeare-char-cpu"] <= 0.85e6
    assert sizes["gpt2-124m"] == pytest.approx(124e6, rel=0.01)


def test_weights_and_biases_is_imported_only_when_asked(trained, tmp_path, monkeypatch):
    trained("quiet", "--steps", 1)
    assert "wandb" not in sys.modules
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = trained("loud", "--steps", 2, "--wandb")
    assert list(run.glob("wandb/offline-run-*"))


def test_checkpoints_of_a_finished_run_are_the_newest_and_the_best(trained):
    run = trained("run", "--steps", 6, "--eval-every", 2, "--save-every", 1)
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoints(run)]
    validation = records(run, "val_loss")
    assert steps[-2:] == [5, 6] and min(validation, key=validation.get) in steps and len(steps) <= 3
