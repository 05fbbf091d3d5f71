"""The content of the report, and its charts, comparisons and characters in a browser."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import report
from engine.data.dataset import open_dataset
from engine.report.attention_maps import encode_triangles
from engine.report.callback import text_origin
from engine.report.page import read_run, write_page
from prepare import PrepareConfig, prepare

NUM_STEPS = 60


def make_run(folder: Path, about: Any = None) -> Any:
    """Describe a run from the files that it would write."""
    records = []
    for step in range(1, NUM_STEPS + 1):
        record = {"step": step, "tokens": 64 * step, "elapsed_seconds": step, "grad_norm": 1.5}
        record |= {"learning_rate": 0.01, "tokens_per_second": 9000}
        records.append({**record, "train_loss": 4 - step / 60})
        if step % 20 == 0:
            val = {"val_loss": 4.2 - step / 60, "val_bits_per_byte": 2 - step / 90}
            records.append({"step": step, **val, "val_perplexity": 30})
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    (folder / "about.json").write_text(json.dumps(about or {}))
    (folder / "config.toml").write_text(f"data = [{json.dumps(f'data/{folder.name}')}]\n")
    return read_run(folder)


def show(page: Any, path: Path, *runs: Any) -> None:
    write_page(runs, path)
    page.goto(path.as_uri())


def expect(locator: Any) -> Any:
    return pytest.importorskip("playwright.sync_api").expect(locator)


def read_legend(page: Any, chart: int = 0) -> dict[str, str]:
    """The names and the values below a chart."""
    legend = page.locator("#charts .u-legend").nth(chart)
    names, values = (legend.locator(tag).all_inner_texts() for tag in ("th", "td"))
    return dict(zip(map(str.strip, names), values, strict=True))


def read_text(locator: Any) -> str:
    """The text of an element, without marks of direction."""
    return locator.inner_text().replace("\u200e", "")


@pytest.mark.browser
def test_all_runs_are_listed_sorted_and_compared(
    page, tmp_path, monkeypatch, capsys, check_accessibility
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "group").mkdir(parents=True)
    names = ("first", "group/<b>2{{data}},", "group/10", "damaged", "\x1b[31mred\n")
    about = {"machine": {"processor": "fast", "commit": "1234567"}}
    state = {"state": "training", "step": 60, "seconds": 90}
    for index, name in enumerate(names):
        make_run(Path("out", name), about | {"parameters": 10 + index, "state": {**state}})
    Path("out/damaged/about.json").write_text("[]")
    report.main([])
    *rows, path = capsys.readouterr().out.splitlines()
    assert path == "out/index.html" and len(rows) == 1 + len(names)
    assert rows[-1].startswith("damaged: damaged. out/damaged/about.json: must be")
    assert any(row.startswith("?[31mred?") for row in rows)
    row = next(row for row in rows if row.startswith("first"))
    assert " ".join(row.split()) == "first stopped data/first 0.00M 60 1.5 3.2000 1.3333"
    page.goto((tmp_path / "out" / "index.html").as_uri() + "#%")
    shown = page.locator("#list tbody tr")

    def read_names() -> list[str]:
        return [row.locator("th").inner_text().strip() for row in shown.all()]

    assert sorted(read_names()[-3:]) == ["first", "group/10", "group/<b>2{{data}},"]
    page.get_by_role("button", name="parameters").click()
    page.get_by_role("button", name="parameters").click()
    assert read_names()[1:4] == ["group/10", "group/<b>2{{data}},", "first"]
    check_accessibility()
    link = page.get_by_role("link", name="group/<b>2{{data}}").get_attribute("href")
    assert link == "group/%3Cb%3E2%7B%7Bdata%7D%7D%2C/report.html"
    page.get_by_role("button", name="Compare").click()
    assert "Mark" in page.locator("#compare-status").inner_text()
    for mark in page.locator("#list input[value^=group]").all():
        mark.check()
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("h1")).to_have_text("Compared: group/10, group/<b>2{{data}},")
    assert page.locator("#results tbody tr").count() == 2 and page.locator("#charts canvas").count()
    page.get_by_role("link", name="All runs").click()
    expect(page.locator("h1")).to_have_text("5 runs")


@pytest.mark.browser
def test_texts_and_heads_of_a_step_are_shown_together(page, tmp_path):
    run = full_run(tmp_path / "run", 1, 2, 4)
    texts = {1: "noise", 2: "nose", 20: "words"}
    run["samples"] = [{"step": step, "prompt": "A ", "text": text} for step, text in texts.items()]
    run["best_step"] = 20
    maps = torch.rand(2, 4, 4).tril()
    frames = [
        {**run["attention"], "step": step, "weights": encode_triangles(maps**step)}
        for step in (1, 2)
    ]
    show(page, tmp_path / "page.html", run | {"frames": frames})
    pixels = "document.querySelector('#small-heads canvas').toDataURL()"
    pictures = [page.evaluate(pixels)]
    for index, text in enumerate(texts.values()):
        page.locator("#when").fill(str(index))
        expect(page.locator("#written")).to_have_text(f"A {text}")
        pictures.append(page.evaluate(pixels))
    assert pictures[0] == pictures[3] != pictures[1] != pictures[2]
    page.locator("#small-heads [role=gridcell]").nth(1).click()
    expect(page.locator("#looks")).to_contain_text("layer 1, head 2")


def test_losses_are_comparable_by_tokenizer_and_text(numbers, tmp_path):
    (tmp_path / "text.txt").write_text("different text\n" * 500)
    datasets = [open_dataset(numbers)]
    for path in (numbers.parent / "numbers.txt", tmp_path / "text.txt"):
        out = tmp_path / path.stem
        prepare(PrepareConfig(inputs=(str(path),), tokenizer="byte", out=out))
        datasets.append(open_dataset(out))
    texts = [text_origin(dataset) for dataset in datasets]
    tokenizers = [dataset.tokenizer.fingerprint for dataset in datasets]
    assert texts[0] == texts[1] != texts[2] and tokenizers[0] != tokenizers[1] == tokenizers[2]


STATE = {"step": 60, "total_steps": 80, "progress": 0.75, "seconds": 373, "seconds_left": 48}
RESUME = "python train.py --out out/a --resume"
LONGER = f"{RESUME} --steps 120"

# Headings of rows, and words of commands, that stand on two lines.
BROKEN_WORDS = """[...document.querySelectorAll("#machine th, .commands span")].filter((word) => {
  const range = new Range();
  range.selectNodeContents(word);
  return range.getClientRects().length > 1 && word.textContent.length < 20;
}).map((word) => word.textContent)"""


def make_state(state: str) -> dict[str, Any]:
    commands = {"resume": RESUME, "longer": LONGER}
    return {**STATE, **commands, "state": state, "updated_at": time.time()}


def full_run(folder: Path, layers: int = 2, heads: int = 3, length: int = 12) -> Any:
    """Describe a run that has everything: samples, attention, baselines, copied passages."""
    about = {
        "state": make_state("done"),
        "parameters": 926_000,
        "data": [{"dataset": "data/pydocs"}],
        "machine": {"cores": 2, "processor": "Chip " * 12},
        "typed": {"data": ["data/pydocs"], "text": "../notes"},
        "defaults": {"data": ["data/pydocs"], "steps": None, "eval_every": None, "seed": 1},
        "baselines": {"uniform": 7.6, "unigram": 6.5, "bigram": 4.3},
        "xz_bits_per_byte": 1.7,
        "text": ["x"],
        "tokenizer": "t",
    }
    run = make_run(folder, about)
    run["settings"] |= {"steps": 60, "eval_every": 20, "seed": 1, "vocab_size": 2048}
    run["settings"] |= {"num_layers": layers, "num_heads": heads, "context_length": length}
    run["samples"] = [
        {"step": step, "prompt": prompt, "text": f"text of step {step}"}
        for step, prompt in itertools.product((20, 40, 60), ("first", "第二 ‏زيتون"))
    ]
    maps = torch.eye(length).expand(layers * heads, length, length).clone()
    maps[1] = torch.eye(length).roll(-1, dims=1).tril()  # to the token before
    run["attention"] = {
        "ids": [*range(length)],
        "texts": [f"w{index}" for index in range(length)],
        "labels": [f"w{index}" for index in range(length)],
        "shared": [None] * length,
        "layers": layers,
        "heads": heads,
        "weights": encode_triangles(maps),
    }
    return run


@pytest.mark.browser
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("training", "Training – 75%, 4"),
        ("done", "Done in 6 min 13 s, 60 steps"),
        ("stopped", "Stopped at step 60 of 80"),
    ],
)
def test_the_first_screen_says_whether_the_run_goes_on_and_how_good_it_is(
    page, tmp_path, name, text
):
    run = full_run(tmp_path / "a")
    run["state"] = make_state(name)
    page.set_viewport_size({"width": 1280, "height": 900})
    show(page, tmp_path / "page.html", run)
    assert text in page.locator("#state").inner_text()
    assert "0.93M parameters" in page.locator("#sentence").inner_text()
    figures = page.locator("#headline dd").all_inner_texts()
    bits = f"{run['best']['val_bits_per_byte']:.4f}"
    assert figures == [f"{run['best']['val_loss']:.4f}", bits, "30", "60"]
    values = [float(read_legend(page, chart)["validation"]) for chart in (0, 1)]
    assert values == [*map(float, figures[:2])]
    bars = page.locator("#yardsticks span").all_inner_texts()
    assert bars[::2] == ["uniform", "unigram", "bigram", "xz -9", "this model"]
    assert bars[-1] == bits
    assert "Still improving" in page.locator("#verdict p").inner_text()
    assert (LONGER in page.locator("#verdict code").all_inner_texts()) == (name == "done")
    commands = page.locator("#next code").all_inner_texts()
    assert (RESUME in commands) == (name == "stopped") and any("--page" in c for c in commands)
    box = page.locator("#first").bounding_box()
    assert box["y"] + box["height"] < 900


@pytest.mark.browser
def test_a_page_refreshes_during_training_until_the_reader_does_something(page, tmp_path):
    run = full_run(tmp_path / "a")
    page.clock.install()
    run["state"] = make_state("training")
    show(page, tmp_path / "page.html", run)
    titles = page.locator("#settings summary").all_inner_texts()
    assert titles == ["Set by you (2)", "Chosen automatically (6)", "At their defaults (1)"]
    assert "text\t../notes\tnot set" in page.locator("#settings table").first.inner_text()
    for state, text in (("training", "Training"), ("done", "Done")):
        run["state"] = make_state(state)
        write_page([run], tmp_path / "page.html")
        with page.expect_navigation():
            page.clock.fast_forward(11_000)
        assert text in page.locator("#state").inner_text()
    run["state"] = make_state("training")
    show(page, tmp_path / "page.html", run)
    page.get_by_label("tokens", exact=True).check()
    page.clock.fast_forward(11_000)
    assert page.get_by_label("tokens", exact=True).is_checked()


@pytest.mark.browser
def test_charts_share_their_cursor_their_zoom_and_their_legend(page, tmp_path):
    run = full_run(tmp_path / "a")
    run["state"] = make_state("training")
    show(page, tmp_path / "page.html", run)
    legend = read_legend(page)
    assert legend.items() >= {"steps": "80", "training": "3", "bigram": "4.3"}.items()
    assert legend["validation"] == legend["checkpoint used"] == "3.2"
    plot = page.locator("#charts .plot").nth(2)
    for _ in range(3):
        plot.press("ArrowLeft")
    assert read_legend(page, 3)["steps"] == "59"
    assert read_legend(page)["training"] == "3.0167" and read_legend(page)["validation"] == "3.2"
    page.locator(".u-over").first.scroll_into_view_if_needed()
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50, steps=5)
    page.mouse.up()
    page.mouse.move(box["x"] + 1, box["y"] + 50)
    assert read_legend(page, 3)["steps"] == "20"  # the zoom is that of all charts
    page.mouse.dblclick(box["x"] + 1, box["y"] + 50)
    page.mouse.move(box["x"] + 2, box["y"] + 50)
    assert read_legend(page, 3)["steps"] == "0"
    button = page.locator("#charts .u-legend").nth(1).get_by_role("button", name="validation")
    button.press("Enter")
    assert page.locator("#charts .u-series.u-off").count() == 4  # lines and rings
    page.get_by_label("minutes").check()
    assert "minutes" in read_legend(page) and page.locator("#charts .u-series.u-off").count() == 4


@pytest.mark.browser
@pytest.mark.parametrize("changes", [{}, {"text": ["y"]}])
def test_runs_are_compared_and_the_better_is_named_where_texts_are_equal(page, tmp_path, changes):
    runs = [full_run(tmp_path / name) for name in "abc"]
    runs[1]["best"] = runs[1]["best"] | {"val_bits_per_byte": 1.2}
    runs[1]["about"] = runs[1]["about"] | changes
    runs[1]["settings"] |= {"steps": 90, "eval_every": 7}
    runs[1]["about"]["machine"]["commit"] = "1a2b"
    show(page, tmp_path / "page.html", *runs)
    winner = page.locator("#winner").inner_text()
    assert ("b is better than" in winner) == ("text" not in changes)
    assert "text" in changes or "by 10.0%" in winner
    rows = page.locator("#results tbody th")
    assert rows.first.inner_text() == "b"
    page.get_by_role("button", name="loss").click()
    assert rows.first.inner_text() == "a"
    assert page.locator("#samples .beside").first.locator("h3").all_inner_texts() == [*"abc"]
    settings = page.locator("#settings table").inner_text().split("\n")
    expected = ["data\t[data/a]\t[data/b]\t[data/c]", "steps\t60\t90\t60", "eval_every\t20\t7\t20"]
    assert settings[1:] == [*expected, "commit of the code\tnot recorded\t1a2b\tnot recorded"]


@pytest.mark.browser
@pytest.mark.parametrize("count", [1, 2])
def test_the_report_is_accessible_and_fits_a_phone(page, tmp_path, count, check_accessibility):
    runs = [full_run(tmp_path / name, 3, 4) for name in "ab"][:count]
    show(page, tmp_path / "page.html", *runs)
    check_accessibility()
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for width in range(360, 400, 4):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate(BROKEN_WORDS) == []


@pytest.mark.browser
def test_a_large_run_has_a_small_page_that_is_soon_interactive(page, tmp_path):
    run = full_run(tmp_path / "a", 24, 16, 32)
    records = [
        {"step": step, "tokens": step, "elapsed_seconds": step, "train_loss": 1 + 1 / step}
        for step in range(1, 20_001)
    ]
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    (tmp_path / "a" / "metrics.jsonl").write_text(lines)
    path = tmp_path / "page.html"
    write_page([read_run(tmp_path / "a")], path)
    assert path.stat().st_size < 1_000_000
    write_page([read_run(tmp_path / "a") | {"attention": run["attention"]}], path)
    assert path.stat().st_size < 3_000_000
    started_at = time.monotonic()
    page.goto(path.as_uri())
    assert read_legend(page)["steps"] == "19,975.5"
    assert page.locator("#heads [role=gridcell]").count() == 384
    assert time.monotonic() - started_at < 10  # a second on an idle machine
