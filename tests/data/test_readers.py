"""Every kind of file: the same texts come out, and whatever is damaged is named in one line."""

import bisect
import csv
import gzip
import io
import json
import lzma
import random
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd

from engine.core.errors import UserError
from engine.data.inputs import readers, sources
from engine.data.inputs.readers import Text, count_documents, count_parts, read, split_document
from engine.data.inputs.sources import Source, find_sources
from engine.data.tokenizer import Tokenizer, named_tokenizer
from engine.data.tokenizer_json import SPLIT_PATTERNS
from engine.data.tokenizer_training import train_bpe_tokenizer

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress, ".xz": lzma.compress}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make large documents, pieces and blocks so small that a test has many."""
    monkeypatch.setattr(readers, "LARGE_DOCUMENT_BYTES", 2**11)
    monkeypatch.setattr(readers, "PIECE_BYTES", 2**10)
    monkeypatch.setattr(readers, "MAX_BATCH_BYTES", 2**12)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 100)


# Texts with and without places to cut, of characters of all lengths.
PLAIN = {
    "small": "🚀 just below " * 127,
    "just below large": "🚀é漢" * 227 + "é\n\n",
    "just above large": "🚀é漢" * 227 + "é\n\n\n",
    "words": "some words, and\nlines; " * 300,
    "lines of CRLF": "a line\r\n\r\n" * 500,
    "unbroken": "x" * 5000,
    "spaces": " " * 5000,
    "characters of four bytes": "a" + "🚀" * 1500,
    "characters of three bytes": "ab" + "漢" * 1500,
    "Chinese": "漢字かなです、と。いう！" * 200,
    "one cut late in each piece": ("x" * 1000 + " " + "y" * 900) * 5,
}
TEXTS = [
    "first",
    " spaces, and\n\nlines\r\nof \rall kinds\t",
    'quotes " and ""',
    "naïve 漢字、かな。 🚀",
    "",
    *PLAIN.values(),
]


def join_pieces(texts: list[Text]) -> list[str]:
    """Join pieces to documents, and check their sizes and offsets."""
    documents = [""]
    for text in texts:
        assert text.offset == len(documents[-1].encode())
        documents[-1] += text.text
        if text.ends:
            assert text.size in (None, len(documents[-1].encode()))
            documents.append("")
    assert documents.pop() == ""
    return documents


def write(path: Path, texts: list[str]) -> Path:
    """Write texts to a file of the kind that its name says."""
    kind, _, compression = path.name.removeprefix("a.").partition(".")
    if kind == "parquet":
        table = pyarrow.table({"id": range(len(texts)), "text": texts})
        pyarrow.parquet.write_table(table, path, row_group_size=3)
        return path
    content = "".join(texts)
    if kind in ("jsonl", "ndjson"):
        records = [{"id": i, "text": text} for i, text in enumerate(texts)]
        content = "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    elif kind == "csv":
        file = io.StringIO()
        csv.writer(file).writerows([("id", "text"), *enumerate(texts)])
        content = file.getvalue()
    path.write_bytes(COMPRESS[f".{compression}" if compression else ""](content.encode()))
    return path


def texts_of(path: Path, **settings: Any) -> list[str]:
    return [text.text for text in read(Source(path, path.name, **settings))]


KINDS = [f"a.{kind}{ending}" for kind in ("jsonl", "ndjson", "csv") for ending in COMPRESS]


@pytest.mark.parametrize("name", [*KINDS, "a.parquet"])
def test_the_same_texts_come_out_of_every_kind_of_file(name: str, small, tmp_path: Path):
    pieces = [*read(Source(write(tmp_path / name, TEXTS), name))]
    assert join_pieces(pieces) == TEXTS
    assert pieces == [*read(Source(write(tmp_path / "a.jsonl", TEXTS), name))]


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_text_file_is_one_document(ending: str, small, tmp_path: Path):
    for text in TEXTS:
        pieces = [*read(Source(write(tmp_path / f"a.txt{ending}", [text]), "a"))]
        assert join_pieces(pieces) == [text]
        assert len(pieces) == 1 or len(text.encode()) > readers.LARGE_DOCUMENT_BYTES


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    """Save the texts with Hugging Face's library, and as a folder of Parquet that it streams."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("saved")
    rows = datasets.Dataset.from_dict({"id": range(len(TEXTS)), "text": TEXTS})
    rows.save_to_disk(folder / "Dataset")
    datasets.DatasetDict({"train": rows}).save_to_disk(folder / "DatasetDict")
    (folder / "streamed").mkdir()
    for number in range(4):
        part = rows.select(range(number * 5, min(len(TEXTS), number * 5 + 5)))
        part.to_parquet(folder / "streamed" / f"{number}.parquet")
    names = ("Dataset", "DatasetDict", "streamed")
    return {name: find_sources((f"hf:{folder / name}",), None, "", folder)[0] for name in names}


def test_the_same_texts_come_out_of_hugging_face_datasets(saved: dict[str, Source], small):
    for source in saved.values():
        assert join_pieces([*read(source)]) == TEXTS
        assert count_documents(source) in (None, len(TEXTS))


def test_parts_in_order_are_the_whole(saved: dict[str, Source], small, tmp_path: Path):
    parquet = Source(write(tmp_path / "a.parquet", TEXTS), "a.parquet")
    for source, count in ((parquet, 6), (saved["Dataset"], 9), (saved["streamed"], 4)):
        part_bytes = -(-source.size // 9)
        assert [count_parts(source, size) for size in (part_bytes, source.size)] == [count, 1]
        for num_parts in (1, 3, count):
            parts = [[*read(source, index, num_parts)] for index in range(num_parts)]
            assert all(parts) and [text for part in parts for text in part] == [*read(source)]


# Pieces of a large document.


@pytest.fixture(scope="module", params=[*SPLIT_PATTERNS, "tiktoken gpt2", "cl100k_base"])
def tokenizer(request: pytest.FixtureRequest, code: str) -> Tokenizer:
    if request.param in SPLIT_PATTERNS:
        chinese = "".join(random.Random(0).choices("漢字かな一ゖ。、，！？", k=20_000))
        return train_bpe_tokenizer([code, chinese], 2000, request.param)
    request.getfixturevalue("tiktoken_cache")
    return named_tokenizer(request.param.removeprefix("tiktoken "))


SPACES = [" ", " ", "\n", "\n", "  ", "    ", "\n   ", "   \n", " \n", "\n\n", "\r\n", "\r\n\r\n"]
SPACES += ["\t", "\n\t", "\x1c", "\xa0", "\u3000", "\u2028"]
MARKS = [".", ",", "'s", " '", "!\n/", "//\n//", "\n/", ")\n", "漢字かな漢字", "é", "\u0301", "12"]
MARKS += [
    "。",
    "、\n",
    "！？",
    "，/",
    "？'s",
    "。\n/",
    "ゖ、",
    "\u9fff！",
    "か\u3099。",
    "\n。",
    "🚀",
]


@pytest.mark.parametrize("seed", range(3))
def test_text_cut_anywhere_encodes_to_the_ids_of_the_whole(tokenizer, code: str, seed: int):
    chance = random.Random(seed)
    words = chance.choices([*code.split(), *["漢字かな", "字", "一かゖ"] * 500], k=1500)
    gaps = [chance.choice(SPACES if chance.random() < 0.5 else MARKS) for _ in words]
    text = "".join(word + gap for word, gap in zip(words, gaps, strict=True))
    cuts = [match.start() for match in readers.CUT.finditer(text)]
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert len(parts) > 200
    ids = [token for part in parts for token in tokenizer.encode(part)]
    assert ids == tokenizer.encode(text).tolist()


def test_pieces_start_at_the_first_cut_after_a_multiple(small):
    text = PLAIN["words"]
    cuts = [match.start() for match in readers.CUT.finditer(text)]
    offsets = [piece.offset for piece in split_document([text.encode()], len(text))]
    multiples = range(readers.PIECE_BYTES, len(text), readers.PIECE_BYTES)
    assert offsets == [0, *(cuts[bisect.bisect_left(cuts, multiple)] for multiple in multiples)]


def test_unbroken_text_is_cut_between_characters(small):
    for name in ("unbroken", "characters of four bytes", "characters of three bytes", "spaces"):
        data = PLAIN[name].encode()
        pieces = split_document([data], len(data))
        for index, piece in enumerate(pieces):
            assert 0 <= piece.offset - index * readers.PIECE_BYTES < 4


def test_a_file_that_becomes_shorter_is_an_error(small):
    with pytest.raises(UserError, match=r"^a\.txt: has become shorter"):
        list(split_document([b"x" * 4000], 5000, "a.txt"))


def test_memory_does_not_grow_with_a_document():
    def blocks(count: int) -> Iterator[bytes]:
        block = b"some words and\nmore of them\n" * 9000
        return (block for _ in range(count))

    peaks = []
    for count in (10, 10, 400):  # 2.5 MB, once to warm up, and 100 MB
        tracemalloc.start()
        for _ in split_document(blocks(count), 252_000 * count):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] * 1.2 < 4 * 2**20


# Text that is not UTF-8.

BAD = [(b"abc\xffdef", 3), (b"abcd\xc3\xa9\xe2\x82", 6), (b"abcde\xed\xa0\x80", 5)]


@pytest.mark.parametrize("before", [0, 1000, 1021, 1022, 1023, 1024, 3072])
@pytest.mark.parametrize(("content", "offset"), BAD)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_bytes_that_are_not_utf8_are_located(content, offset, before, ending, small, tmp_path):
    path = tmp_path / f"a.txt{ending}"
    data = (b"a b\n" * 4000)[:before] + content
    path.write_bytes(COMPRESS[ending](data))
    with pytest.raises(UserError, match=rf"^a\.txt.*at byte {before + offset}\. .*--errors"):
        texts_of(path)
    assert "".join(texts_of(path, errors="replace")) == data.decode(errors="replace")


@pytest.mark.parametrize("block_bytes", [1, 4, 7, 100])
@pytest.mark.parametrize(("content", "offset"), BAD)
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_bytes_that_are_not_utf8_are_located_in_csv(content, offset, block_bytes, start, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", block_bytes)
    data = start + b'id,text\n1,"\xc3\xa9\n"\n2,' + content
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(UserError, match=rf"at byte {len(data) - len(content) + offset}\."):
        texts_of(tmp_path / "a.csv")
    replaced = texts_of(tmp_path / "a.csv", errors="replace")
    assert replaced == ["é\n", content.decode(errors="replace")]


# Records.


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("block_bytes", [1, 5, 2**18])
def test_json_lines_have_a_document_a_line(ending: str, block_bytes, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", block_bytes)
    lines = b'\xef\xbb\xbf{"text": " one\\ntwo\\n"}\n\n  \r\n{"id": 1, "text": "\\u00e9\xc3\xa9"}\r\n'
    lines += b'{"text": "", "id": ' + b"7" * 5000 + b'}\n{"text": "\\ud83d!"}'
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(COMPRESS[ending](lines))
    assert texts_of(path) == [" one\ntwo\n", "éé", "", "\ufffd!"]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("text\nplain\n\n\nlast", ["plain", "last"]),
        ('\ufefftext,id\r\n"a ""b"", c\nand d\r\n",1\r\n\r\n,2\r\n', ['a "b", c\nand d\r\n', ""]),
        ('id,text\n1," spaces "\n2,  more \n', [" spaces ", "  more "]),
        ('text\n""\n"  "\n', ["", "  "]),
        ("text\n", []),
        ("", []),
    ],
)
def test_csv_has_a_document_a_row(content: str, texts: list[str], tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(content.encode())
    assert texts_of(tmp_path / "a.csv") == texts


def test_empty_files_have_no_rows(tmp_path: Path):
    for name, texts in {"a.csv": [], "a.jsonl": [], "a.parquet": [], "a.txt": [""]}.items():
        assert texts_of(write(tmp_path / name, [])) == texts


def turns_of(record: dict) -> list[tuple[str, str]]:
    if "bad" in record["q"]:
        raise UserError("something is bad")
    return [("user", record["q"]), ("assistant", record["a"])]


def test_examples_are_the_json_of_their_turns_and_are_never_cut(small, tmp_path: Path):
    lines = '{"a": "\\ud83d", "q": "é \\"x\\"\\n"}\n\n{"q": "", "a": "\\ud83d\\ude80"}\n'
    (tmp_path / "a.jsonl").write_text(lines)
    texts = texts_of(tmp_path / "a.jsonl", turns_of=turns_of)
    assert texts[0] == '[["user", "é \\"x\\"\\n"], ["assistant", "\ufffd"]]'
    assert texts[1] == '[["user", ""], ["assistant", "🚀"]]'
    (tmp_path / "a.csv").write_text("q,a\nlong," + "words " * 2000)
    (text,) = texts_of(tmp_path / "a.csv", turns_of=turns_of)
    assert json.loads(text)[1] == ["assistant", "words " * 2000]


# Errors name the file and the line or row.


def assert_refused(read_it: Callable[[], Any], where: str, *words: str) -> None:
    with pytest.raises(UserError) as error:
        read_it()
    line = str(error.value)
    assert "\n" not in line and line.startswith(f"{where}: "), line
    assert all(word in line for word in words), line


@pytest.mark.parametrize(("name", "where"), [("a.jsonl", "line 2"), ("a.csv", "line 3"), ("a.parquet", "row 2")])
def test_a_bad_example_is_located(name: str, where: str, tmp_path: Path):
    path = write(tmp_path / name, ["good", "bad"])
    settings = {"turns_of": lambda record: turns_of({"q": record["text"], "a": ""})}
    assert_refused(lambda: texts_of(path, **settings), f"{name}, {where}", "something is bad")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "cut', ["JSON"]),
        (b'{"body": "b", "id": 1}', ["'text'", "'body', 'id'", "--field"]),
        (b'["text"]', ["object"]),
        (b'{"text": 7.5}', ["'text'", "7.5"]),
        (b'{"text": null}', ["'text'", "null"]),
        (b'{"text": "\xff"}', ["UTF-8 at byte 10"]),
        (b"[" * 100_000, ["JSON"]),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_bad_json_line_is_located(line: bytes, words, ending, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 7)
    path = tmp_path / f"a.jsonl{ending}"
    content = b'{"text": "good"}\n\n' * 10 + line + b'\n{"text": "good"}\n'
    path.write_bytes(COMPRESS[ending](content))
    assert_refused(lambda: texts_of(path), f"{path.name}, line 21", *words)


@pytest.mark.parametrize(
    ("content", "number", "words"),
    [
        ("text,id\na,1\nb\n", 3, ["2 values", "got 1"]),
        ("text,id\na,1,2\n", 2, ["2 values", "got 3"]),
        ('text\nok\n"open\nfor ever', 4, ["CSV", "quote"]),
        ('text\n"a"b\n', 2, ["CSV"]),
        ("id,body\n1,2\n", 2, ["'text'", "'id', 'body'"]),
        ("text\rold\rMac", 1, ["CSV"]),
    ],
)
def test_a_bad_csv_line_is_located(content: str, number: int, words: list[str], tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(content.encode())
    assert_refused(lambda: texts_of(tmp_path / "a.csv"), f"a.csv, line {number}", *words)


@pytest.mark.parametrize(
    ("columns", "where", "words"),
    [
        ({"body": ["a"], "id": [1]}, "", ["'body', 'id'", "--field"]),
        ({"text": [1, 2]}, ", row 1", ["'text'", "'1'"]),
        ({"text": [*"abcdefg", None]}, ", row 8", ["'text'", "null"]),
    ],
)
def test_bad_columns_are_located(columns: dict, where: str, words: list[str], tmp_path: Path):
    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    assert_refused(lambda: texts_of(tmp_path / "a.parquet"), f"a.parquet{where}", *words)
    source = Source(tmp_path / "a.parquet", "a.parquet")
    if None in columns.get("text", ()):
        assert_refused(lambda: [*read(source, 2, 3)], f"a.parquet{where}", *words)


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"", lambda data: data[:100] + b"\xff" * 2000])
def test_corrupted_parquet_is_named(damage: Callable, tmp_path: Path):
    path = write(tmp_path / "a.parquet", TEXTS)
    path.write_bytes(damage(path.read_bytes()))
    assert_refused(lambda: texts_of(path), "a.parquet", "could not be read")


@pytest.mark.parametrize("ending", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
def test_a_corrupted_compressed_file_is_named(ending: str, kind: str, tmp_path: Path):
    path = write(tmp_path / f"a.{kind}{ending}", [str(number) for number in range(10_000)])
    data = path.read_bytes()
    middle = len(data) // 2
    for damaged in (data[:-9], b"no" + data, data[:middle] + b"\xff" * 99 + data[middle:]):
        path.write_bytes(damaged)
        assert_refused(lambda: texts_of(path), path.name, "could not be read")


def test_bad_rows_of_hugging_face_datasets_are_located(saved: dict[str, Source], tmp_path: Path):
    for name, where in (("Dataset", ", row 1"), ("streamed", ", file 1, row 1")):
        source = saved[name]
        for field, place in (("body", ""), ("id", where)):
            wrong = Source(source.path, name, field, hub_split=source.hub_split)
            assert_refused(lambda: [*read(wrong)], f"{name}{place}", f"'{field}'")  # noqa: B023
    name = saved["streamed"].name
    for options in ({"split": "absent"}, {"config": "absent"}):
        find = lambda: find_sources((name,), None, "", tmp_path, **options)  # noqa: B023, E731
        assert_refused(find, name, "--hf-config", "--hf-split")


@pytest.mark.parametrize(("name", "module"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "backports.zstd")])
def test_a_missing_package_is_named(name: str, module: str, tmp_path: Path, monkeypatch):
    path = write(tmp_path / name, ["text"])
    for loaded in [loaded for loaded in sys.modules if f"{loaded}.".startswith(f"{module}.")]:
        monkeypatch.setitem(sys.modules, loaded, None)
    monkeypatch.setattr(sources, "available_compressions", lambda: [None, "gzip"])
    assert_refused(lambda: texts_of(path), name, re.escape(module).replace("\\", ""), "pip install")
