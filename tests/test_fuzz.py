"""Formats that strangers write, with any content: a result, or a UserError of one line.

FUZZ_CASES=10000 pytest tests/test_fuzz.py      as many random cases for each, instead of the same
"""

import copy
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from backports import zstd
from helpers import make_reader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from transformers import LlamaConfig, LlamaForCausalLM

from engine.core.errors import UserError
from engine.data.chats.examples import parse_chat, parse_pair
from engine.data.documents.corpus import Corpus
from engine.data.documents.document import read_documents
from engine.data.records.text import ExampleParser, Reader
from engine.data.sources.notes import Notes
from engine.data.sources.source import Source
from engine.data.tokenizer import ByteTokenizer, CharTokenizer, load_tokenizer
from engine.data.tokenizer_training import train_bpe_tokenizer
from huggingface import ImportConfig, import_model

WRAPPED_BUG = re.compile(r"\((?:Assertion|Attribute|Index|Key|Name|Runtime|Type)Error: ")
CASES = settings(
    max_examples=int(os.environ.get("FUZZ_CASES", 50)),
    derandomize="FUZZ_CASES" not in os.environ,
    deadline=None,
    database=None,
    suppress_health_check=[*HealthCheck],
)

numbers_of_json = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2**63, 10**30]))
names = st.one_of(st.text(max_size=8), st.sampled_from(["file", "text", "bpe", "../x", "uint16"]))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers_of_json, names),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=4)),
    max_leaves=8,
)


@st.composite
def changed_json(draw, *originals: Any):
    """Draw the content of a JSON file: an original, one part of which is replaced or removed."""
    result = holder = {"": copy.deepcopy(draw(st.sampled_from(originals)))}
    key = ""
    while isinstance(holder[key], dict | list) and holder[key] and draw(st.integers(0, 3)):
        holder = holder[key]
        keys = sorted(holder) if isinstance(holder, dict) else range(len(holder))
        key = draw(st.sampled_from(keys))
    holder[key] = draw(values)
    if key and not draw(st.integers(0, 3)):
        del holder[key]
    return json.dumps(result[""]).encode()


@st.composite
def damaged(draw, content: bytes):
    """Replace some bytes of a content, and perhaps cut its end off."""
    data = bytearray(content)
    edits = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    for offset, byte in draw(st.lists(edits, max_size=4)):
        data[offset] = byte
    return bytes(data[: draw(st.just(len(content)) | st.integers(0, len(content)))])


def fuzz(
    path: Path,
    contents: st.SearchStrategy,
    parse: Callable[..., object],
    cases: settings = CASES,
    **options: Any,
) -> None:
    """Parse a file with each content, or any bytes: there are errors, and each is one line."""
    errors: list[UserError] = []

    @cases
    @given(st.one_of(contents, st.binary(max_size=60)), st.fixed_dictionaries(options))
    def check(content, drawn):
        path.write_bytes(content)
        try:
            parse(**drawn)
        except UserError as error:
            assert not WRAPPED_BUG.search(str(error)) and "\n" not in str(error), str(error)
            errors.append(error)

    check()
    assert errors


def test_tokenizer_files(tmp_path):
    path = tmp_path / "tokenizer.json"
    bpe = train_bpe_tokenizer(["abc abd " * 9], 264)
    originals = [tokenizer.document for tokenizer in (CharTokenizer("abc"), ByteTokenizer(), bpe)]
    fuzz(path, changed_json(*originals), lambda: load_tokenizer(path).encode("abc"))


def test_imported_models(tmp_path):
    sizes = {"vocab_size": 300, "hidden_size": 8, "intermediate_size": 8}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    path = tmp_path / "hf" / "config.json"
    LlamaForCausalLM(config).save_pretrained(path.parent)
    ByteTokenizer().save(path.parent / "tokenizer.json")

    def parse() -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        import_model(ImportConfig(str(path.parent), tmp_path / "run"))

    cases = settings(CASES, max_examples=CASES.max_examples // 3)
    fuzz(path, changed_json(json.loads(path.read_bytes())), parse, cases)


@pytest.mark.parametrize(
    "parse_record", [parse_chat, partial(parse_pair, prompt_fields=["a"], completion_field="c")]
)
def test_pairs_and_chats(parse_record, tmp_path):
    path = tmp_path / "examples.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    contents = changed_json({"a": "b", "c": "d", "messages": messages})

    def parse() -> None:
        reader = Reader(examples=ExampleParser(parse_record, ("a", "c", "messages")))
        documents = read_documents(Source(path, path.name), reader=reader)
        assert all(json.loads(document.text) for document in documents)

    fuzz(path, contents, parse)


def write_documents(path: Path) -> bytes:
    """Write two documents to a file of the kind that its name says, and return its content."""
    content = '{"text": "Some words, naïve."}\n{"text": "and\\nlines"}\n'
    if path.suffix in (".csv", ".tsv", ".txt"):
        content = 'id,text\n1,"Some words, naïve."\n2,"and\nlines"\n'
    elif path.suffix == ".json":
        content = "[" + content.replace("}\n{", "},\n{") + "]"
    path.write_bytes((zstd.compress if path.suffix == ".zst" else bytes)(content.encode()))
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": [1, 2, 3], "text": ["abc", "Some words, naïve.", "lines"]})
        parquet.write_table(table, path, row_group_size=2)
    return path.read_bytes()


TABLE_LINES = ["id,text", "id;text", "text\tid", "1,abc", '2;"a;b', "a\t7", '"', "", ",,"]
TEXT_LINES = ["abc", "naïve", "漢字", "<|endoftext|>", "\0", "%PDF-", "\ufeff"]
JSON_LINES = ["[", "]", "{", "}", ",", '{"text": "abc"}', '{"text": "\\ud83d"},', '"text": "a"']
LINES = {"csv": TABLE_LINES, "tsv": TABLE_LINES, "txt": TEXT_LINES}
KINDS = [*LINES, "json", "jsonl", "parquet", "jsonl.zst"]
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "gb18030", "latin-1"]


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_text_are_read_twice_alike(kind, tmp_path):
    path = tmp_path / f"file.{kind}"
    known_lines = st.sampled_from(LINES.get(kind, JSON_LINES))
    line = st.one_of(known_lines, st.text(max_size=5), values.map(json.dumps))
    text = st.builds(str.join, st.sampled_from(["", "\n", "\r\n"]), st.lists(line, max_size=9))
    encoded = st.builds(str.encode, text, st.sampled_from(ENCODINGS), st.just("replace"))
    documents = damaged(write_documents(path))
    contents = st.one_of(encoded, encoded.filter(bool).flatmap(damaged), documents)

    def parse(**options: Any) -> None:
        source = Source(path, path.name)
        reader = make_reader(**options)
        notes = Notes()
        texts = [each.text for each in read_documents(source, notes=notes, reader=reader)]
        assert texts == [each.text for each in read_documents(source, reader=reader)]
        assert "\0" not in "".join(texts) or kind not in LINES
        assert not any(note.startswith("rows") for note in notes) or reader.skip_bad_rows
        Corpus([source], 0.1, (), reader)

    options = {
        "encoding": st.sampled_from(["utf-8", "auto", "utf-16", "gb18030", "cp1252"]),
        "errors": st.sampled_from(["strict", "replace"]),
        "skip_bad_rows": st.booleans(),
        "separator": st.sampled_from(["", "<|endoftext|>"] if kind == "txt" else [""]),
    }
    fuzz(path, contents, parse, **options)
