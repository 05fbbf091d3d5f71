"""Settings: defaults ← file ← command line, and how commands report mistakes."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from engine.settings import flatten, load_settings, run_command, to_toml


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
    inner: Inner = field(default_factory=Inner)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path):
    path = written(tmp_path, 'rate = 1\nwidth = 7\nkind = "b"\nplace = "there"\nperhaps = true\n')
    got = load_settings(Outer, [path, "--width", "9", "--flag"])
    assert got == Outer(rate=1.0, place=Path("there"), flag=True, perhaps=True, inner=Inner(width=9, kind="b"))
    assert type(got.rate) is float


def test_hyphens_and_underscores_are_the_same():
    @dataclass(frozen=True)
    class Long:
        num_heads: int = 1

    assert load_settings(Long, ["--num_heads", "4"]) == load_settings(Long, ["--num-heads", "4"]) == Long(4)


def test_what_is_written_is_read_back(tmp_path):
    config = Outer(rate=1e-5, place=Path('odd "name" é\n'), flag=True, inner=Inner(kind="b"))
    assert load_settings(Outer, [written(tmp_path, to_toml(config))]) == config
    assert flatten(config)["kind"] == "b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("widht = 3", r"run.toml: no setting is called widht; did you mean width\?"),
        ("zzz = 3", "no setting is called zzz; see --help"),
        ('width = "3"', "width is '3'; it must be int"),
        ("width = true", "width is True; it must be int"),
        ("rate = true", "rate is True; it must be float"),
        ('kind = "c"', "kind is 'c'; it must be one of 'a', 'b'"),
        ("perhaps = 1", "perhaps is 1; it must be bool"),
        ("width = ", "run.toml is not valid TOML"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_settings(Outer, [written(tmp_path, text)])


def test_a_file_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"run.yaml is not a settings file"):
        load_settings(Outer, ["run.yaml"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--widht", "3"], "Unrecognized options: --widht, 3 Perhaps you meant: --width"),
        (["--width", "x"], "Error parsing --width: invalid literal for int"),
        (["--kind", "c"], "'c'"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        load_settings(Outer, arguments)
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and message in printed
    assert printed.count("\n") == 1 and printed.startswith("error: ")


def test_our_own_errors_are_one_line_and_a_library_s_keep_their_traceback(capsys):
    def refuse():
        load_settings(Outer, ["run.yaml"])

    with pytest.raises(SystemExit) as stop:
        run_command(refuse)
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("error: run.yaml is not a settings file")

    with pytest.raises(ValueError, match="Expecting value"):
        run_command(lambda: json.loads("["))


def test_an_error_of_the_system_names_the_file(capsys):
    with pytest.raises(SystemExit):
        run_command(lambda: Path("/not/there").read_text())
    assert capsys.readouterr().err == "error: No such file or directory: /not/there\n"
