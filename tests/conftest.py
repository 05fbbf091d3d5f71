"""What several modules' tests share."""

import argparse
import os
import random
import shutil
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: so small a model only waits for a second thread
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # nor do a few sums pay for compiling what finds the vector instructions
os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"

from helpers import ROOT, SHARED, numbers_text, train_tiny

from prepare import PrepareConfig, prepare

LONG = (
    "test_distributed",
    "test_train",
    "test_kernels",
    "test_readme",
    "test_huggingface",
    "test_kills",
)
LONG += ("test_estimate", "test_prepare", "test_dates", "test_tokenizer", "test_sample", "test_speed")
LONG += ("test_trust", "test_generate")


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests wait for processes that start, end or are to be given up."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no core waits for another's last file."""
    order = {name: index for index, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


@pytest.fixture(scope="session")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset of characters, only to be read."""
    folder = tmp_path_factory.mktemp("numbers")
    (folder / "numbers.txt").write_text(numbers_text(2000), encoding="utf-8")
    prepare(PrepareConfig(inputs=(str(folder / "numbers.txt"),), tokenizer="char", out=folder / "numbers"))
    return folder / "numbers"


@pytest.fixture
def trained(tmp_path: Path, numbers: Path) -> Callable[..., Path]:
    """Trains a tiny model on the numbers in this process, which spares importing torch anew; returns the run folder."""

    def trained(name: str, *flags: object, **options: object) -> Path:
        train_tiny(numbers, tmp_path / name, *flags, **options)
        return tmp_path / name

    return trained


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs a command of this project as a user would, in tmp_path; keywords are those of subprocess.run."""

    def run(script: str, *arguments: object, **options: object) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / script), *map(str, arguments)]
        defaults = {"cwd": tmp_path, "capture_output": True, "encoding": "utf-8", "timeout": 120}
        return subprocess.run(command, **defaults | options)

    return run


@pytest.fixture(scope="session")
def shakespeare() -> Path:
    """Tiny Shakespeare's file."""
    path = SHARED / "data" / "tinyshakespeare.txt"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


@pytest.fixture(scope="session")
def tiktoken_cache() -> Iterator[Path]:
    """The folder with gpt2 and cl100k_base, as tiktoken's cache here and in the commands that tests run."""
    path = SHARED / "tiktoken"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(path))
        yield path


@pytest.fixture(scope="session")
def code() -> str:
    """A hundred kilobytes of source code, to train tokenizers on."""
    return Path(argparse.__file__).read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def strings() -> list[str]:
    """Random strings, the same at each run, of every sort that tokenizers stumble over, pure and mixed."""
    chance = random.Random(0)
    sorts = [
        string.printable,
        [chr(code_point) for code_point in range(0xA0)],  # with all control characters
        " \t\n\r\x0b\x1c\x85\xa0\u2003\u2028\u3000",
        "ae\u0301\u0308\u0489\u20dd\u200d\ufe0f",  # marks that combine
        "漢字かなカナ한글、。（）",
        "🚀👩🏽🇩🇪𝔘𐍈\U0010ffff",
        ["I", "'m", "'LL", " the", "The", "1234", " 7", "...", "//", "\r\n", "\n\n", "\n/", "<|endoftext|>"],
        [chr(code_point) for code_point in range(0x110000) if not 0xD800 <= code_point < 0xE000],
    ]
    pure = ["".join(chance.choices(sort, k=length)) for sort in sorts for length in (1, 2, 5, 50, 500)]
    mixed = ["".join(chance.choice(chance.choice(sorts)) for _ in range(500)) for _ in range(10)]
    return ["", *pure, *mixed]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium, the system's or playwright's own."""
    playwright = pytest.importorskip("playwright.sync_api")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with playwright.sync_playwright() as started:
        try:
            opened = started.chromium.launch(executable_path=found, args=["--no-sandbox"])  # root has none
        except playwright.Error as error:
            pytest.skip(f"no Chromium can be started here: {error.message.splitlines()[0]}")
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of the browser; afterwards, nothing was wrong in its console, and no request had left this machine."""
    context, problems = browser.new_context(), []
    page, here = context.new_page(), ("file:", "data:", "blob:", "http://127.0.0.1:", "http://localhost:")
    page.set_default_timeout(10_000)
    page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda sent: problems.append(sent.url) if not sent.url.startswith(here) else None)
    yield page
    context.close()
    assert not problems
