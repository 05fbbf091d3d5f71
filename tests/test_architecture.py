"""The size of the project, and the diffs in docs/architecture.md: each applies and trains."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, fork, logged, newest_checkpoint, tiny, train_tiny, wait_for

import train
from engine.core.settings import load_settings
from engine.training.config import TrainConfig

PAGE = ROOT / "docs" / "architecture.md"
SOURCES = ("*.py", "engine", "config")
# A change may lower them, and may not raise them.
MAX_SOURCE_LINES = 17_320
MAX_TEST_LINES = 17_240
MAX_TOOL_LINES = 450  # tests/tools/
MAX_PAGE_LINES = 2_600  # HTML, CSS and JavaScript
MAX_DOCUMENT_WORDS = 10_700


def read_changes() -> dict[str, tuple[str, list[str]]]:
    """The changes of the page: {title: (unified diff, flags that use it)}."""
    text = PAGE.read_text(encoding="utf-8")
    changes = {}
    for title, body in re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL):
        diff = re.search(r"```diff\n(.*?)```", body, re.DOTALL)
        command = re.search(r"```text\npython train.py (.*?)\n```", body, re.DOTALL)
        if diff and command:
            changes[title] = (diff[1], command[1].split())
    return changes


CHANGES = read_changes()


def import_from(project: Path) -> None:
    """Let this process import the sources of a project."""
    for name in [*sys.modules]:
        if name.split(".")[0] in ("engine", "model", "prepare", "train", "sample"):
            del sys.modules[name]
    sys.path.insert(0, str(project))
    assert Path(importlib.import_module("train").__file__ or "").parent == project


def test_tree_lists_every_module_of_the_engine():
    tree = PAGE.read_text(encoding="utf-8").split("```")[1]
    listed = re.findall(r"^ {4,}(\w+\.py) ", tree, re.MULTILINE)
    modules = [path.name for path in ROOT.glob("engine/**/*.py") if path.name != "__init__.py"]
    assert sorted(listed) == sorted(modules) and len(CHANGES) == 5


def count_lines(*patterns: str) -> int:
    """Count the lines of the files that match the patterns."""
    paths = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_the_house_stays_within_its_budget():
    assert count_lines("*.py", "engine/**/*.py") <= MAX_SOURCE_LINES
    num_tool_lines = count_lines("tests/tools/**/*.py")
    assert num_tool_lines <= MAX_TOOL_LINES
    assert count_lines("tests/**/*.py") - num_tool_lines <= MAX_TEST_LINES
    web = "engine/report/web/[!u]*"  # uPlot's files are of others
    assert count_lines(f"{web}.js", f"{web}.css", f"{web}.html") <= MAX_PAGE_LINES
    documents = [page for page in ROOT.glob("docs/*.md") if ".zh." not in page.name]
    documents.append(ROOT / "README.md")
    assert sum(len(page.read_text().split()) for page in documents) <= MAX_DOCUMENT_WORDS


def test_a_change_applies_to_one_file():
    for diff, _ in CHANGES.values():
        assert len(re.findall(r"^\+\+\+ ", diff, re.MULTILINE)) == 1
        apply = ["git", "apply", "--check", "-"]
        subprocess.run(apply, input=diff, encoding="utf-8", cwd=ROOT, check=True)


def test_two_changes_train_and_changed_scores_are_sampled_and_drawn(numbers, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    for path in (path for pattern in SOURCES for path in ROOT.glob(pattern)):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, project / path.name)
    scores, optimizer = CHANGES["ALiBi"], CHANGES["An optimizer"]
    for diff, _ in (scores, optimizer):
        subprocess.run(["git", "apply", "-"], input=diff, encoding="utf-8", cwd=project, check=True)
    assert 0 < len(re.findall(r"^[+-](?!\+\+|--)", scores[0], re.MULTILINE)) <= 10
    runs = {"unchanged": [], "scores": scores[1], "both": [*scores[1], *optimizer[1]]}

    def train_both() -> int:
        import_from(project)
        for name in ("scores", "both"):
            flags = tiny(numbers, tmp_path / name, "--steps", 12, *runs[name])
            importlib.import_module("train").main(flags)
        check_changed_scores(tmp_path / "scores")
        fused = tiny(numbers, tmp_path / "fused", *optimizer[1])
        with pytest.raises(Exception, match=r"Head\.attention defines.*--attention loop"):
            importlib.import_module("train").main(fused)
        return 0

    train_tiny(numbers, tmp_path / "unchanged", "--steps", 12)
    assert wait_for(fork(tmp_path / "log", train_both)) == 0, (tmp_path / "log").read_text()
    losses = [logged(tmp_path / name, "train_loss") for name in runs]
    assert all(each[12] < each[1] for each in losses)
    assert losses[0] != losses[1] != losses[2]


def check_changed_scores(run: Path) -> None:
    """Check that a run's scores are sampled and drawn as they are computed."""
    model = importlib.import_module("sample").load(run).model
    maps = importlib.import_module("engine.report.attention_maps").attention_maps
    attention = model.blocks[0].attention
    ids = torch.arange(model.config.context_length)
    x = model.blocks[0].attention_norm(model.embed(ids[None], ids))
    values = [group_head.value(x) for _, group_head, _ in attention.heads_with_shared()]
    mixed = torch.cat([*maps(model, ids)[0][:, None] @ torch.stack(values)], dim=-1)
    torch.testing.assert_close(attention(x, model.rotation(ids)), attention.projection(mixed))
    engine = importlib.import_module("engine.generation.decoding_engine").DecodingEngine(model)
    text = [5, 3]
    engine.add(text)
    logits = engine.read(0)
    for token in [7, 1, 8] * model.config.context_length:
        text.append(token)
        logits = engine.step([token])
    context = text[-engine.rows[0].num_cached :]
    torch.testing.assert_close(logits, model(torch.tensor([context]))[:, -1])


def test_the_change_from_outside_trains_a_new_parameter(numbers, tmp_path, monkeypatch, capsys):
    (code,) = re.findall(
        r"```python\n(import torch\n.*?)```", PAGE.read_text(encoding="utf-8"), re.S
    )
    flags = ["--steps", 12, "--eval-every", 6, "--learning-rate", 0.05]
    config = load_settings(TrainConfig, tiny(numbers, tmp_path / "run", *flags))
    monkeypatch.setattr(train, "TrainConfig", lambda **_: config)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    lines = re.findall(r"(?m)^scales \[(.*)\]$", capsys.readouterr().out)
    assert len(lines) == 14 and lines[-1].count("0.5,") == 0  # 12 steps and 2 evaluations
    assert len({line for line in lines}) > 5
    losses = logged(tmp_path / "run", "val_loss")
    assert losses[12] < losses[6]
    scale = dict(newest_checkpoint(tmp_path / "run").model())["blocks.1.scale"]
    assert scale.shape == (16,) and not scale.eq(0.5).any()
