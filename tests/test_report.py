"""A run's page: its data without a browser, and what is seen and done on it in one."""

import base64
import hashlib
import json
import math
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ROOT, assert_same_run, exit_code_of, logged, randomised, train_tiny

import report
from engine.data.mixture import open_mixture
from engine.generation.attention_maps import attention_maps
from engine.report.callback import Report
from engine.report.page import MAP_BYTES, POINTS, attention_of, describe_run, new_samples, thinned, write_page
from engine.training.callbacks import records_until
from engine.training.checkpoint import load_model
from engine.training.run_dir import find_checkpoint
from model import GPT, ModelConfig

EVIL = "</script><img src=x onerror=\"document.title='taken'\"><!--"


@pytest.fixture(scope="module")
def place(numbers, tmp_path_factory) -> Path:
    """A folder with two runs, a and b, the first with all that its page shows."""
    folder = tmp_path_factory.mktemp("report")
    train_tiny(numbers, folder / "a", "--steps", 8, "--eval-every", 4, "--save-every", 4, observers=[Report()])
    train_tiny(numbers, folder / "b", "--steps", 6, "--eval-every", 3, "--learning-rate", 1e-3, observers=[Report()])
    return folder


@pytest.fixture
def run_a(place, tmp_path) -> Path:
    """The first run, to do harm to."""
    return Path(shutil.copytree(place / "a", tmp_path / "a"))


def shown(page: Path) -> Any:
    """What a page shows: its JSON, of one run or of several."""
    island = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page.read_text("utf-8"), re.S)
    runs = json.loads(island[0])["runs"]
    return runs[0] if len(runs) == 1 else runs


def made(folder: Path, *others: Path) -> Any:
    """What the page of a run, or of several, shows, made by the command."""
    page = folder.parent / "page.html"
    report.main([*map(str, (folder, *others)), "--out", str(page)])
    return shown(page)


# What a run keeps, and what its page shows.


def test_a_quotation_in_a_sample_is_told_from_what_is_common(run_a, numbers):
    samples = [json.loads(line) for line in (run_a / "samples.jsonl").read_text().splitlines()]
    train = open_mixture([numbers]).datasets[0].train
    quotation = open_mixture([numbers]).tokenizer.decode(train[500:700].tolist())
    samples[-1]["text"] = f"@{quotation}@"
    (run_a / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    page = made(run_a)
    (start, length, where), *_ = page["copies"]["samples"][2]
    assert (start, length) == (1, 200) and where == "byte 500 of the text, token 500 of train-00000.npy"
    assert page["copies"]["yardstick"].startswith("The yardstick, validation text in 3 pieces")
    assert set(page["baselines"]) == {"uniform", "unigram", "bigram"} == set(shown(run_a / "report.html")["baselines"])
    assert page["baselines"]["uniform"] == pytest.approx(math.log(open_mixture([numbers]).tokenizer.vocab_size))


def test_a_run_makes_its_page_at_each_evaluation(place, numbers):
    page, run = shown(place / "a" / "report.html"), place / "a"
    losses, validation = logged(run, "train_loss"), logged(run, "val_loss")
    assert page["name"] == "a" and page["training"]["step"] == list(losses) and page["validation"]["step"] == [4, 8]
    assert page["training"]["train_loss"]["mean"] == pytest.approx(list(losses.values()), rel=1e-5)
    assert page["validation"]["val_loss"]["mean"] == pytest.approx(list(validation.values()), rel=1e-5)
    assert page["training"]["tokens"] == [64 * step for step in losses] and page["validation"]["tokens"] == [256, 512]
    assert page["figures"]["validation loss, nats per token"] == f"{validation[8]:.4f}"
    assert page["figures"]["steps"] == "8 of 8" and page["figures"]["tokens"] == "512"
    assert page["settings"]["d_model"] == 16 and page["defaults"]["d_model"] == 128
    assert page["machine"]["processor"] and page["machine"]["PyTorch"] == torch.__version__
    assert page["data"][0]["dataset"] == str(numbers)
    assert "{{" not in (run / "report.html").read_text("utf-8").split("<script>")[0]


def test_samples_follow_the_same_prompts_at_each_evaluation(place):
    samples = shown(place / "a" / "report.html")["samples"]
    by_step = {step: [one["prompt"] for one in samples if one["step"] == step] for step in (4, 8)}
    assert by_step[4] == by_step[8] and len(by_step[4]) == 3 and by_step[4][0] == ""
    assert re.fullmatch(r"\d+ is foll.*", by_step[4][2])  # the beginning of a line
    assert all(len(one["text"]) == 70 for one in samples)


@pytest.mark.parametrize("source", ["live", "checkpoint"])
def test_attention_is_what_the_heads_compute(place, numbers, source):
    page = shown(place / "a" / "report.html")["attention"] if source == "live" else made(place / "a")["attention"]
    model, dataset = load_model(find_checkpoint(place / "a"), ModelConfig, GPT), open_mixture([numbers])
    text = "".join(page["tokens"]).replace("·", " ").replace("⏎", "\n")
    tokens = torch.from_numpy(dataset.tokenizer.encode(text).astype(np.int64))
    maps = np.frombuffer(base64.b64decode(page["weights"]), np.uint8).reshape(2, 2, 16, 16) / 255
    np.testing.assert_allclose(maps, attention_maps(model, tokens).numpy(), atol=0.003)
    assert (page["layers"], page["heads"], page["of"]) == (2, 2, [2, 2])


def test_of_a_model_with_many_heads_the_first_that_fit_are_shown(numbers):
    dataset = open_mixture([numbers])
    for layers, heads in ((220, 1), (2, 110)):
        config = ModelConfig(dataset.tokenizer.vocab_size, 32, num_layers=layers, num_heads=heads, d_model=2 * heads)
        found = attention_of(GPT(config).eval(), dataset)
        weights = base64.b64decode(found["weights"])
        assert len(weights) == found["layers"] * found["heads"] * 32**2 <= MAP_BYTES < len(weights) + 70_000
        assert found["of"] == [layers, heads]


def test_the_page_changes_nothing_in_training(place, numbers, tmp_path):
    train_tiny(numbers, tmp_path / "alone", "--steps", 8, "--eval-every", 4, "--save-every", 4)
    assert_same_run(tmp_path / "alone", place / "a")


def test_a_resumed_run_drops_the_samples_after_its_step(run_a, numbers):
    shutil.rmtree(run_a / "checkpoints" / "step-00000008")
    train_tiny(numbers, run_a, "--steps", 8, "--eval-every", 2, "--save-every", 4, "--resume", observers=[Report()])
    steps = [json.loads(line)["step"] for line in (run_a / "samples.jsonl").read_text("utf-8").splitlines()]
    assert steps == [4, 4, 4, 6, 6, 6, 8, 8, 8]


def test_lines_that_are_no_records_are_put_aside(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1}\n{"step": "2"}\n7\n{"step": 3}\n{"step": 9}\n{"st')
    assert records_until(path, 3) == [{"step": 1}, {"step": 3}]
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'
    assert path.with_suffix(".damaged").read_text() == '{"step": "2"}\n7\n'


def test_a_sharded_model_is_not_sampled_from(run_a, numbers):
    before = (run_a / "samples.jsonl").read_bytes()
    run = SimpleNamespace(config=SimpleNamespace(out=run_a), world=SimpleNamespace(sharded=True), step=9)
    run.dataset = open_mixture([numbers])
    observer = Report()
    observer.baselines = {}
    observer.recorded(run, {"step": 9, "val_loss": 1.0})
    assert (run_a / "samples.jsonl").read_bytes() == before and shown(run_a / "report.html")["attention"] is None


def test_a_model_that_diverged_has_a_page(numbers):
    dataset = open_mixture([numbers])
    model = randomised(ModelConfig(dataset.tokenizer.vocab_size, 16, d_model=8))
    model.head.weight.data.fill_(math.nan)
    model.blocks[0].attention.heads[0].query.weight.data.fill_(math.nan)
    assert {one["text"][:5] for one in new_samples(model, dataset, 1, 1)} == {"none:"}
    assert attention_of(model, dataset)["weights"]


def test_each_point_of_a_long_curve_has_the_mean_least_and_most_of_its_records():
    values = np.random.default_rng(0).normal(size=100_003)
    values[::7] = math.nan
    values[50_000:51_000] = math.nan
    found = thinned(values)
    groups = np.split(values, np.linspace(0, len(values), POINTS, endpoint=False).astype(int)[1:])
    expected = [group[np.isfinite(group)] for group in groups]
    for name, function in (("mean", np.mean), ("min", np.min), ("max", np.max)):
        wanted = [function(group) if len(group) else None for group in expected]
        assert [one is None for one in found[name]] == [one is None for one in wanted] and None in wanted
        assert [one for one in found[name] if one is not None] == pytest.approx(
            [one for one in wanted if one is not None], rel=1e-5, abs=1e-12
        )
    assert thinned(np.array([1.0, math.nan, 3.0])) == {"mean": [1.0, None, 3.0]} and thinned(np.array([])) == {
        "mean": []
    }


@pytest.fixture(scope="module")
def long_run(tmp_path_factory) -> Path:
    """A run of 100,000 records and more samples than are shown, and its page."""
    chance, folder = random.Random(0), tmp_path_factory.mktemp("long")
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, 100_001):
            known = {
                "tokens": 9 * step,
                "learning_rate": 0.01,
                "grad_norm": chance.random(),
                "elapsed_seconds": step / 9,
            }
            loss = {"train_loss": 2 + chance.random() + 50 / step, "tokens_per_second": 1000 * chance.random()}
            file.write(f"{json.dumps({'step': step} | known | loss)}\n")
            if step % 200 == 0:
                file.write(f"{json.dumps({'step': step, 'val_loss': 2.5, 'val_bits_per_byte': 1.5})}\n")
    samples = [{"step": step, "prompt": "p", "text": "text " * 60} for step in range(1, 1001)]
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in samples))
    report.main([str(folder)])
    return folder


def test_a_page_of_a_hundred_thousand_records_is_small(long_run):
    page = shown(long_run / "report.html")
    assert (long_run / "report.html").stat().st_size < 300_000  # and as much again for attention
    assert len(page["training"]["train_loss"]["mean"]) == len(page["training"]["train_loss"]["max"]) == POINTS
    steps = [one["step"] for one in page["samples"]]
    assert len(steps) == 40 and (steps[0], steps[-1]) == (1, 1000)


# Runs that are not whole.


def test_a_run_killed_in_the_middle_of_a_line_shows_what_was_whole(run_a):
    with open(run_a / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "train_lo')
    assert made(run_a)["training"]["step"] == list(range(1, 9))


def test_losses_that_are_not_finite_are_gaps(run_a):
    lines = (run_a / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        if record["step"] in (2, 3) and "train_loss" in record:
            record |= {"train_loss": None, "grad_norm": math.nan}
        if record["step"] >= 3 and "train_loss" in record:
            record["skipped_steps"] = 2
    (run_a / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    page = made(run_a)
    losses = page["training"]["train_loss"]["mean"]
    assert losses[1:3] == [None, None] and None not in losses[:1] + losses[3:]
    assert page["training"]["grad_norm"]["mean"][1:3] == [None, None]
    assert page["figures"]["skipped steps (gradients not finite)"] == "2"


@pytest.mark.parametrize(
    "gone, kept, note",
    [
        ("checkpoints", "data", "holds no checkpoint;"),
        ("metrics.jsonl", "attention", None),
        ("about.json", "attention", None),
        ("samples.jsonl", "attention", None),
        ("config.toml", "samples", "names no dataset"),
    ],
)
def test_of_a_run_that_lacks_something_the_rest_is_shown(run_a, gone, kept, note):
    (shutil.rmtree if (run_a / gone).is_dir() else Path.unlink)(run_a / gone)
    page = made(run_a)
    assert page[kept] and (note in page["notes"][0] if note else page["notes"] == [])


def test_without_its_data_a_run_has_its_curves(run_a):
    settings = run_a / "config.toml"
    settings.write_text(re.sub("^data = .*$", 'data = ["data/gone"]', settings.read_text(), flags=re.M))
    page = made(run_a)
    assert page["attention"] is None and page["data"] == [] and page["training"]["step"]
    assert "data/gone holds no dataset" in page["notes"][0]


def test_a_damaged_checkpoint_costs_the_attention_alone(run_a):
    for weights in run_a.glob("checkpoints/*/model.safetensors"):
        weights.write_bytes(b"")
    page = made(run_a)
    assert page["data"] and page["baselines"] and page["attention"] is None
    (note,) = page["notes"]
    assert note.startswith("The attention can't be shown: ") and "model.safetensors is not as it was written" in note


def test_other_text_in_place_of_the_run_s_is_not_told_as_its_own(numbers, tmp_path):
    data = Path(shutil.copytree(numbers, tmp_path / "data"))
    train_tiny(data, tmp_path / "run", "--steps", 2, observers=[Report()])
    (data / "manifest.json").write_text((data / "manifest.json").read_text() + "\n")
    page = made(tmp_path / "run")
    assert (page["data"], page["baselines"], page["copies"], page["attention"]) == ([], {}, None, None)
    assert page["notes"] == [
        f"The data can't be shown: {data} is not the text that it was trained on; prepare that again."
    ]


def test_what_is_no_run_is_told_in_a_line(run_a, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for folder, reason in (("empty", "holds no run"), ("missing", "is no folder"), ("a/config.toml", "is no folder")):
        assert exit_code_of(lambda folder=folder: report.main([str(tmp_path / folder)])) == 1
        assert reason in (said := capsys.readouterr().err) and said.count("\n") == 1
    (run_a / "config.toml").write_text("steps = ")
    assert exit_code_of(lambda: report.main([str(run_a)])) == 1
    assert "is not valid TOML" in capsys.readouterr().err
    for flags in ([], [str(run_a), "--out", "page.png"], [str(run_a), "--out", str(tmp_path / "no" / "page.html")]):
        assert exit_code_of(lambda flags=flags: report.main(flags)) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_records_of_any_kind_make_a_page(run_a):
    odd = [1, "text", None, True, [1], {"a": 1}, 10**400, -(10**400), 1e308, math.inf, math.nan, "\ud800"]
    keys = ["train_loss", "val_loss", "tokens", "elapsed_seconds", "skipped_steps", "val_bits_per_byte", "prompt"]
    chance = random.Random(1)
    for name in ("metrics.jsonl", "samples.jsonl"):
        records = [{key: chance.choice(odd) for key in chance.sample(keys, 5)} for _ in range(400)]
        records = [record | {"step": chance.choice([1, 2, 3, True, *odd]), "text": "\ud800"} for record in records]
        records.append({"step": 4, "train_loss": 1.0, "elapsed_seconds": 1e308, "prompt": "", "text": "\ud800"})
        (run_a / name).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (run_a / "about.json").write_text('{"machine": 7, "defaults": [], "parameters": "many"}')
    with open(run_a / "config.toml", "a") as file:
        file.write("day = 2020-01-01\n")
    assert made(run_a)["settings"]["day"] == "2020-01-01"


# Nothing from a run's files is markup or script.


def poisoned(folder: Path) -> Path:
    """The same run with markup wherever a text can stand; its name too."""
    poisoned = folder.with_name("<img src=x onerror=alert(1)>")
    folder.rename(poisoned)
    with open(poisoned / "samples.jsonl", "a") as file:
        for _ in range(2):
            file.write(f"{json.dumps({'step': 8, 'prompt': EVIL, 'text': EVIL})}\n")
    with open(poisoned / "config.toml", "a") as file:
        file.write(f"evil = {json.dumps(EVIL)}\n")
    (poisoned / "about.json").write_text(json.dumps({"machine": {EVIL: EVIL}, "defaults": {EVIL: EVIL}}))
    return poisoned


def test_markup_in_a_run_stays_text(run_a):
    template = (ROOT / "engine" / "report" / "web" / "report.html").read_text("utf-8")
    folder = poisoned(run_a)
    page = made(folder)
    text = (folder.parent / "page.html").read_text("utf-8")
    assert text.count("<script") == template.count("<script") and text.count("<!--") == template.count("<!--")
    assert "<img" not in text
    assert page["samples"][-1]["text"] == page["settings"]["evil"] == EVIL and page["name"] == folder.name


def test_the_policy_names_the_scripts_and_styles_of_the_template_alone(place):
    text = (place / "a" / "report.html").read_text("utf-8")
    assert text.index('charset="utf-8"') < 1024  # as HTML asks
    policy = re.search('Content-Security-Policy" content="(.*?)"', text)[1]
    inline = re.findall(r"<(script|style)>(.*?)</\1>", text, re.S)
    hashes = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for _, content in inline]
    assert len(hashes) == 4 and re.findall("'sha256-(.*?)'", policy) == hashes
    assert "unsafe" not in policy and policy.startswith("default-src 'none'; ")


# Several runs on one page.


def test_runs_are_compared_on_one_page(place, capsys):
    report.main([str(place / "a"), str(place / "b")])
    assert capsys.readouterr().out.strip() == str(place / "compare.html")
    one, other = shown(place / "compare.html")
    assert (one["name"], other["name"]) == ("a", "b") and one["attention"] is other["attention"] is None
    assert one["settings"]["learning_rate"] != other["settings"]["learning_rate"]


# What is seen and done on it, in a browser.


def opened(page: Any, path: Path) -> Any:
    page.goto(path.as_uri())
    return page


def readouts(page: Any) -> list[str]:
    """What is said beneath each chart."""
    return page.locator("#charts .readout").all_inner_texts()


@pytest.mark.browser
def test_values_are_read_at_the_mouse_and_by_keyboard(page, place):
    losses, validation = logged(place / "a", "train_loss"), logged(place / "a", "val_loss")
    plot = opened(page, place / "a" / "report.html").locator("#charts .plot").first
    box = plot.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 20)
    expected = f"step 8: training {losses[8]:.4g}; validation {validation[8]:.4g} at 8"
    page.wait_for_function("text => document.querySelector('.readout').textContent === text", arg=expected)
    assert all(text.startswith("step 8: ") for text in readouts(page))  # the others' cursors go along
    page.mouse.move(0, 0)
    plot.press("Home")
    assert readouts(page)[0] == f"step 1: training {losses[1]:.4g}; validation {validation[4]:.4g} at 4"
    plot.press("ArrowRight")
    plot.press("ArrowRight")
    assert f"step 3: training {losses[3]:.4g}" in plot.get_attribute("aria-valuetext")
    plot.press("End")
    assert readouts(page)[0] == expected
    page.get_by_role("button", name="validation").press("Enter")
    plot.press("ArrowLeft")
    assert readouts(page)[0] == f"step 7: training {losses[7]:.4g}"
    page.get_by_label("steps", exact=True).press("ArrowRight")
    assert page.get_by_label("tokens", exact=True).is_checked()
    plot.press("Home")
    assert readouts(page)[0] == f"64 tokens: training {losses[1]:.4g}"


@pytest.mark.browser
def test_charts_are_zoomed_by_mouse_and_by_keyboard(page, place):
    plot = opened(page, place / "a" / "report.html").locator("#charts .plot").first
    extent = "plots.map(({u}) => [u.scales.x.min, u.scales.x.max])"
    assert page.evaluate(extent) == [[1, 8]] * 5
    plot.press("End")
    plot.press("+")
    assert page.evaluate(extent) == [[6.25, 8]] * 5
    plot.press("0")
    assert page.evaluate(extent) == [[1, 8]] * 5
    box = plot.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 7, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 4 / 7, box["y"] + 20, steps=3)
    page.mouse.up()
    assert page.evaluate(extent)[0] == pytest.approx([2, 5], abs=0.1)


@pytest.mark.browser
def test_heads_and_layers_and_tokens_are_chosen_by_mouse_and_by_keyboard(page, place):
    found = shown(place / "a" / "report.html")["attention"]
    maps = np.frombuffer(base64.b64decode(found["weights"]), np.uint8).reshape(2, 2, 16, 16) / 255

    def said(layer: int, head: int, row: int, column: int) -> str:
        row_, column_ = (f"“{found['tokens'][i]}” (token {i + 1})" for i in (row, column))
        weight = f"{maps[layer, head, row, column]:.3f}"
        return f"Layer {layer + 1}, head {head + 1}: {row_} looks at {column_} with weight {weight}"

    output = opened(page, place / "a" / "report.html").locator("#attention output")
    assert output.inner_text() == said(0, 0, 15, int(maps[0, 0, 15].argmax()))
    page.get_by_label("Layer", exact=True).press("ArrowDown")
    assert output.inner_text() == said(1, 0, 15, int(maps[0, 0, 15].argmax()))
    page.get_by_label("Head", exact=True).select_option("2")
    assert output.inner_text() == said(1, 1, 15, int(maps[0, 0, 15].argmax()))
    page.locator("#sentence").press("ArrowLeft")
    assert output.inner_text() == said(1, 1, 14, int(maps[1, 1, 14].argmax()))
    page.locator("#map").press("ArrowUp")
    for _ in range(20):
        page.locator("#map").press("ArrowLeft")
    page.locator("#map").press("ArrowRight")
    assert output.inner_text() == said(1, 1, 13, 1)
    page.locator("#sentence span").nth(4).hover()
    assert output.inner_text() == said(1, 1, 4, int(maps[1, 1, 4].argmax()))
    page.locator("#map").hover(position=page.evaluate("({x: 90 + 22 * 2.5, y: 90 + 22 * 7.5})"))
    assert output.inner_text() == said(1, 1, 7, 2)


@pytest.mark.browser
def test_samples_are_leafed_through_and_copies_and_baselines_are_shown(page, place, tmp_path):
    copies = {"samples": [[[2, 5, "train, byte 7"]], [], []], "yardstick": "In validation text such runs have 3."}
    run = describe_run(place / "a", baselines={"bigram": 2.5}, copies=copies)
    run["samples"] = [one | {"text": f"é🚀{one['text']}"} for one in run["samples"]]
    write_page([run], tmp_path / "page.html")
    samples = opened(page, tmp_path / "page.html").locator("#samples")
    assert page.locator("#samples mark").inner_text() == run["samples"][3]["text"][2:7]
    assert "5 characters: train, byte 7" in samples.inner_text() and "such runs have 3" in samples.inner_text()
    page.locator("#when").press("ArrowLeft")
    assert "at step 4" in samples.inner_text() and page.locator("#samples mark").count() == 0
    assert run["samples"][1]["text"] in page.locator("#samples pre").nth(1).text_content()
    assert "baseline: bigram, nats per token\t2.5000" in page.locator("#figures").inner_text()


@pytest.mark.browser
def test_markup_in_a_run_is_seen_as_text(page, run_a):
    folder = poisoned(run_a)
    made(folder, folder)
    opened(page, folder.parent / "page.html")
    assert page.locator("img").count() == 0 and page.locator("h1").inner_text().count(folder.name) == 2
    made(folder)
    opened(page, folder.parent / "page.html")
    assert page.title() == page.locator("h1").inner_text() == folder.name
    assert page.locator("img").count() == 0 and page.locator("#samples b").last.inner_text() == EVIL
    assert EVIL in page.locator("#settings").inner_text() and EVIL in page.locator("#machine").inner_text()


@pytest.mark.browser
@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1280, "light")])
def test_pages_fit_the_screen(page, place, long_run, width, scheme):
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    made(place / "a", place / "b")
    for path in (place / "a" / "report.html", long_run / "report.html", place / "page.html"):
        opened(page, path)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        for _ in range(3):
            page.locator("#charts .plot").first.press("ArrowRight")
        assert readouts(page)[0].startswith("step ")


@pytest.mark.browser
def test_runs_are_compared_by_steps_tokens_or_time(page, place, tmp_path):
    made(place / "a", place / "b")
    opened(page, place / "page.html")
    assert page.locator("h1").inner_text() == "Compared: a, b"
    plot = page.locator("#charts .plot").first
    plot.press("End")
    (one, other), name = (logged(place / run, "train_loss") for run in "ab"), "training"
    assert f"a, {name} {one[8]:.4g}" in readouts(page)[0] and f"b, {name} {other[6]:.4g}" in readouts(page)[0]
    page.get_by_role("button", name="b", exact=True).click()
    plot.press("ArrowLeft")
    assert "b, " not in readouts(page)[0]
    page.get_by_label("time", exact=True).check()
    plot.press("End")
    assert re.match(r"[\d.]+ seconds: a, training ", readouts(page)[0])
    rows = dict(line.split("\t", 1) for line in page.locator("#settings table").inner_text().split("\n"))
    assert rows == {"setting": "a\tb", "steps": "8\t6", "eval_every": "4\t3", "save_every": "4\t500"} | {
        "learning_rate": f"{describe_run(place / 'a')['settings']['learning_rate']}\t0.001"
    }
    assert "8 of 8\t6 of 6" in page.locator("#figures").inner_text()
