"""Values of TOML and JSON → typed fields of dataclasses, within their bounds."""

import dataclasses
import math
import operator
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from engine.core.errors import UserError

Record = TypeVar("Record")
BOUND_TYPES: dict[type, tuple[str, Any]] = {
    Ge: ("at least", operator.ge),
    Gt: ("greater than", operator.gt),
    Le: ("at most", operator.le),
    Lt: ("less than", operator.lt),
}
PLAIN_TYPES: dict[type, Any] = {float: (int, float), Path: str}  # in TOML and JSON
TYPE_NOUNS: dict[type, str] = {int: "a whole number", float: "a number", Path: "a path"}
TYPE_NOUNS |= {bool: "true or false", str: "text", dict: "an object", list: "a list"}
MAX_QUOTED_CHARACTERS = 60  # of a value in a message
MAX_INTEGER = 2**63
# Numbers in a file of the project.
Count = Annotated[int, Ge(0), Le(MAX_INTEGER)]
Seconds = Annotated[float, Ge(0), Le(MAX_INTEGER)]


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
    """Raise UserError for a setting that is not finite, or outside the bounds of its annotation."""
    values = field_values(config)
    for name, hint in iterate_hints(type(config)):
        check_bounds(values[name], hint, f"--{name.replace('_', '-')}")


def check_bounds(value: Any, hint: Any, name: str) -> None:
    """Raise UserError for a number, or one in a tuple, that is not finite or out of bounds.

    Bounds are those of annotated_types, as in ``Annotated[int | None, Ge(1)]``. None has no bounds.
    """
    if type(None) in get_args(hint):  # Annotated[…] | None
        hint = get_args(hint)[0]
    bounds = [mark for mark in getattr(hint, "__metadata__", ()) if type(mark) in BOUND_TYPES]
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int | float):
            continue
        if isinstance(number, float) and not math.isfinite(number):
            raise UserError(f"{name}: must be finite (got {number}).")
        if isinstance(number, int) and abs(number) > MAX_INTEGER:
            raise UserError(f"{name}: must be at most {MAX_INTEGER:,} (got {number}).")
        for bound in bounds:
            relation, is_within = BOUND_TYPES[type(bound)]
            (limit,) = dataclasses.astuple(bound)
            if not is_within(number, limit):
                raise UserError(f"{name}: must be {relation} {limit:,} (got {number}).")


def from_json(cls: type[Record], value: Any, name: str, ignores_others: bool = False) -> Record:
    """Return the dataclass with the fields of a JSON object, nested as they are.

    Raises UserError, which starts with the name of the value, for what does not fit, and for an
    unknown field unless others are ignored.
    """
    values = convert(value, dict, name)
    hints = get_type_hints(cls, include_extras=True)
    unknown_names = values.keys() - hints.keys()
    if unknown_names and not ignores_others:
        raise UserError(f"{name}: unknown field {min(unknown_names)}.")
    arguments = {}
    for field in dataclasses.fields(cast(Any, cls)):
        if field.name in values:
            path = f"{name}.{field.name}"
            arguments[field.name] = convert(values[field.name], hints[field.name], path)
        elif field.default is field.default_factory is MISSING:
            raise UserError(f"{name}: must have {field.name}.")
    try:
        return cls(**arguments)
    except ValueError as error:  # of a __post_init__
        raise UserError(f"{name}: {error}.") from None


def convert(value: Any, hint: Any, name: str) -> Any:
    """Return a value of TOML or JSON as the type of a field, within its bounds.

    A list becomes a tuple if the field is one, and text a path. Raises UserError.
    """
    origin = get_origin(hint)
    arguments = get_args(hint)
    if hasattr(hint, "__metadata__"):  # Annotated[X, …]
        value = convert(value, arguments[0], name)
        check_bounds(value, hint, name)
        return value
    if hint is Any or type(None) in arguments:  # X | None
        return value if hint is Any or value is None else convert(value, arguments[0], name)
    if dataclasses.is_dataclass(hint):
        return from_json(cast(type, hint), value, name)
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(convert(item, arguments[0], name) for item in items)
    if origin is list:
        return [convert(item, arguments[0], name) for item in convert(value, list, name)]
    if origin is dict:
        items = convert(value, dict, name).items()
        return {key: convert(item, arguments[1], f"{name}.{key}") for key, item in items}
    if origin is Literal:
        is_right = value in arguments
        noun = f"one of {', '.join(arguments)}"
    else:
        is_right = isinstance(value, PLAIN_TYPES.get(hint, hint))
        is_right = is_right and (hint is bool or not isinstance(value, bool))
        noun = TYPE_NOUNS.get(hint) or hint.__name__
    if hint is Path and "\0" in str(value):
        is_right = False
        noun = "a path without NUL"
    if not is_right:
        quoted = f"{value!r}"[:MAX_QUOTED_CHARACTERS]
        raise UserError(f"{name}: must be {noun} (got {quoted}).")
    try:
        value = value if origin is Literal else hint(value)
    except OverflowError:  # an integer that is too large for a float
        raise UserError(f"{name}: must be finite (got {str(value)[:20]}…).") from None
    check_bounds(value, hint, name)  # is finite
    return value
