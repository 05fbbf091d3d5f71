"""The first screen of a report: state, verdict, yardsticks and commands, from a run's figures."""

import json
import re
import subprocess
from typing import Any

import pytest
from helpers import numbers_text, train_tiny

from engine.core.files import acquire_lock
from engine.report import callback
from engine.report.callback import Report, describe_run
from engine.report.overview import compare, judge, list_yardsticks, suggest_commands
from engine.report.page import read_run
from engine.training.config import TrainConfig

LONGER = "python train.py --out out/a --resume --steps 400"
BASELINES = {"uniform": 8.0, "unigram": 6.0, "bigram": 4.0}


def make_run(losses: list[float], train: float = 3.0, epochs: float = 1, **content: Any) -> Any:
    steps = [100.0 * index for index in range(1, len(losses) + 1)]
    lowest = min(losses, default=0.0)
    return {
        "training": {"step": [50.0, *steps], "train_loss": [9, *[train] * len(steps)]},
        "validation": {"val_loss": losses, "step": steps} if losses else {"step": []},
        "best": {"val_loss": lowest, "val_bits_per_byte": lowest / 2} if losses else None,
        "best_step": 100,
        "num_tokens": 1000 * epochs,
        "about": {"baselines": BASELINES, "epoch_tokens": [1000, 5000]},
        "state": {"state": "done", "longer": LONGER},
        "memorization": None,
        "folder": "out/a b",
        **content,
    }


@pytest.mark.parametrize(
    ("losses", "content", "kind", "expected"),
    [
        ([3.5, 3.0], {}, "good", "Still improving.*14.3%"),
        ([3.5, 3.0], {"epochs": 9}, "good", "Still improving"),
        ([3.0, 2.999], {}, "good", "Converged"),
        ([5.0, 4.5], {"train": 4.4}, "warning", "No better than the bigram"),
        ([3.0, 2.0, 2.5], {}, "warning", "Too little text: .*rose by 25.0% from its lowest"),
        ([3.5, 3.2], {"train": 2.2}, "good", "Still improving"),
        ([3.5, 3.2], {"train": 2.2, "epochs": 3}, "warning", "is 1.00 above"),
        ([3.5, 3.2], {"train": 2.2, "epochs": 6.6}, "warning", "1.00 above.* was read 6.6 times"),
        ([3.0, 2.999], {"epochs": 6.6}, "warning", "Too little text: .*read 6.6 times"),
        ([3.5, 3.0], {"state": {"state": "training"}}, "good", "Still improving"),
    ],
)
def test_the_verdict_is_one_sentence_with_figures_and_a_command(losses, content, kind, expected):
    verdict, text, command = judge(make_run(losses, **content))
    assert verdict == kind and re.search(expected, text)
    has_command = "state" not in content and not re.match("Too little|Converged", text)
    assert command == (LONGER if has_command else "")


def test_the_verdict_compares_equal_evaluations_in_their_order():
    run = make_run([3.0, 2.0, 1.90, 1.50, 1.48])
    run["validation"]["val_loss_partial"] = [None, None, 1.95, None, 1.499]
    assert "Converged" in judge(run)[1]
    run = make_run([1.0, 3.0, 2.0])
    run["validation"]["val_tokens"] = [32, 64, 99]
    run["validation"]["val_tokens_partial"] = [None, None, 64]
    assert "Still improving" in judge(run)[1]


@pytest.mark.parametrize(
    ("loss", "num_tokens", "tokenizer", "kind"),
    [
        (1.8, 1000, "first", "good"),
        (1.8, 900, "first", "warning"),
        (3.6, 500, "second", "good"),  # all of the same text
        (3.6, 400, "second", "warning"),
    ],
)
def test_runs_are_ranked_only_if_the_same_text_was_counted(loss, num_tokens, tokenizer, kind):
    best = {"val_loss": 2.0, "val_bits_per_byte": 1.0, "val_tokens": 1000}
    first = make_run([], name="a", best=best, about={"tokenizer": "first"})
    best = {"val_loss": loss, "val_bits_per_byte": 0.9, "val_tokens": num_tokens}
    second = make_run([], name="b", best=best, about={"tokenizer": tokenizer})
    assert compare([first, second])[0] == kind


def test_yardsticks_are_bits_per_byte_the_worst_first():
    run = make_run([])
    assert judge(run) is None and list_yardsticks(run) == suggest_commands(run) == []
    run = make_run([3.5, 3.0], about={"baselines": BASELINES, "xz_bits_per_byte": 1.7})
    names, bits = zip(*list_yardsticks(run), strict=True)
    assert names == ("uniform", "unigram", "bigram", "xz -9", "this model")
    assert bits == (4.0, 3.0, 2.0, 1.7, 1.5)


def test_commands_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = dict(suggest_commands(make_run([3.0])))
    assert commands["Look inside"] == "python sample.py 'out/a b' --page"
    assert "Compare" not in commands
    for name in ("a b", "c"):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "metrics.jsonl").touch()
    run = make_run([3.0], about={"is_chat": True})
    assert dict(suggest_commands(run))["Compare"] == "python report.py 'out/a b' out/c"
    assert dict(suggest_commands(run))["Chat"].endswith("--chat")


def test_a_killed_run_is_stopped_and_a_locked_one_is_training(tmp_path):
    state = {"state": "training", "step": 3}
    (tmp_path / "about.json").write_text(json.dumps({"state": state}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    assert read_run(tmp_path)["state"] == {"state": "stopped", "step": 7}
    lock = acquire_lock(tmp_path / ".lock", tmp_path)
    assert read_run(tmp_path)["state"] == state
    lock.release()


def test_the_commit_of_the_code_is_recorded_and_whether_files_were_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(callback, "__file__", str(tmp_path / "engine" / "report" / "callback.py"))
    commits = [callback.code_commit()]
    (tmp_path / "model.py").write_text("a = 1")
    options = ["-c", "user.name=a", "-c", "user.email=a", "-c", "commit.gpgsign=false"]
    for command in (["init"], ["add", "."], [*options, "commit", "--message", "first"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True, capture_output=True)
    commits.append(callback.code_commit())
    (tmp_path / "model.py").write_text("a = 2")
    commits.append(callback.code_commit())
    assert commits[0] == "" and commits[1] and commits[2] == f"{commits[1]} with changed files"


@pytest.mark.parametrize("is_done", [True, False])
def test_a_run_records_its_end_its_typed_settings_and_prompts(numbers, tmp_path, is_done):
    steps: list[int] = []
    config = TrainConfig(data=(numbers,), seed=7)
    flags = ["--steps", 30, "--eval-every", 30, "--log-every", 1]
    page = tmp_path / "run" / "report.html"
    callbacks = [Report(config)]

    def should_stop() -> bool:
        steps.append(page.exists())
        return not is_done and len(steps) > 14

    trainer = train_tiny(numbers, page.parent, *flags, callbacks=callbacks, should_stop=should_stop)
    assert steps[:3] == [False, True, True]  # from the first record on
    state = callbacks[0].about["state"]
    assert state["state"] == ("done" if is_done else "stopped") and state["step"] == trainer.step
    about = describe_run(trainer, config)
    assert state["longer"].endswith(f"--resume --steps {2 * trainer.step}")
    assert state["longer"].startswith(state["resume"])
    assert about["typed"] == {"data": [str(numbers)], "seed": 7}
    assert numbers_text(1).startswith(about["prompts"][0])
