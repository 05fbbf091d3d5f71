"""Settings of a command: a dataclass's defaults ← a TOML file ← the command line."""

import contextlib
import dataclasses
import difflib
import io
import json
import re
import sys
import tomllib
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro


def load_settings(cls: type, arguments: list[str] | None = None) -> Any:
    """An instance of the dataclass ``cls``, from ``[FILE.toml] [--flags]`` (default: this process's command line).

    Flags carry bare field names, also those of nested dataclasses; so do the keys of the file, which has no sections.
    Raises ValueError for an unknown key or a value of the wrong type; the command line's mistakes exit with 2.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    defaults = cls()
    if arguments and not arguments[0].startswith("-"):
        path = Path(arguments.pop(0))
        if path.suffix != ".toml":
            raise ValueError(f"{path} is not a settings file: it should end in .toml (flags begin with --)")
        defaults = override(defaults, read_toml(path), str(path))
    return parse(cls, arguments, default=defaults, config=(tyro.conf.OmitArgPrefixes,))


def parse(cls: type, arguments: list[str] | None = None, **options: Any) -> Any:
    """tyro.cli, but a mistake on the command line is one line on stderr, like any other, and exit code 2."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(cls, args=arguments, **options)
    except SystemExit as stop:
        if stop.code:
            # tyro draws a box: a title, the message, perhaps a similar option, and where to find help.
            lines = [line.strip("│| ") for line in printed.getvalue().splitlines()[1:]]
            message = " ".join(line for line in lines if line.strip("─╰╯-+"))
            message = re.split("Argument helptext:|For full helptext", message)[0].strip()
            print(f"error: {message} (see --help)", file=sys.stderr)
        raise


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a TOML file. Raises ValueError if it is not one."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None


def flatten(config: Any) -> dict[str, Any]:
    """{field name: value} of a dataclass and of those nested in it; a path as text."""
    flat = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        value = str(value) if isinstance(value, Path) else value
        flat |= flatten(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return flat


def override(config: Any, values: dict[str, Any], source: str) -> Any:
    """The dataclass with some fields, nested ones too, replaced; ValueError names the source for what does not fit."""
    known = flatten(config)
    if not isinstance(values, dict):
        raise ValueError(f"{source}: settings are names and values, not {values!r}")
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {near[0]}?" if near else "see --help for all of them"
            raise ValueError(f"{source}: no setting is called {name}; {advice}")
    hints = get_type_hints(type(config))
    changes = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            inner = {name: values[name] for name in flatten(value) if name in values}
            changes[field.name] = override(value, inner, source) if inner else value
        elif field.name in values:
            changes[field.name] = _checked(field.name, values[field.name], hints[field.name], source)
    return dataclasses.replace(config, **changes)


def _checked(name: str, value: Any, kind: Any, source: str) -> Any:
    """The file's value as the field's type; whole numbers serve as floats, and text as paths."""
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ValueError(f"{source}: {name} is {value!r}; it must be one of {', '.join(map(repr, get_args(kind)))}")
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for option in options:
        if type(value) is option:
            return value
        if (option is float and type(value) is int) or (option is Path and type(value) is str):
            return option(value)
    expected = " or ".join(option.__name__ for option in options if option is not type(None))
    raise ValueError(f"{source}: {name} is {value!r}; it must be {expected}")


def to_toml(config: Any) -> str:
    """Every setting as a line of TOML, which :func:`load_settings` reads back; None, having no TOML, is left out."""
    given = {name: value for name, value in flatten(config).items() if value is not None}
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in given.items())
