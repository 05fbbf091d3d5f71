"""Settings of a command: a dataclass's defaults ← a TOML file ← the command line."""

import contextlib
import dataclasses
import difflib
import io
import json
import math
import operator
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import tyro

from engine.core.errors import UserError

LIMITS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def load_settings(cls: type, arguments: list[str] | None = None) -> Any:
    """An instance of the dataclass ``cls``, from ``[FILE.toml] [--flags]`` (default: this process's command line).

    Flags carry bare field names, also those of nested dataclasses; so do the keys of the file, which has no sections.
    Raises UserError for an unknown key or a value of the wrong type; the command line's mistakes exit with 2.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if odd := [given for given in arguments if given != given.encode(errors="replace").decode()]:
        raise UserError(f"{odd[0]!r} is not UTF-8, which config.toml has to be; choose another name")
    for name, hint in get_type_hints(cls).items():  # where None is a third choice too, --flag is True
        for flag, value in ((f"--{name}", True), (f"--no-{name}", False)):
            for at in [at for at, given in enumerate(arguments) if hint == bool | None and given == flag]:
                if arguments[at + 1 : at + 2] not in (["True"], ["False"], ["None"]):
                    arguments[at] = f"--{name}={value}"
    defaults = cls()
    if arguments and not arguments[0].startswith("-"):
        path = Path(arguments.pop(0))
        if path.suffix != ".toml":
            raise UserError(f"{path} is not a settings file: it should end in .toml (flags begin with --)")
        try:
            defaults = from_values(cls, tomllib.loads(path.read_text(encoding="utf-8")), str(path))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{path} is not valid TOML: {error}") from None
    return parse(cls, arguments, default=defaults)


def given_settings(arguments: list[str] | None = None) -> set[str]:
    """The names of the settings that a command line, or the file it names, says: the others have their defaults."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    flags = [given[2:].split("=")[0].replace("-", "_") for given in arguments if given.startswith("--")]
    named = arguments[0] if arguments and not arguments[0].startswith("-") else None
    values = tomllib.loads(Path(named).read_text(encoding="utf-8")) if named else {}
    return {name.removeprefix("no_") for name in flags} | set(values)


def differing(config: Any) -> set[str]:
    """The names of the settings that are not their defaults."""
    defaults = flatten(type(config)())
    return {name for name, value in flatten(config).items() if value != defaults[name]}


def with_values(config: Any, values: dict[str, Any]) -> Any:
    """The dataclass with these fields, nested ones' too, by bare name, and the others as they are."""
    found = {}
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        found[one.name] = with_values(value, values) if dataclasses.is_dataclass(value) else values.get(one.name, value)
    return dataclasses.replace(config, **found)


def parse(cls: type, arguments: Sequence[str] | None = None, **default: Any) -> Any:
    """An instance of ``cls`` from the command line; a mistake there is one line on stderr, and exit code 2."""
    try:
        return _parse(cls, arguments, **default)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())[:1000]} (see --help)", file=sys.stderr)
        sys.exit(2)


def _parse(cls: type, arguments: Sequence[str] | None, *config: Any, **default: Any) -> Any:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            found = tyro.cli(cls, args=arguments, config=(tyro.conf.OmitArgPrefixes, *config), **default)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        # tyro draws a box: a title, the message, perhaps a similar option, and where to find help.
        lines = [line.strip("│| ") for line in printed.getvalue().splitlines()[1:]]
        message = " ".join(line for line in lines if line.strip("─╰╯-+"))
        message = re.split("Argument helptext:|For full helptext", message)[0].strip()
        raise UserError(re.sub(r"^Error parsing (\w+Config|model|optimizer): ", "", message)) from None
    check_ranges(found)
    return found


def check_ranges(config: Any) -> None:
    """Raise UserError for a setting outside of the range beside its type: ``Annotated[float, "at least 0, below 1"]``.

    None, which stands for "not set", is in every range; NaN and infinity in none.
    """
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        value, flag = getattr(config, name), f"--{name.replace('_', '-')}"
        if dataclasses.is_dataclass(value):
            check_ranges(value)
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, float) and not math.isfinite(one):
                raise UserError(f"{flag} is {one}; it must be a finite number")
            for allowed in filter(lambda said: isinstance(said, str), getattr(hint, "__metadata__", ())):
                limits = (limit.rsplit(" ", 1) for limit in allowed.split(", "))
                if one is not None and not all(LIMITS[words](one, float(number)) for words, number in limits):
                    raise UserError(f"{flag} is {one}; it must be {allowed}")


def flatten(config: Any) -> dict[str, Any]:
    """{field name: value} of a dataclass and of those nested in it, for JSON: paths as text, tuples as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(one) for one in value]
        return str(value) if isinstance(value, Path) else value

    flat = {}
    for field in dataclasses.fields(config):
        value = plain(getattr(config, field.name))
        flat |= flatten(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return flat


def from_values(cls: type, values: Any, source: str) -> Any:
    """An instance of the dataclass with these fields, nested ones' too, by bare name; the others have their defaults.

    Raises UserError naming the source for what does not fit.
    """
    if not isinstance(values, dict):
        raise UserError(f"{source}: settings are names and values, not {values!r}")
    known = flatten(cls())
    if unknown := [name for name in values if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, 1)
        advice = f"did you mean {near[0]}?" if near else "see --help for all of them"
        raise UserError(f"{source}: no setting is called {unknown[0]}; {advice}")
    hints, flags = get_type_hints(cls), []  # flags, so that the command line and the file are checked alike
    for nested in filter(dataclasses.is_dataclass, list(hints.values())):
        hints |= get_type_hints(nested)
    for name, value in values.items():
        if value and isinstance(value, list) and "tuple" in str(hints.get(name)):
            texts = [f"./{one}" if isinstance(one, str) and one.startswith("-") else str(one) for one in value]
            flags += [f"--{name}", *texts]  # a path that begins with - would be a flag
        else:
            flags.append(f"--{name}={value}")
    try:
        return _parse(cls, flags, tyro.conf.FlagConversionOff)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from None


def to_toml(config: Any) -> str:
    """Every setting as a line of TOML, which :func:`load_settings` reads back; None, having no TOML, is left out."""
    given = {name: value for name, value in flatten(config).items() if value is not None}
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in given.items())
