"""What a dataset validated on stays in validation when its text grows; validation of one's own."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from engine.data import splits
from engine.data.dataset import Examples, open_dataset
from engine.data.inputs import readers
from prepare import PrepareConfig, prepare

SIZES = (1, 2, 3, 7, 20, 59, 60, 61, 120, 400)  # of growing datasets
PAIR_FIELDS = {"prompt_field": "q", "completion_field": "a"}


def document(number: int) -> str:
    """Return a text in which each line occurs in no other document."""
    return "".join(f"document {number}, line {line}, é🚀\n" for line in range(2 + number % 9))


def decode(path: Path) -> dict[str, str]:
    """Return the text of each split."""
    dataset = open_dataset(path)
    texts = {}
    for split in ("train", "val"):
        tokens = getattr(dataset, split)
        ids = tokens.tokens[:] if isinstance(tokens, Examples) else tokens[:]
        texts[split] = dataset.tokenizer.decode([max(i, ~i) for i in ids.tolist()])
    return texts


def lines_of(text: str) -> set[str]:
    """Return the complete lines of a text, without ends of documents."""
    lines = (line.removeprefix("<|endoftext|>") for line in text.split("\n")[1:-1])
    return {line for line in lines if line.startswith("document") and line.endswith("🚀")}


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_folder(path: Path, texts: list[str]) -> None:
    """Write a file for each text; a new one may come before the others."""
    path.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (path / f"{number * 7919 % 1000:03d}.txt").write_text(text, encoding="utf-8")


def write_parquet(path: Path, texts: list[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=50)


def write_pairs(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"q": "?", "a": text}) + "\n" for text in texts))


def write_one(path: Path, texts: list[str]) -> None:
    path.write_text("".join(texts), encoding="utf-8")


GROWING: dict[str, tuple[Any, dict[str, Any]]] = {
    "a.jsonl": (write_lines, {}),
    "folder": (write_folder, {"deduplicate": True}),
    "a.parquet": (write_parquet, {"val_fraction": 0.3}),
    "pairs.jsonl": (write_pairs, PAIR_FIELDS),
    "one.txt": (write_one, {}),
}


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("is_small", [False, True])
def test_validated_text_never_trains_when_text_is_appended(
    name: str, is_small: bool, tmp_path: Path, monkeypatch
):
    if is_small:  # so that documents are large, and one text has many pieces
        for module in (readers, splits):
            monkeypatch.setattr(module, "LARGE_DOCUMENT_BYTES", 128)
        monkeypatch.setattr(readers, "PIECE_BYTES", 64)
    write, settings = GROWING[name]
    fraction = settings.get("val_fraction", 0.1)
    validated: set[str] = set()
    texts = [document(number) for number in range(SIZES[-1])]
    for size in SIZES:
        if name == "pairs.jsonl" and size == 1:
            continue  # one example cannot be split
        write(tmp_path / name, texts[:size])
        config = PrepareConfig(
            (str(tmp_path / name),), tokenizer="byte", out=tmp_path / "data", force=True, **settings
        )
        prepare(config)
        decoded = decode(tmp_path / "data")
        assert not validated & lines_of(decoded["train"]), size
        validated |= lines_of(decoded["val"])
        assert sum(map(len, decoded.values())) >= sum(map(len, texts[:size]))
        num_bytes = {split: len(text.encode()) for split, text in decoded.items()}
        assert size < 59 or 0.5 < num_bytes["val"] / sum(num_bytes.values()) / fraction < 2.5
        before = (tmp_path / "data" / "manifest.json").read_bytes()
        assert prepare(PrepareConfig(**{**vars(config), "force": False}))[1] is False
        prepare(config)
        assert (tmp_path / "data" / "manifest.json").read_bytes() == before
    assert len(validated) > 20
