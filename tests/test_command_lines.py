"""Any command line ends with 0, 1 or 2 and at most one line on stderr: no traceback, no hang.

COMMAND_LINES=5000 pytest -o addopts= tests/test_command_lines.py    runs that many
"""

import contextlib
import dataclasses
import io
import json
import os
import random
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
from helpers import exit_code_of, numbers_text, train_tiny

import huggingface
import prepare
import report
import sample
import train
from benchmarks import speed
from engine.training.config import TrainConfig
from prepare import PrepareConfig

LINES = int(os.environ.get("COMMAND_LINES", 150))
SECONDS = 20  # that a command line may take
ABSURD = [
    "",
    " ",
    "x",
    "-",
    "--",
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e-400",
    "10" * 20,
    "0x10",
    "½",
    "日本",
    "True",
]
ABSURD += ["\n", "a" * 5000, "None", "[1]", "{}", "%s", "\udcff"]
PLAUSIBLE = {
    int: ["1", "2", "3", "4", "8"],
    float: ["0", "0.1", "0.5", "0.9", "1", "2", "1e-30", "1e300"],
}
TINY = "--steps 2 --num-layers 1 --num-heads 2 --d-model 8 --context-length 8"
TINY += " --batch-size 2 --eval-tokens 50"
OF = {  # what only some settings can sensibly have
    "data": ["data/numbers", "data/none", "text.txt", "out/run"],
    "mix": ["1", "0.5"],
    "device": ["cpu", "auto", "cuda", "meta", "cpu:0"],
    "tokenizer": ["char", "byte", "bpe", "gpt2", "gpt5"],
    "vocab_size": ["257", "300", "4096"],
    "pattern": ["gpt2", "llama3", "pairs", "gpt5"],
    "prompt_field": ["text", "none"],
    "completion_field": ["text", "none"],
    "init_from": ["out/run", "out/none"],
    "prompts_file": ["prompts.jsonl", "chats.jsonl", "none"],
    "family": ["auto", "llama", "nanochat", "gpt2"],
    "run": ["out/run", "out/none"],
    "runs": ["out/run", "out/run", "out/none"],
    "source": ["hf", "out/run", "none"],
    "inputs": [
        "text.txt",
        "lines.jsonl",
        "chats.jsonl",
        "folder",
        "none.txt",
        "-",
        "http://127.0.0.1:9/a.txt",
    ],
    "path": ["out/run", "out/none", "out/run/checkpoints/step-00000004", "text.txt"],
    "out": [
        "out/one",
        "out/two",
        "out/run",
        "data/made",
        "data/numbers",
        "text.txt",
        "text.txt/inside",
        "data/numbers/in",
        "page.html",
    ],
    "part": ["1/1", "1/2", "2/2", "3/2"],
    "glob": ["*.txt", "*", "**/*", "["],
    "prompt_file": ["text.txt", "none", "folder"],
    "attention": ["picture.png", "picture", "folder.png"],
    "nanogpt": ["none"],
    "compile": ["False", "None"],  # to compile takes too long here
}
UNASKED = (
    "wandb",
    "compile",
    "page",
)  # flags that wait for others, take long, or serve until Ctrl-C


def plain(hint: Any) -> Any:
    """Return a type without its annotations."""
    return plain(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


def settings_of(cls: type) -> Iterator[tuple[str, Any, bool]]:
    """The name, the type and whether it is positional of each setting, nested ones too."""
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            yield from settings_of(hint)
        else:
            yield name, plain(hint), "Positional" in str(cls.__annotations__.get(name, ""))


def value_of(name: str, kind: Any, chance: random.Random) -> str:
    """A value for a setting: one that might be meant, or not."""
    if chance.random() < 0.3:
        return chance.choice(ABSURD)
    if name in OF:
        return chance.choice(OF[name])
    options = get_args(kind) if get_origin(kind) is not None else (kind,)
    if get_origin(kind) is Literal:
        return chance.choice(options)
    numeric_type = next((option for option in options if option in PLAUSIBLE), None)
    return chance.choice(PLAUSIBLE.get(numeric_type, ["a", "b"]))


def line_of(command: str, cls: type, chance: random.Random) -> list[str]:
    """A command line for a command whose settings the dataclass lists."""
    flags = {
        "train": [*TINY.split(), "--data", "data/numbers"],
        "sample": ["--max-new-tokens", "5"],
    }.get(command, [])
    flags += ["--device", "cpu"] * (command in ("train", "sample"))
    settings = list(settings_of(cls))
    first = [value_of(name, kind, chance) for name, kind, positional in settings if positional]
    for name, kind, positional in chance.sample(
        settings, min(len(settings), chance.choice([0, 1, 1, 2, 2, 3, 6]))
    ):
        prefix = chance.choice(["", "no-"] if kind is bool else [""])
        flag = f"--{prefix}{name.replace('_', chance.choice('-_'))}"
        if name not in UNASKED or kind is not bool:
            values = [
                value_of(name, kind, chance)
                for _ in range(chance.choice([1, 2]) if "tuple" in str(kind) else 1)
            ]
            flags += [] if positional else [flag] if kind is bool else [flag, *values]
    if command == "bench":  # which takes long, unless it refuses
        flags += chance.choice(
            [["--rounds", "0"], ["--batch-size", "-1"], ["--dtype", "int8"], ["--nanogpt", "none"]]
        )
    counts = [0, 1, 2, 2, 2, 2] if command in ("export", "import") else [0, 1, 1, 1, 1, len(first)]
    return first[: chance.choice(counts)] + flags


def main_of(command: str) -> SimpleNamespace:
    """One of the two commands of huggingface.py."""
    return SimpleNamespace(main=lambda arguments: huggingface.main([command, *arguments]))


COMMANDS = {
    "export": (main_of("export"), huggingface.ExportConfig),
    "import": (main_of("import"), huggingface.ImportConfig),
    "train": (train, TrainConfig),
    "prepare": (prepare, PrepareConfig),
    "sample": (sample, sample.SampleConfig),
    "report": (report, report.ReportConfig),
    "bench": (speed, speed.BenchConfig),
}


class TooLong(BaseException):
    """The command line took longer than it may."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def place(numbers, tmp_path_factory) -> Iterator[Path]:
    """A folder to be in, with texts, a dataset and a run."""
    folder = tmp_path_factory.mktemp("lines")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setitem(sys.modules, "wandb", None)
        for name in ("folder", "folder.png", "data", "out"):
            Path(name).mkdir()
        Path("text.txt").write_text(numbers_text(60))
        Path("folder/part.txt").write_text(numbers_text(20))
        Path("lines.jsonl").write_text('{"text": "one line"}\n{"text": "another line"}\n' * 20)
        Path("prompts.jsonl").write_text('{"prompt": "1 is"}\n{"prompt": "22 is foll"}\n')
        turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
        Path("chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 20)
        Path("data/numbers").symlink_to(numbers)
        train_tiny(Path("data/numbers"), Path("out/run"), "--steps", 4, "--context-length", 8)
        huggingface.main(["export", "out/run", "hf"])
        yield folder


KEPT = {
    "text.txt",
    "lines.jsonl",
    "prompts.jsonl",
    "chats.jsonl",
    "folder",
    "folder.png",
    "data",
    "out",
    "hf",
}


def clear(place: Path, arguments: list[str]) -> set[str]:
    """Remove the outputs that a command line names; return the other new files."""
    made = {path.name for path in place.iterdir()} - KEPT
    named = {
        value.split("/")[0] for word in arguments for value in (word, word.partition("=")[2])
    } | {"cache"}
    if "" in named or "." in named:  # which is here
        named |= {".lock", "config.toml", "checkpoints", "metrics.jsonl", "loss.png"}
        named |= {"about.json", "samples.jsonl", "report.html"}
    for name in made & named:
        (shutil.rmtree if (place / name).is_dir() else os.remove)(place / name)
    return made - named


@pytest.mark.parametrize("command", COMMANDS)
def test_any_command_line_ends_in_one_line_at_most(command, place, monkeypatch):
    module, cls = COMMANDS[command]
    chance, codes = random.Random(command), {0: 0, 1: 0, 2: 0}
    for _ in range(LINES // {"bench": 20, "export": 4, "import": 10, "report": 1}.get(command, 3)):
        arguments = line_of(command, cls, chance)
        streams = [
            io.TextIOWrapper(io.BytesIO(b"a prompt, or some text\n" * 20), "utf-8")
            for _ in range(3)
        ]
        streams[1:] = [io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2)]
        line = shlex.join([command, *arguments])
        with monkeypatch.context() as patch, at_most(SECONDS):
            for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
                patch.setattr(sys, name, stream)
            try:
                code = exit_code_of(lambda arguments=arguments: module.main(arguments))
            except BaseException as error:
                raise AssertionError(f"{line}: {type(error).__name__}") from error
        streams[2].flush()
        errors = streams[2].buffer.getvalue().decode()
        assert code in codes and errors.count("\n") <= 1 and (code == 0 or errors), (
            f"{line}: {code}, {errors}"
        )
        assert (place / "data" / "numbers" / "manifest.json").is_file() and not clear(
            place, arguments
        ), line
        codes[code] += 1
    assert codes[2] and (command == "bench" or (codes[0] and codes[1])), codes  # all three came up


def test_every_setting_comes_up():
    chance = random.Random(0)
    for command, (_, cls) in COMMANDS.items():
        words = {word for _ in range(2000) for word in line_of(command, cls, chance)}
        for name, kind, positional in settings_of(cls):
            flags = {
                f"--{prefix}{name.replace('_', joint)}" for prefix in ("", "no-") for joint in "-_"
            }
            assert positional or flags & words or (name in UNASKED and kind is bool), name
