"""Documents keep their split when others are added; validation text of one's own."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import make_dataset

from engine.core.errors import UserError
from engine.data.dataset import open_dataset
from engine.data.split import token_ids
from prepare import PrepareConfig, prepare

SIZES = (60, 61, 400)  # of growing datasets
PAIR_FIELDS = {"prompt_field": "q", "completion_field": "a"}
PAIR_SETTINGS = {"val_fraction": 0.3, **PAIR_FIELDS}


def document(number: int) -> str:
    """Return a text in which each line occurs in no other document."""
    return "".join(f"document {number}, line {line}, é🚀\n" for line in range(2 + number % 9))


def decode(path: Path) -> dict[str, str]:
    """Return the text of each split."""
    dataset = open_dataset(path)
    ids = {split: token_ids(getattr(dataset, split).tokens[:]) for split in ("train", "val")}
    return {split: dataset.tokenizer.decode(ids[split].tolist()) for split in ids}


def lines_of(text: str) -> set[str]:
    """Return the complete lines of a text, without ends of documents."""
    lines = (line.removeprefix("<|endoftext|>") for line in text.split("\n")[1:-1])
    return {line for line in lines if line.startswith("document") and line.endswith("🚀")}


def write_texts(path: Path, texts: list[str]) -> Path:
    """Write a file for each text; a new one may come before the others."""
    path.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (path / f"{number * 7919 % 1000:03d}.txt").write_text(text, encoding="utf-8")
    return path


GROWING: dict[str, tuple[Callable[[Path, list[str]], Any], dict[str, Any]]] = {
    "folder": (write_texts, {"deduplicate": True}),
    "pairs": (lambda _, texts: [{"q": text[:12], "a": text} for text in texts], PAIR_SETTINGS),
}


@pytest.mark.parametrize("name", GROWING)
def test_many_documents_stay_in_their_split_when_others_are_added(name, tmp_path, capsys):
    make_content, settings = GROWING[name]
    fraction = settings.get("val_fraction", 0.1)
    texts = [document(number) for number in range(SIZES[-1])]
    validated: set[str] = set()
    for size in SIZES:
        content = make_content(tmp_path / name, texts[:size])
        decoded = decode(make_dataset(tmp_path, content, force=True, **settings))
        assert not validated & lines_of(decoded["train"]), size
        validated |= lines_of(decoded["val"])
        assert sum(map(len, decoded.values())) >= sum(map(len, texts[:size]))
        num_bytes = {split: len(text.encode()) for split, text in decoded.items()}
        assert 0.5 < num_bytes["val"] / sum(num_bytes.values()) / fraction < 2.5
    assert len(validated) > 20 and not capsys.readouterr().err


# Validation text of one's own.

CHAT = '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "%s"}]}\n'
OWN_VALIDATION: dict[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("%s\n", {}),
    ".jsonl": ('{"text": "%s"}\n', {"deduplicate": True}),
    "-pairs.jsonl": ('{"q": "?", "a": "%s"}\n', PAIR_FIELDS),
    "-chats.jsonl": (CHAT, {"chat": True}),
}


@pytest.mark.parametrize("kind", OWN_VALIDATION)
def test_validation_text_is_that_of_val(kind: str, tmp_path: Path):
    line, settings = OWN_VALIDATION[kind]
    words = {"train": ["one", "two", "three"], "val": ["four", "two"]}
    for split, texts in words.items():
        content = "".join(line % f"document {text} é🚀" for text in texts)
        (tmp_path / split).mkdir()
        (tmp_path / split / f"{split}{kind}").write_text(content)
    settings = {"tokenizer": "byte", "val": (str(tmp_path / "val"),), **settings}
    config = PrepareConfig((str(tmp_path / "train"),), out=tmp_path / "data", **settings)
    prepare(config)
    decoded = decode(tmp_path / "data")
    expected = {**words, "val": ["four"]} if "deduplicate" in settings else words
    all_words = {"one", "two", "three", "four"}
    for split, texts in expected.items():
        assert [word for word in decoded[split].split() if word in all_words] == texts
    manifest = open_dataset(tmp_path / "data").manifest
    assert (manifest["origin"]["val"], manifest["origin"]["val_fraction"]) == (["val"], 0)
    is_copy = "deduplicate" not in settings and kind != ".txt"
    assert manifest["statistics"]["repeats"] == is_copy

    assert not prepare(PrepareConfig(**{**vars(config), "val_fraction": 0.0}))[1]
    path = tmp_path / "val" / f"val{kind}"
    with path.open("a") as file:
        file.write(line % "document five")
    with pytest.raises(UserError, match=r"other text.*--force"):
        prepare(config)
    prepare(PrepareConfig(**{**vars(config), "force": True}))
    path.rename(tmp_path / "train" / path.name)  # the same texts in the same order
    shutil.move(tmp_path / "train" / f"train{kind}", path)
    with pytest.raises(UserError, match=r"other text.*--force"):
        prepare(config)


def test_validation_is_another_split_of_a_dataset_of_hugging_face(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    texts = {"train": ["one", "two"], "test": ["three"]}
    rows = {name: datasets.Dataset.from_dict({"text": column}) for name, column in texts.items()}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "saved")
    inputs = (f"hf:{tmp_path}/saved",)
    config = PrepareConfig(inputs, tokenizer="byte", out=tmp_path / "data", hf_val_split="test")
    prepare(config)
    end = "<|endoftext|>"
    expected = {"train": f"one{end}two{end}", "val": f"three{end}"}
    assert decode(tmp_path / "data") == expected
    with pytest.raises(UserError, match="hf_val_split test"):
        prepare(PrepareConfig(**{**vars(config), "hf_val_split": "train"}))
