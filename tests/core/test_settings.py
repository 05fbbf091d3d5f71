"""Settings: defaults ← file ← command line, bounds, and messages for mistakes."""

import importlib
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt

from engine.core.errors import UserError
from engine.core.settings import flatten, from_values, load_settings, to_toml
from engine.core.values import Count, Seconds, convert, iterate_hints
from engine.serving.openai_format import ChatSettings, CompletionSettings
from engine.training.config import TrainConfig
from engine.training.optimizer import OptimizerConfig
from huggingface import ExportConfig, ImportConfig
from model import ModelConfig
from prepare import PrepareConfig, make_reader
from report import ReportConfig
from sample import SampleConfig


@dataclass(frozen=True)
class Inner:
    width: int = 3  # How wide.
    kind: Literal["a", "b"] = "a"  # Which.
    windows: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.width == 13:
            raise ValueError("width 13 is unlucky")  # as model.py, which knows no UserError


@dataclass(frozen=True)
class Outer:
    rate: Annotated[float, Gt(0), Le(1)] = 0.5  # How fast.
    path: Path = Path("here")  # Where.
    paths: tuple[Path, ...] = (Path("here"),)
    flag: bool = False  # Whether.
    count: Annotated[int | None, Ge(1), Lt(1000)] = None  # How many; None: all.
    sizes: tuple[Annotated[float, Gt(0)], ...] | None = None
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.path == Path("nowhere"):
            raise UserError(f"--path: must exist (got {self.path}).")


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    return str(path)


def test_command_line_overrides_file_and_file_overrides_defaults(tmp_path):
    path = write(tmp_path, 'rate = 1\nwidth = 7\nkind = "b"\npath = "there"\ncount = 1\n')
    config = load_settings(Outer, [path, "--width", "9", "--flag", "--count", "2"])
    expected_inner = Inner(width=9, kind="b")
    assert config == Outer(rate=1.0, path=Path("there"), flag=True, count=2, inner=expected_inner)
    assert type(config.rate) is float
    assert load_settings(Outer, [write(tmp_path, "\ufeffcount = 5\r\n")]).count == 5
    assert load_settings(Outer, []) == Outer()
    assert load_settings(Outer, ["--paths", "flag=true"]).paths == (Path("flag=true"),)
    (tmp_path / "a\tb").touch()  # of a run that is resumed
    assert from_values(Outer, {"paths": [str(tmp_path / "a\tb")]}, "state.json").paths
    for value in (True, False):  # as sweeps of Weights & Biases write it
        assert load_settings(Outer, [f"--flag={value}", "--count=5"]) == Outer(flag=value, count=5)


@pytest.mark.parametrize(
    "config",
    [
        Outer(),
        Outer(1e-5, Path('odd "name" é\\'), (), True, 7, (), Inner(9, "b", (256, 0, -1))),
        Outer(paths=(Path("a b"), Path("--sizes"), Path("-")), sizes=(0.5, 1e-9)),
    ],
)
def test_settings_are_read_back_from_toml_and_from_json(tmp_path, config):
    assert load_settings(Outer, [write(tmp_path, to_toml(config))]) == config
    assert from_values(Outer, flatten(config), "state.json") == config


UNFIT_VALUES: dict[str, list[Any]] = {
    "width": ["3", True, 3.0, [3], None],
    "rate": [True, "0.5", float("nan"), 0],
    "flag": [1, "true"],
    "kind": ["c", ["a"]],
    "path": [3, None],
    "paths": [[3]],
    "windows": [[1, "2"]],
    "sizes": [[1, -2]],
    "count": [1000],
}


@pytest.mark.parametrize(("name", "values"), UNFIT_VALUES.items())
def test_value_of_wrong_type_or_out_of_bounds_names_file_and_setting(name, values):
    for value in values:
        with pytest.raises(UserError, match=rf"^state\.json: (--)?{name}: .* \(got "):
            from_values(Outer, {name: value}, "state.json")
        with pytest.raises(UserError, match=r"^state\.json: "):
            from_values(Outer, [value], "state.json")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("widht = 3", "widht.* width"),
        ("[inner]\nwidth = 3", "inner"),
        ("width = 13", "width 13 is unlucky"),
        ('path = "nowhere"', "--path: must exist"),
        ("width = ", "not valid TOML"),
        ("a = " + "[" * 5000 + "]" * 5000, "not valid TOML"),
        ("rate = 1 # \udcff", "not valid TOML"),
        ('path = "C:\\new\\text"', "path: .*single quotes"),
        ('paths = ["C:\\new"]', "paths: .*single quotes"),
        ('path = "C:\\data"', "single quotes"),
    ],
    ids=lambda value: value[:20],
)
def test_mistake_in_a_file_names_the_file(tmp_path, text, expected):
    with pytest.raises(UserError, match=rf"run\.toml: .*{expected}"):
        load_settings(Outer, [write(tmp_path, text)])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--widht 3", "--width"),
        ("--width 13", "width 13 is unlucky"),
        ("--path nowhere", "--path: must exist (got nowhere)"),
        ("--wid\x1b[31m", "--wid?[31m: "),
        ("--rate 0", "--rate: must be greater than 0 (got 0.0)"),
        ("--sizes 1 -2", "--sizes: must be greater than 0 (got -2.0)"),
    ],
)
def test_mistake_on_the_command_line_is_one_line_and_exit_code_2(arguments, expected, capsys):
    with pytest.raises(SystemExit, match="2"):
        load_settings(Outer, arguments.split())
    printed = capsys.readouterr()
    assert expected in printed.err and not printed.out
    assert printed.err.count("\n") == 1 and printed.err.startswith("error: ")


@pytest.mark.parametrize("command", ["train", "prepare", "sample", "report", "benchmarks.speed"])
def test_help_describes_every_flag(command, capsys):
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(command).main(["--help"])
    assert not stop.value.code
    printed = capsys.readouterr().out
    assert "--debug shows" in printed and "{None}" not in printed
    entries = re.split(r"^[│ ] (?=--?[a-z])", printed, flags=re.MULTILINE)[1:]
    assert len(entries) > 1
    for entry in entries:  # flags and type, then a description and the default
        _, description = re.split(r"\s{2,}", entry.replace("│", " "), maxsplit=1)
        assert not description.startswith("(default") and len(description.split()) > 2, entry


def test_every_number_has_bounds():
    """Also those in tuples: a least value, and floats a largest one."""
    classes = [TrainConfig, ModelConfig, OptimizerConfig, PrepareConfig, SampleConfig, ReportConfig]
    classes += [ExportConfig, ImportConfig, CompletionSettings, ChatSettings]
    for name, hint in itertools.chain.from_iterable(map(iterate_hints, classes)):
        is_number = re.search(r"\b(int|float)\b", str(hint))
        has_bounds = re.search("G[et]", str(hint)) and re.search("L[et]|int", str(hint))
        assert has_bounds or not is_number or name == "prompt", name


@dataclass(frozen=True)
class Shard:
    tokens: Count


@dataclass(frozen=True)
class Manifest:
    shards: list[Shard]
    notes: dict[str, Count]
    shape: Inner
    loss: Seconds | None = None
    details: Any = None


def test_a_record_is_read_from_json_or_refused_by_the_name_of_its_field():
    right = {"shards": [{"tokens": 1}], "notes": {"a": 2}, "shape": {"width": 4, "windows": [1]}}
    expected = Manifest([Shard(1)], {"a": 2}, Inner(4, windows=(1,)))
    assert convert(right, Manifest, "m") == expected
    for change, name in [
        ({"shards": [{"tokens": True}]}, r"m\.shards\.tokens"),
        ({"shards": [{"tokens": 2**64}]}, r"m\.shards\.tokens"),
        ({"shards": {"tokens": 1}}, r"m\.shards"),
        ({"shards": [{}]}, r"m\.shards\.tokens: is missing"),
        ({"notes": {"a": -1}}, r"m\.notes\.a"),
        ({"loss": 1e400}, r"m\.loss"),
        ({"shape": {"width": 13}}, r"m\.shape: width 13"),
        ({"z": 1}, r"m\.z: is unknown"),
    ]:
        with pytest.raises(UserError, match=f"^{name}"):
            convert({**right, **change}, Manifest, "m")


def test_escapes_mean_the_same_in_each_flag():
    separator = make_reader(PrepareConfig(("a",), separator=r"\n\t"), None).separator
    assert SampleConfig(stop=(r"\n\t",)).options["stop"] == (separator,) == ("\n\t",)
