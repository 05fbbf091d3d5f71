"""Every parser of ours on what no one would write: a result, or a ValueError of one line.

FUZZ_CASES=10000 pytest tests/test_fuzz.py      as many cases for each
"""

import copy
import gzip
import json
import lzma
import os
import random
import shutil
from functools import partial
from pathlib import Path

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
from engine.core.files import sha256, write_json
from engine.core.settings import load_settings
from engine.data.chat import parse_chat, parse_pair
from engine.data.dataset import open_dataset
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

CASES = int(os.environ.get("FUZZ_CASES", 100))
fuzz = settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None)

numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30]))
names = st.one_of(st.text(max_size=8), st.sampled_from(["file", "tokens", "char", "bpe", "../x", "uint16", "train"]))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, names),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=4)),
    max_leaves=8,
)


@st.composite
def changed(draw, original):
    """A JSON value with one part, at a place drawn, made another or taken away."""
    result = holder = {"": copy.deepcopy(original)}
    key = ""
    while isinstance(holder[key], dict | list) and holder[key] and draw(st.integers(0, 3)):
        holder = holder[key]
        key = draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
    if isinstance(holder, dict) and key and not draw(st.integers(0, 3)):
        del holder[key]
    else:
        holder[key] = draw(values)
    return result[""]


refusals: list[ValueError] = []


@pytest.fixture(autouse=True)
def none_refused_yet():
    refusals.clear()


def refused_cleanly(parse, *arguments) -> None:
    """Whatever comes, no other error than one that a user can read."""
    try:
        parse(*arguments)
    except ValueError as error:
        assert "\n" not in str(error), str(error)
        refusals.append(error)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "text.txt").write_text("0 is followed by 1.\n" * 200, encoding="utf-8")
    prepare(PrepareConfig(inputs=(str(folder / "text.txt"),), tokenizer="byte", out=folder / "data"))
    train_tiny(folder / "data", folder / "run", "--steps", 1, "--num-layers", 1, "--d-model", 8)
    return folder


def test_dataset_manifests(place):
    path = place / "data" / "manifest.json"
    original = path.read_bytes()

    @fuzz
    @given(st.one_of(changed(json.loads(original)).map(json.dumps).map(str.encode), st.binary(max_size=50)))
    def check(content):
        path.write_bytes(content)
        refused_cleanly(open_dataset, place / "data")

    check()
    assert refusals
    path.write_bytes(original)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_checkpoints(place, name):
    folder = list_checkpoints(place / "run")[0]
    originals = {name: (folder / name).read_bytes() for name in ("manifest.json", "state.json")}
    manifest = json.loads(originals["manifest.json"])

    @fuzz
    @given(st.one_of(changed(json.loads(originals[name])).map(json.dumps).map(str.encode), st.binary(max_size=50)))
    def check(content):
        (folder / name).write_bytes(content)
        if name == "state.json":
            manifest["files"][name] = sha256(folder / name)
            write_json(folder / "manifest.json", manifest)
        refused_cleanly(lambda: load_model(open_checkpoint(folder).verify()))

    check()
    assert refusals
    for name, content in originals.items():
        (folder / name).write_bytes(content)


def test_settings(tmp_path):
    path = tmp_path / "config.toml"
    keys = st.one_of(st.sampled_from(["steps", "batch_size", "d_model", "dropout", "data", "dtype", "compile"]), names)
    pairs = st.dictionaries(keys, values, max_size=4).map(
        lambda pairs: "".join(f"{key} = {json.dumps(value)}\n" for key, value in pairs.items())
    )

    @fuzz
    @given(st.one_of(pairs.map(lambda text: text.encode("utf-8", "surrogatepass")), st.binary(max_size=60)))
    def check(content):
        path.write_bytes(content)
        refused_cleanly(load_settings, TrainConfig, [str(path)])

    check()
    assert refusals


def test_tokenizer_files(tmp_path):
    path = tmp_path / "tokenizer.json"
    originals = []
    for tokenizer in (CharTokenizer("abc"), ByteTokenizer(), train_bpe_tokenizer(["abc abd " * 9], 264)):
        tokenizer.save(path)
        originals.append(json.loads(path.read_text()))

    @fuzz
    @given(st.one_of(*(changed(original).map(json.dumps).map(str.encode) for original in originals), st.binary()))
    def check(content):
        path.write_bytes(content)
        refused_cleanly(lambda: load_tokenizer(path).encode("abc"))

    check()
    assert refusals


def test_prompts(tmp_path):
    path = tmp_path / "prompt.txt"
    known = [CharTokenizer("abc"), ByteTokenizer()]

    @fuzz
    @given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
    def check(content):
        path.write_bytes(content)
        for tokenizer in known:
            config = SampleConfig(tmp_path, prompt_file=path)
            refused_cleanly(lambda config=config, tokenizer=tokenizer: tokenizer.encode(read_prompt(config)))

    check()
    assert refusals


def test_pairs_and_chats(tmp_path):
    path = tmp_path / "examples.jsonl"
    turn = {"role": "user", "content": "a"}
    record = {"a": "b", "c": "d", "messages": [turn, {"role": "assistant", "content": "b"}]}

    @fuzz
    @given(st.one_of(changed(record).map(json.dumps).map(str.encode), st.binary(max_size=50)), st.booleans())
    def check(content, chat):
        path.write_bytes(content)
        turns_of = parse_chat if chat else partial(parse_pair, prompt_field="a", completion_field="c")
        source = Source(path, "examples.jsonl", turns_of=turns_of)
        refused_cleanly(lambda: [json.loads(text.text) for text in read(source)])

    check()
    assert refusals


def test_models_from_elsewhere(tmp_path):
    config = LlamaConfig(vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    ByteTokenizer().save(tmp_path / "hf" / "tokenizer.json")
    files = {name: (tmp_path / "hf" / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    originals = {name: json.loads(content) for name, content in files.items()}
    settings = st.dictionaries(st.sampled_from(sorted(originals["config.json"])), values, max_size=3)
    settings = settings.map(lambda given: ("config.json", json.dumps(originals["config.json"] | given).encode()))
    odd = st.sampled_from(sorted(files)).flatmap(
        lambda name: st.one_of(changed(originals[name]).map(json.dumps).map(str.encode), st.binary(max_size=50)).map(
            lambda content: (name, content)
        )
    )

    @fuzz
    @given(st.one_of(settings, odd))
    def check(given):
        for name, content in (files | dict([given])).items():
            (tmp_path / "hf" / name).write_bytes(content)
        refused_cleanly(lambda: huggingface.import_model(ImportConfig(str(tmp_path / "hf"), tmp_path / "run")))
        shutil.rmtree(tmp_path / "run", ignore_errors=True)

    check()
    assert refusals


def written(kind: str, folder: Path) -> bytes:
    """A small file of a kind, with three documents."""
    path, texts = folder / f"whole{kind}", ["abc", "Some words, naïve.", "and\nlines"]
    if kind == ".parquet":
        parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": texts}), path, row_group_size=2)
    elif kind == ".csv":
        path.write_text("id,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(texts)), encoding="utf-8")
    else:
        compress = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd.compress}[f".{kind.split('.')[-1]}"]
        path.write_bytes(compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode()))
    return path.read_bytes()


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst"])
def test_files_of_every_kind(kind, tmp_path):
    path = tmp_path / f"file{kind}"
    lines = st.lists(st.one_of(values.map(json.dumps), st.text(max_size=20), st.just('{"text": "abc"}')), max_size=4)
    lines = lines.map("\n".join).map(lambda text: text.encode("utf-8", "surrogatepass"))
    content = st.one_of(lines, st.binary(max_size=60))
    if kind != ".jsonl":
        whole = written(kind, tmp_path)
        edits = st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=4)
        content = st.one_of(content, st.tuples(st.integers(0, len(whole)), edits).map(lambda how: damaged(whole, *how)))

    @fuzz
    @given(content, st.sampled_from(["strict", "replace"]))
    def check(content, errors):
        path.write_bytes(content)
        source = Source(path, path.name, errors=errors)
        refused_cleanly(lambda: ["".join(text.text) for text in read(source)])
        refused_cleanly(lambda: Corpus([source], 0.1))

    check()
    assert refusals


def damaged(content: bytes, length: int, edits: list[tuple[int, int]]) -> bytes:
    """The first bytes of a content, some of them others."""
    changed = bytearray(content)
    for offset, byte in edits:
        changed[offset] = byte
    return bytes(changed[:length])


def test_ten_thousand_strings_come_back_from_every_tokenizer(strings, code, tiktoken_cache):
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
