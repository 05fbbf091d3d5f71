"""The charts of a run or of several, in a browser."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT

pytestmark = pytest.mark.browser
WEB_DIR = ROOT / "engine" / "report" / "web"
FILES = ["style.css", "curves.css", "uPlot.min.css", "uPlot.iife.min.js", "common.js", "curves.js"]
POLICY = "default-src 'none'; style-src 'nonce-x'; script-src 'nonce-x'"
ELEMENTS = '<p id="axis"></p><p id="shown"></p><p id="how"></p><div id="charts"></div>'


def make_curves(steps: range, **curves: list[float]) -> Any:
    axes = {"step": [*steps], "tokens": [64 * i for i in steps], "seconds": [5 * i for i in steps]}
    return axes | {name: {"mean": values} for name, values in curves.items()}


def make_run(name: str = "a", num_records: int = 60) -> Any:
    """Describe a run with a record of each step, and an evaluation of each twentieth."""
    steps = range(1, num_records + 1)
    losses = [2 + 5 / step for step in steps]
    val = [3 + abs(step - 40) / 100 for step in steps[19::20]]
    training = make_curves(steps, train_loss=losses, grad_norm=[-1, *losses[1:]])
    validation = make_curves(steps[19::20], val_loss=val, val_bits_per_byte=val)
    run = {"name": name, "training": training, "validation": validation, "best_step": 40}
    run["baselines"] = {"uniform": 7.625, "unigram": 5.912, "bigram": 4.2965}
    return run | {"status": {"state": "training", "step": num_records, "total_steps": 120}}


def show(page: Any, folder: Path, *runs: Any, **options: Any) -> Any:
    """Open a page with only the charts; return the slider of the first one."""
    html = f'<!doctype html><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    html += ELEMENTS
    for name in FILES:
        tag = "script" if name.endswith(".js") else "style"
        html += f'<{tag} nonce="x">{(WEB_DIR / name).read_text("utf-8")}</{tag}>'
    call = f"showCurves({json.dumps(runs)}, {json.dumps(options)});"
    html += f'<script nonce="x">{call}</script>'
    (folder / "page.html").write_text(html, "utf-8")
    page.goto((folder / "page.html").as_uri())
    return page.get_by_role("slider").first


def read_charts(page: Any) -> list[str]:
    return page.locator("#charts .readout").all_inner_texts()


def test_keys_and_a_finger_read_the_values_of_a_point(page, tmp_path):
    slider = show(page, tmp_path, make_run())
    assert read_charts(page)[0].startswith("step 60: training 2.083,")  # the last point
    assert slider.get_attribute("aria-valuetext") == "no point is selected"
    description = "validation, best: 3 at step 40; baselines inside the chart: bigram 4.296; "
    description += "baselines above the chart: unigram 5.912, uniform 7.625"
    assert slider.get_attribute("aria-description") == description
    slider.press("+")
    page.get_by_role("button", name="Reset zoom").click()
    assert page.get_by_role("button", name="Reset zoom").count() == 0  # it is hidden
    slider.press("Home")
    assert read_charts(page)[0] == "step 1: training 7, smoothed 7; validation 3.2 at step 20"
    page.get_by_label("time").check()
    assert float(slider.get_attribute("aria-valuemax")) == 600  # of 120 steps that are planned
    box = page.locator(".u-over").first.bounding_box()
    finger = {"pointerType": "touch", "clientX": box["x"] + box["width"] / 4, "clientY": box["y"]}
    page.locator(".u-over").first.dispatch_event("pointermove", finger)
    assert read_charts(page)[0].startswith("2 min 30 s: training 2.167, smoothed 2.175;")


def test_the_points_shown_are_downloaded_as_csv(page, tmp_path):
    show(page, tmp_path, make_run('a "b", c'), make_run("b", 400), bitsFirst=True)
    page.get_by_role("slider", name="bits").press("Home")
    read = 'step 20: a "b", c, validation 3.2; b, validation 3.2'
    assert read_charts(page)[0] == read and "; b, training (smoothed) 2." in read_charts(page)[1]
    page.get_by_label("log axis").check()  # though the first norm has no logarithm
    page.get_by_role("button", name="b", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Values as CSV").click()
    text = download.value.path().read_text()
    columns = "run,step,tokens,seconds,train_loss,grad_norm,val_bits_per_byte,val_loss"
    rows = list(csv.reader(text.removeprefix(f"{columns}\n").splitlines()))
    assert [row[1] for row in rows] == [*map(str, range(1, 61))]
    assert rows[0][1:] == ["1", "64", "5", "7", "-1", "", ""]
    assert rows[19] == ['a "b", c', "20", "1280", "100", "2.25", "2.25", "3.2", "3.2"]
