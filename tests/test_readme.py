"""Every command of the README and of docs/ runs as it is printed, one page after the other, in one reader's folder.

AS_USERS=1 pytest -o addopts= tests/test_readme.py      in processes of their own, on the whole built-in corpus
"""

import contextlib
import email
import gzip
import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from backports import zstd
from fsspec.implementations.memory import MemoryFileSystem
from helpers import ROOT
from pyarrow import Table, parquet
from torch.distributed.run import get_args_parser

import bench
import demo
import prepare
import sample
import train
from engine import observers, report_page, sources
from engine.files import sha256
from engine.settings import load_settings, parse

AS_USERS = "AS_USERS" in os.environ
TRANSLATED = sorted([*ROOT.glob("*.zh.md"), *ROOT.glob("docs/*.zh.md")])
PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if page not in TRANSLATED]
PROGRAMS = ("python", "pip", "torchrun", "pytest", "lm_eval")
BY_SLURM = ("sbatch", "srun", "scontrol")
# What is not run here, why, and what runs it.
ELSEWHERE = {
    "pip": ("changes what is installed", ".ci/run"),
    "pytest": ("is what is running", ".ci/run"),
    "lm_eval": ("is no package that the tests need; AS_USERS=1 runs it", "tests/test_readme.py"),
    "bench.py": ("takes minutes", "tests/test_bench.py"),
    "docs/attention.py": ("takes minutes", "tests/test_docs.py"),
}
AFAR = ("s3://", "hf:HuggingFaceFW", "shakespeare", "HOST:")  # has a stand-in in this process
DONE: set[tuple[str, ...]] = set()  # a command that two pages have is run once
TINY = "--num-layers 2 --num-heads 2 --d-model 16 --batch-size 2 --micro-batch-size 2 --eval-tokens 200 --device cpu"
# What stands in the way of a program: it notes the arguments and the standard input that the shell gives it.
NOTE = """#!/bin/bash
case "${0##*/} $1" in
"python -"*) exec "$PYTHON" "$@" ;;
"sbatch --array") for i in $(seq ${2/-/ }); do SLURM_ARRAY_TASK_ID=$i bash -euc "$4"; done ;;
"scontrol show") echo first-machine ;;
"srun torchrun") exec "$@" ;;
*) call=$CALLS/$((1000 + $(ls "$CALLS" | wc -l))); printf '%s\\0' "${0##*/}" "$@" > "$call"; cat > "$call.stdin" ;;
esac
"""


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of a page's code blocks, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def script_of(language: str, text: str) -> str:
    """The commands of a block, for a shell; output is none."""
    if language == "console":
        return "\n".join(re.findall(r"^\$ (.*)$", text, re.MULTILINE))
    return text if language == "sh" or (not language and text.startswith(PROGRAMS)) else ""


def shortened(script: str, given: list[str]) -> list[str]:
    """A command's arguments, and after them those that make it short."""
    if script == "train.py":
        length = "--minutes 0.01" if "--minutes" in given else "--steps 2 --warmup-steps 0"
        length += " --depth 1" * ("--minutes" in given and "--plan" in given)  # of which the speed is measured soon
        length += " --context-length 64" * (not {"--context-length", "--init-from"} & {*given})
        sized = "--init-from" in given or {"--minutes", "--plan"} <= {*given}  # by another model, or to be chosen
        return [*given, *TINY.split()[6 if sized else 0 :], *length.split()]
    if script == "sample.py" and "--page" not in given:
        return [*given, "--max-new-tokens", "3"]
    return given + (["--examples", "100", "--test", "5", "--steps", "2"] if script == "demo.py" else [])


class Bucket(MemoryFileSystem):
    """An object store at s3://, while the tests run."""

    protocol, store, pseudo_dirs = "s3", {}, [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("s3:").strip("/")


def write_inputs(home: Path) -> None:
    """Make the files that the commands name, and folders with the names of what is on the hub."""
    documents, numbers = PAGES[0].read_text(encoding="utf-8").split("\n\n"), range(50)
    roles = ("user", "assistant")
    rows = {
        "posts.jsonl.gz": [{"body": text} for text in documents],
        "pairs.jsonl": [{"question": f"What is {i}?", "answer": f"{i}."} for i in numbers],
        "chats.jsonl": [{"messages": [{"role": role, "content": f"{i}"} for role in roles]} for i in numbers],
        "questions.jsonl": [{"prompt": "What is 7?"}],
    }
    files = {name: "".join(f"{json.dumps(row)}\n" for row in found).encode() for name, found in rows.items()}
    files["posts.jsonl.gz"] = gzip.compress(files["posts.jsonl.gz"])
    files |= dict.fromkeys(("book.txt", "more.txt", "error.log", "shakespeare.txt"), "\n".join(documents).encode())
    for i, text in enumerate(documents):
        files |= {f"{folder}/{i}.{kind}": text.encode() for folder in ("folder", "web") for kind in ("md", "txt")}
    parquet.write_table(Table.from_pydict({"text": documents}), table := io.BytesIO())
    files |= dict.fromkeys(("tables/rows.parquet", "HuggingFaceFW/fineweb-edu/rows.parquet"), table.getvalue())
    card = '---\nconfigs:\n- config_name: sample-10BT\n  data_files: "*.parquet"\n---\n'
    files["HuggingFaceFW/fineweb-edu/README.md"] = card.encode()
    for name, content in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(content)
    (home / "openai-community").mkdir()
    (home / "openai-community" / "gpt2").symlink_to("../hf/stdlib")  # which is exported before it is imported
    for name in ("config", "docs"):
        (home / name).symlink_to(ROOT / name)
    for name in (*PROGRAMS, *BY_SLURM):
        (home / ".bin" / name).parent.mkdir(exist_ok=True)
        (home / ".bin" / name).write_text(NOTE)
        (home / ".bin" / name).chmod(0o755)


@contextlib.contextmanager
def no_cluster(address: str) -> Iterator[tuple[int, Callable]]:
    """Makes the parts in this process: Ray itself is run by tests/test_cluster.py."""
    yield 1, map


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a reader who has some texts and has trained the default run; what is far away has stand-ins."""
    home = tmp_path_factory.mktemp("reader")
    write_inputs(home)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(home)
        monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
        monkeypatch.setattr(sources, "SHAKESPEARE", (home / "shakespeare.txt").as_uri())
        monkeypatch.setattr(sources, "SHAKESPEARE_SHA256", sha256(home / "shakespeare.txt"))
        monkeypatch.setattr(prepare, "ray_cluster", no_cluster)
        monkeypatch.setattr(demo, "run_script", lambda script, *given: perform([script, *map(str, given)]))
        if not AS_USERS:
            for module in (observers, report_page):
                monkeypatch.setattr(module, "SAMPLE_TOKENS", 5)
            monkeypatch.setattr(sysconfig, "get_path", lambda name: str(Path(email.__file__).parent))
        fsspec.register_implementation("s3", Bucket, clobber=True)
        Bucket().pipe("/bucket/web/a.jsonl.zst", zstd.compress(b'{"text": "in a bucket"}\n' * 50))
        perform(["train.py"])
        yield home


def follow(script: str, typed: str = "") -> None:
    """Have a shell read a script in the current folder, and run the programs that it calls."""
    with tempfile.TemporaryDirectory() as calls:
        own = {"PATH": f"{Path.cwd() / '.bin'}:{os.environ['PATH']}", "PYTHON": sys.executable, "CALLS": calls}
        own |= {"SLURM_NNODES": "2", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "machine[1-2]"}
        shell = ["bash", "-euo", "pipefail", "-c", script]
        subprocess.run(shell, env=os.environ | own, input=typed, encoding="utf-8", check=True)
        for call in sorted(Path(calls).glob("????")):
            program, *given = call.read_text(encoding="utf-8").split("\0")[:-1]
            if program == "torchrun":
                given = as_one_process(given)
            if program in ("python", "torchrun"):
                perform(given, call.with_suffix(".stdin"))
            elif program == "lm_eval" and AS_USERS and shutil.which(program):
                subprocess.run([program, *given], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
            else:
                assert program in ELSEWHERE


def as_one_process(given: list[str]) -> list[str]:
    """What torchrun is to start; it has to know its own flags."""
    found = get_args_parser().parse_args(given)
    return [found.training_script, *found.training_script_args]


def perform(given: list[str], stdin: Path = Path(os.devnull)) -> None:
    """Run one of the project's commands in the current folder, shortened; it has to succeed."""
    script, *arguments = given
    assert (ROOT / script).is_file(), f"{script} is not there"
    if script in ELSEWHERE or tuple(given) in DONE:
        return
    DONE.add(tuple(given))
    arguments = shortened(script, arguments)
    if "--page" in arguments:
        return look_inside(arguments)
    with stdin.open(encoding="utf-8") as file, pytest.MonkeyPatch.context() as monkeypatch:
        if AS_USERS and not any(name in " ".join(arguments) for name in AFAR):
            subprocess.run([sys.executable, ROOT / script, *arguments], stdin=file, check=True)
            return
        standard = os.dup(0)
        os.dup2(file.fileno(), 0)
        monkeypatch.setattr(sys, "stdin", file)
        try:
            assert not importlib.import_module(script.removesuffix(".py")).main(arguments)
        finally:
            os.dup2(standard, 0)
            os.close(standard)


class Browser(io.StringIO):
    """A terminal whose reader opens the address that is printed, and then presses Ctrl-C."""

    seen = b""

    def write(self, text: str) -> int:
        if text.startswith("http://"):
            threading.Thread(target=self.open, args=[text.strip()]).start()
        return len(text)

    def open(self, address: str) -> None:
        try:
            self.seen = urllib.request.urlopen(address, timeout=60).read()
        finally:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def look_inside(arguments: list[str]) -> None:
    """Run sample.py --page until its page has been seen."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a test in the background has not
    try:
        with contextlib.redirect_stdout(Browser()) as browser, pytest.raises(KeyboardInterrupt):
            sample.main(arguments)
    finally:
        signal.signal(signal.SIGINT, before)
    assert b"<html" in browser.seen


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_runs(page: Path, home: Path, request: pytest.FixtureRequest):
    found = blocks(page)
    if any("--tokenizer gpt2" in text for _, text in found):
        request.getfixturevalue("tiktoken_cache")
    for language, text in found:
        if language == "python":
            exec(compile(text.replace("steps=100", "steps=2"), page.name, "exec"), {})
        follow(script_of(language, text), "".join(re.findall("^> (.*\n)", text, re.MULTILINE)))


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: page.name)
def test_another_language_has_the_same_commands(page: Path):
    assert blocks(page) == blocks(page.with_name(page.name.replace(".zh", "")))


@pytest.mark.parametrize(
    "script",
    [
        "python prepare.py book.txt --tokeniser byte",
        "python prepare.py bok.txt",
        "python trian.py",
        "python train.py config/gpt3.toml",
        "python sample.py out/stdlip",
        "python sample.py out/stdlib --page --prots 0",
        "pyhton train.py",
        "torchrun --nproc-per-nodes 8 train.py",
        "torchrun --nproc-per-node 8 train.py --stpes 3",
        "cat *.lgo | python prepare.py - --out data/logs",
    ],
)
def test_a_mistake_in_a_command_is_seen(script: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(home, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path / "copy")
    with pytest.raises((SystemExit, ValueError, OSError, AssertionError, subprocess.CalledProcessError)):
        follow(script)


def test_what_is_run_elsewhere_is_there():
    scripts = [script_of(*block) for page in PAGES for block in blocks(page)]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for named in re.findall(r'pip install -e "\.\[(.*?)\]"', "\n".join(scripts)):
        assert set(named.split(",")) <= extras.keys()
    for _, place in ELSEWHERE.values():
        assert (ROOT / place).is_file()


PARSERS = {
    "train.py": lambda given: load_settings(train.TrainConfig, given),
    "prepare.py": lambda given: parse(prepare.PrepareConfig, given),
    "sample.py": lambda given: parse(sample.SampleConfig, given),
    "bench.py": lambda given: parse(bench.BenchConfig, given),
}


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_in_the_text_is_one(page: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    for command in re.findall("`python ([^`]+)`", prose(page)):
        script, *given = shlex.split(command)
        assert Path(script).is_file(), command
        if script in PARSERS and not re.search("…|--help|[A-Z]{3}", command):  # NAME is for the reader to say
            PARSERS[script](given)


def anchors(page: Path) -> set[str]:
    """What a link may name after #, as GitHub has it."""
    titles = re.findall("^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *TRANSLATED], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert "://" in target or (found.is_file() and (not anchor or anchor in anchors(found))), target


def test_every_package_of_the_engine_is_in_the_table():
    rows = re.findall(r"^\| `(\w+)/` \|", PAGES[0].read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(path.parent.name for path in ROOT.glob("engine/*/__init__.py"))
