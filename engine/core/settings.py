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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import tyro
from annotated_types import Ge, Gt, Le, Lt
from tyro import conf

from engine.core.cli import MAX_MESSAGE_CHARS, escape_controls
from engine.core.errors import UserError, wrap_library_errors
from engine.core.files import read_input

Config = TypeVar("Config")
BOUND_TYPES: dict[type, tuple[str, Any]] = {
    Ge: ("at least", operator.ge),
    Gt: ("greater than", operator.gt),
    Le: ("at most", operator.le),
    Lt: ("less than", operator.lt),
}
PLAIN_TYPES: dict[type, Any] = {float: (int, float), Path: str}  # in TOML and JSON
TYPE_NOUNS: dict[type, str] = {int: "a whole number", float: "a number", Path: "a path"}
TYPE_NOUNS |= {bool: "true or false", str: "text"}
(POSITIONAL_TYPE,) = get_args(conf.Positional[int])[1:]  # the mark of a field without a flag
# Setting → names that other tools give it.
OTHER_NAMES = {
    "learning_rate": "lr max_lr",
    "steps": "epochs num_epochs num_train_epochs max_steps max_iters iters",
    "minutes": "epochs num_epochs num_train_epochs hours max_time",
    "batch_size": "bs per_device_train_batch_size",
    "context_length": "block_size ctx n_ctx seq_len max_seq_len max_length",
    "num_heads": "num_attention_heads",
    "d_model": "n_embd dim hidden_size width",
    "data": "dataset input train_file",
    "init_from": "model base pretrained model_name_or_path",
    "out": "o output output_dir",
    "resume": "continue resume_from_checkpoint",
    "eval_every": "eval_interval eval_steps",
    "save_every": "save_interval save_steps",
    "dtype": "precision fp16 bf16",
    "device": "gpu cuda",
    "max_new_tokens": "length max_tokens n_predict max_length",
    "num_samples": "n",
    "gguf": "quant quantize outtype",
}
DEBUG_HELP = "--debug shows the traceback of any error."  # cli.run_command handles it
# Without DisallowNone the help has {None} at each flag.
TYRO_MARKERS = (conf.OmitArgPrefixes, conf.DisallowNone, conf.PositionalMetavarFromFieldName)


def load_settings(
    cls: type[Config], arguments: Sequence[str], recorded: Mapping[str, Any] | None = None
) -> Config:
    """Return the dataclass of the command line ``[FILE.toml] [--flags]``.

    Flags and keys are bare field names; ``recorded`` has values of settings in neither. Raises
    UserError for a mistake in the file; one on the command line exits with 2.
    """
    for argument in arguments:
        if argument != argument.encode(errors="replace").decode():
            raise UserError(f"{argument!r}: must be UTF-8, as config.toml is. Use another name.")
    values = dict(recorded or {})
    source = "config.toml"
    if arguments and not arguments[0].startswith("-"):
        source, *arguments = arguments
        values |= read_toml(Path(source))
    return parse(cls, arguments, default=from_values(cls, values, source))


def read_toml(path: Path) -> dict[str, Any]:
    """Return the settings in a TOML file. Raises UserError if it is not valid."""
    with open(path, "rb") as file:
        content = read_input(file, path)
    with wrap_library_errors(f"{path}: not valid TOML", ValueError, RecursionError, advice="."):
        return tomllib.loads(content.decode("utf-8-sig"))


def parse(cls: Any, arguments: Sequence[str] | None = None, **options: Any) -> Any:
    """Parse a command line into a dataclass, or into one of several; a mistake exits with 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    description = options.get("description", inspect.getdoc(cls))
    options |= {"description": f"{description} {DEBUG_HELP}", "config": TYRO_MARKERS}
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
        message = explain_mistake(cls, arguments, box.getvalue())
        if isinstance(stop.__context__, UserError):  # of a __post_init__: the box would wrap it
            message = str(stop.__context__)
    line = escape_controls(" ".join(message.split())[:MAX_MESSAGE_CHARS])
    print(f"error: {line} (see --help)", file=sys.stderr)
    sys.exit(2)


def explain_mistake(cls: Any, arguments: Sequence[str], box: str) -> str:
    """Return the message in a box of tyro in the words of this project, without its help."""
    text = re.sub(r"([─│╭╮╰╯\s]|-{4,})+", " ", box.partition("\n")[2])
    message = re.split(" Argument helptext:| For full helptext", text)[0].strip()
    commands = [get_args(command)[0] for command in get_args(cls)] or [cls]
    hints = {name: hint for command in commands for name, hint in iterate_hints(command)}
    if match := re.match(r"Error parsing --(\S+): .*?(?:from|:) (\[.*?\]|['\"].*)", message):
        hint = str(hints[match[1].replace("-", "_")])
        noun = TYPE_NOUNS[float if "float" in hint else int]
        noun = f"{noun.removeprefix('a ')}s" if "tuple" in hint else noun
        values = match[2].strip("[]'\"").replace("', '", " ")
        return f"--{match[1]}: must be {noun} (got {values})."
    if match := re.match(r"invalid choice '(.*)' for argument '(.*?)'. .*\((.*?)\)", message):
        choices = sorted({*re.findall("'(.*?)'", match[3])} - {"None"})
        return f"{match[2]}: must be one of {', '.join(choices)} (got {match[1]})."
    if match := re.match(r"Missing value for argument '(.*?)'", message):
        return f"{match[1]}: needs a value. Give one after it."
    if match := re.match(r"Missing from \S+(?: \w+)?: (\S+) (\w)(.*?)\.? \(required\)", message):
        return f"{match[1]}: missing. Give {match[2].lower()}{match[3]}."
    match = re.match(r"Unrecognized .*?options: ([^, ]+)", message)
    if not match:
        return message
    word = match[1]
    if subcommands := message.partition("Available subcommands: ")[2]:
        return f"{word}: unknown command. Give one of {subcommands}."
    if word.startswith("-"):
        flag = word.partition("=")[0]
        names = [n for n in hints if POSITIONAL_TYPE not in getattr(hints[n], "__metadata__", ())]
        if flag[2:].replace("-", "_") in names:
            return f"{flag}: is a flag of another command. Leave it out."
        return f"{flag}: unknown flag. {propose_name(flag, names, '--')}"
    for flag in [name.partition("=")[0] for name in arguments if name.endswith(f"={word}")]:
        return f"{flag}: takes no value (got {word}). Leave the value out, or use --no-{flag[2:]}."
    before = arguments[: -1 - arguments[::-1].index(word)] if word in arguments else []
    flags = [name for name in before if name.startswith("--")]
    if flags and Path(word).exists():  # the shell replaced a pattern by files
        pattern = f"{flags[-1]} '*{Path(word).suffix}'"
        return f"{flags[-1]}: must be one value (got {word} too). Quote a pattern: {pattern}"
    return f"{word}: unexpected argument. Quote a value with spaces, or leave it out."


def propose_name(name: str, names: Collection[str], prefix: str = "") -> str:
    """Return the sentence that names the setting that a wrong name may mean."""
    name = name.strip("-").replace("-", "_").lower()
    matches = [ours for ours in OTHER_NAMES if name in OTHER_NAMES[ours].split() and ours in names]
    matches = matches or [ours for ours in names if ours.startswith(name) and len(name) > 2][:1]
    matches = matches or difflib.get_close_matches(name, names, 1)
    flags = [f"--{ours.replace('_', '-')}" if prefix else ours for ours in matches]
    if not flags:
        return "Leave it out." if prefix else "See --help for all settings."
    return f"Did you mean {' or '.join(flags)}?"


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
        bounds = [mark for mark in getattr(hint, "__metadata__", ()) if type(mark) in BOUND_TYPES]
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
    return "\n".join([*lines, ""]).replace("\x7f", "\\u007f")  # TOML has no control characters


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
            raise UserError(f"{source}: unknown setting {name}. {propose_name(name, hints)}")
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
    if hint is Path and "\0" in str(value):
        raise TypeError("a path without NUL")
    is_plain_type = isinstance(value, PLAIN_TYPES.get(hint, hint))
    if not is_plain_type or (isinstance(value, bool) and hint is not bool):
        raise TypeError(TYPE_NOUNS.get(hint, hint.__name__))
    return hint(value)
