"""Which documents belong to which split and part, how they are cut, and what a sample of them is."""

import gzip
import hashlib
import itertools
import json
import os
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from engine.data import readers, splits
from engine.data.readers import Text, read
from engine.data.sources import Source, Unreadable
from engine.data.splits import Corpus, Piece, digest_of, lot_of


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large, its pieces and a sample's places, so small that a test has many."""
    for module in (readers, splits):
        monkeypatch.setattr(module, "LARGE", 2**11)
    monkeypatch.setattr(readers, "PIECE", 2**10)
    monkeypatch.setattr(splits, "SAMPLE", 2**10)


def source_of(path: Path, content: list[str] | str | bytes, **reading: object) -> Source:
    """A file with text, or with documents, in the way that its name says."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": content}), path, row_group_size=10)
        return Source(path, path.name, **reading)
    if isinstance(content, list):
        content = "".join(json.dumps({"text": text}) + "\n" for text in content)
    content = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return Source(path, path.name, **reading)


def corpus_of(folder: Path, *sources: list[str] | str | bytes, val_fraction: float = 0.1, **reading: object) -> Corpus:
    """A corpus of a .jsonl file for each list of documents, and of a .txt file for each text."""
    folder.mkdir(exist_ok=True)
    names = [f"{i}.{'jsonl' if isinstance(content, list) else 'txt'}" for i, content in enumerate(sources)]
    found = [source_of(folder / name, content, **reading) for name, content in zip(names, sources, strict=True)]
    return Corpus(found, val_fraction)


def pieces_of(corpus: Corpus, part: int = 1, parts: int = 1) -> list[Piece]:
    texts = corpus.texts(*corpus.stretch(part, parts))
    return [piece for text in texts for piece in corpus.rule.pieces(text, digest_of(text))]


def split_documents(corpus: Corpus, part: int = 1, parts: int = 1) -> dict[str, list[str]]:
    """The documents of each split of a part, which must be whole."""
    found, waiting = {"train": [], "val": []}, {"train": "", "val": ""}
    for piece in pieces_of(corpus, part, parts):
        waiting[piece.split] += piece.text
        if piece.ends:
            found[piece.split].append(waiting[piece.split])
            waiting[piece.split] = ""
    assert not any(waiting.values())
    return found


DOCUMENTS = ["", *(f"Document {i}: naïve 🚀\n" + "with lines\n" * (i % 7) for i in range(60))]


def test_a_digest_is_of_the_text_and_its_place():
    assert digest_of(Text("é")) == digest_of(Text("é", ends=False)) == hashlib.blake2b("é".encode()).digest()[:32]
    assert len({digest_of(Text(text, offset, 9)) for text in ("", "é", "e") for offset in (0, 1, 256)}) == 9


# Many documents, drawn by lot.


def test_many_documents_are_split_whole_and_in_any_order_alike(tmp_path: Path):
    forward = split_documents(corpus_of(tmp_path / "a", DOCUMENTS, val_fraction=0.2))
    backward = split_documents(corpus_of(tmp_path / "b", DOCUMENTS[::-1], val_fraction=0.2))
    files = split_documents(corpus_of(tmp_path / "c", *DOCUMENTS, val_fraction=0.2))
    assert files == forward == {split: texts[::-1] for split, texts in backward.items()}
    assert sorted(forward["train"] + forward["val"]) == sorted(DOCUMENTS)
    assert 4 <= len(forward["val"]) <= 25  # about a fifth of 61


@pytest.mark.parametrize("reading", [{}, {"turns_of": lambda record: record["text"]}])
@pytest.mark.parametrize("count", [6, 60])
def test_identical_documents_fall_to_the_same_split(count: int, reading: dict, tmp_path: Path):
    texts = DOCUMENTS[1 : count + 1] * 3
    random.Random(0).shuffle(texts)
    corpus = corpus_of(tmp_path, texts, val_fraction=0.3, **reading)
    found = split_documents(corpus)
    assert found["train"] and found["val"] and not {*found["train"]} & {*found["val"]}
    assert len(found["train"] + found["val"]) >= len(texts)


def test_a_fraction_of_the_documents_is_for_validation(tmp_path: Path):
    texts = [str(number) for number in range(5000)]
    for val_fraction in (0.01, 0.1, 0.5, 0.9):
        count = len(split_documents(corpus_of(tmp_path, texts, val_fraction=val_fraction))["val"])
        assert abs(count / 5000 - val_fraction) < 0.02
    lots = [lot_of(digest_of(Text(text))) for text in texts]
    assert 0 <= min(lots) < 0.01 and 0.99 < max(lots) < 1


def test_a_large_document_among_many_gives_its_tail(small, tmp_path: Path):
    large = ["words and words; " * 1000, "x" * 5000, "🚀" * 600]
    corpus = corpus_of(tmp_path, [*DOCUMENTS, *large], large[0], "just below" * 200)
    assert not corpus.rule.few
    found = split_documents(corpus)
    rest = split_documents(corpus_of(tmp_path / "rest", [*DOCUMENTS, "just below" * 200]))
    for text in [*large, large[0]]:
        tail = int(len(text.encode()) * 0.9)
        train = next(one for one in found["train"] if text.startswith(one) and 0 <= len(one.encode()) - tail < 4)
        found["train"].remove(train)
        found["val"].remove(text[len(train) :])
    assert found == rest


# Few documents, of which each gives its tail.


@pytest.mark.parametrize("sizes", [(60_000, 49), (49, 60_000), (1000, 1000), (10, 10), (10, 5000, 10, 10), (5, 0, 1)])
@pytest.mark.parametrize("val_fraction", [0.1, 0.5, 0.9])
def test_few_documents_give_their_tails(sizes: tuple[int, ...], val_fraction: float, small, tmp_path: Path):
    texts = ["abcdefghij"[i % 10] * size for i, size in enumerate(sizes)]
    for number, contents in enumerate([texts, [texts]]):
        corpus = corpus_of(tmp_path / str(number), *contents, val_fraction=val_fraction)
        assert corpus.rule.few and not corpus.single
        found = pieces_of(corpus)
        assert "".join(piece.text for piece in found) == "".join(texts)
        assert sum(piece.last for piece in found) == len(texts)
        heads = [text[: int(len(text) * (1 - val_fraction))] for text in texts]
        tails = [text[len(head) :] for text, head in zip(texts, heads, strict=True)]
        splits = split_documents(corpus)
        assert [text for text in splits["train"] if text] == [head for head in heads if head]
        assert splits["val"] == [tail for tail in tails if tail]
        assert [piece for part in (1, 2, 3) for piece in pieces_of(corpus, part, 3)] == found


@pytest.mark.parametrize("val_fraction", [number / 90 for number in range(1, 90)])  # after each byte once
def test_one_document_is_split_where_a_character_ends(val_fraction: float, tmp_path: Path):
    text = "🚀é漢" * 10
    found = pieces_of(corpus_of(tmp_path, text, val_fraction=val_fraction))
    train = "".join(piece.text for piece in found if piece.split == "train")
    assert "".join(piece.text for piece in found) == text and text.startswith(train)
    assert 0 <= len(train.encode()) - int(90 * (1 - val_fraction)) < 4
    assert found[-1].split == "val" and [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]
    assert [piece.last for piece in found] == [piece.ends for piece in found]


def test_a_large_document_is_split_at_its_byte_however_it_is_cut(code: str, small, tmp_path: Path):
    text = "é🚀" + code
    for val_fraction in (0.3, 1024 / len(text.encode()), 0.01):
        corpus = corpus_of(tmp_path, text, val_fraction=val_fraction)
        found = pieces_of(corpus)
        names = [piece.split for piece in found]
        assert names == sorted(names) and len(names) > 50 and "".join(piece.text for piece in found) == text
        size = sum(len(piece.text.encode()) for piece in found if piece.split == "train")
        assert 0 <= size - int(corpus.bytes * (1 - val_fraction)) < 4
        assert [piece.ends for piece in found] == [False] * (len(names) - 1) + [True]


def test_a_document_has_an_end_in_both_splits_where_a_piece_ends_too(small, tmp_path: Path):
    found = split_documents(corpus_of(tmp_path, "x" * 4096, "y" * 4096, val_fraction=0.5))
    assert found == {split: ["x" * 2048, "y" * 2048] for split in ("train", "val")}


def test_a_character_is_not_cut_where_a_piece_ends(small, tmp_path: Path):
    for shift in range(8):  # the boundary meets the end of a piece at each of its bytes
        text = "a" * shift + "🚀" * 1024
        size = len(text.encode())
        for byte in range(2040, 2056):
            corpus = corpus_of(tmp_path, text, val_fraction=1 - (byte + 0.5) / size)
            train = [piece.text for piece in pieces_of(corpus) if piece.split == "train"]
            assert 0 <= len("".join(train).encode()) - byte < 4


@pytest.mark.parametrize("val_fraction", [0.05, 0.1, 0.3, 0.5, 0.77])
def test_bytes_that_are_replaced_leave_the_tail_in_one(val_fraction: float, small, tmp_path: Path):
    data = "naïve, très gênant; ".encode("latin-1") * 500  # each replaced by three bytes
    found = pieces_of(corpus_of(tmp_path, data, val_fraction=val_fraction, errors="replace"))
    assert "".join(piece.text for piece in found) == data.decode(errors="replace")
    names = [piece.split for piece in found]
    assert names == sorted(names) and [piece.ends for piece in found] == [False] * (len(names) - 1) + [True]
    val = sum(len(piece.text) for piece in found if piece.split == "val")
    assert abs(val / len(data) - val_fraction) < 0.01


def test_an_empty_corpus_has_no_text(tmp_path: Path):
    for content in ([], "", []):
        corpus = corpus_of(tmp_path, content)
        assert not any(piece.text for piece in pieces_of(corpus)) and not any(corpus.sample(1000))
    assert pieces_of(Corpus([], 0.1)) == []


# Parts.


def various(folder: Path) -> list[Source]:
    """Sources of all kinds, some of them empty, or with a large document."""
    contents = {
        "a.txt": "",
        "b.jsonl": DOCUMENTS[:20],
        "c.txt": "one line\n" * 1000,
        "d.jsonl.gz": DOCUMENTS[20:],
        "e.parquet": DOCUMENTS,
        "f.txt": "",
        "g.jsonl": [],
        "h.csv": "text\nrow\n" + "large " * 1000 + "\n",
        "i.jsonl": ["é" * 3000, "漢字です。" * 1000, ""],
        "j.txt.gz": "text " * 1000,
        "k.txt": "short",
        "l.txt": "",
    }
    return [source_of(folder / name, content) for name, content in contents.items()]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 100, 10_000])
def test_parts_end_to_end_are_all_documents(parts: int, small, tmp_path: Path):
    corpus = Corpus(various(tmp_path), 0.2)
    whole = [text for source in corpus.sources for text in read(source)]
    numbers = range(1, parts + 1) if parts < 1000 else [*range(1, 300), *range(parts - 300, parts + 1)]
    found = [[*corpus.texts(*corpus.stretch(part, parts))] for part in numbers]
    if parts < 1000:
        assert [text for some in found for text in some] == whole == [*corpus.texts()]
        pieces = [piece for part in numbers for piece in pieces_of(corpus, part, parts)]
        assert pieces == pieces_of(corpus)
    edges = [corpus.stretch(part, parts) for part in range(1, parts + 1)]
    assert edges[0][0] == 0 and edges[-1][1] == corpus.bytes + 1
    assert all(one[1] == other[0] for one, other in itertools.pairwise(edges))


def test_texts_may_begin_anywhere(small, tmp_path: Path):
    corpus, chance = Corpus(various(tmp_path), 0.2), random.Random(0)
    whole = [*corpus.texts()]
    for _ in range(30):
        inner = [chance.choice([chance.choice(corpus.starts), chance.randrange(corpus.bytes)]) for _ in range(5)]
        edges = [0, *sorted(inner), corpus.bytes + 1]
        assert [text for edge in itertools.pairwise(edges) for text in corpus.texts(*edge)] == whole


@pytest.mark.parametrize("part, others, text", [(1, [1, 2], "a"), (2, [0, 2], "b"), (3, [0, 1], "c")])
def test_a_source_with_none_of_a_part_is_not_read(part: int, others: list[int], text: str, tmp_path: Path):
    corpus = corpus_of(tmp_path, "a" * 112, ["b" * 100], "c" * 112)
    sources = [Source(source.path, source.name) for source in corpus.sources]
    corpus = Corpus(sources, 0.1)
    assert corpus.starts == [0, 112, 225, 337]
    for number in others:
        corpus.sources[number].path.unlink()
    start, end = corpus.starts[part - 1 : part + 1]
    assert [found.text for found in corpus.texts(start, end)] == [text * (112 if text != "b" else 100)]


def test_no_more_is_read_than_tells_that_documents_are_many(tmp_path: Path):
    good, bad = [f"document {number}" for number in range(61)], ["this is no JSON\n"]
    lines = [json.dumps({"text": text}) + "\n" for text in good]
    (tmp_path / "a.jsonl").write_text("".join(lines + bad))
    (tmp_path / "few.jsonl").write_text("".join(lines[:30] + bad))
    (tmp_path / "bad.jsonl").write_text("".join(bad))
    (tmp_path / "bad.txt").write_bytes(b"\xff")

    def corpus(*names: str) -> Corpus:
        return Corpus([Source(tmp_path / name, name) for name in names], 0.1)

    assert not corpus("a.jsonl", "bad.jsonl").rule.few
    assert not corpus(*["bad.txt"] * 60).rule.few and corpus(*["bad.txt"] * 59).rule.few
    assert not corpus(*["bad.txt"] * 60, "bad.jsonl").rule.few
    for names in (["few.jsonl"], [*["bad.txt"] * 59, "bad.jsonl"]):
        with pytest.raises(Unreadable, match="is not JSON"):
            corpus(*names)
    for count in (59, 40):
        parquet = source_of(tmp_path / "a.parquet", [str(number) for number in range(count)], field="absent")
        assert Corpus([parquet], 0.1).rule.few == (count < 60)  # told by its footer


def test_a_few_small_documents_before_larger_ones_are_not_many(tmp_path: Path):
    small, large = ["", "yes", "no", "a title", "hi"], ["words and words\n" * 2000] * 3
    assert corpus_of(tmp_path, [*small, *large]).rule.few
    assert not corpus_of(tmp_path, [*small, *large] * 8).rule.few


def test_few_documents_with_much_beside_their_text_are_few(tmp_path: Path):
    lines = [json.dumps({"text": f"text {number}", "embedding": [0.5] * 4000}) + "\n" for number in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    assert Corpus([Source(tmp_path / "a.jsonl", "a.jsonl")], 0.1).rule.few


def test_another_revision_of_a_dataset_is_another_corpus(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text")
    sources = [Source(tmp_path / "a.txt", "hf:a", revision=revision) for revision in ("1", "1", "2")]
    listings = [Corpus([source], 0.1).listing for source in sources]
    assert listings[0] == listings[1] != listings[2]


# Examples, which are never cut. Here each is the text of a record.

WHOLE = {"turns_of": lambda record: record["text"]}


def test_an_example_longer_than_any_piece_is_whole(small, tmp_path: Path):
    texts = ["many words " * 2**10, "few words"]
    found = pieces_of(corpus_of(tmp_path, texts, **WHOLE))
    assert [(json.loads(piece.text), piece.ends, piece.last) for piece in found] == [
        (text, True, True) for text in texts
    ]


@pytest.mark.parametrize("val_fraction", [0.01, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("sizes", [(9, 9), (1, 1000), (1000, 1), (10, 5000, 10, 10), (5000, 10, 10), (9,) * 7])
def test_few_examples_are_split_whole_and_both_splits_have_some(sizes, val_fraction: float, small, tmp_path: Path):
    texts = ["abcdefg"[i] * size for i, size in enumerate(sizes)]
    corpus = corpus_of(tmp_path, texts, val_fraction=val_fraction, **WHOLE)
    found = pieces_of(corpus)
    assert [json.loads(piece.text) for piece in found] == texts and all(piece.ends and piece.last for piece in found)
    names = [piece.split for piece in found]
    assert {*names} == {"train", "val"}
    assert names.count("val") == min(max(1, round(val_fraction * len(sizes))), len(sizes) - 1)
    assert [*pieces_of(corpus, 1, 3), *pieces_of(corpus, 2, 3), *pieces_of(corpus, 3, 3)] == found


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_single_example_or_its_repeats_are_for_training(count: int, tmp_path: Path):
    found = pieces_of(corpus_of(tmp_path, ["one"] * count, val_fraction=0.9, **WHOLE))
    assert [piece.split for piece in found] == ["train"] * count


def test_few_examples_are_split_alike_in_any_order_and_any_files(tmp_path: Path):
    for number in range(10):
        texts = [f"{number} {i}" for i in range(12)]
        one = split_documents(corpus_of(tmp_path / "a", texts, val_fraction=0.25, **WHOLE))
        other = split_documents(corpus_of(tmp_path / "b", texts[5:], texts[:5], val_fraction=0.25, **WHOLE))
        assert len(one["val"]) == 3 and sorted(one["val"]) == sorted(other["val"])


def test_many_examples_are_split_by_their_hashes(tmp_path: Path):
    forward = split_documents(corpus_of(tmp_path / "a", DOCUMENTS, val_fraction=0.2, **WHOLE))
    backward = split_documents(corpus_of(tmp_path / "b", DOCUMENTS[::-1], val_fraction=0.2, **WHOLE))
    assert forward == {split: texts[::-1] for split, texts in backward.items()} and len(forward["val"]) > 3


# Samples.


def corpora(folder: Path) -> dict[str, Corpus]:
    """A thousand numbered documents of a hundred bytes, in files of all sorts."""
    folder.mkdir(exist_ok=True)
    texts = [f"{number:<99}\n" for number in range(1000)]
    files = [source_of(folder / f"{i:04}.txt", text) for i, text in enumerate(texts)]
    zipped = [source_of(folder / f"{i}.jsonl.gz", texts[i * 50 : i * 50 + 50]) for i in range(20)]
    named = {name: source_of(folder / name, texts) for name in ("a.jsonl", "a.parquet", "a.jsonl.gz")}
    sources = {"files": files, "zipped": zipped, "text": [source_of(folder / "a.txt", "".join(texts))]}
    sources |= {name: [source] for name, source in named.items()}
    return {name: Corpus(some, 0.1) for name, some in sources.items()}


def numbers_in(texts: list[str]) -> list[int]:
    return [int(number) for text in texts for number in text.split()]


def test_a_sample_is_spread_over_the_corpus(small, tmp_path: Path):
    for name, corpus in corpora(tmp_path).items():
        sample = [*corpus.sample(20_000)]
        assert sample == [*corpus.sample(20_000)] == [*Corpus(corpus.sources, 0.5).sample(20_000)]
        assert 19_000 <= sum(map(len, sample)) <= 24_000, name
        numbers = numbers_in(sample)
        assert numbers == sorted({*numbers}) and numbers[0] == 0
        if name != "a.jsonl.gz":  # which can only be read from its beginning
            assert all(number + 100 > other for number, other in itertools.pairwise([*numbers, 1000])), name


def test_a_sample_has_about_the_bytes_asked(small, tmp_path: Path):
    for name, corpus in corpora(tmp_path / "a").items():
        for size in (1, 100, 1000, 10_000, 50_000):
            most = readers.PIECE if name == "text" else 100  # of one text
            assert size <= sum(map(len, corpus.sample(size))) < size + 2 * most
    uneven = corpus_of(tmp_path, *(text for number in range(50) for text in ("one", f"{number:<999} ")))
    assert 9_900 <= sum(map(len, uneven.sample(10_000))) <= 11_100


def test_a_sample_is_everything_if_there_is_no_more(small, tmp_path: Path):
    for name, corpus in corpora(tmp_path).items():
        for size in (100_000, 200_000, 2**19):
            if size > 100_000 or corpus.counted:
                assert numbers_in([*corpus.sample(size)]) == [*range(1000)], name


def test_what_is_not_known_to_have_bytes_is_sampled_too(tmp_path: Path, monkeypatch):
    corpus = corpus_of(tmp_path, DOCUMENTS[:30], DOCUMENTS[30:])
    monkeypatch.setattr(Source, "size", 0)  # as of a web server that does not say
    monkeypatch.setattr(Source, "seekable", False)
    corpus = Corpus([Source(source.path, source.name) for source in corpus.sources], 0.1)
    assert corpus.bytes == 0 and [*corpus.sample(2**20)] == DOCUMENTS
    assert [text.text for part in (1, 2, 3) for text in corpus.texts(*corpus.stretch(part, 3))] == DOCUMENTS


# What tells whether files are the same.


def test_the_stamp_changes_with_a_file_and_the_listing_with_its_size(tmp_path: Path):
    def known() -> tuple[str, str]:
        corpus = Corpus([Source(tmp_path / name, name) for name in ("a.txt", "b.txt")], 0.1)
        return corpus.stamp, corpus.listing

    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    before = known()
    assert before == known() and all(before)
    os.utime(tmp_path / "b.txt", ns=(1, 1))
    stamp, listing = known()
    assert stamp != before[0] and listing == before[1]
    (tmp_path / "b.txt").write_text("texts")
    assert (of_both := known()[1]) != listing
    (tmp_path / "copy").mkdir()
    for name, text in (("a.txt", "TEXT"), ("b.txt", "TEXTS")):
        (tmp_path / "copy" / name).write_text(text)
    copies = [Source(tmp_path / "copy" / name, f"copy/{name}") for name in ("a.txt", "b.txt")]
    assert Corpus(copies, 0.1).listing == of_both
    os.rename(tmp_path / "b.txt", tmp_path / "c.txt")
    assert Corpus([Source(tmp_path / name, name) for name in ("a.txt", "c.txt")], 0.1).listing != of_both


def test_bytes_are_counted_where_they_are_those_of_the_text(tmp_path: Path):
    for name, corpus in corpora(tmp_path).items():
        assert corpus.counted == (name in ("files", "text", "a.jsonl"))
