"""Values of TOML and JSON → typed fields of dataclasses, within their bounds."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import numpy as np
from annotated_types import Ge, Le

from engine.core.errors import UserError

Value = TypeVar("Value")
if TYPE_CHECKING:
    from pydantic import TypeAdapter  # imported where used, for a fast --help

    # Types of settings are those of a run, in which no value is None.
    Auto = Annotated[Value, "or None"]
else:

    class Auto:
        """A setting of that type, or None: then it is chosen automatically."""

        def __class_getitem__(cls, hint: Any) -> Any:
            return hint | None


AUTO: Any = None

MAX_QUOTED_CHARACTERS = 60  # of a value in a message
MAX_INTEGER = 2**63
# Numbers in a file of the project.
Count = Annotated[int, Ge(0), Le(MAX_INTEGER)]
Seconds = Annotated[float, Ge(0), Le(MAX_INTEGER)]
# Type of an error of pydantic → reason, where the value is not what is wrong.
REASON_BY_TYPE = {"missing": "is missing", "unexpected_keyword_argument": "is unknown"}


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
    """Raise UserError for a setting of another type than its annotation, or out of its bounds.

    Defaults are not checked: a command that only prints its help need not import pydantic.
    """
    hints = get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_ranges(value)
        elif value is not field.default:
            if isinstance(value, list):  # as in a notebook
                value = tuple(value)
            elif isinstance(value, np.generic):
                value = value.item()
            with _named_errors(f"--{field.name.replace('_', '-')}"):
                _adapter(hints[field.name]).validate_python((value,))


def convert(value: Any, hint: Any, name: str) -> Any:
    """Return a value of TOML or JSON as the type of a field or dataclass, within its bounds.

    A list becomes a tuple if the field is one, and text a path. Raises UserError, which starts
    with the name of the value, for what does not fit.
    """
    with _named_errors(name):
        return _adapter(hint).validate_json(json.dumps([value]))[0]


@functools.cache
def _adapter(hint: Any) -> "TypeAdapter[Any]":
    """Return what validates a tuple of one value: inside it, dataclasses get this config."""
    from pydantic import ConfigDict, TypeAdapter

    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    return TypeAdapter(tuple[hint], config=config)


@contextlib.contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Raise UserError for pydantic's first problem with a value of that name."""
    from pydantic import ValidationError

    try:
        yield
    except ValidationError as error:
        raise _value_error(name, error.errors()[0]) from None
    except RecursionError:
        raise UserError(f"{name}: is nested too deeply.") from None


def _value_error(name: str, problem: Any) -> UserError:
    """Return one line on a problem of pydantic, such as {"type": "missing", "loc": ("a",), …}."""
    name = ".".join([name, *[part for part in problem["loc"] if isinstance(part, str)]])
    if problem["type"] in REASON_BY_TYPE:
        return UserError(f"{name}: {REASON_BY_TYPE[problem['type']]}.")
    message = problem["msg"].removeprefix("Value error, ").replace("Input should", "must")
    quoted = f"{problem['input']!r}"[:MAX_QUOTED_CHARACTERS]
    return UserError(f"{name}: {message} (got {quoted}).")
