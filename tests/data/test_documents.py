"""Which documents belong to which split, how sources form units, and what a sample contains."""

import dataclasses
import gzip
import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers import make_reader

from engine.core.errors import UserError
from engine.data.documents import corpus as documents
from engine.data.documents.corpus import Corpus, Piece, digest_of, find_repeats
from engine.data.documents.document import Document, read_documents
from engine.data.records import reader as records
from engine.data.sources.source import Source
from engine.data.tokenizer_training import sample_texts


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make large documents, pieces and units so small that a test has many."""
    monkeypatch.setattr(records, "LARGE_TEXT_BYTES", 2**11)
    monkeypatch.setattr(records, "PIECE_BYTES", 2**10)
    monkeypatch.setattr(documents, "MIN_UNIT_BYTES", 2**10)


def source_of(path: Path, content: list[str] | str | bytes) -> Source:
    """Write text, or documents, to a file of the kind of its suffix."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": content}), path, row_group_size=10)
        return Source(path, path.name)
    if isinstance(content, list):
        content = "".join(json.dumps({"text": text}) + "\n" for text in content)
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return Source(path, path.name)


def corpus_of(folder: Path, *contents: Any, val_fraction: float = 0.1, **settings: Any) -> Corpus:
    """Write a .jsonl file for each list of documents, and a .txt file for each text."""
    suffixes = [".jsonl" if isinstance(content, list) else ".txt" for content in contents]
    files = [(folder / f"{n}{suffix}", contents[n]) for n, suffix in enumerate(suffixes)]
    return Corpus([source_of(*file) for file in files], val_fraction, (), make_reader(**settings))


def pieces_of(corpus: Corpus) -> list[Piece]:
    texts = [text for unit in corpus.units for text in unit.documents()]
    return [piece for text in texts for piece in corpus.rule.pieces(text, digest_of(text))]


def split_documents(corpus: Corpus) -> dict[str, list[str]]:
    """Return the documents of each split."""
    documents: dict[str, list[str]] = {"train": [""], "val": [""]}
    for piece in pieces_of(corpus):
        documents[piece.split][-1] += piece.text
        if piece.ends_document:
            documents[piece.split].append("")
    assert all(texts.pop() == "" for texts in documents.values())
    return documents


DOCUMENTS = ["", *(f"Document {i}: naïve 🚀\n" + "with lines\n" * (i % 7) for i in range(60))]


def turns_of(record: dict[str, str]) -> list[tuple[str, str]]:
    """Return a prompt of one text, and as its completion another."""
    prompt, _, completion = record["text"].partition("|")
    return [("prompt", prompt), ("completion", completion)]


EXAMPLES: dict[str, Any] = {"turns_of": turns_of, "fields": ("text",)}


def test_a_digest_is_of_the_text_and_its_offset():
    expected = hashlib.blake2b("é".encode()).digest()[:32]
    assert digest_of(Document("é")) == digest_of(Document("é", 0, 9, 2)) == expected
    texts = [Document(text, offset, 9) for text in ("", "é", "e") for offset in (0, 1, 256)]
    assert len({digest_of(text) for text in texts}) == 9


# Many documents are assigned by their hashes.


@pytest.mark.parametrize("settings", [{}, EXAMPLES], ids=["text", "examples"])
def test_the_order_of_documents_does_not_change_their_split(settings, tmp_path: Path):
    settings = {"val_fraction": 0.2, **settings}
    forward = split_documents(corpus_of(tmp_path / "a", DOCUMENTS, **settings))
    backward = split_documents(corpus_of(tmp_path / "b", DOCUMENTS[::-1], **settings))
    assert forward == {split: texts[::-1] for split, texts in backward.items()}
    assert 4 <= len(forward["val"]) <= 25


def test_the_files_of_documents_do_not_change_their_split(tmp_path: Path):
    split = split_documents(corpus_of(tmp_path / "files", *DOCUMENTS))
    assert split == split_documents(corpus_of(tmp_path / "lines", DOCUMENTS))
    assert sorted(split["train"] + split["val"]) == sorted(DOCUMENTS)
    again = split_documents(corpus_of(tmp_path / "again", DOCUMENTS * 3))  # copies stay together
    assert {name: {*texts} for name, texts in again.items()} == {k: {*v} for k, v in split.items()}


def test_a_fraction_of_the_documents_is_for_validation(tmp_path: Path):
    texts = [str(number) for number in range(5000)]
    for val_fraction in (0.01, 0.1, 0.5, 0.9):
        split = split_documents(corpus_of(tmp_path, texts, val_fraction=val_fraction))
        assert abs(len(split["val"]) / 5000 - val_fraction) < 0.02


def test_the_tail_of_a_large_document_among_many_is_for_validation(small, tmp_path: Path):
    large = ["words and words; " * 1000, "x" * 5000, "🚀" * 600]
    split = split_documents(corpus_of(tmp_path, [*DOCUMENTS, *large]))
    rest = split_documents(corpus_of(tmp_path / "rest", DOCUMENTS))
    for text in large:
        tail = int(len(text.encode()) * 0.9)
        heads = [head for head in split["train"] if head and text.startswith(head)]
        (head,) = [head for head in heads if 0 <= len(head.encode()) - tail < 4]
        split["train"].remove(head)
        split["val"].remove(text[len(head) :])
    assert split == rest


# The tails of few documents are for validation.


@pytest.mark.parametrize("sizes", [(60_000, 49), (1000, 1000), (10, 5000, 10, 10), (5, 0, 1)])
@pytest.mark.parametrize("val_fraction", [0.1, 0.5, 0.9])
def test_the_tails_of_few_documents_are_for_validation(sizes, val_fraction, small, tmp_path):
    texts = ["abcdefghij"[i % 10] * size for i, size in enumerate(sizes)]
    for number, contents in enumerate([texts, [texts]]):
        corpus = corpus_of(tmp_path / str(number), *contents, val_fraction=val_fraction)
        assert corpus.rule.has_few_documents and not corpus.rule.is_single_document
        heads = [text[: int(len(text) * (1 - val_fraction))] for text in texts]
        tails = [text[len(head) :] for text, head in zip(texts, heads, strict=True)]
        split = split_documents(corpus)
        assert [text for text in split["train"] if text] == [head for head in heads if head]
        assert split["val"] == [tail for tail in tails if tail]


def test_one_document_is_split_at_its_byte_between_characters(code: str, small, tmp_path: Path):
    cases = [("🚀é漢" * 10, number / 90) for number in range(1, 90)]
    for text in ["é🚀" + code, *("a" * shift + "🚀" * 1024 for shift in range(4))]:
        size = len(text.encode())
        fractions = (0.3, 0.01, 1024 / size, 1 - 2047.5 / size, 1 - 2050.5 / size)
        cases += [(text, val_fraction) for val_fraction in fractions]
    for text, val_fraction in cases:
        pieces = pieces_of(corpus_of(tmp_path, text, val_fraction=val_fraction))
        names = [piece.split for piece in pieces]
        assert names == sorted(names) and "".join(piece.text for piece in pieces) == text
        train = "".join(piece.text for piece in pieces if piece.split == "train")
        assert 0 <= len(train.encode()) - int(len(text.encode()) * (1 - val_fraction)) < 4
        assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]


# Examples are split by their prompts.


def answers_by_split(corpus: Corpus) -> dict[str, list[str]]:
    """Return prompt|completion of the examples of each split."""
    answers: dict[str, list[str]] = {"train": [], "val": []}
    for piece in pieces_of(corpus):
        assert piece.ends_document
        answers[piece.split].append("|".join(text for _, text in json.loads(piece.text)))
    return answers


@pytest.mark.parametrize("num_prompts", [2, 7, 59, 400])
def test_answers_to_one_prompt_have_one_split(num_prompts: int, tmp_path: Path):
    texts = [f"prompt {n % num_prompts}|answer {n}" for n in range(1200)]
    answers = answers_by_split(corpus_of(tmp_path, texts, **EXAMPLES))
    prompts = [{text.partition("|")[0] for text in answers[split]} for split in ("train", "val")]
    assert len(prompts[0]) + len(prompts[1]) == num_prompts and not prompts[0] & prompts[1]
    assert sorted(answers["train"] + answers["val"]) == sorted(texts)
    assert 1 <= len(prompts[1]) <= max(1, 0.2 * num_prompts)
    shuffled = random.Random(0).sample(texts, len(texts))
    again = answers_by_split(corpus_of(tmp_path / "shuffled", shuffled, **EXAMPLES))
    assert {*again["val"]} == {*answers["val"]}


def test_white_space_of_a_prompt_does_not_count(tmp_path: Path):
    forms = ("what is {}=", "what  is {} =", "\nwhat is {}=\n")
    texts = [f"{form.format(n)}|{n}" for n in range(200) for form in forms]
    answers = answers_by_split(corpus_of(tmp_path, texts, **EXAMPLES))
    numbers = [{text.partition("|")[2] for text in answers[split]} for split in ("train", "val")]
    assert numbers[1] and not numbers[0] & numbers[1]


def test_a_chat_is_split_by_all_before_its_first_answer(tmp_path: Path):
    def chat(record: dict[str, str]) -> list[tuple[str, str]]:
        system, question, *rest = record["text"].split("|")
        return [("system", system), ("user", question), *(("assistant", text) for text in rest)]

    texts = [f"s{n % 3}|q{n % 40}|answer {n}|more" for n in range(480)]
    corpus = corpus_of(tmp_path, texts, turns_of=chat, fields=("text",))
    splits: dict[str, set[str]] = {}
    for piece in pieces_of(corpus):
        splits.setdefault(json.dumps(json.loads(piece.text)[:2]), set()).add(piece.split)
    assert len(splits) == 120 and all(len(names) == 1 for names in splits.values())
    assert {"train", "val"} == set.union(*splits.values())


@pytest.mark.parametrize("texts", [["q|a"], [f"q|{n}" for n in range(100)]])
def test_examples_of_one_prompt_are_refused_unless_validation_is_given(texts, tmp_path: Path):
    with pytest.raises(UserError, match=r"^0\.jsonl: .*\(got 1\).*--val"):
        corpus_of(tmp_path, texts, **EXAMPLES)
    sources = [source_of(tmp_path / name, texts) for name in ("0.jsonl", "val.jsonl")]
    separate = Corpus(sources[:1], 0.0, sources[1:], make_reader(**EXAMPLES))
    assert separate.rule.val_prompts == ()


# How many documents there are.


def test_only_as_much_is_read_as_tells_that_documents_are_many(tmp_path: Path):
    lines = [json.dumps({"text": f"document {number}"}) + "\n" for number in range(61)]
    (tmp_path / "a.jsonl").write_text("".join([*lines, "this is not JSON\n"]))
    (tmp_path / "few.jsonl").write_text("".join([*lines[:30], "this is not JSON\n"]))
    (tmp_path / "bad.txt").write_bytes(b"\xff")

    def is_few(*names: str) -> bool:
        return Corpus([Source(tmp_path / name, name) for name in names], 0.1).rule.has_few_documents

    assert not is_few("a.jsonl")
    assert not is_few(*["bad.txt"] * 60) and is_few(*["bad.txt"] * 59)
    assert not is_few(*["bad.txt"] * 60, "few.jsonl")
    with pytest.raises(UserError, match="JSON"):
        is_few("few.jsonl")


# Units.


def mixed_sources(folder: Path) -> list[Source]:
    """Write sources of all kinds, some of them empty, or with a large document."""
    contents: dict[str, Any] = {
        "a.txt": "",
        "b.jsonl": DOCUMENTS[:20],
        "c.txt": "one line\n" * 1000,
        "d.jsonl.gz": DOCUMENTS[20:],
        "e.parquet": DOCUMENTS,
        "h.csv": "text\nrow\n" + "large " * 1000 + "\n",
        "i.jsonl": ["é" * 3000, "漢字です。" * 1000, ""],
        **{f"k{number:02d}.txt": "short" * number for number in range(50)},
    }
    return [source_of(folder / name, content) for name, content in contents.items()]


def test_units_in_order_are_all_documents(small, tmp_path: Path):
    sources = mixed_sources(tmp_path)
    corpus = Corpus(sources, 0.2)
    assert [unit.number for unit in corpus.units] == list(range(len(corpus.units)))
    assert 10 < len(corpus.units) < 25  # the small files share units, the Parquet file has several
    expected = [document for source in sources for document in read_documents(source)]
    assert [text for unit in corpus.units for text in unit.documents()] == expected
    assert Corpus(sources, 0.2).units == corpus.units
    parts = [(part[1], part[2]) for unit in corpus.units for part in unit.parts]
    assert (0, 7) in parts and (6, 7) in parts


def test_repeats_are_found_in_all_units_and_dropped(small, tmp_path: Path):
    large = "b " * 3000  # read in pieces
    units = [["a", large, "a"], [], [large, large[:2000], "c", "c"]]
    corpus = corpus_of(tmp_path, *units)
    repeats = find_repeats(corpus.digests())
    assert repeats == [{2}, frozenset(), {0, 3}]
    kept = [dataclasses.replace(unit, dropped=repeats[unit.number]) for unit in corpus.units]
    texts = [["".join(text.text for text in unit.documents())] for unit in kept]
    assert texts == [["a" + large], [""], [large[:2000] + "c"]]


# Samples.


def test_a_sample_is_everything_if_it_fits_else_the_beginning_of_each_unit(small, tmp_path: Path):
    texts = [f"{number:<99}\n" for number in range(1000)]
    files = [source_of(tmp_path / f"{i:04}.txt", text) for i, text in enumerate(texts)]
    gz = [source_of(tmp_path / f"{i}.jsonl.gz", texts[i * 50 : i * 50 + 50]) for i in range(20)]
    parquet = [source_of(tmp_path / "a.parquet", texts)]
    for sources in (files, gz, parquet):
        corpus = Corpus(sources, 0.1)
        assert [*sample_texts(corpus, 200_000)] == [*sample_texts(corpus, math.inf)] == texts
        sample = [*sample_texts(corpus, 20_000)]
        assert sample == [*sample_texts(Corpus(sources, 0.5), 20_000)]
        assert 20_000 <= sum(map(len, sample)) <= 22_000
        numbers = [int(text) for text in sample]
        assert numbers[0] == 0 and numbers == sorted({*numbers})
        assert max(np.diff([*numbers, 1000])) <= 250  # from all over the corpus
