"""Settings: defaults ← file ← command line, and how mistakes in them are named."""

import dataclasses
import importlib
import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

import prepare
import sample
import train
from benchmarks import speed
from engine.core.settings import flatten, from_values, load_settings, to_toml
from engine.training.optimizer import OptimizerConfig
from model import ModelConfig


@dataclass(frozen=True)
class Inner:
    width: int = 3  # How wide.
    kind: Literal["a", "b"] = "a"  # Which.


@dataclass(frozen=True)
class Outer:
    rate: float = 0.5  # How fast.
    place: Path = Path("here")  # Where.
    flag: bool = False  # Whether.
    perhaps: bool | None = None  # Or not.
    count: int | None = None  # How many; None: all.
    inner: Inner = field(default_factory=Inner)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path):
    path = written(tmp_path, 'rate = 1\nwidth = 7\nkind = "b"\nplace = "there"\nperhaps = true\ncount = 5\n')
    got = load_settings(Outer, [path, "--width", "9", "--flag", "--count", "None"])
    assert got == Outer(1.0, Path("there"), flag=True, perhaps=True, inner=Inner(width=9, kind="b"))
    assert type(got.rate) is float
    assert load_settings(Outer, []) == Outer()


def test_hyphens_and_underscores_are_the_same():
    @dataclass(frozen=True)
    class Long:
        num_heads: int = 1

    assert load_settings(Long, ["--num_heads", "4"]) == load_settings(Long, ["--num-heads", "4"]) == Long(4)


@pytest.mark.parametrize("perhaps", [True, False, None])
@pytest.mark.parametrize("count", [7, None])
def test_what_is_written_is_read_back(tmp_path, perhaps, count):
    config = Outer(1e-5, Path('odd "name" é\n\\'), True, perhaps, count, Inner(kind="b"))
    assert load_settings(Outer, [written(tmp_path, to_toml(config))]) == config


def test_flattened_settings_have_bare_names():
    assert flatten(Outer()) == flatten(Inner()) | {
        "rate": 0.5, "place": "here", "flag": False, "perhaps": None, "count": None
    }  # fmt: skip


@dataclass(frozen=True)
class Nested:
    counts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Several:
    places: tuple[Path, ...] = (Path("here"),)
    sizes: Annotated[tuple[float, ...] | None, "above 0"] = None
    nested: Nested = Nested()


def test_several_values_are_a_list_in_a_file_and_a_path_of_it_is_no_flag(tmp_path):
    config = Several((Path("a b"), Path("--sizes"), Path("-")), (0.5, 1e-9), Nested((256, -1, 0)))
    assert load_settings(Several, [written(tmp_path, to_toml(config))]) == config
    assert load_settings(Several, ["--places", "x", "y", "--sizes", "1", "2"]) == Several(
        (Path("x"), Path("y")), (1, 2)
    )
    path = written(tmp_path, 'places = "alone"\nsizes = [2, 3]')
    assert load_settings(Several, [path]) == Several((Path("alone"),), (2, 3))
    assert load_settings(Several, [path, "--places", "x", "--sizes", "None"]) == Several((Path("x"),))
    for given, said in (("[1, -2]", "-2.0; it must be above 0"), ("[1, nan]", "nan; it must be a finite number")):
        with pytest.raises(ValueError, match=f"--sizes is {said}"):
            load_settings(Several, [written(tmp_path, f"sizes = {given}")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("widht = 3", r"run.toml: no setting is called widht; did you mean width\?"),
        ("zzz = 3", "no setting is called zzz; see --help"),
        ("[inner]\nwidth = 3", r"no setting is called inner"),
        ('width = "x"', "run.toml: Error parsing --width: invalid literal for int.*'x'"),
        ("width = true", "--width: invalid literal for int.*'True'"),
        ("width = 3.0", "--width: invalid literal for int.*'3.0'"),
        ("width = [3]", "--width: invalid literal for int"),
        ("rate = true", "--rate: could not convert string to float: 'True'"),
        ('kind = "c"', "run.toml: .*'c' for argument '--kind'. Expected one of .'a', 'b'"),
        ("perhaps = 1", "--perhaps.*True"),
        ("help = 1", "no setting is called help"),
        ("width = ", "run.toml is not valid TOML"),
        ("a = " + "[" * 5000 + "]" * 5000, "run.toml is not valid TOML"),
    ],
    ids=lambda value: value[:40],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_settings(Outer, [written(tmp_path, text)])


def test_files_that_are_no_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"run.yaml is not a settings file: it should end in .toml"):
        load_settings(Outer, ["run.yaml"])
    (tmp_path / "run.toml").write_bytes(b"rate = 1 # \xff")
    with pytest.raises(ValueError, match=r"run.toml is not valid TOML"):
        load_settings(Outer, [str(tmp_path / "run.toml")])
    with pytest.raises(ValueError, match=r"state.json: settings are names and values, not \[1\]"):
        from_values(Outer, [1], "state.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--widht", "3"], "Unrecognized options: --widht, 3 Perhaps you meant: --width"),
        (["--width", "x"], "Error parsing --width: invalid literal for int"),
        (["--kind", "c"], "'c'"),
        (["--width"], "--width"),
    ],
    ids=str,
)
def test_mistakes_on_the_command_line_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        load_settings(Outer, arguments)
    printed = capsys.readouterr()
    assert stop.value.code == 2 and message in printed.err and not printed.out
    assert printed.err.count("\n") == 1 and printed.err.startswith("error: ")


COMMANDS = {
    "train": (train.TrainConfig, train.ChangeableConfig, ModelConfig, OptimizerConfig),
    "prepare": (prepare.PrepareConfig,),
    "sample": (sample.SampleConfig,),
    "benchmarks.speed": (speed.BenchConfig,),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_every_setting_means(command, capsys):
    def letters(text: str) -> str:
        return re.sub(r"[\s│|]", "", text)

    with pytest.raises(SystemExit) as stop:
        importlib.import_module(command).main(["--help"])
    assert not stop.value.code
    printed = capsys.readouterr().out
    said, names = letters(printed), {field.name for cls in COMMANDS[command] for field in dataclasses.fields(cls)}
    for cls in COMMANDS[command]:
        comments = re.findall(r"^    (\w+): .*  # (.+)$", inspect.getsource(cls), re.MULTILINE)
        above = re.findall(r"^    # (.+)\n    (\w+): [^#\n]+$", inspect.getsource(cls), re.MULTILINE)
        comments += [(name, meaning) for meaning, name in above]
        documented = re.findall(r'^    (\w+): .*\n    """(.+?)"""', inspect.getsource(cls), re.MULTILINE | re.DOTALL)
        for name, meaning in comments + documented:
            assert letters(meaning) in said and meaning[-1] in ".…", f"{name}: {meaning}"
            assert "Positional" in str(cls.__annotations__[name]) or f"--{name.replace('_', '-')}" in printed, name
            names.remove(name)
    assert names <= {"model", "optimizer"}  # whose fields are settings of their own


@pytest.mark.parametrize(
    ("given", "compiled"),
    [(["--compile"], True), (["--no-compile"], False), ([], None), (["--compile", "False"], False)],
    ids=str,
)
def test_compile_is_a_flag_that_may_be_left_open(given, compiled):
    assert load_settings(train.TrainConfig, [*given, "--steps", "20"]).compile is compiled
    assert load_settings(train.TrainConfig, ["--steps", "20", *given]).compile is compiled


# Ranges.


@dataclass(frozen=True)
class Ranged:
    share: Annotated[float, "above 0, at most 1"] = 1.0  # A share.
    size: Annotated[int | None, "at least 1, below 1e3"] = None  # A size.
    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize("flags", [[], ["--share", "1"], ["--share", "1e-9"], ["--size", "1"], ["--size", "999"]])
def test_what_is_in_a_setting_s_range_is_taken(flags):
    assert load_settings(Ranged, flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--share", "0"], "--share is 0.0; it must be above 0, at most 1"),
        (["--share", "1.1"], "--share is 1.1; it must be above 0, at most 1"),
        (["--share", "nan"], "--share is nan; it must be a finite number"),
        (["--share", "-inf"], "--share is -inf; it must be a finite number"),
        (["--size", "0"], "--size is 0; it must be at least 1, below 1e3"),
        (["--size", "1000"], "--size is 1000; it must be at least 1, below 1e3"),
    ],
)
def test_what_is_outside_is_named_with_the_range(flags, message, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        load_settings(Ranged, flags)
    assert capsys.readouterr().err == f"error: {message} (see --help)\n"
    name, value = flags[0].removeprefix("--"), flags[1]
    with pytest.raises(ValueError, match=f"run.toml: {re.escape(message)}"):
        load_settings(Ranged, [written(tmp_path, f"{name} = {value}")])


def test_names_that_no_file_can_hold_are_refused():
    with pytest.raises(ValueError, match=r"'out/\\udcff' is not UTF-8, which config.toml has to be"):
        load_settings(Ranged, ["--place", "out/\udcff"])
