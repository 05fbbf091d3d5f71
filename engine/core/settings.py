"""Settings of a command: the defaults of a dataclass ← a TOML file ← the command line."""

import contextlib
import dataclasses
import difflib
import inspect
import io
import json
import math
import operator
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import tyro
from annotated_types import Ge, Gt, Le, Lt

from engine.core.errors import UserError
from engine.core.files import read_input

Config = TypeVar("Config")
BOUND_TYPES: dict[type, tuple[str, Any]] = {
    Ge: ("at least", operator.ge),
    Gt: ("greater than", operator.gt),
    Le: ("at most", operator.le),
    Lt: ("less than", operator.lt),
}
PLAIN_TYPES: dict[type, Any] = {float: (int, float), Path: str}  # in TOML and JSON
DEBUG_HELP = "--debug shows the traceback of any error."  # cli.run_command handles it


def load_settings(cls: type[Config], arguments: Sequence[str] | None = None) -> Config:
    """Return the dataclass of ``[FILE.toml] [--flags]``, by default of this process's command line.

    Flags and keys of the file are bare field names, of nested dataclasses too. Raises UserError for
    a mistake in the file; a mistake on the command line exits with 2.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for argument in arguments:
        if argument != argument.encode(errors="replace").decode():
            raise UserError(f"{argument!r}: must be UTF-8, as config.toml is. Use another name.")
    config = cls()
    if arguments and not arguments[0].startswith("-"):
        path = Path(arguments.pop(0))
        with open(path, "rb") as file:
            content = read_input(file, path)
        try:
            values = tomllib.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: not valid TOML ({error}).") from None
        config = from_values(cls, values, str(path))
    return parse(cls, arguments, default=config)


def parse(cls: Any, arguments: Sequence[str] | None = None, **options: Any) -> Any:
    """Parse a command line into a dataclass, or into one of several (subcommands).

    A mistake there is one line on stderr, and exit code 2.
    """
    docstring = inspect.getdoc(cls) if inspect.isclass(cls) else ""
    options |= {"config": (tyro.conf.OmitArgPrefixes,), "description": f"{docstring} {DEBUG_HELP}"}
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            config = tyro.cli(cls, args=arguments, **options)
        check_ranges(config)
        return config
    except UserError as error:
        message = str(error)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        message = _read_error_box(box.getvalue())
        if isinstance(stop.__context__, UserError):  # of a __post_init__: the box would wrap it
            message = str(stop.__context__)
    print(f"error: {' '.join(message.split())[:1000]} (see --help)", file=sys.stderr)
    sys.exit(2)


def _read_error_box(box: str) -> str:
    """Return the message in a box that tyro drew: below its title, and above its help."""
    text = re.sub(r"([─│╭╮╰╯\s]|-{4,})+", " ", box.partition("\n")[2])
    return re.split(" Argument helptext:| For full helptext", text)[0]


def iterate_hints(cls: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and annotation of each field of a dataclass, and of those nested in it."""
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            yield from iterate_hints(hint)
        else:
            yield name, hint


def field_values(config: Any) -> dict[str, Any]:
    """Return {field name: value} of a dataclass and of those nested in it."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values |= field_values(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return values


def check_ranges(config: Any) -> None:
    """Raise UserError for a setting that is not finite, or outside the bounds of its annotation.

    Bounds are those of annotated_types, as in ``Annotated[int | None, Ge(1)]``. None has no bounds.
    """
    values = field_values(config)
    for name, hint in iterate_hints(type(config)):
        value = values[name]
        metadata = getattr(hint, "__metadata__", ())
        bounds = [bound for bound in metadata if type(bound) in BOUND_TYPES]
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, int | float):
                continue
            flag = f"--{name.replace('_', '-')}"
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{flag}: must be finite (got {number}).")
            for bound in bounds:
                relation, is_within = BOUND_TYPES[type(bound)]
                (limit,) = dataclasses.astuple(bound)
                if not is_within(number, limit):
                    raise UserError(f"{flag}: must be {relation} {limit:,} (got {number}).")


def flatten(config: Any) -> dict[str, Any]:
    """Return {field name: value} of a dataclass and of those nested in it, in types of JSON."""
    return json.loads(json.dumps(field_values(config), default=str))


def to_toml(config: Any) -> str:
    """Return a line of TOML for each setting that is not None, which load_settings() reads."""
    values = {name: value for name, value in flatten(config).items() if value is not None}
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    return "\n".join([*lines, ""])


def build(cls: type[Config], values: Mapping[str, Any]) -> Config:
    """Return the dataclass with the given fields, by bare name, also in nested ones.

    The others have their defaults. Raises UserError if a field without a default is missing.
    """
    arguments: dict[str, Any] = {}
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            arguments[name] = build(cast(type, hint), values)
        elif name in values:
            arguments[name] = values[name]
    for field in dataclasses.fields(cast(Any, cls)):
        if field.name not in arguments and field.default is field.default_factory is MISSING:
            raise UserError(f"{field.name}: missing.")
    return cls(**arguments)


def from_values(cls: type[Config], values: Any, source: str) -> Config:
    """Return the dataclass with the fields in ``values``: see :func:`build`.

    ``values`` are as in TOML or JSON: lists for tuples and text for paths. Raises UserError, which
    names the source, for anything that does not fit.
    """
    if not isinstance(values, dict):
        raise UserError(f"{source}: must hold settings by name (got {values!r}).")
    hints = dict(iterate_hints(cls))
    converted = {}
    for name, value in values.items():
        if name not in hints:
            matches = difflib.get_close_matches(name, hints, 1)
            advice = f"Did you mean {matches[0]}?" if matches else "See --help for all settings."
            raise UserError(f"{source}: unknown setting {name}. {advice}")
        try:
            converted[name] = _convert(value, hints[name])
        except OverflowError:  # an integer that is too large for a float
            raise UserError(f"{source}: {name}: must be finite (got {str(value)[:20]}…).") from None
        except TypeError as error:
            raise UserError(f"{source}: {name}: must be {error} (got {value!r}).") from None
    try:
        config = build(cls, converted)
        check_ranges(config)
    except (UserError, ValueError) as error:  # of a __post_init__, or of bounds
        raise UserError(f"{source}: {error}") from None
    return config


def _convert(value: Any, hint: Any) -> Any:
    """Return a value of TOML or JSON as the type of a field. Raises TypeError naming the type."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if hasattr(hint, "__metadata__"):  # Annotated[X, …]
        return _convert(value, arguments[0])
    if type(None) in arguments:  # X | None
        return None if value is None else _convert(value, arguments[0])
    if origin is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_convert(item, arguments[0]) for item in items)
    if origin is Literal:
        if value not in arguments:
            raise TypeError(f"one of {', '.join(arguments)}")
        return value
    is_plain_type = isinstance(value, PLAIN_TYPES.get(hint, hint))
    if not is_plain_type or (isinstance(value, bool) and hint is not bool):
        raise TypeError(hint.__name__)
    return hint(value)
