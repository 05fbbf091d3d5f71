"""Every kind of file: the same texts come out, from wherever reading begins, and what is damaged is named in a line."""

import bisect
import csv
import gzip
import io
import itertools
import json
import lzma
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import tiktoken_ext.openai_public
from backports import zstd

from engine.data import readers
from engine.data.readers import Text, can_be_cut, cut_up, read
from engine.data.sources import Source, Unreadable, find_sources
from engine.data.tokenizer import PATTERNS, BPETokenizer, named_tokenizer, train_bpe

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress, ".xz": lzma.compress}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large, and its pieces, so small that a test has many."""
    monkeypatch.setattr(readers, "LARGE", 2**11)
    monkeypatch.setattr(readers, "PIECE", 2**10)
    monkeypatch.setattr(readers, "BLOCK", 100)
    monkeypatch.setattr(readers, "BATCH", 2**12)


# Awkward texts: what may stand at a cut, or makes one impossible.
PLAIN = {
    "small": "🚀 just below " * 127,
    "just below large": "🚀é漢" * 227 + "é\n\n",
    "just above large": "🚀é漢" * 227 + "é\n\n\n",
    "words": "some words, and\nlines; " * 300,
    "lines of CRLF": "a line\r\n\r\n" * 500,
    "unbroken": "x" * 5000,
    "spaces": " " * 5000,
    "new lines": "\n" * 5000,
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


def joined(texts: list[Text]) -> list[str]:
    """The documents that pieces make up, whose sizes and offsets must be right."""
    found = [""]
    for text in texts:
        assert text.offset == len(found[-1].encode()) and (text.size is not None or text.ends)
        found[-1] += text.text
        if text.ends:
            assert text.size in (None, len(found[-1].encode()))
            found.append("")
    assert found.pop() == ""
    return found


def write(path: Path, texts: list[str]) -> Path:
    """A file of texts, of the kind that its name says."""
    kind, _, compression = path.name.removeprefix("a.").partition(".")
    if kind == "parquet":
        table = pyarrow.table({"id": range(len(texts)), "text": texts})
        pyarrow.parquet.write_table(table, path, row_group_size=3)
        return path
    content = "".join(texts)
    if kind in ("jsonl", "ndjson"):
        content = "\n".join(json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 > 0) for i, text in enumerate(texts))
    elif kind == "csv":
        file = io.StringIO()
        csv.writer(file).writerows([("id", "text"), *enumerate(texts)])
        content = file.getvalue()
    path.write_bytes(COMPRESS[f".{compression}" if compression else ""](content.encode()))
    return path


FILES = [f"a.{kind}{compression}" for kind in ("jsonl", "ndjson", "csv") for compression in COMPRESS] + ["a.parquet"]


@pytest.mark.parametrize("name", FILES)
def test_the_same_texts_come_out_of_all_kinds_of_files(name: str, small, tmp_path: Path):
    source = Source(write(tmp_path / name, TEXTS), name)
    assert joined([*read(source)]) == TEXTS
    assert [*read(source)] == [*read(Source(write(tmp_path / "a.jsonl", TEXTS), name))]  # the same pieces


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_text_file_is_one_document(compression: str, small, tmp_path: Path):
    for text in TEXTS:
        source = Source(write(tmp_path / f"a.txt{compression}", [text]), "a")
        assert joined([*read(source)]) == [text]
        assert [*read(source)] == [*read(Source(write(tmp_path / "a.jsonl", [text]), "a"))]
        assert len([*read(source)]) == 1 or len(text.encode()) > readers.LARGE


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    """The texts as datasets that Hugging Face's library saved, and as a folder of Parquet that it streams."""
    datasets, folder = pytest.importorskip("datasets"), tmp_path_factory.mktemp("saved")
    rows = datasets.Dataset.from_dict({"id": range(len(TEXTS)), "text": TEXTS})
    rows.save_to_disk(folder / "Dataset")
    datasets.DatasetDict({"train": rows, "other": rows.select([1])}).save_to_disk(folder / "DatasetDict")
    (folder / "streamed").mkdir()
    for number in range(4):
        some = rows.select(range(number * 5, min(len(TEXTS), number * 5 + 5)))
        some.to_parquet(folder / "streamed" / f"{number}.parquet")
    names = [path.name for path in folder.iterdir()]
    found = {name: find_sources((f"hf:{folder / name}",), None, "", folder) for name in names}
    (found["other"],) = [find_sources((f"hf:{folder / 'DatasetDict'}",), None, "", folder, split="other")]
    return {name: source for name, (source,) in found.items()}


def test_the_same_texts_come_out_of_hugging_face_datasets(saved: dict[str, Source], small):
    for name in ("Dataset", "DatasetDict", "streamed"):
        assert joined([*read(saved[name])]) == TEXTS
        assert readers.READERS["rows"].count(saved[name]) in (None, len(TEXTS))
    assert joined([*read(saved["other"])]) == TEXTS[1:2]


# Reading in stretches.


def assert_same_in_stretches(source: Source, seed: str, cuts: int = 6) -> None:
    chance, size = random.Random(seed), source.size
    whole = [*read(source)]
    assert not [*read(source, 0, 0)] and [*read(source, -9, size + 9)] == whole
    for _ in range(4):
        inner = [chance.randrange(size + 2) for _ in range(chance.randrange(cuts))]
        edges = [0, *sorted(inner), chance.choice([size + 1, float("inf")])]
        found = [[*read(source, start, end)] for start, end in itertools.pairwise(edges)]
        assert [text for some in found for text in some] == whole
        if not can_be_cut(source):
            assert sum(map(bool, found)) == bool(whole)


@pytest.mark.parametrize("name", PLAIN)
def test_stretches_of_a_text_end_to_end_are_all_of_it(name: str, small, tmp_path: Path):
    content = PLAIN[name].encode()
    chance = random.Random(name)
    broken = bytes(byte if chance.random() < 0.9 else chance.randrange(256) for byte in content)
    for file, data in {
        "a.txt": content,
        "broken.txt": broken,
        "moved.txt": b"." + content,
        "end.txt": content[:-1],
    }.items():
        (tmp_path / file).write_bytes(data)
        source = Source(tmp_path / file, file, errors="replace")
        assert "".join(text.text for text in read(source)) == data.decode(errors="replace")
        assert_same_in_stretches(source, file + name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.jsonl.gz", "a.txt.zst"])
def test_stretches_of_a_file_end_to_end_are_all_of_it(name: str, small, tmp_path: Path):
    for seed in range(3):
        texts = random.Random(seed).sample(TEXTS, len(TEXTS) - 1)
        source = Source(write(tmp_path / name, texts), name)
        assert can_be_cut(source) == (name in ("a.jsonl", "a.parquet"))
        assert_same_in_stretches(source, name + str(seed))


def test_stretches_of_json_lines_may_begin_at_any_byte(tmp_path: Path):
    content = b'\xef\xbb\xbf{"text": "a"}\n\n\r\n  \n{"text": "b\xc3\xa9"}\r\n{"text": "c"}'
    (tmp_path / "a.jsonl").write_bytes(content)
    source = Source(tmp_path / "a.jsonl", "a.jsonl")
    for inner in itertools.combinations_with_replacement(range(len(content) + 2), 2):
        edges = itertools.pairwise((0, *inner, float("inf")))
        assert [text.text for edge in edges for text in read(source, *edge)] == ["a", "bé", "c"]


def test_stretches_of_datasets_end_to_end_are_all_of_them(saved: dict[str, Source], small):
    for name in ("Dataset", "streamed"):
        assert_same_in_stretches(saved[name], name, cuts=4)
        assert can_be_cut(saved[name])


def test_what_holds_a_byte_begins_where_snap_says(saved: dict[str, Source], small, tmp_path: Path):
    parquet = Source(write(tmp_path / "a.parquet", TEXTS), "a")
    for source, parts in ((parquet, -(-len(TEXTS) // 3)), (saved["streamed"], 4)):
        begins = sorted(
            {
                readers.READERS[readers.kind_of(source)].snap(source, x)
                for x in range(0, source.size, 1 + source.size // 999)
            }
        )
        assert len(begins) == parts and begins[0] == 0
        found = [[*read(source, *edges)] for edges in zip(begins, [*begins[1:], source.size], strict=True)]
        assert all(found) and [text for some in found for text in some] == [*read(source)]
        assert [text for some in found for text in some[:1]] == [next(read(source, begin)) for begin in begins]


# Pieces of a large document.


@pytest.fixture(scope="module", params=[*PATTERNS, "tiktoken's gpt2", "cl100k_base", "o200k_base"])
def tokenizer(request: pytest.FixtureRequest, code: str) -> BPETokenizer:
    if request.param in PATTERNS:
        chance = random.Random(0)  # of all neighbours some become one token
        return train_bpe([code, "".join(chance.choices("漢字かな一ゖ。、，！？", k=20_000))], 2000, request.param)
    request.getfixturevalue("tiktoken_cache")
    if request.param != "o200k_base":
        return named_tokenizer(request.param.removeprefix("tiktoken's "))
    # Its ranks may not be here; its way of cutting words is what matters, so it runs with another's ranks.
    ranks = named_tokenizer("cl100k_base").encoding._mergeable_ranks
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *_, **__: ranks)
        return named_tokenizer("o200k_base")


SPACES = [" ", " ", " ", "\n", "\n", "  ", "    ", "\n   ", "   \n", " \n", "\n ", "\n\n", "\r\n", "\r\n\r\n", "\t"]
SPACES += ["\n\t", "\x1c", "\xa0", "\u3000", "\u2028"]
MARKS = [".", ",", "'s", " '", "!\n/", "//\n//", "\n/", ")\n", "...", "漢字かな漢字", "é", "\u0301", "12", "\n1", "🚀"]
MARKS += [
    "。",
    "、\n",
    "！？",
    "，/",
    "？'s",
    "。\n/",
    "漢。",
    "ゖ、",
    "\u9fff！",
    "\u4e00？a",
    "\u3041，\u3099",
    "か\u3099。",
    "\n。",
]


def without_cut(text: str) -> list[int]:
    """The offsets, in characters, at which a text could be cut."""
    return [match.start() for match in readers.CUT.finditer(text)]


@pytest.mark.parametrize("seed", range(3))
def test_text_cut_at_any_place_encodes_to_the_ids_of_the_whole(tokenizer: BPETokenizer, code: str, seed: int):
    chance = random.Random(seed)  # words with all that may come between two: every offset where a cut could go wrong
    words = chance.choices([*code.split(), *["漢字かな", "字", "一かゖ"] * 500], k=1500)
    text = "".join(word + chance.choice(SPACES if chance.random() < 0.5 else MARKS) for word in words)
    cuts = without_cut(text)
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert len(parts) > 300
    assert [i for part in parts for i in tokenizer.encode(part)] == tokenizer.encode(text).tolist()


def test_pieces_encode_apart_to_the_ids_of_the_whole(tokenizer: BPETokenizer, code: str, small):
    chance = random.Random(0)
    words = chance.choices([*code.split(), *["漢字かな", "字", "一かゖ"] * 500], k=5000)
    text = "".join(word + chance.choice(SPACES if chance.random() < 0.7 else MARKS) for word in words)
    data = text.encode()
    parts = [piece.text for piece in cut_up(io.BytesIO(data), len(data))]
    assert len(parts) > 20 and "".join(parts) == text
    assert [i for part in parts for i in tokenizer.encode(part)] == tokenizer.encode(text).tolist()


@pytest.mark.parametrize("text", ["words and\nlines; ", "漢字かなです、と。いう！", "a line\r\nof two\r\n"])
def test_pieces_are_about_as_long_as_they_should_be(text: str):
    data = (text * 2**15).encode()
    pieces = [len(piece.text.encode()) for piece in cut_up(io.BytesIO(data), len(data))]
    assert all(abs(size - readers.PIECE) < 2**7 for size in pieces[:-1])


def test_pieces_begin_at_the_first_cut_after_a_multiple(small):
    text = PLAIN["words"]
    cuts = without_cut(text)
    pieces = [*cut_up(io.BytesIO(text.encode()), len(text))]
    multiples = range(readers.PIECE, len(text), readers.PIECE)
    assert [piece.offset for piece in pieces] == [0, *(cuts[bisect.bisect_left(cuts, i)] for i in multiples)]


def test_pieces_of_unbroken_text_are_cut_where_a_character_begins(small):
    for name in ("unbroken", "characters of four bytes", "characters of three bytes", "spaces", "new lines"):
        data = PLAIN[name].encode()
        offsets = [piece.offset for piece in cut_up(io.BytesIO(data), len(data))]
        assert all(0 <= offset - index * readers.PIECE < 4 for index, offset in enumerate(offsets))


def test_a_file_that_becomes_shorter_is_told(small):
    with pytest.raises(Unreadable, match=r"^a\.txt has become shorter while it was read"):
        [*cut_up(io.BytesIO(b"x" * 4000), 5000, name="a.txt")]


def test_memory_does_not_grow_with_a_document(small, tmp_path: Path):
    class Counting(io.BytesIO):
        most = done = 0

        def read(self, size: int = -1) -> bytes:
            data = super().read(size)
            Counting.done += len(data)
            return data

    data = PLAIN["words"].encode() * 10
    for text in cut_up(Counting(data), len(data)):
        Counting.most = max(Counting.most, Counting.done - text.offset)
    assert Counting.done == len(data) and Counting.most < 4 * readers.PIECE


# Plain text.


@pytest.mark.parametrize("block", [1, 2, 3, 64])
def test_text_is_whole_however_blocks_cut_its_characters(block: int, strings: list[str], tmp_path: Path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK", block)
    text = "".join(strings)[:2000]
    for name in ("a.txt", "a.csv", "a.jsonl"):
        source = Source(write(tmp_path / name, [text]), name)
        assert [found.text for found in read(source)] == [text]


BAD = [(b"abc\xffdef", 3), (b"abcd\xc3\xa9\xe2\x82", 6), (b"abcd\xf0\x9f\x9aefgh", 4), (b"abcde\xed\xa0\x80", 5)]


@pytest.mark.parametrize("before", [0, 1000, 1021, 1022, 1023, 1024, 3000, 3072])
@pytest.mark.parametrize("content, offset", BAD)
@pytest.mark.parametrize("compression", ["", ".gz"])
def test_bytes_that_are_not_utf8_are_located(content, offset, before, compression, small, tmp_path: Path):
    name = f"a.txt{compression}"
    for filling in (b"x", b"a b\n"):
        data = (filling * 4000)[:before] + content
        (tmp_path / name).write_bytes(COMPRESS[compression](data))
        with pytest.raises(Unreadable, match=rf"^{re.escape(name)} is not UTF-8 at byte {before + offset};"):
            [*read(Source(tmp_path / name, name))]
        found = "".join(text.text for text in read(Source(tmp_path / name, name, errors="replace")))
        assert found == data.decode(errors="replace")


@pytest.mark.parametrize("block", [1, 4, 5, 6, 7, 100])
@pytest.mark.parametrize("content, offset", BAD)
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_bytes_that_are_not_utf8_are_located_in_csv(content, offset, block, start, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK", block)
    data = start + b'id,text\n1,"\xc3\xa9\n"\n2,' + content
    (tmp_path / "a.csv").write_bytes(data)
    at = len(data) - len(content) + offset
    with pytest.raises(Unreadable, match=rf"^a\.csv is not UTF-8 at byte {at};"):
        [*read(Source(tmp_path / "a.csv", "a.csv"))]
    texts = [text.text for text in read(Source(tmp_path / "a.csv", "a.csv", errors="replace"))]
    assert texts == ["é\n", content.decode(errors="replace")]


# Files with fields.


@pytest.mark.parametrize("compression", COMPRESS)
def test_jsonl_has_a_document_a_line(compression: str, tmp_path: Path):
    lines = (
        b'{"text": " one\\ntwo\\n"}\n\n  \r\n{"id": 1, "text": "\\u00e9\xc3\xa9"}\r\n{"text": ""}\n{"text": "\\ud83d!"}'
    )
    (tmp_path / f"a.jsonl{compression}").write_bytes(COMPRESS[compression](lines))
    texts = [text.text for text in read(Source(tmp_path / f"a.jsonl{compression}", "a"))]
    assert texts == [" one\ntwo\n", "éé", "", "\ufffd!"]  # half a character can't be encoded


def texts_of(path: Path, **reading: object) -> list[str]:
    return [text.text for text in read(Source(path, path.name, **reading))]


def test_jsonl_from_another_field_with_errors_replaced(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "no", "body": "yes\xff"}\n')
    assert texts_of(tmp_path / "a.jsonl", field="body", errors="replace") == ["yes\ufffd"]


def test_json_may_begin_with_a_byte_order_mark_and_have_numbers_of_any_length(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "id": ' + "7" * 5000 + "}\n", encoding="utf-8-sig")
    assert texts_of(tmp_path / "a.jsonl") == ["a"]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("text\nplain\n\n\nlast", ["plain", "last"]),
        (
            '\ufefftext,id\r\n"a ""quote"", a comma\nand lines\r\n",1\r\n\r\n,2\r\n',
            ['a "quote", a comma\nand lines\r\n', ""],
        ),
        ('\ufeff"text"\n"all in quotes"\n', ["all in quotes"]),
        ('id,text\n1," spaces "\n2,  more \n', [" spaces ", "  more "]),
        ('text\n""\n"  "\n', ["", "  "]),
        ("text\n", []),
    ],
)
def test_csv_has_a_document_a_row(content: str, texts: list[str], tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(content.encode())
    assert texts_of(tmp_path / "a.csv") == texts


def test_an_empty_file_has_no_rows(tmp_path: Path):
    for name, texts in {"a.csv": [], "a.jsonl": [], "a.parquet": [], "a.txt": [""]}.items():
        assert texts_of(write(tmp_path / name, [])) == texts
    (tmp_path / "a.csv").write_bytes(b"")
    assert texts_of(tmp_path / "a.csv") == []


def turns_of(record: dict) -> list[tuple[str, str]]:
    if "bad" in record["q"]:
        raise ValueError("has something bad")
    return [("user", record["q"]), ("assistant", record["a"])]


def test_examples_are_the_json_of_their_turns(small, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"a": "\\ud83d", "q": "é \\"x\\"\\n"}\n\n{"q": "", "a": "\\ud83d\\ude80"}\n')
    found = texts_of(tmp_path / "a.jsonl", turns_of=turns_of)
    assert found[0] == '[["user", "é \\"x\\"\\n"], ["assistant", "\ufffd"]]'
    assert found[1] == '[["user", ""], ["assistant", "🚀"]]' and len(found) == 2
    (tmp_path / "a.csv").write_text("q,a\nlong," + "words " * 2000, encoding="utf-8")  # which is never cut
    assert json.loads(*texts_of(tmp_path / "a.csv", turns_of=turns_of)) == [
        ["user", "long"],
        ["assistant", "words " * 2000],
    ]
    pyarrow.parquet.write_table(pyarrow.table({"q": ["1", "2"], "a": ["x", "y"]}), tmp_path / "a.parquet")
    assert [json.loads(text)[1][1] for text in texts_of(tmp_path / "a.parquet", turns_of=turns_of)] == ["x", "y"]


@pytest.mark.parametrize(("name", "where"), [("a.jsonl", "line 2"), ("a.csv", "line 3"), ("a.parquet", "row 2")])
def test_bad_example_is_numbered(name: str, where: str, tmp_path: Path):
    path = write(tmp_path / name, ["good", "bad"])
    with pytest.raises(Unreadable, match=rf"^{re.escape(name)}, {where} has something bad"):
        texts_of(path, turns_of=lambda record: turns_of({"q": record["text"], "a": ""}))


# What is damaged, or is not what it should be, in one line.


def refused(read_it: Callable[[], Any], *said: str) -> None:
    """Reading ends with one line, which begins with the first and has all that should be said."""
    with pytest.raises(Unreadable) as error:
        read_it()
    line = str(error.value)
    assert "\n" not in line and line.startswith(said[0]), line
    assert all(words in line for words in said[1:]), line


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"text": "cut', "is not JSON"),
        (b'{"body": "b", "id": 1}', "has only 'body', 'id'; it should have the field 'text'"),
        (b'["text"]', "is not an object"),
        (b"7", "is not an object"),
        (b'{"text": 7.5}', "the field 'text' is not text"),
        (b'{"text": null}', "the field 'text' is null; leave out such rows"),
        (b'{"text": "\xff"}', "is not UTF-8 at byte 10"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_bad_jsonl_line_is_numbered(line: bytes, message: str, name: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK", 7)
    content = b'{"text": "good"}\n\n' * 10 + line + b'\n{"text": "good"}\n'
    (tmp_path / name).write_bytes(COMPRESS[name.removeprefix("a.jsonl")](content))
    source = Source(tmp_path / name, name)
    refused(lambda: [*read(source)], f"{name}, line 21", message)
    if name == "a.jsonl":  # wherever reading begins
        for start in (1, 18, 19, 100, content.index(line)):
            refused(lambda: [*read(source, start)], "a.jsonl, line 21", message)  # noqa: B023
        assert [text.text for text in read(source, content.index(line) + 1)] == ["good"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("text,id\na,1\nb\n", ("a.csv, line 3 has 1 values, but there are 2 columns",)),
        ("text,id\na,1,2\n", ("a.csv, line 2 has 3 values, but there are 2 columns",)),
        ('text\nok\n"open\nfor ever', ("a.csv, line 4 is not CSV", "quotes")),
        ('text\n"a"b\n', ("a.csv, line 2 is not CSV",)),
        ("id,body\n1,2\n", ("a.csv, line 2 has only 'id', 'body'; it should have the field 'text'",)),
        ("text\rold\rMac", ("a.csv, line 1 is not CSV",)),
    ],
)
def test_bad_csv_is_told_with_its_line(content: str, said: tuple[str, ...], tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(content.encode())
    refused(lambda: texts_of(tmp_path / "a.csv"), *said)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"body": ["a"], "id": [1]}, ("a.parquet has only 'body', 'id'; it should have the field 'text'",)),
        ({"text": [1, 2]}, ("a.parquet, row 1: the field 'text' is not text but '1'",)),
        ({"text": [b"a"]}, ("a.parquet, row 1: the field 'text' is not text",)),
        ({"text": [*"abcdefg", None]}, ("a.parquet, row 8: the field 'text' is null",)),
    ],
)
def test_bad_columns_are_told_with_their_row(columns: dict, said: tuple[str, ...], tmp_path: Path):
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=3)
    source = Source(tmp_path / "a.parquet", "a.parquet")
    refused(lambda: [*read(source)], *said)
    if None in columns.get("text", ()):
        refused(lambda: [*read(source, source.size // 2)], *said)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-9],
        lambda data: b"no" * 100,
        lambda data: b"",
        lambda data: data[:100] + b"\xff" * 2000 + data[2100:],
    ],
)
def test_damaged_parquet_is_named(damage: Callable, tmp_path: Path):
    path = write(tmp_path / "a.parquet", TEXTS)
    path.write_bytes(damage(path.read_bytes()))
    refused(lambda: texts_of(path), "a.parquet could not be read", "get it again")


@pytest.mark.parametrize(("compression", "word"), [(".gz", "gzip"), (".xz", "xz"), (".zst", "zstd")])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
def test_a_damaged_compressed_file_is_named(compression: str, word: str, kind: str, tmp_path: Path):
    path = write(tmp_path / f"a.{kind}{compression}", [str(number) for number in range(10_000)])
    data = path.read_bytes()
    for damaged in (data[:-9], b"no" + data, data[: len(data) // 2] + b"\xff" * 99 + data[len(data) // 2 :]):
        path.write_bytes(damaged)
        refused(lambda: texts_of(path), f"{path.name} is a damaged {word} file", "get it again")


def test_bad_datasets_are_one_line(saved: dict[str, Source], run: Callable, tmp_path: Path):
    import datasets

    for name in ("Dataset", "streamed"):
        source = Source("", name, "body", rows=saved[name].rows)
        refused(lambda: [*read(source)], f"{name} has only 'id', 'text'; it should have the field 'body'")  # noqa: B023
        source = Source("", name, "id", rows=saved[name].rows)
        where = f"{name}, file 1" if name == "streamed" else name
        refused(lambda: [*read(source)], f"{where}, row 1: the field 'id' is not text but '0'")  # noqa: B023
        where = f"{name}, file 3, row 1" if name == "streamed" else name
        refused(lambda: [*read(source, source.size // 2)], where, "the field 'id' is not text")  # noqa: B023
    datasets.Dataset.from_dict({"text": ["a", None]}).save_to_disk(tmp_path / "null")
    (source,) = find_sources((f"hf:{tmp_path / 'null'}",), None, "", tmp_path)
    refused(lambda: [*read(source)], f"{source.name}, row 2: the field 'text' is null")
    absent = f"hf:{saved['DatasetDict'].name.removeprefix('hf:')}"
    refused(lambda: find_sources((absent,), None, "", tmp_path, split="absent"), absent, "absent", "--hf-split")
    streamed = saved["streamed"].name
    refused(lambda: find_sources((streamed,), None, "", tmp_path, split="absent"), streamed, "absent", "--hf-split")
    refused(lambda: find_sources((streamed,), None, "", tmp_path, config="absent"), streamed, "--hf-config")


@pytest.mark.parametrize(("name", "module"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "backports.zstd")])
def test_a_package_that_is_missing_is_told(name: str, module: str, tmp_path: Path, monkeypatch):
    path = write(tmp_path / name, ["text"])
    for one in [found for found in sys.modules if found == module or found.startswith(f"{module}.")]:
        monkeypatch.setitem(sys.modules, one, None)
    refused(lambda: texts_of(path), f"{name} needs the package {module}: pip install {module}, or")
