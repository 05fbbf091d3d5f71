"""Settings: defaults ← file ← command line, bounds, and messages for mistakes."""

import dataclasses
import importlib
import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt

import prepare
import sample
from benchmarks import speed
from engine.core.errors import UserError
from engine.core.settings import flatten, from_values, load_settings, parse, to_toml, with_values
from engine.training.config import ChangeableConfig, ModelSettings, TrainConfig
from engine.training.optimizer import OptimizerConfig
from model import ModelConfig


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
    sizes: Annotated[tuple[float, ...] | None, Interval(gt=0)] = None
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.path == Path("nowhere"):
            raise UserError(f"--path: must exist (got {self.path}{'/long' * 50}).")


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_command_line_overrides_file_and_file_overrides_defaults(tmp_path):
    path = write(tmp_path, 'rate = 1\nwidth = 7\nkind = "b"\npath = "there"\ncount = 5\n')
    config = load_settings(Outer, [path, "--width", "9", "--flag", "--count", "None"])
    expected_inner = Inner(width=9, kind="b")
    assert config == Outer(rate=1.0, path=Path("there"), flag=True, inner=expected_inner)
    assert type(config.rate) is float
    assert load_settings(Outer, []) == Outer()


@pytest.mark.parametrize(
    "config",
    [
        Outer(),
        Outer(1e-5, Path('odd "name" é\n\\'), (), True, 7, (), Inner(9, "b", (256, 0, -1))),
        Outer(paths=(Path("a b"), Path("--sizes"), Path("-")), sizes=(0.5, 1e-9)),
    ],
)
def test_settings_written_as_toml_are_read_back(tmp_path, config):
    assert load_settings(Outer, [write(tmp_path, to_toml(config))]) == config


def test_flattened_settings_have_bare_names_and_can_be_replaced():
    config = with_values(Outer(), {"rate": 0.1, "width": 9})
    assert config == Outer(rate=0.1, inner=Inner(width=9))
    assert flatten(config)["width"] == 9 and flatten(config)["paths"] == ["here"]
    assert from_values(Outer, flatten(config), "state.json") == config


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("rate", 1, 1.0),
        ("paths", "alone", (Path("alone"),)),
        ("windows", [3, 0], (3, 0)),
        ("windows", None, None),
        ("count", None, None),
    ],
)
def test_values_of_json_become_the_type_of_the_field(name, value, expected):
    config = from_values(Outer, {name: value}, "state.json")
    converted = getattr(config.inner if name == "windows" else config, name)
    assert converted == expected and type(converted) is type(expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("width", "3"),
        ("width", True),
        ("width", 3.0),
        ("width", [3]),
        ("width", None),
        ("rate", True),
        ("rate", "0.5"),
        ("rate", float("nan")),
        ("flag", 1),
        ("flag", "true"),
        ("kind", "c"),
        ("kind", ["a"]),
        ("path", 3),
        ("path", None),
        ("paths", [3]),
        ("windows", [1, "2"]),
        ("sizes", [1, -2]),
        ("rate", 0),
        ("count", 1000),
    ],
)
def test_value_of_wrong_type_or_out_of_bounds_names_file_and_setting(name, value):
    with pytest.raises(UserError, match=rf"^state\.json: (--)?{name}: must be .* \(got "):
        from_values(Outer, {name: value}, "state.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("widht = 3", "unknown setting widht. Did you mean width"),
        ("zzz = 3", "unknown setting zzz"),
        ("[inner]\nwidth = 3", "unknown setting inner"),
        ("width = 13", "width 13 is unlucky"),
        ('path = "nowhere"', "--path: must exist"),
        ("width = ", "not valid TOML"),
        ("a = " + "[" * 5000 + "]" * 5000, "not valid TOML"),
        ("rate = 1 # \udcff", "not valid TOML"),
    ],
    ids=lambda value: value[:20],
)
def test_mistake_in_a_file_names_the_file(tmp_path, text, message):
    (tmp_path / "run.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=rf"run\.toml: .*{message}"):
        load_settings(Outer, [str(tmp_path / "run.toml")])


def test_other_files_are_refused():
    with pytest.raises(UserError, match=r"run\.yaml: must be"):
        load_settings(Outer, ["run.yaml"])
    with pytest.raises(UserError, match=r"state\.json: must hold settings"):
        from_values(Outer, [1], "state.json")
    with pytest.raises(UserError, match="must be UTF-8"):
        load_settings(Outer, ["--path", "out/\udcff"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--widht", "3"], "Perhaps you meant: --width"),
        (["--width", "x"], "--width: invalid literal for int"),
        (["--width", "13"], "width 13 is unlucky"),
        (["--path", "nowhere"], f"(got nowhere{'/long' * 50})"),  # not wrapped
        (["--kind", "c"], "'c'"),
        (["--width"], "--width"),
        (["--rate", "0"], "--rate: must be greater than 0 and at most 1 (got 0.0)"),
        (["--rate", "nan"], "--rate: must be finite"),
        (["--count", "0"], "--count: must be at least 1 and less than 1,000 (got 0)"),
        (["--sizes", "1", "-2"], "--sizes: must be greater than 0 (got -2.0)"),
    ],
    ids=str,
)
def test_mistake_on_the_command_line_is_one_line_and_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        load_settings(Outer, arguments)
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out
    assert printed.err.count("\n") == 1 and printed.err.startswith("error: ")


def test_bounds_include_their_limits_where_they_say_so():
    for rate, count in ((1, 1), (1e-9, 999)):
        config = load_settings(Outer, ["--rate", str(rate), "--count", str(count)])
        assert (config.rate, config.count) == (rate, count)


COMMANDS: dict[str, tuple[Any, ...]] = {
    "train": (TrainConfig, ChangeableConfig, ModelConfig, ModelSettings, OptimizerConfig),
    "prepare": (prepare.PrepareConfig,),
    "sample": (sample.SampleConfig,),
    "benchmarks.speed": (speed.BenchConfig,),
}


NESTED = {"model", "optimizer"}  # not flags themselves


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_every_setting(command, capsys):
    def letters(text: str) -> str:
        return re.sub(r"[\s│|]", "", text)

    with pytest.raises(SystemExit) as stop:
        importlib.import_module(command).main(["--help"])
    assert not stop.value.code
    printed = capsys.readouterr().out
    assert "--debug shows" in printed
    for cls in COMMANDS[command]:
        source = inspect.getsource(cls)
        descriptions = re.findall(r"^    (\w+): .*  # (?!type:)(.+)$", source, re.MULTILINE)
        above = re.findall(r"^    # (.+)\n    (\w+): [^#\n]+$", source, re.MULTILINE)
        descriptions += [(name, text) for text, name in above]
        docstring = re.compile(r'^    (\w+): [^\n]*\n    """(.+?)"""', re.MULTILINE | re.DOTALL)
        descriptions += docstring.findall(source)
        names = {field.name for field in dataclasses.fields(cls)} & set(cls.__annotations__)
        assert {name for name, text in descriptions} >= names - NESTED
        for name, text in descriptions:
            is_replaced = cls is ModelConfig and name in ModelSettings.__annotations__
            if name in NESTED or is_replaced:
                continue
            assert letters(text) in letters(printed), name
            is_positional = "Positional" in str(cls.__annotations__[name])
            assert is_positional or f"--{name.replace('_', '-')}" in printed, name


@pytest.mark.parametrize(("flags", "expected"), [(["--compile"], True), (["--no-compile"], False), ([], None)])
def test_compile_has_three_values_and_two_flags(flags, expected):
    assert load_settings(TrainConfig, [*flags, "--steps", "20"]).compile is expected


def test_parse_takes_a_union_of_subcommands():
    @dataclass(frozen=True)
    class First:
        size: Annotated[int, Ge(1)] = 1

    @dataclass(frozen=True)
    class Second:
        size: int = 2

    assert parse(First | Second, ["second", "--size", "0"]) == Second(0)
    with pytest.raises(SystemExit, match="2"):
        parse(First | Second, ["first", "--size", "0"])
