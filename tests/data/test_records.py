"""Text files of records, and text in other encodings: limits, counts, and large files."""

import gzip
import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from helpers import make_reader, texts_of

from engine.core.errors import UserError
from engine.data.dataset import open_dataset
from engine.data.inputs import readers, records, sources
from engine.data.inputs.documents import Corpus
from engine.data.inputs.readers import read
from engine.data.inputs.sources import Reader, Source
from prepare import PrepareConfig, prepare

LINE = "ein Satz, schön und 漢字 🚀\n"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make records, pieces and blocks so small that a test exceeds them."""
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr(readers, "LARGE_DOCUMENT_BYTES", 2**11)
    monkeypatch.setattr(readers, "PIECE_BYTES", 2**10)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 100)


LONG = "x" * 2000


@pytest.mark.parametrize(
    ("name", "content", "location"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "' + LONG, "a.jsonl, line 2"),
        ("a.jsonl.gz", '{"text": "' + LONG, "a.jsonl.gz, line 1"),
        ("a.json", '[\n{"text": "' + LONG + '"}]', "a.json, line 2"),
        ("a.json", '[\n{"text":\n' + "[1,\n" * 400, "a.json, record 1"),
        ("a.csv", "text\na\n" + LONG, "a.csv, line 3"),
        ("a.csv", 'text\n"' + "x\n" * 1000, "a.csv, line 2"),
        ("a.csv", LONG, "a.csv, line 1"),
        ("a.txt", "a%b%" + LONG, "a.txt, document 3"),
    ],
)
def test_a_record_that_is_too_long_is_refused_by_name(name, content, location, small, tmp_path):
    compress = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(compress(content.encode()))
    with pytest.raises(UserError, match=f"^{location}: "):
        texts_of(tmp_path / name, separator="%" if name == "a.txt" else "")


def assert_equal_peaks(path: Path, contents: Iterator[bytes], reader: Reader, limit: int) -> None:
    """Check the memory to read each content: the first is to warm up, and the last is large."""
    peaks = []
    for content in contents:
        path.write_bytes(content)
        tracemalloc.start()
        assert sum(1 for _ in read(Source(path, path.name), reader=reader)) > 10
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] * 1.2 < limit


@pytest.mark.parametrize(
    ("name", "head", "unit"),
    [
        ("a.jsonl", "", '{"text": "' + "word " * 99 + '"}\n'),
        ("a.json", "[", '\n{"text": "' + "word " * 99 + '"},'),
        ("a.csv", "text\n", '"' + "word " * 99 + '\n"\n'),
        ("a.txt", "", "word " * 99 + "%"),
    ],
)
def test_memory_does_not_grow_with_the_number_of_records(name, head, unit, tmp_path: Path):
    reader = Reader(skip_bad_rows=True, separator="%" if name == "a.txt" else "")
    end = "\n{}]" if name == "a.json" else ""
    contents = ((head + unit * count + end).encode() for count in (800, 800, 4000))  # 0.4 and 2 MB
    assert_equal_peaks(tmp_path / name, contents, reader, 4 * 2**20)


# Encodings.


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "gb18030"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.csv"])
def test_other_encodings_give_the_texts_of_utf8(name, encoding, small, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 10**6)
    text = LINE * 500
    rows = "".join(json.dumps({"text": LINE}, ensure_ascii=False) + "\n" for _ in range(500))
    content = {"jsonl": rows, "csv": "text\n" + f'"{LINE}"\n' * 500}.get(name[2:], text)
    compress = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(compress(content.encode()))
    expected = [*read(Source(tmp_path / name, name))]
    assert "".join(piece.text for piece in expected) == text
    (tmp_path / name).write_bytes(compress(content.encode(encoding)))
    assert [*read(Source(tmp_path / name, name), reader=make_reader(encoding=encoding))] == expected


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32-le", "gb18030", "shift_jis"])
def test_a_large_file_is_detected_by_its_beginning(encoding: str, tmp_path: Path):
    text = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n" * 2000
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert "".join(texts_of(tmp_path / "a.txt", encoding="auto")) == text


@pytest.mark.parametrize(
    ("encoding", "num_lines", "max_bytes"),
    [("utf-8", 1_400_000, 4 * 2**20), ("utf-16", 360_000, 8 * 2**20)],
)
def test_memory_does_not_grow_with_a_document(encoding, num_lines, max_bytes, tmp_path: Path):
    contents = ((LINE * count).encode(encoding) for count in (90_000, 90_000, num_lines))
    assert_equal_peaks(tmp_path / "a.txt", contents, Reader(encoding=encoding), max_bytes)


def test_an_encoding_is_detected_where_utf8_ends(tmp_path: Path):
    text = "plain English words\n" * 10_000 + "Ça a été très difficile à voir, déjà là-bas.\n" * 9
    (tmp_path / "a.txt").write_bytes(text.encode("cp1252"))
    notes: Counter = Counter()
    assert "".join(texts_of(tmp_path / "a.txt", notes, encoding="auto")) == text
    assert +notes == {"files read as cp1252": 1}
    with pytest.raises(UserError, match=r"at byte 200000\b.*--encoding auto"):
        texts_of(tmp_path / "a.txt")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
@pytest.mark.parametrize("count", [1, 3000])
def test_replacements_are_counted_once(encoding: str, count: int, tmp_path: Path):
    data = "word \ufffd ".encode(encoding) * count
    bad = {"utf-8": b"\xff", "utf-16-le": b"\x00\xd8"}[encoding]
    (tmp_path / "a.txt").write_bytes((data + bad + b" \0"[: len(bad)]) * 40)
    notes: Counter = Counter()
    text = "".join(texts_of(tmp_path / "a.txt", notes, encoding=encoding, errors="replace"))
    expected = 40 if encoding == "utf-8" else text.count("\ufffd")
    assert notes == {"characters replaced by U+FFFD": expected} and text.count("word") == 40 * count


# What is left out.


def test_notes_of_all_units_are_in_the_manifest(tmp_path: Path, monkeypatch):
    names = [f"{tmp_path}/{name}.jsonl" for name in "abc"]
    for name in names:
        rows = [f'{{"text": "{i} {name}"}}\n{{"te\n' for i in range(30)]
        Path(name).write_text("".join(rows))
    monkeypatch.setattr("engine.data.inputs.documents.MIN_UNIT_BYTES", 1)
    options = {"tokenizer": "byte", "out": tmp_path / "out", "skip_bad_rows": True}
    config = PrepareConfig(tuple(names), deduplicate=True, **options)
    prepare(config)
    manifest = open_dataset(tmp_path / "out").manifest
    assert manifest["statistics"]["notes"] == {"rows left out: is not JSON": 90}
    assert manifest["statistics"]["documents"] == 90
    assert prepare(config)[1] is False
    for change in ({"encoding": "auto"}, {"errors": "replace"}):
        changed = PrepareConfig(**{**vars(config), **change})
        with pytest.raises(UserError, match=next(iter(change))):
            prepare(changed)


def test_a_separator_across_blocks_is_found(small, tmp_path: Path):
    separator = "<|endoftext|>"
    texts = [f"{i}" * i for i in range(1, 200)]
    for filler in range(14):
        documents = ["x" * filler, *texts]
        (tmp_path / "a.txt").write_text(separator.join(documents))
        expected = [*filter(None, documents)]
        assert texts_of(tmp_path / "a.txt", separator=separator) == expected


def test_a_table_of_one_row_is_cut_as_before(tmp_path: Path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["word " * 50]}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("word " * 50)
    sources = [Source(tmp_path / name, name) for name in ("a.parquet", "a.txt")]
    assert [Corpus([source], 0.1).rule.is_single_document for source in sources] == [False, True]
    assert not Corpus(sources[1:], 0.1, (), Reader(separator="%")).rule.is_single_document
