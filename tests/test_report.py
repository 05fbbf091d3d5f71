"""The page of a run: its data without a browser, and its behavior in one."""

import base64
import json
import math
import re
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    SpoilHead,
    exit_code_of,
    logged,
    make_dataset,
    numbers_text,
    read_lines,
    train_tiny,
    write_lines,
)

import report
from engine.data.batches import open_mixture
from engine.report.attention_maps import compute_attention
from engine.report.callback import EARLY_SAMPLE_TOKENS, SAMPLE_TOKENS, Report
from engine.report.page import MAX_CURVE_POINTS, MAX_SHOWN_EVALUATIONS, downsample, select_samples
from engine.runs.checkpoint import load_model
from engine.runs.run_files import find_checkpoint

EVIL = "</script><img src=x onerror=\"document.title='taken'\"><!--"


@pytest.fixture(scope="module")
def runs(numbers, tmp_path_factory) -> Path:
    """A folder with two runs, a and b, and their pages."""
    folder = tmp_path_factory.mktemp("report")
    flags = ["--steps", 8, "--eval-every", 4, "--save-every", 4]
    train_tiny(numbers, folder / "a", *flags, callbacks=[Report()])
    train_tiny(numbers, folder / "b", "--steps", 2, "--eval-every", 2, callbacks=[Report()])
    return folder


@pytest.fixture
def run_a(runs, tmp_path) -> Path:
    """A copy of the first run, to be changed."""
    return Path(shutil.copytree(runs / "a", tmp_path / "a"))


def read_page(path: Path) -> Any:
    """The JSON that a page shows, of one run or of several."""
    pattern = r'<script id="data" type="application/json">(.*?)</script>'
    shown = json.loads(re.findall(pattern, path.read_text("utf-8"), re.S)[0])["runs"]
    return shown[0] if len(shown) == 1 else shown


def make_page(*folders: Path) -> Any:
    """The JSON of the page that the command makes of runs."""
    page = folders[0].parent / "page.html"
    report.main([*map(str, folders), "--out", str(page)])
    return read_page(page)


def test_a_run_writes_its_page_at_each_evaluation(runs, numbers):
    page = read_page(runs / "a" / "report.html")
    training, validation = (page["training"], page["validation"])
    losses, val_losses = (logged(runs / "a", key) for key in ("train_loss", "val_loss"))
    assert training["step"] == list(losses) and validation["step"] == [4, 8]
    assert training["train_loss"] == pytest.approx(list(losses.values()), rel=1e-5)
    assert validation["val_loss"] == pytest.approx(list(val_losses.values()), rel=1e-5)
    assert validation["tokens"] == [256, 512]
    assert page["best"]["val_loss"] == pytest.approx(val_losses[8]) and page["state"]["step"] == 8
    about = page["about"]
    assert page["settings"]["d_model"] == 16 and "d_model" in about["defaults"]
    assert about["machine"]["processor"] and about["machine"]["PyTorch"] == torch.__version__
    assert about["data"][0]["dataset"] == str(numbers)
    assert about["baselines"].keys() == {"uniform", "unigram", "bigram"}


def test_samples_follow_the_same_prompts_at_each_evaluation(runs):
    samples = read_page(runs / "a" / "report.html")["samples"]
    first, second = ([s["prompt"] for s in samples if s["step"] == step] for step in (4, 8))
    assert first == second and len(first) == 3 and numbers_text(1).startswith(first[0])
    assert re.fullmatch(r"\d+ is foll.*", first[2])  # the beginning of a line
    sizes = {1: EARLY_SAMPLE_TOKENS, 2: EARLY_SAMPLE_TOKENS, 4: SAMPLE_TOKENS, 8: SAMPLE_TOKENS}
    assert all(len(sample["text"]) == sizes.pop(sample["step"]) for sample in samples[::3])
    assert not sizes


def test_the_first_steps_are_drawn_at_doublings(numbers, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.report.callback.MAX_EARLY_TIME", 0.0)
    run = tmp_path / "run"
    train_tiny(numbers, run, "--steps", 20, "--eval-every", 10, callbacks=[Report()])
    samples = read_lines(run / "samples.jsonl")
    assert [sample["step"] for sample in samples[::3]] == [1, 2, 4, 10, 20]
    frames = read_lines(run / "attention.jsonl")
    assert [frame["step"] for frame in frames] == [1, 2, 4, 10, 20]
    assert read_page(run / "report.html")["frames"] == frames
    attention = compute_attention(load_model(find_checkpoint(run)), open_mixture([numbers]))
    assert frames[-1] == {"step": 20, **attention}
    assert frames[0]["weights"] != attention["weights"]


def test_memorized_passages_are_shown_and_losses_that_are_not_finite_are_gaps(run_a, numbers):
    records = read_lines(run_a / "metrics.jsonl")
    first, second, *_ = (record for record in records if "train_loss" in record)
    first["train_loss"] = None
    second["train_loss"] = math.nan
    write_lines(run_a / "metrics.jsonl", records)
    samples = read_lines(run_a / "samples.jsonl")
    data = open_mixture([numbers])
    text = data.tokenizer.decode(data.train.tokens[500:700].tolist())
    samples[-1]["text"] = f"@{text}@"
    write_lines(run_a / "samples.jsonl", samples)
    page = make_page(run_a)
    losses = page["training"]["train_loss"]
    assert [loss is None for loss in losses] == [True, True] + [False] * 6
    assert page["memorization"]["passages"][2] == [[1, 200, "numbers.txt"]]


def test_a_resumed_run_drops_the_samples_after_its_step(run_a, numbers):
    shutil.rmtree(run_a / "checkpoints" / "step-00000008")
    flags = ["--steps", 8, "--eval-every", 2, "--save-every", 4, "--resume"]
    train_tiny(numbers, run_a, *flags, callbacks=[Report()])
    steps = [sample["step"] for sample in read_lines(run_a / "samples.jsonl")]
    assert steps[::3] == [1, 2, 4, 6, 8]
    assert [frame["step"] for frame in read_lines(run_a / "attention.jsonl")] == [1, 2, 4, 6]


def test_the_page_shows_the_checkpoint_that_is_used_also_after_a_resume(numbers, tmp_path):
    flags = ["--eval-every", 3, "--steps"]
    train_tiny(numbers, tmp_path / "a", *flags, 6, callbacks=[Report(), SpoilHead(5, -1)])
    pages = [read_page(tmp_path / "a" / "report.html"), make_page(tmp_path / "a")]
    train_tiny(numbers, tmp_path / "a", *flags, 7, "--resume", callbacks=[Report()])
    pages.append(read_page(tmp_path / "a" / "report.html"))
    losses = logged(tmp_path / "a", "val_loss")
    assert losses[3] < min(losses[6], losses[7])
    for page in pages:
        assert page["best_step"] == 3 and page["attention"] == pages[0]["attention"]
        assert page["best"]["val_loss"] == pytest.approx(losses[3])
    data = open_mixture([numbers])
    best = compute_attention(load_model(find_checkpoint(tmp_path / "a")), data)
    assert pages[0]["attention"] == best


def test_points_of_a_long_curve_are_means_and_of_many_evaluations_some_are_shown():
    values = np.arange(2.5 * MAX_CURVE_POINTS)  # three values a point
    values[[6, 7, 8, 10]] = math.nan
    curve = downsample(values)
    assert len(curve) == math.ceil(len(values) / 3)
    assert curve[1:4] == [4, None, 10] and curve[-1] == values[-1]
    assert downsample(np.array([1.0, math.nan, 3.0])) == [1.0, None, 3.0]
    samples = [{"step": step, "text": "text"} for step in range(1, 1001)]
    steps = [sample["step"] for sample in select_samples(samples)]
    assert len(steps) == MAX_SHOWN_EVALUATIONS and (steps[0], steps[-1]) == (1, 1000)


@pytest.mark.parametrize(
    ("missing", "shown", "note"),
    [
        ("checkpoints/*/model.safetensors", "memorization", "model.safetensors"),
        ("metrics.jsonl", "attention", None),
        ("about.json", "attention", None),
        ("config.toml", "samples", "dataset"),
    ],
)
def test_an_incomplete_run_is_shown_without_what_is_missing(run_a, missing, shown, note):
    for path in [*run_a.glob(missing)]:
        (shutil.rmtree if path.is_dir() else Path.unlink)(path)
    page = make_page(run_a)
    assert page[shown] and (note in page["notes"][0] if note else page["notes"] == [])


def test_runs_are_compared_in_the_terminal_too(runs, capsys):
    pages = make_page(runs / "a", runs / "b")
    best, second = sorted(pages, key=lambda page: page["best"]["val_bits_per_byte"])
    verdict, path = capsys.readouterr().out.splitlines()
    assert f"{best['name']} is better than {second['name']}, by" in verdict
    assert path == str(runs / "page.html")


def test_a_folder_that_is_not_a_run_is_refused(run_a, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    (run_a / "config.toml").write_text("steps = ")
    flags = [[str(tmp_path / name)] for name in ("empty", "missing", "a")]
    flags += [[], [str(run_a), "--out", "a.png"], ["--out", "no/page.html"]]
    monkeypatch.chdir(tmp_path)
    for code, arguments in zip([1, 1, 1, 1, 2, 2], flags, strict=True):
        assert exit_code_of(lambda arguments=arguments: report.main(arguments)) == code
        assert (arguments or ["out: "])[-1].split("/")[0] in capsys.readouterr().err


def poison(folder: Path) -> Path:
    """Rename a run, and put markup wherever it has text."""
    poisoned = folder.rename(folder.with_name("<img src=x onerror=alert(1)>"))
    samples = read_lines(poisoned / "samples.jsonl")
    write_lines(poisoned / "samples.jsonl", [*samples, {"step": 8, "prompt": EVIL, "text": EVIL}])
    with open(poisoned / "config.toml", "a") as file:
        file.write(f"evil = {json.dumps(EVIL)}\n")
    about = {"machine": {EVIL: EVIL}, "defaults": {EVIL: EVIL}, "typed": {"evil": EVIL}}
    (poisoned / "about.json").write_text(json.dumps(about))
    return poisoned


def test_markup_in_a_run_ends_no_script_and_the_policy_allows_those_of_the_template_alone(run_a):
    page = make_page(poison(run_a))
    assert page["samples"][-1]["text"] == page["settings"]["evil"] == EVIL
    text = (run_a.parent / "page.html").read_text("utf-8")
    assert text.index('charset="utf-8"') < 1024  # as HTML requires
    policy = re.search('Content-Security-Policy" content="(.*?)"', text)[1]
    inline = [content for _, content in re.findall(r"<(script|style)>(.*?)</\1>", text, re.S)]
    hashes = [base64.b64encode(sha256(content.encode()).digest()).decode() for content in inline]
    assert len(hashes) == 4 and re.findall("'sha256-(.*?)'", policy) == hashes
    assert "unsafe" not in policy and policy.startswith("default-src 'none'; ")


@pytest.mark.browser
def test_markup_in_a_run_is_shown_as_text(page, run_a):
    folder = poison(run_a)
    for folders in ((folder, folder), (folder,)):
        make_page(*folders)
        page.goto((folder.parent / "page.html").as_uri())
        heading = page.locator("h1").inner_text()
        assert heading.count(folder.name) == len(folders) and page.locator("img").count() == 0
    assert page.title() == heading == folder.name
    assert page.locator("#samples b").last.inner_text() == EVIL
    assert all(EVIL in page.locator(name).inner_text() for name in ("#settings", "#machine"))


@pytest.mark.parametrize("is_missing", [False, True])
def test_data_that_is_missing_or_not_that_of_the_run_is_noted(numbers, run_a, is_missing):
    data = run_a.with_name("data")
    if not is_missing:
        flags = {"tokenizer": str(numbers), "val_fraction": 0.3, "out": data}
        make_dataset(run_a.parent, numbers.with_suffix(".txt"), **flags)
    config = run_a / "config.toml"
    config.write_text(config.read_text().replace(str(numbers), str(data)))
    page = make_page(run_a)
    assert page["about"]["data"] and page["memorization"] is None
    assert page["training"]["step"] and str(data) in page["notes"][0]
