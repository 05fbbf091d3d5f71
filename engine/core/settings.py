"""Settings of a command: the defaults of a dataclass ← a TOML file ← the command line."""

import contextlib
import dataclasses
import difflib
import inspect
import io
import json
import math
import operator
import sys
import tomllib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import tyro
from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt

from engine.core.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
BOUND_TYPES: dict[type, tuple[str, Any]] = {
    Ge: ("at least", operator.ge),
    Gt: ("greater than", operator.gt),
    Le: ("at most", operator.le),
    Lt: ("less than", operator.lt),
}
PLAIN_TYPES: dict[type, Any] = {float: (int, float), Path: str}  # in TOML and JSON
DEBUG_HELP = "--debug shows the traceback of any error."  # cli.run_command handles it
BOX_CHARACTERS = str.maketrans("─│╭╮╰╯", " " * 6)


def load_settings(cls: type[Config], arguments: Sequence[str] | None = None) -> Config:
    """Return the dataclass of ``[FILE.toml] [--flags]``, by default of this process's command line.

    Flags and keys of the file are bare field names, of nested dataclasses too. Raises UserError for
    a mistake in the file; a mistake on the command line exits with 2.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for argument in arguments:
        if argument != argument.encode(errors="replace").decode():
            raise UserError(f"{argument!r}: must be UTF-8, as config.toml is. Use another name.")
    if not arguments or arguments[0].startswith("-"):
        return parse(cls, arguments, default=cls())
    path = Path(arguments.pop(0))
    if path.suffix != ".toml":
        raise UserError(f"{path}: must be a settings file in .toml. Flags begin with --.")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML ({error}).") from None
    return parse(cls, arguments, default=from_values(cls, values, str(path)))


@overload
def parse(cls: type[Config], arguments: Sequence[str] | None = ..., **options: Any) -> Config: ...
@overload
def parse(cls: Any, arguments: Sequence[str] | None = ..., **options: Any) -> Any: ...
def parse(cls: Any, arguments: Sequence[str] | None = None, **options: Any) -> Any:
    """Return the dataclass, or one of a union of subcommands, that the command line describes.

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
        # tyro prints a box with a title, the message and help, and wraps long words. A UserError of
        # __post_init__ is the exception that it was handling.
        lines = box.getvalue().translate(BOX_CHARACTERS).splitlines()
        text = " ".join(" ".join(lines[1:]).split())
        text = text.partition(" Argument helptext:")[0].partition(" For full helptext")[0]
        message = str(stop.__context__) if isinstance(stop.__context__, UserError) else text
    print(f"error: {' '.join(message.split())[:1000]} (see --help)", file=sys.stderr)
    sys.exit(2)


def check_ranges(config: Any) -> None:
    """Raise UserError for a setting that is not finite, or outside the bounds of its annotation.

    Bounds are those of annotated_types, as in ``Annotated[int | None, Ge(1)]``. None has no bounds.
    """
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            check_ranges(value)
            continue
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float):
                _check_number(f"--{name.replace('_', '-')}", number, hint)


def _check_number(flag: str, number: float, hint: Any) -> None:
    """Raise UserError unless a number is finite and within the bounds of an annotation."""
    if not math.isfinite(number):
        raise UserError(f"{flag}: must be finite (got {number}).")
    bounds: list[Any] = []
    for item in getattr(hint, "__metadata__", ()):
        bounds += item if isinstance(item, GroupedMetadata) else [item]
    limits = {}
    for bound in bounds:
        if type(bound) in BOUND_TYPES:
            (limits[type(bound)],) = dataclasses.astuple(bound)
    if not all(BOUND_TYPES[kind][1](number, limit) for kind, limit in limits.items()):
        text = " and ".join(f"{BOUND_TYPES[kind][0]} {limit:,}" for kind, limit in limits.items())
        raise UserError(f"{flag}: must be {text} (got {number}).")


def flatten(config: Any) -> dict[str, Any]:
    """Return {field name: value} of a dataclass and of those nested in it, for JSON or TOML.

    Paths become text and tuples lists.
    """
    flat = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat.update(flatten(value))
        elif isinstance(value, tuple):
            flat[field.name] = [str(item) if isinstance(item, Path) else item for item in value]
        else:
            flat[field.name] = str(value) if isinstance(value, Path) else value
    return flat


def to_toml(config: Any) -> str:
    """Return a line of TOML for each setting that is not None, which load_settings() reads."""
    values = {name: value for name, value in flatten(config).items() if value is not None}
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    return "\n".join([*lines, ""])


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """Return the dataclass with some fields replaced, by bare name, also in nested ones."""
    changes = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changes[field.name] = with_values(value, values)
        elif field.name in values:
            changes[field.name] = values[field.name]
    return dataclasses.replace(config, **changes)


def fill_unset(config: Config, values: dict[str, Any]) -> Config:
    """Replace fields that are None, those of nested dataclasses too, by the values of their names."""
    current = flatten(config)
    return with_values(config, {name: value for name, value in values.items() if current[name] is None})


def from_values(cls: type[Config], values: Any, source: str) -> Config:
    """Return the dataclass with the fields in ``values``, by bare name, also in nested ones.

    ``values`` are as in TOML or JSON: lists for tuples and text for paths. The other fields have
    their defaults. Raises UserError, which names the source, for anything that does not fit.
    """
    if not isinstance(values, dict):
        raise UserError(f"{source}: must hold settings by name (got {values!r}).")
    names = flatten(cls())
    for name in values:
        if name not in names:
            matches = difflib.get_close_matches(name, names, 1)
            advice = f"Did you mean {matches[0]}?" if matches else "See --help for all settings."
            raise UserError(f"{source}: unknown setting {name}. {advice}")
    try:
        config = _construct(cls, values)
        check_ranges(config)
    except ValueError as error:  # of this module, or of a __post_init__
        raise UserError(f"{source}: {error}") from None
    return config


def _construct(cls: Any, values: dict[str, Any]) -> Any:
    """Return the dataclass, and those nested in it, with converted values."""
    arguments = {}
    defaults = cls()
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            # The default's class: a field may be typed as the class that it becomes later.
            arguments[name] = _construct(type(getattr(defaults, name)), values)
        elif name in values:
            try:
                arguments[name] = _convert(values[name], hint)
            except TypeError as error:
                raise UserError(f"{name}: must be {error} (got {values[name]!r}).") from None
    return cls(**arguments)


def _convert(value: Any, hint: Any) -> Any:
    """Return a value of TOML or JSON as the type of a field. Raises TypeError naming the type."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, types.UnionType):  # X | None
        return None if value is None else _convert(value, arguments[0])
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(item, arguments[0]) for item in items)
    if origin is Literal:
        if value not in arguments:
            raise TypeError(f"one of {', '.join(arguments)}")
        return value
    is_plain_type = isinstance(value, PLAIN_TYPES.get(hint, hint))
    if not is_plain_type or (isinstance(value, bool) and hint is not bool):
        raise TypeError(hint.__name__)
    return hint(value)
