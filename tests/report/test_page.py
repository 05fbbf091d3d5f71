"""The report in a browser: charts, comparisons, samples and attention are legible."""

import base64
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import train_tiny

from engine.data.mixture import open_mixture
from engine.report.dataset_summary import describe_dataset
from engine.report.page import describe_data, describe_run, write_page
from engine.report.samples import describe_environment
from prepare import PrepareConfig, prepare

BLUE = [0, 114, 178]  # training
ORANGE = [213, 94, 0]  # validation
CHARTS = ["loss", "bits", "rate", "norm", "speed"]
BASELINES = {"uniform": 3.9, "unigram": 3.3, "bigram": 3.28}
# The pixels of a canvas; a copy, because reading the canvas itself often would slow it down.
PIXELS = """canvas => {
  const {width, height} = canvas, context = new OffscreenCanvas(width, height)
    .getContext("2d", {willReadFrequently: true});
  context.drawImage(canvas, 0, 0);
  return context.getImageData(0, 0, width, height);
}"""
# The width and height, in pixels, of what is drawn in a color on the canvas of a chart.
EXTENT = f"""([index, color]) => {{
  const {{data, width}} = ({PIXELS})(plots[index].u.ctx.canvas), xs = [], ys = [];
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] > 200 && color.every((c, k) => Math.abs(c - data[i + k]) < 40)) {{
      xs.push(i / 4 % width);
      ys.push(Math.floor(i / 4 / width));
    }}
  const extent = values => values.length && Math.max(...values) - Math.min(...values) + 1;
  return [extent(xs), extent(ys)];
}}"""
# The numbers of the columns, in pixels, where a color is drawn.
COLUMNS = f"""([index, color]) => {{
  const {{data, width}} = ({PIXELS})(plots[index].u.ctx.canvas), columns = new Set();
  for (let i = 0; i < data.length; i += 4)
    if (color.every((c, k) => Math.abs(c - data[i + k]) < 60)) columns.add(i / 4 % width);
  return [...columns];
}}"""
# How many pixels of the attention map have each color.
COLORS = f"""() => {{
  const {{data}} = ({PIXELS})(document.querySelector("#map")), count = {{}};
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3]) count[data.slice(i, i + 3)] = (count[data.slice(i, i + 3)] || 0) + 1;
  return count;
}}"""
LOG_TEXTS = """() => {
  window.texts = [];
  let count = 0;
  const fillText = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    this.canvas.number ??= count++;
    texts.push([text, this.canvas.number, x, y]);
    fillText.call(this, text, x, y);
  };
}"""
SETTLE = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def make_run(
    folder: Path, log_every: int = 1, eval_every: int = 20, about: Any = None, **extras: Any
) -> Any:
    """Describe a run of 60 steps from the files that it would write."""
    records = []
    for step in range(log_every, 61, log_every):
        record = {"step": step, "tokens": 64 * step, "elapsed_seconds": step, "grad_norm": 1.5}
        record |= {"learning_rate": (61 - step) / 5000, "tokens_per_second": 9000 + step}
        records.append({**record, "train_loss": 4 - step / 60})
        if step % eval_every == 0:
            val = {"val_loss": 4.2 - step / 60, "val_bits_per_byte": 2 - step / 90}
            records.append({"step": step, **val, "val_perplexity": 30})
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    (folder / "about.json").write_text(json.dumps(about or {}))
    (folder / "config.toml").write_text(f'data = ["data/{folder.name}"]\n')
    return describe_run(folder, **extras)


def show(page: Any, path: Path, *runs: Any) -> None:
    page.add_init_script(f"({LOG_TEXTS})()")
    write_page(runs, path)
    page.goto(path.as_uri())
    page.evaluate(SETTLE)


def drawn(page: Any, color: list[int]) -> dict[str, bool]:
    """Return which charts show a line of a color."""
    page.evaluate(SETTLE)
    return {name: page.evaluate(EXTENT, [i, color])[0] > 50 for i, name in enumerate(CHARTS)}


@pytest.mark.browser
@pytest.mark.parametrize(
    ("buttons", "blue", "orange"),
    [
        (["training"], ["rate", "norm", "speed"], ["loss", "bits"]),
        (["validation"], ["loss", "rate", "norm", "speed"], ["bits"]),
        (["training", "validation", "baselines"], ["rate", "norm", "speed"], ["bits"]),
    ],
)
def test_a_button_hides_its_line_and_no_chart(page, tmp_path, buttons, blue, orange):
    show(page, tmp_path / "page.html", make_run(tmp_path / "a", baselines=BASELINES))
    for name in buttons:
        page.get_by_role("button", name=name, exact=True).click()
    assert drawn(page, BLUE) == {name: name in blue for name in CHARTS}
    assert drawn(page, ORANGE) == {name: name in orange for name in CHARTS}
    scales = page.evaluate("plots.map(({u}) => [u.scales.y.min, u.scales.y.max])")
    assert scales[0][0] > 2 and scales[1][0] > 1 and scales[2][1] < 0.02  # not from 0 to 1


@pytest.mark.browser
@pytest.mark.parametrize("axis", ["steps", "tokens", "time"])
@pytest.mark.parametrize("hidden", [None, "training"])
def test_a_view_between_two_points_shows_the_lines_that_cross_it(page, tmp_path, axis, hidden):
    show(page, tmp_path / "page.html", make_run(tmp_path / "a", log_every=10))
    page.get_by_label(axis, exact=True).check()
    if hidden:
        page.get_by_role("button", name=hidden, exact=True).click()
    first, last = (factor * (64 if axis == "tokens" else 1) for factor in (43, 47))
    show_range = "([min, max]) => plots.forEach(({u}) => u.setScale('x', {min, max}))"
    page.evaluate(show_range, [first, last])
    assert drawn(page, ORANGE) == {name: name in ("loss", "bits") for name in CHARTS}
    expected = {name: name != "bits" and not (hidden and name == "loss") for name in CHARTS}
    assert drawn(page, BLUE) == expected


SAME = {"tokenizer": "t", "text": ["x"]}


@pytest.mark.browser
@pytest.mark.parametrize(
    ("abouts", "warned"),
    [
        ([SAME, SAME], []),
        ([SAME, {**SAME, "tokenizer": "u"}], ["tokenizers"]),
        ([SAME, {**SAME, "text": ["y"]}], ["texts"]),
        ([SAME, SAME, {"tokenizer": "u", "text": ["y"]}], ["tokenizers", "texts"]),
        ([{}, {}], ["tokenizers", "texts"]),  # of an earlier version, with other data
    ],
)
def test_runs_that_share_no_tokenizer_or_text_are_compared_by_bits(page, tmp_path, abouts, warned):
    runs = [make_run(tmp_path / f"run{i}", about=about) for i, about in enumerate(abouts)]
    show(page, tmp_path / "page.html", *runs)
    warnings = page.locator(".warning").all_inner_texts()
    assert [word in text for word, text in zip(warned, warnings, strict=True)] == [True] * len(
        warned
    )
    assert all("bits per byte" in text for text in warnings)
    first_chart = page.locator("#charts h3").first.inner_text()
    first_figure = page.locator("#figures tbody th").first.inner_text()
    assert ("Bits per byte" in first_chart, "bits per byte" in first_figure) == (bool(warned),) * 2


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


@pytest.mark.parametrize("kind", ["few", "many", "repeats", "pairs"])
def test_the_data_has_the_figures_that_prepare_prints(tmp_path, kind):
    documents = [f"Document {i} é.\n" * (i % 7 + 1) for i in range(450 if kind == "many" else 45)]
    flags: dict[str, Any] = {"deduplicate": True} if kind == "repeats" else {}
    path = tmp_path / "text.jsonl"
    rows = [{"text": text} for text in [*documents, *documents[: 9 if kind == "repeats" else 0]]]
    if kind == "pairs":
        flags = {"prompt_field": "text", "completion_field": "answer"}
        rows = [{**row, "answer": "ü" * i} for i, row in enumerate(rows, 1)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    config = PrepareConfig(inputs=(str(path),), tokenizer="byte", out=tmp_path / "data", **flags)
    printed = describe_dataset(prepare(config)[0])
    data = open_mixture([tmp_path / "data"])
    (table,) = describe_data(data)
    assert (
        table["documents"] == re.search(r"documents +([\d,]+)", printed)[1] == str(len(documents))
    )
    rows = re.findall(r"(?:train|val) tokens +([\d,]+)", printed)
    assert [table["tokens to train on"], table["tokens to validate on"]] == rows
    counts = data.manifest["splits"]["train"]
    ratio = f"{counts['bytes'] / counts.get('targets', counts['tokens']):.2f}"
    assert table["bytes per token"] == ratio
    assert kind == "pairs" or f"{ratio} a token" in printed


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(
    "baselines",
    [BASELINES, {"unigram": 3.97, "bigram": 3.7}, {"unigram": 3.24}, {"bigram": 3.02}],
    ids=["close", "at the edge", "between the lines", "on a line"],
)
def test_names_of_baselines_hide_no_line_and_no_name(page, tmp_path, width, baselines):
    page.set_viewport_size({"width": width, "height": 800})
    show(page, tmp_path / "page.html", make_run(tmp_path / "a", baselines=baselines))
    page.evaluate("texts = []; plots[0].u.redraw()")
    page.evaluate(SETTLE)
    names = [f"{name} {value:.4f}" for name, value in baselines.items()]
    texts = {text: y for text, *_, y in page.evaluate("texts") if text in names}
    assert list(texts) == names
    lines = page.evaluate(
        "Object.values(runs[0].baselines).map(y => plots[0].u.valToPos(y, 'y', true))"
    )
    for bottom, line in zip(texts.values(), lines, strict=True):
        assert not bottom - 11 < line < bottom + 2 and abs(bottom - line) < 60
    bottoms = sorted(texts.values())
    assert all(second - first >= 12 for first, second in itertools.pairwise(bottoms))
    first, last = page.evaluate("[20, 60].map(x => plots[0].u.valToPos(x, 'x', true))")
    for color, start in ((ORANGE, first), (BLUE, page.evaluate("plots[0].u.bbox.left"))):
        columns = page.evaluate(COLUMNS, [0, color])
        assert {*range(math.ceil(start) + 2, int(last) - 2)} <= {*columns}


@pytest.mark.browser
@pytest.mark.parametrize("log_every", [1, 60])
def test_one_evaluation_is_a_dot_with_its_value_and_needs_no_slider(page, tmp_path, log_every):
    samples = [{"step": 60, "prompt": "a", "text": "b"}]
    run = make_run(tmp_path / "a", log_every, eval_every=60) | {"samples": samples}
    show(page, tmp_path / "page.html", run)
    width, height = page.evaluate(EXTENT, [1, ORANGE])
    assert width == height >= 6  # the dot is not cut
    texts = {text for text, *_ in page.evaluate("texts")}
    assert {"3.2", "1.333"} <= texts and ("3" in texts or log_every == 1)
    assert (
        page.locator("#when").is_hidden() and "at step 60" in page.locator("#samples").inner_text()
    )


@pytest.mark.browser
def test_an_axis_has_the_same_decimals_everywhere(page, tmp_path):
    show(page, tmp_path / "page.html", make_run(tmp_path / "a"))
    ticks: dict[Any, set[int]] = {}
    for text, canvas, x, _ in page.evaluate("texts"):
        if re.fullmatch(r"\d+\.\d+", text):
            ticks.setdefault((canvas, x), set()).add(len(text.split(".")[1]))
    assert ticks and all(len(decimals) == 1 for decimals in ticks.values())


def attention_of(labels: list[str], shared: dict[int, Any], weights: list[int]) -> dict[str, Any]:
    """Return the attention of one head: each row has the given weights, of 255."""
    table = [[w if j <= i else 0 for j, w in enumerate(weights)] for i in range(len(labels))]
    encoded = base64.b64encode(bytes(itertools.chain(*table))).decode()
    each = [shared.get(i) for i in range(len(labels))]
    return {
        "tokens": labels,
        "shared": each,
        "layers": 1,
        "heads": 1,
        "of": [1, 1],
        "weights": encoded,
    }


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 700, 1280])
def test_attention_begins_at_the_color_of_the_page_and_names_its_axes(
    page, tmp_path, width, scheme
):
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    labels = [f"w{i}" for i in range(32)]
    attention = attention_of(labels, {}, [0, 255] + [0] * 30)
    show(page, tmp_path / "page.html", make_run(tmp_path / "a") | {"attention": attention})
    colors = page.evaluate(COLORS)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(colors, key=colors.get) == ",".join(re.findall(r"\d+", background))
    span = page.locator("#sentence span").first
    assert span.evaluate("e => getComputedStyle(e).backgroundColor") == background
    texts = {text for text, *_ in page.evaluate("texts")}
    assert "looked at →" in texts and texts & {"looks ↓", "← looks"}


@pytest.mark.browser
@pytest.mark.parametrize(
    ("labels", "shared", "direction"),
    [
        (["⟨e6⟩", "⟨98⟩", "⟨a5⟩", "x"], {2: [3, "春"]}, "ltr"),
        (["a", "⟨20 f0 9f⟩", "⟨9a 80⟩"], {2: [2, "·🚀"]}, "ltr"),
        (["⟨d9⟩", "⟨85⟩", "·", "⟨d8⟩"], {1: [2, "م"]}, "rtl"),
        (["مرحبا", "x"], {}, "rtl"),
    ],
)
def test_a_character_stands_over_its_tokens(page, tmp_path, labels, shared, direction):
    attention = attention_of(labels, shared, [255] + [0] * (len(labels) - 1))
    run = make_run(tmp_path / "a") | {"attention": attention}
    show(
        page, tmp_path / "page.html", run | {"samples": [{"step": 1, "prompt": "", "text": "سلام"}]}
    )
    groups = page.locator("#sentence .shared")
    assert groups.locator("b").all_inner_texts() == [text for _, text in shared.values()]
    for group, (count, _) in zip(groups.all(), shared.values(), strict=True):
        boxes = [part.bounding_box() for part in group.locator("span").all()]
        assert len(boxes) == count
        top = group.locator("b").bounding_box()
        assert all(top["y"] < box["y"] and box["x"] < top["x"] + top["width"] for box in boxes)
    sentence = page.locator("#sentence")
    assert sentence.evaluate("e => getComputedStyle(e).direction") == direction
    assert page.locator("#samples pre").get_attribute("dir") == "auto"
    sentence.press("ArrowRight" if direction == "rtl" else "ArrowLeft")
    output = page.locator("#attention output").inner_text()
    assert f"token {len(labels) - 1})" in output
    assert all(text in output for _, text in [s for e, s in shared.items() if e == len(labels) - 2])
    assert page.locator("#layer").is_disabled()
