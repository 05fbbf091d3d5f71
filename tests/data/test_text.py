"""One text has one treatment, whatever file, command or turn it is in."""

import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from helpers import SMALL, make_dataset, random_model, write_lines

from engine.core.errors import UserError
from engine.data.dataset import Dataset, open_dataset
from engine.data.split import token_ids
from engine.data.tokenizer import ByteTokenizer, from_document
from engine.generation.prompt_file import encode_line
from engine.generation.text_generator import TextGenerator
from engine.huggingface.directory import read_tensors, read_tokenizer
from sample import SampleConfig, read_prompt

RAW = "\ufeffa <think>b\r\nc</think>\rd <|endoftext|>."
CLEAN = "a <think>b\nc</think>\nd <|endoftext|>."
END, THINK, END_OF_THOUGHT = 256, 257, 258
PLAIN_IDS = [*b"a ", THINK, *b"b\nc", END_OF_THOUGHT, *b"\nd ", *b"<|endoftext|>", *b"."]
SPECIAL_IDS = [*PLAIN_IDS[:-14], END, *b"."]
PAIR = {"prompt_field": "p", "completion_field": "c"}
CHAT = {"messages": [{"role": role, "content": RAW} for role in ("user", "assistant")]}
MODEL = dataclasses.replace(SMALL, context_length=99)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def write_table(path: Path, record: dict[str, str]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)


def write_csv(path: Path, record: dict[str, str]) -> None:
    rows = ['"{}"'.format('","'.join(row)) for row in (record, record.values())]
    path.write_bytes("\r\n".join(rows).encode())


WRITERS: dict[str, Callable[[Path, dict[str, str]], Any]] = {
    "a.txt": lambda path, record: path.write_bytes(record["text"].encode()),
    "a.txt.gz": lambda path, record: path.write_bytes(gzip.compress(record["text"].encode())),
    "utf-16.txt": lambda path, record: path.write_bytes(record["text"][1:].encode("utf-16")),
    "a.jsonl": lambda path, record: write_lines(path, [record]),
    "a.json": lambda path, record: path.write_text(json.dumps([record], indent=1)),
    "a.csv": write_csv,
    "a.parquet": write_table,
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """The file of a tokenizer of bytes with markup."""
    document = ByteTokenizer().with_special(["<think>", "</think>"]).document
    for token in document["added_tokens"][1:]:
        token["special"] = False
    from_document(document).save(tmp_path / "tokenizer.json")
    return str(tmp_path / "tokenizer.json")


def count_notes(dataset: Dataset) -> dict[str, int]:
    """Return the counts of line ends and of names of special tokens."""
    notes = dataset.manifest["statistics"]["notes"]
    return {note[:5]: count for note, count in notes.items() if note[:5] in ("lines", "names")}


@pytest.mark.parametrize("parse_special", [False, True])
@pytest.mark.parametrize("name", [*WRITERS, *(f"pairs {name}" for name in [*WRITERS][3:])])
def test_a_text_has_the_same_ids_in_every_file(name, parse_special, tokenizer, tmp_path: Path):
    is_pair = name.startswith("pairs")
    name = name.removeprefix("pairs ")
    settings: dict[str, Any] = {"parse_special": parse_special, **(PAIR if is_pair else {})}
    for folder in ("train", "val"):
        (tmp_path / folder).mkdir()
        WRITERS[name](tmp_path / folder / name, {"p": RAW, "c": RAW} if is_pair else {"text": RAW})
    settings |= {"val": (f"{tmp_path}/val/{name}",), "tokenizer": tokenizer}
    dataset = open_dataset(make_dataset(tmp_path, tmp_path / "train", **settings))
    num_texts = 2 if is_pair else 1
    expected = (SPECIAL_IDS if parse_special else PLAIN_IDS) * num_texts
    assert token_ids(dataset.train.tokens[:]).tolist() == [*expected, END]
    names = {} if parse_special else {"names": 2 * num_texts}
    assert count_notes(dataset) == {"lines": 4 * num_texts, **names}


def test_chats_and_prompts_have_the_ids_of_text(tokenizer: str, tmp_path: Path):
    val = str(write_lines(tmp_path / "val.jsonl", [CHAT]))
    out = make_dataset(tmp_path, [CHAT], chat=True, tokenizer=tokenizer, val=(val,))
    dataset = open_dataset(out)
    (example,) = dataset.train.examples()
    ids = example[example >= 0].tolist()
    assert ids == [*PLAIN_IDS, dataset.tokenizer.special_tokens["<|end|>"]]
    question = token_ids(example[: -len(ids)]).tolist()
    assert not {THINK, END_OF_THOUGHT} & {*dataset.tokenizer.unused_ids()}  # or never sampled
    assert THINK not in question and dataset.tokenizer.decode(question).count(CLEAN) == 1
    assert count_notes(dataset) == {"lines": 8, "names": 2 * (3 + 1)}  # those of a question

    model = TextGenerator(random_model(MODEL), dataset.tokenizer, [0])
    assert model.encode_turns([("user", RAW[1:])], 1)[0] == question
    (tmp_path / "prompt.txt").write_bytes(RAW[1:].encode("utf-16"))
    assert read_prompt(SampleConfig(tmp_path, prompt_file=tmp_path / "prompt.txt")) == CLEAN
    assert model.encode_prompt(RAW[1:]) == PLAIN_IDS
    assert model.encode_prompt(RAW[1:], parse_special=True) == SPECIAL_IDS
    assert encode_line({"prompt": 7.5}, model, False, 1).prompt == [*b"7.5"]


def test_a_text_that_spells_its_end_has_one(tmp_path: Path):
    rows = [{"text": f"<|user|>{n}<|end|><|endoftext|>"} for n in range(99)]
    dataset = open_dataset(make_dataset(tmp_path, rows, tokenizer="bpe", parse_special=True))
    special = dataset.tokenizer.special_tokens
    ids = dataset.train.tokens[:].tolist()
    for name in ("<|user|>", "<|end|>", "<|endoftext|>"):
        assert ids.count(special[name]) == ids.count(special["<|user|>"]) > 50


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.csv", "a.parquet", "a/b.md"])
def test_a_pointer_of_git_lfs_is_not_read(name: str, tmp_path: Path):
    (tmp_path / "a").mkdir()
    for file in (name, "model.safetensors", "tokenizer.json"):
        (tmp_path / file).write_text(POINTER)
    prompt = SampleConfig(tmp_path, prompt_file=tmp_path / name)
    readers: list[Callable[[], Any]] = [lambda: make_dataset(tmp_path, tmp_path / name)]
    readers += [lambda: make_dataset(tmp_path, tmp_path / "a")] if "/" in name else []
    readers += [lambda: read_tensors(tmp_path), lambda: read_tokenizer(tmp_path)]
    for read in (*readers, lambda: read_prompt(prompt)):
        with pytest.raises(UserError, match="git lfs pull"):
            read()


def test_a_suffix_of_prompts_is_kept_for_sampling(tmp_path: Path):
    rows = [{"p": f"{n} + 1?", "c": n + 1} for n in range(99)]
    out = make_dataset(tmp_path, rows, **PAIR, prompt_suffix="\\n")
    dataset = open_dataset(out)
    example = token_ids(next(dataset.train.examples())).tolist()
    assert "?\n" in dataset.tokenizer.decode(example)
    model = TextGenerator(random_model(MODEL), dataset.tokenizer, [0])
    ids = [*b"0 + 1?\n"]
    assert model.encode_prompt("0 + 1?") == model.encode_prompt("0 + 1?\n") == ids
    assert model.encode_prompt("") == [0]
    line = {"prompt": "0 + 1?", "choices": ["1", "2"], "answer": 0}
    question = encode_line(line, model, False, 1)
    assert question.choices == {"1": [*ids, ord("1")], "2": [*ids, ord("2")]}
    text = make_dataset(tmp_path, "text " * 99, tokenizer=str(out), out=tmp_path / "text")
    assert open_dataset(text).tokenizer.prompt_suffix == ""
