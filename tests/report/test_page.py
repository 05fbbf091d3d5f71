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
from engine.report.page import collect_run_content, write_page
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
    (folder / "config.toml").write_text(f'data = ["data/{folder.name}"]\n')
    return collect_run_content(folder)


def show(page: Any, path: Path, *runs: Any) -> None:
    write_page(runs, path)
    page.goto(path.as_uri())


def expect(locator: Any) -> Any:
    return pytest.importorskip("playwright.sync_api").expect(locator)


def read_charts(page: Any) -> list[str]:
    """The text beneath each chart."""
    return page.locator("#charts .readout").all_inner_texts()


def read_text(locator: Any) -> str:
    """The text of an element, without marks of direction."""
    return locator.inner_text().replace("\u200e", "")


@pytest.mark.browser
def test_all_runs_are_listed_sorted_filtered_and_compared(
    page, tmp_path, monkeypatch, capsys, check_accessibility
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "group").mkdir(parents=True)
    names = ("first", "group/<b>2{{data}}", "group/10", "damaged")
    about = {"parameters": 12_000, "machine": {"processor": "fast", "commit": "1234567"}}
    state = {"state": "training", "step": 60, "seconds": 90}
    for index, name in enumerate(names):
        make_run(Path("out", name), about | {"parameters": 10 + index, "state": {**state}})
    Path("out/damaged/about.json").write_text("[]")
    report.main([])
    *rows, path = capsys.readouterr().out.splitlines()
    assert path == "out/index.html" and len(rows) == 1 + len(names)
    assert rows[-1].startswith("damaged: damaged. out/damaged/about.json: must be")
    assert " ".join(rows[1].split()) == "first stopped data/first 0.00M 60 1.5 3.2000 1.3333"
    page.goto((tmp_path / "out" / "index.html").as_uri())
    shown = page.locator("#list tbody tr:visible")

    def read_names() -> list[str]:
        return [row.locator("th").inner_text().strip() for row in shown.all()]

    assert " ".join(read_names()) == "damaged first group/<b>2{{data}} group/10"
    page.get_by_role("button", name="parameters").click()
    page.get_by_role("button", name="parameters").click()
    assert read_names()[:3] == ["group/10", "group/<b>2{{data}}", "first"]
    check_accessibility()
    link = page.get_by_role("link", name="group/<b>2{{data}}").get_attribute("href")
    assert link == "group/%3Cb%3E2%7B%7Bdata%7D%7D/report.html"
    page.fill("#filter", "GROUP")
    assert sorted(read_names()) == ["group/10", "group/<b>2{{data}}"]
    page.get_by_role("button", name="Compare").click()
    assert "Mark" in page.locator("#compare-status").inner_text()
    for mark in page.locator("#list tbody tr:visible input").all():
        mark.check()
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("h1")).to_have_text("Compared: group/10, group/<b>2{{data}}")
    assert page.locator("#results tbody tr").count() == 2 and page.locator("#charts canvas").count()
    page.get_by_role("link", name="All runs").click()
    expect(page.locator("h1")).to_have_text("4 runs")


@pytest.mark.browser
def test_play_shows_texts_and_heads_together(page, tmp_path):
    run = make_run(tmp_path / "run")
    maps = torch.rand(2, 4, 4).tril()
    texts = {1: "noise", 2: "nose", 20: "words"}
    run["samples"] = [{"step": step, "prompt": "A ", "text": text} for step, text in texts.items()]
    habits = {
        1: [None, None],
        2: [None, ["itself", 0.5]],
        20: [["line start", 0.4], ["itself", 0.9]],
    }
    attention = {"labels": [*"abcd"], "shared": [None] * 4, "layers": 1, "heads": 2}
    frames = [
        {**attention, "step": step, "weights": encode_triangles(maps**step), "habits": each}
        for step, each in habits.items()
    ]
    show(page, tmp_path / "page.html", run | {"frames": frames[:2], "attention": frames[2]})
    firsts = page.locator("#firsts")
    expect(firsts).to_contain_text("“itself” from step 2 (layer 1, head 2)")
    pixels = "document.querySelector('#small-heads canvas').toDataURL()"
    pictures = [page.evaluate(pixels)]
    for index, (step, text) in enumerate(texts.items()):
        page.locator("#when").fill(str(index))
        expect(page.locator("#written")).to_have_text(f"A {text}")
        assert ("itself" in firsts.inner_text()) == (step > 1)
        pictures.append(page.evaluate(pixels))
    assert pictures[0] == pictures[3] and len({*pictures}) == 3
    page.locator("#when").press("Home")
    page.get_by_role("button", name="Play").click()
    expect(page.locator("#written")).to_have_text("A words")
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
STATES = {
    "training": ("Training – 75%, 4", 0),
    "silent": ("No news for", -3600),
    "done": ("Done in 6 min 13 s, 60 steps", 0),
    "stopped": ("Stopped at step 60 of 80", 0),
}


# Headings of rows, and words of commands, that stand on two lines.
BROKEN_WORDS = """[...document.querySelectorAll("#machine th, .commands span")].filter((word) => {
  const range = new Range();
  range.selectNodeContents(word);
  return range.getClientRects().length > 1 && word.textContent.length < 20;
}).map((word) => word.textContent)"""


def make_state(state: str, seconds: float = 0) -> dict[str, Any]:
    commands = {"resume": RESUME, "longer": LONGER}
    return {**STATE, **commands, "state": state, "updated_at": time.time() + seconds}


def full_run(folder: Path, layers: int = 2, heads: int = 3, length: int = 12) -> Any:
    """Describe a run that has everything: samples, attention, baselines, copied passages."""
    about = {
        "state": make_state("done"),
        "parameters": 926_000,
        "data": [{"dataset": "data/pydocs"}],
        "machine": {"cores": 2, "processor": "Chip " * 12},
        "typed": ["data", "steps"],
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
        "labels": [f"w{index}" for index in range(length)],
        "shared": [None] * length,
        "layers": layers,
        "heads": heads,
        "weights": encode_triangles(maps),
        "habits": [None, ("previous token", 0.93), *[None] * (layers * heads - 2)],
    }
    return run


@pytest.mark.browser
@pytest.mark.parametrize("name", STATES)
def test_the_first_screen_says_whether_the_run_goes_on_and_how_good_it_is(page, tmp_path, name):
    text, seconds = STATES[name]
    run = full_run(tmp_path / "a")
    run["state"] = make_state("training" if name == "silent" else name, seconds)
    page.set_viewport_size({"width": 1280, "height": 900})
    show(page, tmp_path / "page.html", run)
    assert text in page.locator("#state").inner_text()
    assert "0.93M parameters" in page.locator("#sentence").inner_text()
    figures = page.locator("#headline dd").all_inner_texts()
    assert figures == [f"{run['best']['val_bits_per_byte']:.3f}", "30", "60"]
    bars = page.locator("#yardsticks span").all_inner_texts()
    assert bars[::2] == ["uniform", "unigram", "bigram", "xz -9", "this model"]
    assert bars[-1] == figures[0]
    assert "Still improving" in page.locator("#verdict p").inner_text()
    assert (LONGER in page.locator("#verdict code").all_inner_texts()) == (name == "done")
    commands = page.locator("#next code").all_inner_texts()
    assert (RESUME in commands) == (name == "stopped") and any("--page" in c for c in commands)
    box = page.locator("#first").bounding_box()
    assert box["y"] + box["height"] < 900


@pytest.mark.browser
def test_a_page_refreshes_while_the_run_goes_on_and_keeps_what_was_chosen(page, tmp_path):
    run = full_run(tmp_path / "a")
    run["state"] = make_state("training")
    page.clock.install()
    show(page, tmp_path / "page.html", run)
    page.locator("#when").press("Home")
    page.get_by_label("tokens", exact=True).check()
    page.locator("#heads [role=gridcell]").nth(4).click()
    titles = page.locator("#settings summary").all_inner_texts()
    assert titles == ["Set by you (2)", "Chosen automatically (5)", "At their defaults (1)"]
    page.locator("#settings summary").last.click()
    page.evaluate("scrollTo(0, 700)")
    run["state"] = make_state("done")
    write_page([run], tmp_path / "page.html")
    with page.expect_navigation():
        page.clock.fast_forward(11_000)
    assert "Done" in page.locator("#state").inner_text()
    assert page.locator("#written").inner_text() == "firsttext of step 20"
    assert page.get_by_label("tokens", exact=True).is_checked()
    assert "layer 2, head 2" in page.locator("#looks").inner_text()
    assert page.locator("#settings details").last.get_attribute("open") is not None
    assert page.evaluate("scrollY") == 700


@pytest.mark.browser
def test_all_heads_are_shown_named_and_enlarged_with_mouse_and_keys(page, tmp_path):
    show(page, tmp_path / "page.html", full_run(tmp_path / "a"))
    cells = page.locator("#heads [role=gridcell]")
    assert cells.count() == 6
    page.get_by_role("button", name="previous token").click()
    assert "layer 1, head 2: previous token 0.93." in page.locator("#looks").inner_text()
    page.locator("#tokens [role=option]").nth(5).click()
    text = page.locator("#looks")
    assert "“w5” (token 6) looks at “w4” (token 5) with weight 1.00" in read_text(text)
    cells.nth(1).press("ArrowDown")
    page.locator("#map").press("ArrowUp")
    assert "layer 2, head 2. “w4” (token 5) looks at “w4” (token 5)" in read_text(text)


@pytest.mark.browser
@pytest.mark.parametrize("changes", [{}, {"tokenizer": "u"}, {"text": ["y"]}])
def test_runs_are_compared_and_the_better_is_named_where_texts_are_equal(page, tmp_path, changes):
    runs = [full_run(tmp_path / name) for name in "abc"]
    runs[1]["best"] = runs[1]["best"] | {"val_bits_per_byte": 1.2}
    runs[1]["about"] = runs[1]["about"] | changes
    runs[1]["settings"] |= {"steps": 90, "eval_every": 7}
    runs[1]["about"]["machine"]["commit"] = "1a2b"
    show(page, tmp_path / "page.html", *runs)
    warnings = page.locator(".warning").all_inner_texts()
    assert len(warnings) == len(changes)
    assert all(key in text for key, text in zip(changes, warnings, strict=True))
    winner = page.locator("#winner").inner_text()
    assert ("b is better than" in winner) == ("text" not in changes)
    assert "text" in changes or "by 10.0%" in winner
    assert "bits per byte" in page.locator("#charts h3").first.inner_text().lower() or not changes
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
    if count == 1:
        assert page.is_checked("#with-arcs") and not page.locator("#map").is_visible()


@pytest.mark.browser
def test_a_large_run_has_a_small_page_that_is_soon_interactive(page, tmp_path):
    run = full_run(tmp_path / "a", 24, 16, 64)
    records = [
        {"step": step, "tokens": step, "elapsed_seconds": step, "train_loss": 1 + 1 / step}
        for step in range(1, 100_001)
    ]
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    (tmp_path / "a" / "metrics.jsonl").write_text(lines)
    path = tmp_path / "page.html"
    write_page([collect_run_content(tmp_path / "a")], path)
    assert path.stat().st_size < 1_000_000
    write_page([collect_run_content(tmp_path / "a") | {"attention": run["attention"]}], path)
    assert path.stat().st_size < 3_000_000
    started_at = time.monotonic()
    page.goto(path.as_uri())
    page.locator("#charts .plot").first.press("End")
    assert "step 99," in read_charts(page)[0]
    assert page.locator("#heads [role=gridcell]").count() == 384
    assert time.monotonic() - started_at < 10  # a second on an idle machine
