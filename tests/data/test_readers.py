"""Every kind of file gives the same texts, and names in one line what is damaged."""

import bisect
import csv
import gzip
import io
import json
import lzma
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd
from helpers import texts_of

from engine.core.errors import UserError
from engine.data.inputs import columns, readers, sources
from engine.data.inputs.columns import count_parts
from engine.data.inputs.finder import find_sources
from engine.data.inputs.readers import Text, read, split_document
from engine.data.inputs.sources import Reader, Source
from engine.data.inputs.text import unify_line_ends
from engine.data.tokenizer import Tokenizer, named_tokenizer
from engine.data.tokenizer_json import SPLIT_PATTERNS
from engine.data.tokenizer_training import train_bpe_tokenizer

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress, ".xz": lzma.compress}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make large documents, pieces, batches and blocks so small that a test has many."""
    monkeypatch.setattr(readers, "LARGE_DOCUMENT_BYTES", 2**11)
    monkeypatch.setattr(readers, "PIECE_BYTES", 2**10)
    monkeypatch.setattr(columns, "BATCH_ROWS", 2)
    monkeypatch.setattr(columns, "LARGE_BATCH_BYTES", 2000)
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
SHORT = [
    "first",
    " spaces, and\n\nlines\r\nof \rall kinds\t",
    'quotes " and ""',
    "漢字、かな。 🚀",
    "",
]
TEXTS = [*SHORT, *PLAIN.values()]
READ_TEXTS = [unify_line_ends(text) for text in TEXTS]


def join_pieces(texts: list[Text]) -> list[str]:
    """Join pieces to documents, and check their sizes and offsets."""
    documents = [""]
    offset = 0
    for text in texts:
        assert text.offset == offset
        documents[-1] += text.text
        offset += text.piece_bytes or len(text.text.encode())
        if text.ends_document:
            assert text.document_bytes in (None, offset)
            documents.append("")
            offset = 0
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


KINDS = [f"a.{kind}{ending}" for kind in ("jsonl", "ndjson", "csv") for ending in COMPRESS]


@pytest.mark.parametrize("name", [*KINDS, "a.parquet"])
def test_every_kind_of_file_gives_the_same_texts(name: str, small, tmp_path: Path):
    pieces = [*read(Source(write(tmp_path / name, TEXTS), name))]
    assert join_pieces(pieces) == READ_TEXTS
    assert pieces == [*read(Source(write(tmp_path / "a.jsonl", TEXTS), name))]
    assert texts_of(write(tmp_path / name, [])) == []


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_text_file_is_one_document(ending: str, small, tmp_path: Path):
    for text in TEXTS:
        pieces = [*read(Source(write(tmp_path / f"a.txt{ending}", [text]), "a"))]
        assert join_pieces(pieces) == [unify_line_ends(text)]
        assert len(pieces) == 1 or len(text.encode()) > readers.LARGE_DOCUMENT_BYTES
        marked = write(tmp_path / f"a.txt{ending}", ["\ufeff", text])
        assert "".join(texts_of(marked)) == unify_line_ends(text)


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
    return {name: find_sources((f"hf:{folder / name}",), folder)[0] for name in names}


def test_hugging_face_datasets_give_the_same_texts(saved: dict[str, Source], small):
    for source in saved.values():
        assert join_pieces([*read(source)]) == READ_TEXTS


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
MARKS = [".", ",", "'s", " '", "!\n/", "//\n//", "\n/", ")\n", "漢字かな漢字", "é", "\u0301"]
MARKS += ["12", "🚀"]
MARKS += ["。", "、\n", "！？", "，/", "？'s", "。\n/", "ゖ、", "\u9fff！", "か\u3099。", "\n。"]


@pytest.mark.parametrize("seed", range(3))
def test_text_cut_anywhere_encodes_to_the_ids_of_the_whole(tokenizer, code: str, seed: int):
    chance = random.Random(seed)
    words = chance.choices([*code.split(), *["漢字かな", "字", "一かゖ"] * 500], k=1500)
    gaps = [chance.choice(SPACES if chance.random() < 0.5 else MARKS) for _ in words]
    text = "".join(word + gap for word, gap in zip(words, gaps, strict=True))
    cuts = [match.start() for match in readers.CUT_PATTERN.finditer(text)]
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert len(parts) > 200
    ids = [token for part in parts for token in tokenizer.encode(part)]
    assert ids == tokenizer.encode(text).tolist()


def test_pieces_start_at_the_first_cut_after_a_multiple(small):
    text = PLAIN["words"]
    cuts = [match.start() for match in readers.CUT_PATTERN.finditer(text)]
    offsets = [piece.offset for piece in split_document(io.BytesIO(text.encode()), len(text))]
    multiples = range(readers.PIECE_BYTES, len(text), readers.PIECE_BYTES)
    assert offsets == [0, *(cuts[bisect.bisect_left(cuts, multiple)] for multiple in multiples)]


@pytest.mark.parametrize(
    "name", ["unbroken", "characters of four bytes", "characters of three bytes", "spaces"]
)
def test_unbroken_text_is_cut_between_characters(name: str, small):
    data = PLAIN[name].encode()
    for index, piece in enumerate(split_document(io.BytesIO(data), len(data))):
        assert 0 <= piece.offset - index * readers.PIECE_BYTES < 4


def test_a_file_that_becomes_shorter_is_an_error(small):
    with pytest.raises(UserError, match=r"^a\.txt: "):
        list(split_document(io.BytesIO(b"x" * 4000), 5000, "a.txt"))


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


@pytest.mark.parametrize(("content", "offset"), BAD)
def test_bytes_that_are_not_utf8_are_located_in_csv(content, offset, small, tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfid,text\n1,"\xc3\xa9\n"\n2,' + content)
    with pytest.raises(UserError, match=rf"^a\.csv, line 4: .*at byte {2 + offset}\."):
        texts_of(tmp_path / "a.csv")
    replaced = texts_of(tmp_path / "a.csv", errors="replace")
    assert replaced == ["é\n", content.decode(errors="replace")]


# Records.

JSON_LINES = b'\xef\xbb\xbf{"text": " one\\ntwo\\n"}\n\n  \r\n'
JSON_LINES += b'{"id": 1, "text": "\\u00e9\xc3\xa9"}\r\n'
JSON_LINES += b'{"text": "", "id": 7}\n{"text": "\\ud83d\\ude80!"}'


@pytest.mark.parametrize("block_bytes", [1, 5, 2**18])
@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.jsonl", JSON_LINES, [" one\ntwo\n", "éé", "", "🚀!"]),
        ("a.csv", b"text\nplain\n\n\nlast", ["plain", "last"]),
        (
            "a.csv",
            b'\xef\xbb\xbftext,id\r\n"a ""b"", c\nand d\r\n",1\r\n\r\n,2\r\n',
            ['a "b", c\nand d\n', ""],
        ),
        ("a.csv", b'id,text\n1," spaces "\n2,  more \n', [" spaces ", "  more "]),
        ("a.csv", b'text\n""\n"  "\n', ["", "  "]),
        ("a.csv", b"", []),
        ("a.txt", b"", [""]),
    ],
)
def test_records_are_documents(name, content, texts, block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", block_bytes)
    (tmp_path / name).write_bytes(content)
    assert texts_of(tmp_path / name) == texts


def turns_of(record: dict) -> list[tuple[str, str]]:
    if record["text"] == "bad":
        raise UserError("something is bad")
    return [("user", record["text"]), ("assistant", "\ud83d")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_examples_are_the_json_of_their_turns_and_are_never_cut(name: str, small, tmp_path: Path):
    path = write(tmp_path / name, TEXTS)
    texts = texts_of(path, turns_of=turns_of, fields=("text",), errors="replace")
    expected = [[["user", text], ["assistant", "\ufffd"]] for text in READ_TEXTS]
    assert [json.loads(text) for text in texts] == expected


# Errors name the file and the line or row.

NOT_UTF8 = pyarrow.array([b"a", b"b\xff"]).view(pyarrow.string())


def assert_refused(function: Callable[[], Any], location: str, *words: str) -> None:
    with pytest.raises(UserError) as error:
        function()
    line = str(error.value)
    assert "\n" not in line and line.startswith(f"{location}: "), line
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("name", "location"), [("a.jsonl", "line 2"), ("a.csv", "line 3"), ("a.parquet", "row 2")]
)
def test_an_unsuitable_example_is_located(name: str, location: str, tmp_path: Path):
    path = write(tmp_path / name, ["good", "bad"])
    read_all = partial(texts_of, path, turns_of=turns_of, fields=("text",), errors="replace")
    assert_refused(read_all, f"{name}, {location}", "bad", "--skip-bad-rows")


@pytest.mark.parametrize(
    ("content", "location", "words"),
    [
        (b'{"text": "cut', "a.jsonl, line 3", ["JSON"]),
        (b'{"body": "b", "id": 1}', "a.jsonl, line 3", ["'text'", "'body', 'id'", "--field"]),
        (b'["text"]', "a.jsonl, line 3", ["object"]),
        (b'{"text": NaN}', "a.jsonl, line 3", ["'text'", "nan"]),
        (b'{"text": "\xff"}', "a.jsonl, line 3", ["UTF-8 at byte 10"]),
        (b"[" * 100_000, "a.jsonl, line 3", ["JSON"]),
        (b"text,id\na,1,2\n", "a.csv, line 2", ["2 values", "got 3"]),
        (b'text\nok\n"open\nfor ever', "a.csv, line 3", ["CSV", "quote"]),
        (b'text\n"a"b\n', "a.csv, line 2", ["CSV"]),
        (b"id,body\n1,2\n", "a.csv, line 2", ["'text'", "'id', 'body'"]),
        ({"body": ["a"], "id": [1]}, "a.parquet, row 1", ["'body', 'id'", "--field"]),
        ({"text": [b"1", b"2"]}, "a.parquet, row 1", ["'text'", "got b'1'"]),
        ({"text": [*"abcdefg", None]}, "a.parquet, row 8", ["'text'"]),
        ({"text": pyarrow.array([10**7], pyarrow.date32())}, "a.parquet, row 1", ["out of range"]),
        ({"text": NOT_UTF8}, "a.parquet, row 2", ["UTF-8"]),
    ],
)
def test_an_unsuitable_record_is_located(content, location: str, words, small, tmp_path: Path):
    path = tmp_path / location.partition(",")[0]
    if isinstance(content, dict):
        pyarrow.parquet.write_table(pyarrow.table(content), path, row_group_size=3)
        num_parts = count_parts(Source(path, path.name), 1)
        last = (num_parts - 1, num_parts)
        assert_refused(lambda: [*read(Source(path, path.name), *last)], location, *words)
    else:
        path.write_bytes(b'{"text": "good"}\n\n' * (path.suffix == ".jsonl") + content)
    assert_refused(lambda: texts_of(path), location, *words)


@pytest.mark.parametrize(
    ("name", "part", "location"),
    [
        ("Dataset", (3, 4), "row 13"),
        ("streamed", (0, 1), "row 1"),
        ("streamed", (1, 4), "file 2, row 1"),
    ],
)
def test_an_unsuitable_row_of_a_hugging_face_dataset_is_located(name, part, location, saved):
    source = replace(saved[name], name=name)
    read_part = partial(lambda *values: [*read(*values)], source, *part, None, Reader("body"))
    assert_refused(read_part, f"{name}, {location}", "'body'")


@pytest.mark.parametrize("options", [{"hub_split": "absent"}, {"hub_config": "absent"}])
def test_an_unknown_split_or_configuration_is_refused(options: dict, saved: dict[str, Source]):
    source = replace(saved["streamed"], name="hf:a", **options)
    assert_refused(lambda: [*read(source)], "hf:a", "--hf-config", "--hf-split")


@pytest.mark.parametrize("ending", [".parquet", ".txt.gz", ".jsonl.xz", ".csv.zst", ".jsonl.gz"])
def test_a_corrupted_file_is_named(ending: str, tmp_path: Path):
    path = write(tmp_path / f"a{ending}", [str(number) for number in range(10_000)])
    data = path.read_bytes()
    middle = len(data) // 2
    for damaged in (data[:-9], data[:middle] + b"\xff" * 99 + data[middle:], b"no" + data):
        path.write_bytes(damaged)
        assert_refused(lambda: texts_of(path), path.name, "could not be read")


@pytest.mark.parametrize(
    ("name", "module"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "backports.zstd")]
)
def test_a_missing_package_is_named(name: str, module: str, tmp_path: Path, monkeypatch):
    path = write(tmp_path / name, ["text"])
    for loaded in [loaded for loaded in sys.modules if f"{loaded}.".startswith(f"{module}.")]:
        monkeypatch.setitem(sys.modules, loaded, None)
    assert_refused(lambda: texts_of(path), name, module, "pip install")
