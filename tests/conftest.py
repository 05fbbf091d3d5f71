"""Fixtures of several modules."""

import argparse
import os
import random
import shutil
import signal
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported. So small a model only waits for a second thread, and a few sums are not
# worth compiling the search for vector instructions.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # more are processes that import torch
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a background job of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)

from helpers import ROOT, SHARED, make_dataset, numbers_text, train_tiny
from imitation import GRAPH_POOLS, ImitatedPool, imitate_graphs

LONG_TEST_FILES = (
    "distributed golden loss memorization estimate page writer train inference run_dir callbacks "
    "sizing api tokenizer sample prepare trust kills huggingface convert command_lines"
)


def pytest_xdist_auto_num_workers() -> int:
    """Return one more than there are cores: tests wait for processes to start and to end."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no core waits for the last file."""
    order = {f"test_{name}": index for index, name in enumerate(LONG_TEST_FILES.split())}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for a second run of the suite: CONTRIBUTING.md."""
    text = "take the path of a GPU that replays graphs, on a CPU, in every test"
    parser.addoption("--imitate-graphs", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Imitate graphs in every test with --imitate-graphs."""
    if config.getoption("imitate_graphs"):
        imitate_graphs(pytest.MonkeyPatch())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[ImitatedPool]:
    """The path of a GPU that replays graphs, on a CPU; it counts captures and replays."""
    return imitate_graphs(monkeypatch)


@pytest.fixture(params=["plain", "captured"])
def each_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a CPU, and then that of a GPU that replays graphs."""
    if request.param == "captured":
        imitate_graphs(monkeypatch)


@pytest.fixture
def plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a CPU, also with --imitate-graphs."""
    monkeypatch.delitem(GRAPH_POOLS, "cpu", raising=False)


@pytest.fixture(scope="session")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset of characters, only to be read."""
    folder = tmp_path_factory.mktemp("numbers")
    text = folder / "numbers.txt"
    text.write_text(numbers_text(2000), encoding="utf-8")
    return make_dataset(folder, text, tokenizer="char", out=folder / "numbers")


@pytest.fixture
def trained(tmp_path: Path, numbers: Path) -> Callable[..., Path]:
    """Train a tiny model on the numbers in this process; return the run folder."""

    def trained(name: str, *flags: object, **options: object) -> Path:
        train_tiny(numbers, tmp_path / name, *flags, **options)
        return tmp_path / name

    return trained


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run a command of this project in tmp_path; keywords are those of subprocess.run."""

    def run(script: str, *arguments: object, **options: object) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / script), *map(str, arguments)]
        defaults = {"cwd": tmp_path, "capture_output": True, "encoding": "utf-8", "timeout": 120}
        return subprocess.run(command, **defaults | options)

    return run


def shared_path(name: str) -> Path:
    """Return a path in the shared folder; without it, skip the test."""
    if not (SHARED / name).exists():
        pytest.skip(f"{SHARED / name} does not exist")
    return SHARED / name


@pytest.fixture(scope="session")
def shakespeare() -> Path:
    """The file of Tiny Shakespeare."""
    return shared_path("data/tinyshakespeare.txt")


@pytest.fixture(scope="session")
def tiktoken_cache() -> Iterator[Path]:
    """The folder with gpt2 and cl100k_base, as tiktoken's cache, in child processes too."""
    path = shared_path("tiktoken")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(path))
        yield path


@pytest.fixture(scope="session")
def code() -> str:
    """A hundred kilobytes of source code, to train tokenizers on."""
    return Path(argparse.__file__).read_text(encoding="utf-8")


# Characters and words that are difficult for tokenizers.
ALPHABETS = [
    string.printable,
    [chr(code_point) for code_point in range(0xA0)],  # with all control characters
    " \t\n\r\x0b\x1c\x85\xa0\u2003\u2028\u3000",
    "ae\u0301\u0308\u0489\u20dd\u200d\ufe0f",  # combining marks
    "漢字かなカナ한글、。（）",
    "🚀👩🏽🇩🇪𝔘𐍈\U0010ffff",
    [chr(code_point) for code_point in range(0x110000) if not 0xD800 <= code_point < 0xE000],
    ["I", "'s", "'LL", "'\u017f", "The", " the", "1234", "...", "//", "\r\n", "\n", "  ", "ab"],
]


@pytest.fixture(scope="session")
def strings() -> list[str]:
    """Random strings of each alphabet, and of all."""
    rng = random.Random(0)
    lengths = (1, 2, 5, 50, 500)
    pure = ["".join(rng.choices(letters, k=k)) for letters in ALPHABETS for k in lengths]
    mixed = ["".join(rng.choice(rng.choice(ALPHABETS)) for _ in range(500)) for _ in range(10)]
    return ["", "<|endoftext|>", *pure, *mixed]


@pytest.fixture(scope="session")
def random_strings() -> list[str]:
    """A thousand short strings of any characters and of words, and repetitions."""
    rng = random.Random(1)
    lengths = [rng.randint(1, 60) for _ in range(500)]
    texts = ["".join(rng.choices(letters, k=n)) for n in lengths for letters in ALPHABETS[-2:]]
    units = ("a", " ", "ab", "aab", "=-", "0", "\n")
    return [*texts, *(unit * times for unit in units for times in (2, 3, 7, 50, 333))]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium, the system's or playwright's own."""
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    with playwright.sync_playwright() as context:
        playwright.expect.set_options(timeout=20_000)
        try:  # root has no sandbox
            browser = context.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"Chromium does not start: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def check_accessibility(page: Any) -> Callable[[], None]:
    """Check that axe-core finds no serious violation in the page, in light and in dark colors."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()

    def check_accessibility() -> None:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            violations = axe.run(page).response["violations"]
            serious = [v for v in violations if v["impact"] in ("serious", "critical")]
            nodes = [(v["id"], node["html"][:200]) for v in serious for node in v["nodes"]]
            assert not nodes, (scheme, nodes)

    return check_accessibility


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page whose console must stay free of errors, and whose requests must stay local."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(20_000)
    messages = []
    errors = []
    urls = []
    page.on("console", lambda message: messages.append(message))
    page.on("pageerror", lambda error: errors.append(error))
    page.on("request", lambda request: urls.append(request.url))
    yield page
    errors += [message.text for message in messages if message.type in ("error", "warning")]
    context.close()
    assert not errors
    prefixes = ("file:", "data:", "blob:", "http://127.0.0.1:", "http://localhost:")
    assert all(url.startswith(prefixes) for url in urls), urls
