"""Text → data/<name>/, through main, prepare, or the command in a process of its own."""

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import read_files, write_lines

import prepare as command
from engine.core.errors import UserError
from engine.core.files import exclusive_lock, sha256
from engine.data.dataset import FORMAT_VERSION, open_dataset
from engine.data.documents import corpus as documents
from engine.data.shards.writer import work_folder
from engine.data.tokenizer import ByteTokenizer
from prepare import PrepareConfig

OFFLINE = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
PAIRS = [{"q": f"{i} + 1 = ", "a": f"{i + 1}, naïve 🚀 <|end|>", "id": i} for i in range(60)]
CHATS = []
for _number in range(60):
    _roles = ["system"] * (_number % 3 == 0) + ["user", "assistant"] * (1 + _number % 4)
    _messages = [{"role": role, "content": f"{_number}: <|user|> {role}é"} for role in _roles]
    CHATS.append({"messages": _messages})
CHAT_FLAGS = ("--chat",)
PAIR_FLAGS = ("--prompt-field", "q", "--completion-field", "a")
EXAMPLES = {"pairs": (PAIRS, PAIR_FLAGS), "chats": (CHATS, CHAT_FLAGS)}


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch, capsys) -> Callable[..., str]:
    """Return a function that runs main in tmp_path and returns its output or its error."""
    monkeypatch.chdir(tmp_path)

    def prepare(*arguments: object, error: bool = False) -> str:
        capsys.readouterr()
        if not error:
            command.main([*map(str, arguments)])
            output, errors = capsys.readouterr()
            assert output and not errors
            return output
        with pytest.raises((UserError, SystemExit)) as caught:
            command.main([*map(str, arguments)])
        output, errors = capsys.readouterr()
        line = errors.strip() if isinstance(caught.value, SystemExit) else str(caught.value)
        assert not output and line and "\n" not in line
        return line

    return prepare


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("text to prepare\n" * 10)
    return tmp_path / "a.txt"


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the times and inodes of a folder, which change when a file is written again."""
    stats = {str(path): path.stat() for path in (folder, *folder.rglob("*"))}
    return {name: (stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


@pytest.mark.parametrize(
    ("tokenizer", "dtype", "vocab_size", "train_tokens", "val_tokens"),
    [
        ("char", "uint16", 65, 1_003_854, 111_540),
        ("byte", "uint16", 257, 1_003_854, 111_540 + 1),
        ("gpt2", "uint16", 50257, 301_966, 36_059 + 1),  # nanoGPT's counts, and the end of text
    ],
)
def test_tiny_shakespeare(
    tokenizer, dtype, vocab_size, train_tokens, val_tokens, prepare, shakespeare, tiktoken_cache
):
    output = prepare(shakespeare, "--tokenizer", tokenizer)
    path = Path("data/tinyshakespeare")
    assert f"python train.py --data {path}" in output and f"{vocab_size:,}" in output
    dataset = open_dataset(path)
    expected = shakespeare.read_text(encoding="utf-8")
    ending = "" if tokenizer == "char" else "<|endoftext|>"
    assert dataset.tokenizer.decode(dataset.train.tokens[:]) == expected[:1_003_854]
    assert dataset.tokenizer.decode(dataset.val.tokens[:]) == expected[1_003_854:] + ending

    manifest = json.loads((path / "manifest.json").read_text())
    keys = ["format", "vocab_size", "dtype"]
    assert [manifest[key] for key in keys] == [FORMAT_VERSION, vocab_size, dtype]
    written = sha256(path / "tokenizer.json")
    assert manifest["tokenizer"] == {"kind": dataset.tokenizer.kind, "sha256": written}
    facts = {"documents": 1, "repeats": 0, "longest": train_tokens + val_tokens}
    assert manifest["statistics"] == {**facts, "dropped": 0, "notes": {}}
    for split, tokens, size in (("train", train_tokens, 1_003_854), ("val", val_tokens, 111_540)):
        counts = manifest["splits"][split]
        assert (counts["bytes"], counts["documents"]) == (size, split == "val")
        assert tokens == counts["tokens"]
        (shard,) = counts["shards"]
        assert shard["sha256"] == sha256(path / shard["file"])
    names = {"manifest.json", "tokenizer.json", "prepared_from.json"}
    assert {*os.listdir(path)} == names | {"train-00000.npy", "val-00000.npy"}


def test_documents_are_encoded_in_order_each_with_its_end(code, prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MIN_BATCH_CHARACTERS", 500)
    texts = ["", *(f"№ {i}: {code[100 * i :][: i % 700]}" for i in range(len(code) // 100))]
    write_lines(tmp_path / "lines.jsonl", [{"text": text} for text in texts])
    prepare("lines.jsonl", "--vocab-size", 300, "--val-fraction", 0.2)
    dataset = open_dataset(tmp_path / "data" / "lines")
    order = []
    for split in ("train", "val"):
        tokens = getattr(dataset, split).tokens[:]
        ends = np.flatnonzero(tokens == dataset.tokenizer.end_of_text_id)
        assert ends[-1] == len(tokens) - 1
        encoded = [ids[:-1] for ids in np.split(tokens, ends[:-1] + 1)]
        decoded = [dataset.tokenizer.decode(ids) for ids in encoded]
        counts = dataset.manifest["splits"][split]
        num_bytes = sum(len(text.encode()) for text in decoded)
        assert (counts["documents"], counts["bytes"]) == (len(decoded), num_bytes)
        np.testing.assert_array_equal(encoded[0], dataset.tokenizer.encode(decoded[0]))
        numbers = [texts.index(text) for text in decoded]
        assert numbers == sorted(numbers)
        order += numbers
    assert sorted(order) == list(range(len(texts)))


def test_standard_input(run, tmp_path: Path):
    content = "\n".join(map(json.dumps, CHATS))
    result = run("prepare.py", "-", "--tokenizer", "byte", "--chat", input=content)
    assert (result.returncode, result.stderr) == (0, "") and "⟦" in result.stdout
    assert open_dataset(tmp_path / "data" / "stdin").manifest["statistics"]["documents"] == 60


def test_a_file_for_validation_is_not_for_training(tmp_path: Path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"text of {name}. " * 9)
    out = tmp_path / "out"
    config = PrepareConfig((str(tmp_path),), "byte", out=out, val=(f"{tmp_path}/b.txt",))
    command.prepare(config)
    dataset = open_dataset(out)
    assert "files left out of training, as they are in --val: b.txt" in str(dataset.manifest)
    texts = [bytes(split.tokens[:].clip(0, 255).tolist()) for split in (dataset.train, dataset.val)]
    assert [[f"of {name}".encode() in text for name in "abc"] for text in texts] == [
        [True, False, True],
        [False, True, False],
    ]
    with pytest.raises(UserError, match="--val: "):
        command.prepare(dataclasses.replace(config, inputs=config.val))


def test_show_describes_a_dataset(prepare, text):
    output = prepare("a.txt", "--tokenizer", "byte")
    assert prepare("--show", "data/a").strip() in output
    assert "text to prepare" in output and "144 UTF-8 bytes" in output
    assert "--show" in prepare("--show", "data/a", "--force", error=True)
    assert "prepare.py" in prepare("--show", "data/b", error=True)


# The same again, or something else.


def test_the_same_again_changes_nothing(prepare, text, tmp_path: Path):
    prepare("a.txt")
    before = snapshot(tmp_path / "data")
    assert "up to date" in prepare("a.txt")
    os.utime(text, ns=(1, 1))  # the same text in a newer file
    assert "up to date" in prepare("a.txt")
    assert snapshot(tmp_path / "data") == before
    work_folder(tmp_path / "data" / "a").mkdir()  # of a run that was killed
    assert "up to date" in prepare("a.txt")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("added", "flags", "word"),
    [
        ("other words\n", (), "other text"),
        ("", ("--val-fraction", 0.5), "val_fraction 0.1"),
        ("", ("--tokenizer", "byte"), "tokenizer bpe"),
        ("", ("--pattern", "llama3"), "pattern"),
    ],
)
def test_another_dataset_is_only_replaced_by_force(added, flags, word, prepare, text, tmp_path):
    prepare("a.txt")
    before = snapshot(tmp_path / "data")
    text.write_text("text to prepare\n" * 10 + added)
    line = prepare("a.txt", *flags, error=True)
    assert line.startswith("data/a: ") and word in line and "--force" in line
    assert snapshot(tmp_path / "data") == before
    prepare("a.txt", *flags, "--force")
    assert "up to date" in prepare("a.txt", *flags)


def test_a_corrupted_dataset_is_made_again_by_force(prepare, text, tmp_path: Path):
    prepare("a.txt")
    before = read_files(tmp_path / "data" / "a")
    for name in ("train-00000.npy", "manifest.json"):
        (tmp_path / "data" / "a" / name).write_bytes(b"")
        assert "--force" in prepare("a.txt", error=True)
        prepare("a.txt", "--force")
        assert read_files(tmp_path / "data" / "a") == before
    (tmp_path / "data" / "a" / "manifest.json").unlink()
    assert "--out" in prepare("a.txt", "--force", error=True)


def test_a_dataset_is_made_by_one_process_at_a_time(prepare, text, tmp_path: Path):
    with exclusive_lock(tmp_path / "data" / "a"):
        assert str(os.getpid()) in prepare("a.txt", error=True)
    prepare("a.txt")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a"]


# Mistakes.


def test_the_command_exits_with_1_after_one_line(run, text, tmp_path: Path):
    environment = os.environ | OFFLINE | {"TIKTOKEN_CACHE_DIR": str(tmp_path)}
    result = run("prepare.py", "a.txt", "--tokenizer", "o200k_base", env=environment)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "o200k_base" in result.stderr and "TIKTOKEN_CACHE_DIR" in result.stderr


def test_torch_is_not_imported():
    program = "import sys, prepare; sys.exit('torch' in sys.modules)"
    folder = Path(command.__file__).parent
    assert subprocess.run([sys.executable, "-c", program], cwd=folder).returncode == 0


# Examples.


def render(record: dict) -> str:
    """Write an example as text, its targets between ⟦ and ⟧."""
    if "messages" not in record:
        return f"{record['q']}⟦{record['a']}<|endoftext|>⟧"
    rendered = ""
    for message in record["messages"]:
        end = f"{message['content']}<|end|>"
        rendered += f"<|{message['role']}|>"
        rendered += f"⟦{end}⟧" if message["role"] == "assistant" else end
    return rendered


@pytest.mark.parametrize("tokenizer", ["bpe", "char"])
@pytest.mark.parametrize("kind", EXAMPLES)
def test_examples(kind: str, tokenizer: str, prepare, tmp_path: Path):
    records, flags = EXAMPLES[kind]
    output = prepare(write_lines(tmp_path / "a.jsonl", records), *flags, "--tokenizer", tokenizer)
    dataset = open_dataset(tmp_path / "data" / "a")
    assert dataset.manifest["dtype"] == "int32" and dataset.manifest["origin"]["examples"] == kind
    decode = dataset.tokenizer.decode
    rendered = []
    for split in ("train", "val"):
        for ids in getattr(dataset, split).examples():
            text = ""
            for is_target, group in itertools.groupby(ids.tolist(), key=lambda token: token >= 0):
                tokens = [*group]
                text += f"⟦{decode(tokens)}⟧" if is_target else decode([~i for i in tokens])
            rendered.append(text)
    assert sorted(rendered) == sorted(map(render, records))
    assert rendered[0] in output


def test_a_tokenizer_is_trained_on_the_texts_of_examples_alone(prepare, tmp_path: Path):
    prepare(write_lines(tmp_path / "pairs.jsonl", PAIRS), *PAIR_FLAGS, "--tokenizer", "char")
    tokenizer = open_dataset(tmp_path / "data" / "pairs").tokenizer
    assert tokenizer.vocab_size == len({*"".join(pair["q"] + pair["a"] for pair in PAIRS)}) + 1
    prepare(write_lines(tmp_path / "chats.jsonl", CHATS), "--chat", "--vocab-size", 300)
    tokenizer = open_dataset(tmp_path / "data" / "chats").tokenizer
    merged = "".join(tokenizer.decode([i]) for i in range(256, tokenizer.vocab_size - 5))
    assert not {*'["'} & {*merged}


def test_the_tokenizer_of_another_dataset_is_identified_by_its_content(prepare, text, tmp_path):
    prepare("a.txt", "--vocab-size", 300)
    chats = write_lines(tmp_path / "b.jsonl", CHATS)
    arguments = (chats, *CHAT_FLAGS, "--tokenizer")
    prepare(*arguments, "data/a")
    tokenizers = [(Path("data") / name / "tokenizer.json").read_bytes() for name in ("a", "b")]
    assert tokenizers[0] == tokenizers[1]
    shutil.copytree("data/a", "copy")
    for path in ("data/a", "copy", "copy/tokenizer.json"):
        assert "up to date" in prepare(*arguments, path)
    prepare("a.txt", "--tokenizer", "byte", "--force")
    assert "tokenizer bpe" in prepare(*arguments, "data/a", error=True)


def test_names_that_are_not_utf8_are_prepared(prepare, tmp_path):
    for folder in ("text", "val"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / os.fsdecode(b"caf\xe9.txt")).write_text("some words\n" * 99)
    prepare("text", "--tokenizer", "byte", "--out", "data")
    assert len(open_dataset(tmp_path / "data").train) > 800
    validation = os.fsdecode(b"val/caf\xe9.txt")
    prepare("text", "--tokenizer", "byte", "--out", "both", "--val", validation)
    assert len(open_dataset(tmp_path / "both").val) == 1090


# Like Mistral's: the last question is written in another way than those before it.
REWRITING_TEMPLATE = """{% for message in messages %}
{%- if message['role'] == 'user' %}{{ '[PAST]' if messages[loop.index0 + 2:] else '[LAST]' }}
{%- endif %}{{ message['content'] }}
{{- '<|endoftext|>' if message['role'] == 'assistant' else '' }}{% endfor %}"""


def test_a_chat_of_several_examples_is_one_document(prepare, tmp_path: Path):
    ByteTokenizer().with_chat_template(REWRITING_TEMPLATE).save(tmp_path / "tokenizer.json")
    chats = write_lines(tmp_path / "a.jsonl", CHATS)
    output = prepare(chats, "--chat", "--tokenizer", "tokenizer.json")
    dataset = open_dataset(tmp_path / "data" / "a")
    counts = dataset.manifest["splits"]
    assert dataset.manifest["statistics"]["documents"] == 60
    assert counts["train"]["documents"] + counts["val"]["documents"] == 60
    assert dataset.train.num_examples + dataset.val.num_examples == 150
    assert f"examples: {dataset.train.num_examples}" in output
