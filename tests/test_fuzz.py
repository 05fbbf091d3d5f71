"""Every parser on arbitrary input: a result, or a UserError of one line.

FUZZ_CASES=10000 pytest tests/test_fuzz.py      as many cases for each
"""

import copy
import gzip
import json
import lzma
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import tokenizers
from backports import zstd
from helpers import train_tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from transformers import LlamaConfig, LlamaForCausalLM

import huggingface
from engine.core.errors import UserError
from engine.core.files import sha256, write_json
from engine.core.settings import load_settings
from engine.data.dataset import open_dataset
from engine.data.inputs.examples import parse_chat, parse_pair
from engine.data.inputs.readers import read
from engine.data.inputs.sources import Source
from engine.data.splits import Corpus
from engine.data.tokenizer import ByteTokenizer, CharTokenizer, load_tokenizer, named_tokenizer
from engine.data.tokenizer_training import train_bpe_tokenizer
from engine.training.checkpoint import load_model, open_checkpoint
from engine.training.config import TrainConfig
from engine.training.run_dir import list_checkpoints
from huggingface import ImportConfig
from prepare import PrepareConfig, prepare
from sample import SampleConfig, read_prompt

NUM_CASES = int(os.environ.get("FUZZ_CASES", 100))

numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30]))
names = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["file", "tokens", "char", "bpe", "../x", "uint16", "train"]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, names),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=4)),
    max_leaves=8,
)
short_bytes = st.binary(max_size=60)


@st.composite
def changed_value(draw, original):
    """Replace or remove one part of a JSON value."""
    result = holder = {"": copy.deepcopy(original)}
    key = ""
    while isinstance(holder[key], dict | list) and holder[key] and draw(st.integers(0, 3)):
        holder = holder[key]
        keys = sorted(holder) if isinstance(holder, dict) else range(len(holder))
        key = draw(st.sampled_from(keys))
    if isinstance(holder, dict) and key and not draw(st.integers(0, 3)):
        del holder[key]
    else:
        holder[key] = draw(values)
    return result[""]


def changed_json(*originals: Any) -> st.SearchStrategy[bytes]:
    """Draw the content of a JSON file: an original with a change, or arbitrary bytes."""
    changed = [changed_value(original).map(json.dumps).map(str.encode) for original in originals]
    return st.one_of(*changed, short_bytes)


def encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def fuzz(contents: st.SearchStrategy, parse: Callable[[Any], object]) -> None:
    """Parse each content, and check that errors are of one line and that there are some."""
    errors: list[UserError] = []

    @settings(
        max_examples=NUM_CASES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(contents)
    def check(content):
        try:
            parse(content)
        except UserError as error:
            assert "\n" not in str(error), str(error)
            errors.append(error)

    check()
    assert errors


def fuzz_file(path: Path, contents: st.SearchStrategy[bytes], parse: Callable[[], object]) -> None:
    """Parse a file with each content, then restore it."""
    original = path.read_bytes() if path.exists() else b""

    def write_and_parse(content: bytes) -> None:
        path.write_bytes(content)
        parse()

    fuzz(contents, write_and_parse)
    path.write_bytes(original)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a dataset and a run."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "text.txt").write_text("0 is followed by 1.\n" * 200, encoding="utf-8")
    prepare(PrepareConfig((str(folder / "text.txt"),), tokenizer="byte", out=folder / "data"))
    train_tiny(folder / "data", folder / "run", "--steps", 1, "--num-layers", 1, "--d-model", 8)
    return folder


def test_dataset_manifests(folder):
    path = folder / "data" / "manifest.json"
    fuzz_file(path, changed_json(json.loads(path.read_bytes())), lambda: open_dataset(path.parent))


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_checkpoints(folder, name):
    path = list_checkpoints(folder / "run")[0] / name
    manifest_path = path.with_name("manifest.json")
    manifest = json.loads(manifest_path.read_bytes())

    def parse() -> None:
        if name == "state.json":
            files = manifest["files"] | {name: sha256(path)}
            write_json(manifest_path, manifest | {"files": files})
        load_model(open_checkpoint(path.parent).verify())

    fuzz_file(path, changed_json(json.loads(path.read_bytes())), parse)
    write_json(manifest_path, manifest)


def test_settings(tmp_path):
    keys = st.sampled_from(["steps", "batch_size", "d_model", "dropout", "data", "dtype"])
    tables = st.dictionaries(st.one_of(keys, names), values, max_size=4)
    contents = tables.map(
        lambda table: "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
    )
    path = tmp_path / "config.toml"
    parse = partial(load_settings, TrainConfig, [str(path)])
    fuzz_file(path, st.one_of(contents.map(encode_text), short_bytes), parse)


def test_tokenizer_files(tmp_path):
    path = tmp_path / "tokenizer.json"
    bpe = train_bpe_tokenizer(["abc abd " * 9], 264)
    originals = [tokenizer.document for tokenizer in (CharTokenizer("abc"), ByteTokenizer(), bpe)]
    fuzz_file(path, changed_json(*originals), lambda: load_tokenizer(path).encode("abc"))


@pytest.mark.parametrize("tokenizer", [CharTokenizer("abc"), ByteTokenizer()])
def test_prompts(tokenizer, tmp_path):
    path = tmp_path / "prompt.txt"
    config = SampleConfig(tmp_path, prompt_file=path)
    contents = st.one_of(short_bytes, st.text(max_size=60).map(str.encode))
    fuzz_file(path, contents, lambda: tokenizer.encode(read_prompt(config)))


@pytest.mark.parametrize(
    "turns_of", [parse_chat, partial(parse_pair, prompt_fields=["a"], completion_field="c")]
)
def test_pairs_and_chats(turns_of, tmp_path):
    path = tmp_path / "examples.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    contents = changed_json({"a": "b", "c": "d", "messages": messages})
    source = Source(path, "examples.jsonl", turns_of=turns_of)
    fuzz_file(path, contents, lambda: [json.loads(text.text) for text in read(source)])


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_imported_models(name, tmp_path):
    sizes = {"vocab_size": 300, "hidden_size": 8, "intermediate_size": 8}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    path = tmp_path / "hf" / name
    LlamaForCausalLM(config).save_pretrained(path.parent)
    ByteTokenizer().save(path.parent / "tokenizer.json")
    original = json.loads(path.read_bytes())
    settings = st.dictionaries(st.sampled_from(sorted(original)), values, max_size=3)
    contents = settings.map(lambda values: json.dumps(original | values).encode())

    def parse() -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        huggingface.import_model(ImportConfig(str(path.parent), tmp_path / "run"))

    fuzz_file(path, st.one_of(contents, changed_json(original)), parse)


def write_documents(path: Path) -> bytes:
    """Write three documents to a file of the kind that its name says, and return its content."""
    texts = ["abc", "Some words, naïve.", "and\nlines"]
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    if path.suffix == ".csv":
        content = "id,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(texts))
    compress = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd.compress}
    path.write_bytes(compress.get(path.suffix, bytes)(content.encode()))
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": texts}), path, row_group_size=2)
    return path.read_bytes()


@st.composite
def damaged(draw, content: bytes):
    """Cut the end of a content off, and replace some of its bytes."""
    data = bytearray(content)
    edits = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    for offset, byte in draw(st.lists(edits, max_size=4)):
        data[offset] = byte
    return bytes(data[: draw(st.integers(0, len(content)))])


@pytest.mark.parametrize("errors", ["strict", "replace"])
@pytest.mark.parametrize(
    "kind", ["jsonl", "json", "csv", "parquet", "jsonl.gz", "jsonl.xz", "jsonl.zst"]
)
def test_files_of_every_kind(kind, errors, tmp_path):
    path = tmp_path / f"file.{kind}"
    line = st.one_of(values.map(json.dumps), st.text(max_size=20), st.just('{"text": "abc"}'))
    lines = st.lists(line, max_size=4).map("\n".join).map(encode_text)
    contents = st.one_of(lines, short_bytes, damaged(write_documents(path)))
    source = Source(path, path.name, errors=errors)

    def parse() -> None:
        vars(source).pop("info", None)
        Corpus([source], 0.1)
        assert all(isinstance(text.text, str) for text in read(source))

    fuzz_file(path, contents, parse)


TABLE_LINES = ["id,text", "id;text", "text\tid", "1,abc", '2;"a;b', "a\t7", '"', "", ",,"]
TEXT_LINES = ["abc", "naïve", "漢字", "<|endoftext|>", "\0", "%PDF-", "\ufeff"]
JSON_LINES = [
    "[",
    "]",
    "{",
    "}",
    ",",
    '{"text": "abc"}',
    '{"text": "\\ud83d"},',
    '"text": "a"',
    "[5",
]
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "gb18030", "latin-1"]
FORMS = {
    "json": JSON_LINES,
    "jsonl": JSON_LINES,
    "csv": TABLE_LINES,
    "tsv": TABLE_LINES,
    "txt": TEXT_LINES,
}


@pytest.mark.parametrize("kind", FORMS)
def test_text_in_any_encoding_and_form_is_read_twice_alike(kind, tmp_path):
    path = tmp_path / f"file.{kind}"
    line = st.one_of(st.sampled_from(FORMS[kind]), st.text(max_size=5))
    text = st.lists(line, max_size=9).flatmap(
        lambda lines: st.sampled_from(["", "\n", "\r\n"]).map(lambda end: end.join(lines))
    )
    encoded = st.tuples(text, st.sampled_from(ENCODINGS)).map(
        lambda pair: pair[0].encode(pair[1], "replace")
    )
    contents = st.tuples(
        st.one_of(encoded, encoded.filter(bool).flatmap(damaged)),
        st.sampled_from(["utf-8", "auto", "utf-16", "gb18030", "cp1252"]),
        st.sampled_from(["strict", "replace"]),
        st.booleans(),
        st.sampled_from(["", "<|endoftext|>"] if kind == "txt" else [""]),
    )

    def parse(drawn) -> None:
        content, encoding, errors, skip_bad_rows, separator = drawn
        path.write_bytes(content)
        source = Source(
            path,
            path.name,
            encoding=encoding,
            errors=errors,
            skip_bad_rows=skip_bad_rows,
            separator=separator,
        )
        notes = Counter()
        texts = [text.text for text in read(source, notes=notes)]
        assert texts == [text.text for text in read(source)]
        assert "\0" not in "".join(texts) or kind.startswith("json")
        assert not any(note.startswith("rows") for note in notes) or skip_bad_rows
        Corpus([source], 0.1)

    fuzz(contents, parse)


def test_ten_thousand_strings_round_trip_through_every_tokenizer(strings, code, tiktoken_cache):
    chance = random.Random(1)
    pool = sorted({character for text in strings for character in text})
    texts = ["".join(chance.choices(pool, k=chance.randrange(12))) for _ in range(10_000)]
    bpe = train_bpe_tokenizer([code], 1000)
    reference = tokenizers.Tokenizer.from_str(json.dumps(bpe.document))
    reference.encode_special_tokens = True
    for text, encoding in zip(texts, reference.encode_batch(texts), strict=True):
        assert bpe.encode(text).tolist() == encoding.ids
    for tokenizer in (CharTokenizer("".join(pool)), ByteTokenizer(), bpe, named_tokenizer("gpt2")):
        for text in texts:
            assert tokenizer.decode(tokenizer.encode(text)) == text
