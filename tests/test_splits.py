"""Which documents belong to which split and part, and the pieces that they are cut into."""

import json
import random
from pathlib import Path

import pytest
import tiktoken_ext.openai_public

from engine.sources import Source
from engine.splits import Corpus, assigned, documents_of, pieces
from engine.tokenizer import PATTERNS, BPETokenizer, named_tokenizer, train_bpe


@pytest.fixture(scope="module", params=[*PATTERNS, "tiktoken's gpt2", "cl100k_base", "o200k_base"])
def tokenizer(request: pytest.FixtureRequest, code: str) -> BPETokenizer:
    if request.param in PATTERNS:
        return train_bpe([code], 2000, request.param)
    request.getfixturevalue("tiktoken_cache")
    if request.param != "o200k_base":
        return named_tokenizer(request.param.removeprefix("tiktoken's "))
    # Its ranks may not be here; its way of cutting words is what matters, so it runs with another's ranks.
    ranks = named_tokenizer("cl100k_base").encoding._mergeable_ranks
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *_, **__: ranks)
        return named_tokenizer("o200k_base")


SPACES = [" ", " ", " ", "\n", "\n", "  ", "    ", "\n   ", "   \n", " \n", "\n ", "\n\n", "\r\n", "\r\n\r\n", "\t"]
SPACES += ["\n\t", "\x1c", "\xa0"]
MARKS = [".", ",", "'s", " '", "!\n/", "//\n//", "\n/", ")\n", "...", "漢字かな漢字", "é", "\u0301", "12", "\n1", "🚀"]


@pytest.mark.parametrize("seed", range(3))
def test_pieces_encode_apart_to_the_ids_of_the_whole(tokenizer: BPETokenizer, code: str, seed: int):
    chance = random.Random(seed)  # words with all that may come between two: every offset where a cut could go wrong
    words = chance.choices(code.split(), k=1500)
    text = "".join(word + chance.choice(SPACES if chance.random() < 0.7 else MARKS) for word in words)
    blocks = [text[i : i + 50] for i in range(0, len(text), 50)]
    parts, ends = zip(*pieces(lambda: iter(blocks), length=50), strict=True)
    assert len(parts) > 50
    assert "".join(parts) == text
    assert [*ends] == [False] * (len(parts) - 1) + [True]
    assert [i for part in parts for i in tokenizer.encode(part)] == tokenizer.encode(text).tolist()


def test_pieces_of_real_text_are_about_as_long_as_asked(code: str):
    blocks = [code[i : i + 2000] for i in range(0, len(code), 2000)]
    assert all(len(part) <= 2 * 2000 for part, _ in pieces(lambda: iter(blocks), length=2000))


def test_unbroken_text_is_cut_where_it_gets_too_long():
    parts = [part for part, _ in pieces(lambda: iter(["x" * 7] * 100), length=10, longest=100)]
    assert "".join(parts) == "x" * 700
    assert max(map(len, parts)) == 100


def test_empty_document_is_one_empty_piece():
    assert [*pieces(lambda: iter(()))] == [("", True)]


def corpus_of(folder: Path, *sources: list[str] | str, val_fraction: float = 0.1, **reading: object) -> Corpus:
    """A corpus of a .jsonl file for each list of documents, and of a .txt file for each string."""
    folder.mkdir(exist_ok=True)
    files = []
    for number, content in enumerate(sources):
        files.append(folder / (f"{number}.txt" if isinstance(content, str) else f"{number}.jsonl"))
        lines = content if isinstance(content, str) else "".join(json.dumps({"text": t}) + "\n" for t in content)
        files[-1].write_text(lines, encoding="utf-8")
    return Corpus([Source(file, file.name, **reading) for file in files], val_fraction, lambda size: None)


def split_documents(corpus: Corpus, part: int = 1, parts: int = 1) -> dict[str, list[str]]:
    """The documents of each split of a part, which must be whole."""
    splits = {"train": [], "val": []}
    waiting = dict.fromkeys(splits, "")
    for split, text, ends in assigned(corpus, part, parts):
        waiting[split] += text
        if ends:
            splits[split].append(waiting[split])
            waiting[split] = ""
    assert not any(waiting.values())
    return splits


DOCUMENTS = ["", *(f"Document {i}: naïve 🚀\n" + "with lines\n" * (i % 7) for i in range(60))]


def test_corpus_is_counted(tmp_path: Path):
    corpus = corpus_of(tmp_path / "a", DOCUMENTS, "and one more")
    assert corpus.documents == len(DOCUMENTS) + 1
    assert corpus.sizes == [sum(len(text.encode()) for text in DOCUMENTS), 12] and corpus.bytes == sum(corpus.sizes)
    assert corpus_of(tmp_path / "b", *DOCUMENTS, "and one more").content == corpus.content
    assert corpus_of(tmp_path / "c", "and one more", DOCUMENTS).content != corpus.content


def test_many_documents_are_split_whole_and_in_any_order_alike(tmp_path: Path):
    forward = split_documents(corpus_of(tmp_path / "a", DOCUMENTS, val_fraction=0.2))
    backward = split_documents(corpus_of(tmp_path / "b", DOCUMENTS[::-1], val_fraction=0.2))
    files = split_documents(corpus_of(tmp_path / "c", *DOCUMENTS, val_fraction=0.2))
    assert files == forward == {split: texts[::-1] for split, texts in backward.items()}
    assert sorted(forward["train"] + forward["val"]) == sorted(DOCUMENTS)
    assert 4 <= len(forward["val"]) <= 25  # about a fifth of 61


@pytest.mark.parametrize("sizes", [(60_000, 49), (49, 60_000), (1000, 1000), (10, 10), (10, 5000, 10, 10)])
@pytest.mark.parametrize("val_fraction", [0.1, 0.5, 0.9])
def test_few_documents_are_split_by_their_bytes(sizes: tuple[int, ...], val_fraction: float, tmp_path: Path):
    texts = ["abcdefghij"[i % 10] * size for i, size in enumerate(sizes)]
    corpus = corpus_of(tmp_path, *texts, val_fraction=val_fraction)
    found = [*assigned(corpus)]
    assert "".join(text for _, text, _ in found) == "".join(texts) and sum(ends for *_, ends in found) == len(sizes)
    val = sum(len(text) for split, text, _ in found if split == "val") / corpus.bytes
    assert min(val_fraction / 2, 0.4) <= val <= min(2 * val_fraction, 0.95)
    if not corpus.by_document:
        assert [split for split, *_ in found] == sorted(split for split, *_ in found)  # train, then val
        assert abs(val * corpus.bytes - corpus.bytes * val_fraction) <= 1
        halves = [*assigned(corpus, 1, 2), *assigned(corpus, 2, 2)]
        assert halves == found


def test_a_document_larger_than_all_others_is_cut(tmp_path: Path):
    for seed in range(30):
        texts = [f"{seed} {i} " + "x" * (50_000 if i == 3 else 10) for i in range(20)]
        found = [*assigned(corpus_of(tmp_path, texts))]
        val = sum(len(text) for split, text, _ in found if split == "val") / sum(map(len, texts))
        assert 0.05 <= val <= 0.2


@pytest.mark.parametrize("val_fraction", [number / 90 for number in range(1, 90)])  # after each byte once
def test_one_document_is_split_where_a_character_ends(val_fraction: float, tmp_path: Path):
    text = "🚀é漢" * 10
    splits, pieces_, ends = zip(*assigned(corpus_of(tmp_path, text, val_fraction=val_fraction)), strict=True)
    train = "".join(piece for split, piece in zip(splits, pieces_, strict=True) if split == "train")
    assert "".join(pieces_) == text and text.startswith(train)
    assert 0 <= len(train.encode()) - int(90 * (1 - val_fraction)) < 4
    assert splits[-1] == "val" and [*ends] == [False] * (len(ends) - 1) + [True]


def test_large_document_is_split_at_its_byte_however_it_is_cut(code: str, tmp_path: Path):
    corpus = corpus_of(tmp_path, code * (2**22 // len(code)), val_fraction=0.3)
    splits, parts, _ = zip(*assigned(corpus), strict=True)
    train = splits.index("val")
    assert train > 1 and len(parts) > train + 1 and {*splits[train:]} == {"val"}
    assert sum(len(text.encode()) for text in parts[:train]) == int(corpus.bytes * 0.7)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 100])
def test_parts_end_to_end_are_all_documents(parts: int, tmp_path: Path):
    corpus = corpus_of(tmp_path, "", DOCUMENTS[:20], "one line\n" * 10, "", DOCUMENTS[20:], "", [], val_fraction=0.2)
    assert corpus.by_document
    found = [["".join(d()) for _, d in documents_of(corpus, part, parts)] for part in range(1, parts + 1)]
    texts = [text for some in found for text in some]
    assert texts == ["", *DOCUMENTS[:20], "one line\n" * 10, "", *DOCUMENTS[20:], ""]
    sizes = [sum(len(text.encode()) for text in some) for some in found]
    assert max(sizes) <= corpus.bytes / parts + max(len(text.encode()) for text in texts)
    splits = [split_documents(corpus, part, parts) for part in range(1, parts + 1)]
    assert [text for some in splits for text in some["val"]] == split_documents(corpus)["val"]


@pytest.mark.parametrize("part, others, text", [(1, [1, 2], "a"), (3, [0], "c")])
def test_a_source_with_none_of_a_part_is_not_read(part: int, others: list[int], text: str, tmp_path: Path):
    corpus = corpus_of(tmp_path, "a" * 100, ["b" * 100], "c" * 100)
    for number in others:
        corpus.sources[number].path.unlink()
    assert ["".join(d()) for _, d in documents_of(corpus, part, 3)] == [text * 100]


# Examples, which are never cut. Here each is the text of a record.

WHOLE = {"turns_of": lambda record: record["text"]}


def test_an_example_longer_than_any_piece_is_whole(tmp_path: Path):
    texts = ["many words " * 2**17, "few words"]
    found = [*assigned(corpus_of(tmp_path, texts, **WHOLE))]
    assert [(json.loads(text), ends) for _, text, ends in found] == [(text, True) for text in texts]


@pytest.mark.parametrize("val_fraction", [0.01, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("sizes", [(9, 9), (1, 1000), (1000, 1), (10, 5000, 10, 10), (5000, 10, 10), (9,) * 7])
def test_few_examples_are_split_whole_and_both_splits_have_some(sizes, val_fraction: float, tmp_path: Path):
    corpus = corpus_of(
        tmp_path, ["abcdefg"[i] * size for i, size in enumerate(sizes)], val_fraction=val_fraction, **WHOLE
    )
    found = [*assigned(corpus)]
    assert [json.loads(text)[0] for _, text, _ in found] == [*"abcdefg"[: len(sizes)]] and all(e for *_, e in found)
    splits = [split for split, *_ in found]
    assert {*splits} == {"train", "val"} and (corpus.by_document or splits == sorted(splits))
    assert [*assigned(corpus, 1, 3), *assigned(corpus, 2, 3), *assigned(corpus, 3, 3)] == found


def test_the_tail_of_examples_is_about_the_fraction_asked(tmp_path: Path):
    for number in range(20):  # of which some fall well into the splits by their hashes
        texts = [f"{number} {i} {'x' * 50}" for i in range(20)]
        corpus = corpus_of(tmp_path / str(number), texts, val_fraction=0.25, **WHOLE)
        count = [split for split, *_ in assigned(corpus)].count("val")
        assert 2 <= count <= 10 if corpus.by_document else count == 5


def test_many_examples_are_split_by_their_hashes(tmp_path: Path):
    forward = split_documents(corpus_of(tmp_path / "a", DOCUMENTS, val_fraction=0.2, **WHOLE))
    backward = split_documents(corpus_of(tmp_path / "b", DOCUMENTS[::-1], val_fraction=0.2, **WHOLE))
    assert forward == {split: texts[::-1] for split, texts in backward.items()} and len(forward["val"]) > 3
