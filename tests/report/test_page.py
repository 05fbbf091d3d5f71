"""The content of the report, and its charts, comparisons and characters in a browser."""

import base64
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import train_tiny

from engine.data.batches import open_mixture
from engine.report.dataset_summary import describe_dataset
from engine.report.page import collect_run_content, describe_data, write_page
from engine.report.samples import describe_environment
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


def read_charts(page: Any) -> list[str]:
    """The text beneath each chart."""
    return page.locator("#charts .readout").all_inner_texts()


def read_text(locator: Any) -> str:
    """The text of an element, without marks of direction."""
    return locator.inner_text().replace("\u200e", "")


def test_a_run_records_its_tokenizer_and_its_text(numbers, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("different text\n" * 500)
    paths = {"same": numbers.parent / "numbers.txt", "different": path}
    for name, path in paths.items():
        out = tmp_path / name
        prepare(PrepareConfig(inputs=(str(path),), tokenizer="byte", out=out))
    runs = [
        describe_environment(train_tiny(data, tmp_path / "run" / data.name, "--steps", 1))
        for data in (numbers, tmp_path / "same", tmp_path / "different")
    ]
    texts, tokenizers = ([run[key] for run in runs] for key in ("text", "tokenizer"))
    assert texts[0] == texts[1] != texts[2] and tokenizers[0] != tokenizers[1] == tokenizers[2]


@pytest.mark.parametrize("kind", ["repeats", "pairs"])
def test_the_data_has_the_figures_that_prepare_prints(tmp_path, kind):
    rows = [{"text": f"Document {i} é.\n" * (i % 7 + 1), "answer": "ü" * i} for i in range(1, 46)]
    rows += rows[:9]
    flags: dict[str, Any] = {"deduplicate": True}
    if kind == "pairs":
        flags |= {"prompt_field": "text", "completion_field": "answer"}
    path = tmp_path / "text.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    config = PrepareConfig(inputs=(str(path),), tokenizer="byte", out=tmp_path / "data", **flags)
    printed = describe_dataset(prepare(config)[0])
    data = open_mixture([tmp_path / "data"])
    (table,) = describe_data(data)
    assert table["documents"] == re.search(r"documents +([\d,]+)", printed)[1]
    tokens = re.findall(r"(?:train|val) tokens +([\d,]+)", printed)
    assert [table["tokens to train on"], table["tokens to validate on"]] == tokens
    counts = data.manifest["splits"]["train"]
    ratio = f"{counts['bytes'] / counts.get('targets', counts['tokens']):.2f}"
    assert table["bytes per token"] == ratio
    assert kind == "pairs" or f"{ratio} a token" in printed


@pytest.mark.browser
def test_charts_tell_the_values_of_one_run_or_of_several(page, tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]
    show(page, tmp_path / "page.html", runs[0])
    plot = page.locator("#charts .plot").first
    plot.press("Home")
    assert read_charts(page)[0] == "step 1: training 3.983; validation 3.867 at 20"
    page.get_by_role("button", name="training", exact=True).click()
    page.get_by_label("tokens", exact=True).check()
    page.locator("#charts .plot").first.press("Home")
    assert read_charts(page)[0] == "64 tokens: validation 3.867 at 1,280"
    show(page, tmp_path / "page.html", *runs)
    plot.press("End")
    lines = "a, training 3; a, validation 3.2 at 60; b, training 3; b, validation 3.2 at 60"
    assert read_charts(page)[0] == f"step 60: {lines}"
    settings = page.locator("#settings table").inner_text().split("\n")
    assert settings == ["setting\ta\tb", "data\t[data/a]\t[data/b]"]


@pytest.mark.browser
@pytest.mark.parametrize("changes", [{}, {"tokenizer": "u"}, {"text": ["y"]}])
def test_runs_that_share_no_tokenizer_or_text_are_compared_by_bits(page, tmp_path, changes):
    about = {"tokenizer": "t", "text": ["x"]}
    runs = [make_run(tmp_path / "a", about), make_run(tmp_path / "b", about | changes)]
    show(page, tmp_path / "page.html", *runs)
    warnings = page.locator(".warning").all_inner_texts()
    assert len(warnings) == len(changes)
    assert all(key in text for key, text in zip(changes, warnings, strict=True))
    for heading in ("#charts h3", "#figures tbody th"):
        text = page.locator(heading).first.inner_text().lower()
        assert ("bits per byte" in text) == bool(changes)


@pytest.mark.browser
def test_the_weights_of_each_head_are_told(page, tmp_path):
    # Each head attends to one token: of all four heads, the first to the first, and so on.
    cells = itertools.product(range(4), range(4), range(4))
    weights = [255 * (column == min(head, row)) for head, row, column in cells]
    attention = {
        "tokens": ["⟨e6⟩", "⟨98⟩", "⟨a5⟩", "x"],
        "shared": [None, None, [3, "春"], None],
        "layers": 2,
        "heads": 2,
        "of": [2, 2],
        "weights": base64.b64encode(bytes(weights)).decode(),
    }
    show(page, tmp_path / "page.html", make_run(tmp_path / "a") | {"attention": attention})
    output = page.locator("#attention output")
    assert "“x” (token 4) looks at “春 ⟨e6⟩” (token 1) with weight 1.000" in read_text(output)
    page.get_by_label("Head", exact=True).select_option("2")
    page.locator("#sentence").press("ArrowLeft")
    assert "“春 ⟨a5⟩” (token 3) looks at “春 ⟨98⟩” (token 2)" in read_text(output)
