"""One text, whatever file, encoding, command or turn it is in. See also test_wild.py."""

import csv
import dataclasses
import gzip
import io
import json
import lzma
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd
from helpers import ROOT, SMALL, make_dataset, random_model, texts_of, write_lines

from engine.core.errors import UserError
from engine.data.dataset import open_dataset
from engine.data.documents.document import Document, read_documents
from engine.data.records import reader as records
from engine.data.records import tables
from engine.data.records.reader import read_records
from engine.data.records.tables import count_parts
from engine.data.records.text import Reader, unify_line_ends
from engine.data.sources import source as sources
from engine.data.sources.finder import find_sources
from engine.data.sources.notes import Notes
from engine.data.sources.source import Source
from engine.data.split import token_ids
from engine.data.tokenizer import ByteTokenizer, Tokenizer, from_document
from engine.data.tokenizer_json import SPLIT_PATTERNS
from engine.data.tokenizer_training import train_bpe_tokenizer
from engine.generation.prompt_file import encode_line
from engine.generation.scores import encode_question
from engine.generation.text_generator import TextGenerator
from engine.huggingface.directory import check_weights, read_tokenizer
from sample import SampleConfig, read_prompt


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make large texts, pieces, batches and blocks so small that a test has many."""
    monkeypatch.setattr(records, "LARGE_TEXT_BYTES", 2**11)
    monkeypatch.setattr(records, "PIECE_BYTES", 2**10)
    monkeypatch.setattr(tables, "BATCH_ROWS", 2)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 100)


NOT_UTF8 = pyarrow.array([b"a", b"b\xff"]).view(pyarrow.string())


@pytest.mark.parametrize(
    ("columns", "field", "expected"),
    [
        ({"text": NOT_UTF8}, "text", "could not be read .*utf-8"),
        # A column is named exactly.
        ({"text": ["a"], "s": [{"text": "b"}]}, "s.text", ["b"]),
        ({"s.text": ["a"], "s": [{"text": "b"}]}, "s.text", ["a"]),
    ],
)
def test_a_column_has_its_texts_or_a_message(columns, field, expected, small, tmp_path: Path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
    if isinstance(expected, list):
        assert texts_of(path, field=field) == expected
        return
    with pytest.raises(UserError, match=rf"^a\.parquet.*{expected}"):
        texts_of(path, field=field)


@pytest.mark.parametrize("ending", [".parquet", ".txt.gz", ".jsonl.xz", ".csv.zst", ".jsonl.gz"])
def test_a_corrupted_file_is_named(ending: str, tmp_path: Path):
    path = write(tmp_path / f"a{ending}", [str(number) for number in range(10_000)])
    data = path.read_bytes()
    middle = len(data) // 2
    for damaged in (data[:-9], data[:middle] + b"\xff" * 99 + data[middle:], b"no" + data):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"^a{ending}: could not be read"):
            texts_of(path)


@pytest.mark.parametrize(
    ("name", "module"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "backports.zstd")]
)
def test_a_missing_package_is_named(name: str, module: str, tmp_path: Path, monkeypatch):
    path = write(tmp_path / name, ["text"])
    for loaded in [loaded for loaded in sys.modules if f"{loaded}.".startswith(f"{module}.")]:
        monkeypatch.setitem(sys.modules, loaded, None)
    with pytest.raises(UserError, match=f"^{name}: .*{module}.*pip install"):
        texts_of(path)


# One text, in every kind of file: texts with and without places to cut.

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress, ".xz": lzma.compress}
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
TEXTS = [*SHORT, "", *PLAIN.values()]
READ_TEXTS = [unify_line_ends(text) for text in TEXTS]


def join_pieces(documents: list[Document]) -> list[str]:
    """Join pieces to documents, and check their sizes and offsets."""
    texts = [""]
    offset = 0
    for document in documents:
        assert document.offset == offset
        texts[-1] += document.text
        offset += document.piece_bytes or 0
        if document.ends_document:
            texts.append("")
            offset = 0
    assert texts.pop() == ""
    return texts


def write(path: Path, texts: list[str]) -> Path:
    """Write texts to a file of the kind that its name says."""
    kind, _, compression = path.name.removeprefix("a.").partition(".")
    if kind == "parquet":
        table = pyarrow.table({"id": range(len(texts)), "text": texts})
        pyarrow.parquet.write_table(table, path, row_group_size=3)
        return path
    content = "".join(texts)
    if kind in ("jsonl", "json"):
        records = [{"id": i, "text": text} for i, text in enumerate(texts)]
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        content = "\n".join(lines) if kind == "jsonl" else "[" + ",\n".join(lines) + "]"
    elif kind == "csv":
        file = io.StringIO()
        csv.writer(file).writerows([("id", "text"), *enumerate(texts)])
        content = file.getvalue()
    path.write_bytes(COMPRESS[f".{compression}" if compression else ""](content.encode()))
    return path


KINDS = [f"a.{kind}{ending}" for kind in ("jsonl", "json", "csv") for ending in COMPRESS]


@pytest.mark.parametrize("name", [*KINDS, "a.parquet"])
def test_every_kind_of_file_gives_the_same_texts(name: str, small, tmp_path: Path):
    pieces = [*read_documents(Source(write(tmp_path / name, TEXTS), name))]
    assert join_pieces(pieces) == READ_TEXTS
    as_lines = read_documents(Source(write(tmp_path / "a.jsonl", TEXTS), name))
    assert [piece[:4] for piece in pieces] == [piece[:4] for piece in as_lines]
    assert texts_of(write(tmp_path / name, [])) == []


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-32", "gb18030"])
@pytest.mark.parametrize("ending", [".txt", ".txt.gz", ".jsonl", ".csv"])
def test_encodings_and_compressions_give_the_same_texts(ending, encoding, small, tmp_path):
    for text in TEXTS:
        path = write(tmp_path / f"a{ending}", [text])
        content = gzip.decompress(path.read_bytes()) if ".gz" in ending else path.read_bytes()
        expected = [*read_documents(Source(path, "a"))]
        assert join_pieces(expected) == [unify_line_ends(text)]
        encoded = ("\ufeff" * encoding.startswith("utf-8") + content.decode()).encode(encoding)
        path.write_bytes(gzip.compress(encoded) if ".gz" in ending else encoded)
        documents = [*read_documents(Source(path, "a"), reader=Reader(encoding=encoding))]
        assert "".join(map(lambda each: each.text, documents)) == unify_line_ends(text)


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


def test_parts_in_order_are_the_whole(saved: dict[str, Source], small, tmp_path: Path):
    parquet = Source(write(tmp_path / "a.parquet", TEXTS), "a.parquet")
    for source, count in ((parquet, 6), (saved["Dataset"], 17), (saved["streamed"], 4)):
        part_bytes = -(-source.size // 9)
        assert [count_parts(source, size) for size in (part_bytes, source.size)] == [count, 1]
        documents = [*read_documents(source)]
        assert join_pieces(documents) == READ_TEXTS
        for num_parts in (1, 3, count):
            parts = [[*read_documents(source, index, num_parts)] for index in range(num_parts)]
            assert all(parts) and [piece for part in parts for piece in part] == documents
    assert join_pieces([*read_documents(saved["DatasetDict"])]) == READ_TEXTS


def test_an_unsuitable_row_of_a_hugging_face_dataset_is_located(saved: dict[str, Source]):
    for name, part, location in (
        ("Dataset", (3, 4), "part 4, row 1"),
        ("streamed", (1, 4), "part 2, row 1"),
    ):
        with pytest.raises(UserError, match=f"^hf:.*, {location}: .*'body'"):
            list(read_documents(saved[name], *part, None, Reader("body")))
    source = dataclasses.replace(saved["streamed"], name="hf:a", hub_split="absent")
    with pytest.raises(UserError, match=r"^hf:a: .*--hf-config, --hf-split"):
        list(read_documents(source))


# JSON in Parquet, as datasets and DuckDB write it.

MESSAGES = [
    [{"role": "user", "content": [{"type": "text", "text": 'hi "0"\r\n'}], "name": "n"}],
    [{"role": "user", "content": "?"}],
]


@pytest.mark.parametrize("form", ["columns", "nested"])
def test_json_in_parquet_is_decoded(form: str, tmp_path: Path):
    def encode(values: list[Any]) -> pyarrow.Array:
        texts = pyarrow.array([value and json.dumps(value) for value in values], pyarrow.string())
        return pyarrow.ExtensionArray.from_storage(pyarrow.json_(), texts)

    answer = {"role": "assistant", "content": 'an "answer"\n'}
    rows: list[dict[str, Any]] = [
        {"text": f'{n} "b"\n', "o": {"t": f"{n}"}, "c": None, "messages": [*messages, answer]}
        for n in range(50)
        for messages in MESSAGES
    ]
    lines = write_lines(tmp_path / "lines.jsonl", rows)
    table = {name: encode([row[name] for row in rows]) for name in rows[0]}
    if form == "nested":  # a list of JSON
        messages = [message for row in rows for message in row["messages"]]
        offsets = range(0, len(messages) + 1, 2)
        table["messages"] = pyarrow.ListArray.from_arrays([*offsets], encode(messages))
        values = [encode([row["o"]["t"] for row in rows])]
        table["o"] = pyarrow.StructArray.from_arrays(values, names=["t"])
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    records = [
        [record.value for record in read_records(Source(path, "a"), Reader(""), Notes())]
        for path in (lines, tmp_path / "a.parquet")
    ]
    assert records[0] == records[1] and len(records[0]) == 100


# Pieces of a large document.


@pytest.fixture(scope="module", params=[*SPLIT_PATTERNS])
def tokenizer(request: pytest.FixtureRequest, code: str) -> Tokenizer:
    chinese = "".join(random.Random(0).choices("漢字かな一ゖ。、，！？", k=20_000))
    return train_bpe_tokenizer([code, chinese], 2000, request.param)


SPACES = [" ", " ", "\n", "\n", "  ", "    ", "\n   ", "   \n", " \n", "\n\n", "\r\n", "\r\n\r\n"]
SPACES += ["\t", "\n\t", "\x1c", "\xa0", "\u3000", "\u2028"]
MARKS = [".", ",", "'s", " '", "!\n/", "//\n//", "\n/", ")\n", "漢字かな漢字", "é", "\u0301"]
MARKS += ["12", "🚀"]
MARKS += ["。", "、\n", "！？", "，/", "？'s", "。\n/", "ゖ、", "\u9fff！", "か\u3099。", "\n。"]


@pytest.mark.parametrize("seed", range(2))
def test_text_cut_anywhere_encodes_to_the_ids_of_the_whole(tokenizer, code: str, seed: int):
    chance = random.Random(seed)
    words = chance.choices([*code.split(), *["漢字かな", "字", "一かゖ"] * 500], k=1500)
    gaps = [chance.choice(SPACES if chance.random() < 0.5 else MARKS) for _ in words]
    text = "".join(word + gap for word, gap in zip(words, gaps, strict=True))
    cuts = [match.start() for match in records.CUT_PATTERN.finditer(text)]
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert len(parts) > 200
    ids = [token for part in parts for token in tokenizer.encode(part)]
    assert ids == tokenizer.encode(text).tolist()


def test_pieces_end_at_the_first_cut_or_character_after_their_size(small):
    for name, text in PLAIN.items():
        data = text.encode()
        pieces = [*records.split_text(io.BytesIO(data), len(data))]
        assert b"".join(piece for _, piece in pieces) == data
        for offset, piece in pieces[:-1]:
            assert records.PIECE_BYTES <= len(piece) < 2 * records.PIECE_BYTES, name
            end = len(data[: offset + len(piece)].decode())
            later = text[
                len(data[: offset + records.PIECE_BYTES].decode(errors="ignore")) + 1 : end
            ]
            assert records.CUT_PATTERN.match(text, end) or len(later) < records.CUT_MARGIN, name
    with pytest.raises(UserError, match=r"^a\.txt: "):
        list(records.split_text(io.BytesIO(b"x" * 4000), 5000, "a.txt"))


@pytest.mark.parametrize("before", [0, 1023, 1024, 3072])
@pytest.mark.parametrize(
    ("content", "offset"), [(b"abc\xffdef", 3), (b"abcd\xc3\xa9\xe2\x82", 6), (b"a\xed\xa0\x80", 1)]
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_bytes_that_are_not_utf8_are_located(content, offset, before, ending, small, tmp_path):
    path = tmp_path / f"a.txt{ending}"
    data = (b"a b\n" * 4000)[:before] + content
    path.write_bytes(COMPRESS[ending](data))
    with pytest.raises(UserError, match=rf"^a\.txt.*at byte {before + offset}\. .*--errors"):
        texts_of(path)
    assert "".join(texts_of(path, errors="replace")) == data.decode(errors="replace")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
@pytest.mark.parametrize("count", [1, 3000])
def test_replacements_are_counted_once(encoding: str, count: int, tmp_path: Path):
    data = "word \ufffd ".encode(encoding) * count
    bad = {"utf-8": b"\xff", "utf-16-le": b"\x00\xd8"}[encoding]
    (tmp_path / "a.txt").write_bytes((data + bad + b" \0"[: len(bad)]) * 40)
    notes = Notes()
    text = "".join(texts_of(tmp_path / "a.txt", notes, encoding=encoding, errors="replace"))
    expected = 40 if encoding == "utf-8" else text.count("\ufffd")
    assert notes.counts() == {"characters replaced by U+FFFD": expected}
    assert text.count("word") == 40 * count


# Memory.

MEASURE = """
import re, sys
from pathlib import Path
from engine.data.documents.document import read_documents
from engine.data.records.text import Reader
from engine.data.sources.source import Source

reader = Reader(skip_bad_rows=True, separator="%" if sys.argv[1].endswith("%.txt") else "")
source = Source(Path(sys.argv[1]), "a")
print(sum(len(document.text) for document in read_documents(source, reader=reader)))
print(re.search("VmHWM: *(.*) kB", Path("/proc/self/status").read_text())[1])
"""
UNIT = "ein Satz, schön und 漢字 🚀\n"


@pytest.mark.skipif(sys.platform != "linux", reason="measures memory in /proc")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", UNIT * 200_000),
        ("a%.txt", f"{UNIT}%" * 200_000),
        ("a.jsonl", '{"text": "' + "word " * 99 + '"}\n'),
        ("a.parquet", {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}),
    ],
)
def test_memory_is_that_of_a_few_records(name: str, content: Any, tmp_path: Path):
    path = tmp_path / name
    if name == "a.jsonl":
        content *= 20_000
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    else:
        table = pyarrow.table({"text": ["a text of words " * 2**16] * 64})
        pyarrow.parquet.write_table(table, path, **content)
        assert path.stat().st_size < 2**17
    command = [sys.executable, "-c", MEASURE, path]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    num_read, peak_kilobytes = map(int, result.stdout.split())
    assert num_read >= 4 * 10**6 and peak_kilobytes < (200_000 if "parquet" in name else 85_000)


# One text has the same ids in every file, command and turn.

RAW = "\ufeffa <think>b\r\nc</think>\rd <|endoftext|>."
CLEAN = "a <think>b\nc</think>\nd <|endoftext|>."
END, THINK, END_OF_THOUGHT = 256, 257, 258
PLAIN_IDS = [*b"a ", THINK, *b"b\nc", END_OF_THOUGHT, *b"\nd ", *b"<|endoftext|>", *b"."]
SPECIAL_IDS = [*PLAIN_IDS[:-14], END, *b"."]
PAIR = {"prompt_field": "p", "completion_field": "c"}
CHAT = {"messages": [{"role": role, "content": RAW} for role in ("user", "assistant")]}
MODEL = dataclasses.replace(SMALL, context_length=99)


@pytest.fixture
def markup_tokenizer(tmp_path: Path) -> str:
    """The file of a tokenizer of bytes with markup."""
    document = ByteTokenizer().with_special(["<think>", "</think>"]).document
    for token in document["added_tokens"][1:]:
        token["special"] = False
    from_document(document).save(tmp_path / "tokenizer.json")
    return str(tmp_path / "tokenizer.json")


def count_notes(path: Path) -> dict[str, int]:
    """Return the counts of line ends and of names of special tokens in a dataset."""
    notes = open_dataset(path).manifest["statistics"]["notes"]
    return {note[:5]: count for note, count in notes.items() if note[:5] in ("lines", "names")}


@pytest.mark.parametrize("parse_special", [False, True])
@pytest.mark.parametrize("kind", ["text", "lines", "pairs"])
def test_a_text_has_the_same_ids_in_every_file(kind, parse_special, markup_tokenizer, tmp_path):
    settings: dict[str, Any] = {"parse_special": parse_special, "tokenizer": markup_tokenizer}
    content: Any = {"text": RAW, "lines": [{"text": RAW}], "pairs": [{"p": RAW, "c": RAW}]}[kind]
    val = write_lines(tmp_path / "val.jsonl", [{"text": RAW, "p": RAW, "c": RAW}])
    settings |= {"val": (str(val),), **(PAIR if kind == "pairs" else {})}
    tokens = open_dataset(make_dataset(tmp_path, content, **settings)).train.tokens[:]
    expected = (SPECIAL_IDS if parse_special else PLAIN_IDS) * (2 if kind == "pairs" else 1)
    assert token_ids(tokens).tolist() == [*expected, END]


def test_chats_and_prompts_have_the_ids_of_text(markup_tokenizer: str, tmp_path: Path):
    val = str(write_lines(tmp_path / "val.jsonl", [CHAT]))
    out = make_dataset(tmp_path, [CHAT], chat=True, tokenizer=markup_tokenizer, val=(val,))
    dataset = open_dataset(out)
    (example,) = dataset.train.examples()
    ids = example[example >= 0].tolist()
    assert ids == [*PLAIN_IDS, dataset.tokenizer.special_tokens["<|end|>"]]
    question = token_ids(example[: -len(ids)]).tolist()
    assert not {THINK, END_OF_THOUGHT} & {*dataset.tokenizer.unused_ids()}  # or never sampled
    assert THINK in question and dataset.tokenizer.decode(question).count(CLEAN) == 1
    assert count_notes(out) == {"lines": 8, "names": 2 * (1 + 1)}  # without markup

    model = TextGenerator(random_model(MODEL), dataset.tokenizer, [0])
    assert model.encode_turns([("user", RAW[1:])], 1)[0] == question
    (tmp_path / "prompt.txt").write_bytes(RAW[1:].encode("utf-16"))
    assert read_prompt(SampleConfig(tmp_path, prompt_file=tmp_path / "prompt.txt")) == CLEAN
    assert model.encode_prompt(CLEAN) == PLAIN_IDS
    assert model.encode_prompt(CLEAN, parse_special=True) == SPECIAL_IDS
    assert encode_line({"prompt": 7.5}, model, False, 1) == ([*b"7.5"], 1)


def test_a_text_that_spells_its_end_has_one(tmp_path: Path):
    rows = [{"text": f"<|user|>{n}<|end|><|endoftext|>"} for n in range(99)]
    dataset = open_dataset(make_dataset(tmp_path, rows, tokenizer="bpe", parse_special=True))
    special = dataset.tokenizer.special_tokens
    ids = dataset.train.tokens[:].tolist()
    for name in ("<|user|>", "<|end|>", "<|endoftext|>"):
        assert ids.count(special[name]) == ids.count(special["<|user|>"]) > 50


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl", "a.parquet", "a/b.md"])
def test_a_pointer_of_git_lfs_is_not_read(name: str, tmp_path: Path):
    (tmp_path / "a").mkdir()
    for file in (name, "model.safetensors", "tokenizer.json"):
        (tmp_path / file).write_text(POINTER)
    prompt = SampleConfig(tmp_path, prompt_file=tmp_path / name)
    readers: list[Callable[[], Any]] = [lambda: make_dataset(tmp_path, tmp_path / name)]
    readers += [lambda: make_dataset(tmp_path, tmp_path / "a")] if "/" in name else []
    readers += [lambda: check_weights(tmp_path), lambda: read_tokenizer(tmp_path, None)]
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
    question = encode_question(line, model)
    assert question.choices == {"1": [*ids, ord("1")], "2": [*ids, ord("2")]}
    text = make_dataset(tmp_path, "text " * 99, tokenizer=str(out), out=tmp_path / "text")
    assert open_dataset(text).tokenizer.prompt_suffix == ""
