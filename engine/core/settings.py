"""Settings of a command: the defaults of a dataclass ← a TOML file ← the command line."""

import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import tyro
from tyro import conf

from engine.core.cli import CONTROL_PATTERN, MAX_MESSAGE_CHARS, escape_controls
from engine.core.errors import UserError, did_you_mean, wrap_library_errors
from engine.core.files import read_input
from engine.core.values import check_ranges, convert, field_values, iterate_hints

Config = TypeVar("Config")
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
TOML_ADVICE = ". In TOML, a path with backslashes needs single quotes."
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
    """Return the settings in a TOML file, in types of JSON. Raises UserError if it is not valid."""
    with open(path, "rb") as file:
        content = read_input(file, path)
    problem = f"{path}: not valid TOML"
    with wrap_library_errors(problem, ValueError, RecursionError, advice=TOML_ADVICE):
        return json.loads(json.dumps(tomllib.loads(content.decode("utf-8-sig")), default=str))


def parse(cls: Any, arguments: Sequence[str] | None = None, **options: Any) -> Any:
    """Parse a command line into a dataclass, or into one of several; a mistake exits with 2."""
    arguments = spell_booleans(cls, sys.argv[1:] if arguments is None else arguments)
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
        message = explain_mistake(cls, box.getvalue())
        if isinstance(stop.__context__, UserError):  # of a __post_init__: the box would wrap it
            message = str(stop.__context__)
    line = escape_controls(" ".join(message.split())[:MAX_MESSAGE_CHARS])
    print(f"error: {line} (see --help)", file=sys.stderr)
    sys.exit(2)


def spell_booleans(cls: Any, arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with a boolean flag that has =True or =False in the usual form."""
    names = {name for name, hint in command_hints(cls) if bool in (hint, *get_args(hint))}
    spelled = []
    for argument in arguments:
        flag, _, value = argument.partition("=")
        is_boolean = flag.startswith("--") and flag[2:].replace("-", "_") in names
        if is_boolean and value.lower() in ("true", "false"):
            argument = flag if value.lower() == "true" else flag.replace("--", "--no-", 1)
        spelled.append(argument)
    return spelled


def is_mistyped(path: object) -> bool:
    """Return whether a path with a control character, as ``"C:\\new"`` has in TOML, is missing."""
    text = str(path)
    return bool(CONTROL_PATTERN.search(text)) and ("\0" in text or not os.path.lexists(text))


def command_hints(cls: Any) -> list[tuple[str, Any]]:
    """Return the name and annotation of each setting of a command, or of several commands."""
    commands = [get_args(command)[0] for command in get_args(cls)] or [cls]
    return [pair for command in commands for pair in iterate_hints(command)]


def explain_mistake(cls: Any, box: str) -> str:
    """Return the message in a box of tyro on one line, without its help.

    For an unknown flag it proposes a flag of this project.
    """
    text = re.sub(r"([─│╭╮╰╯\s]|-{4,})+", " ", box.partition("\n")[2])
    message = re.split(" Argument helptext:| For full helptext", text)[0].strip()
    match = re.match(r"Unrecognized .*?options: (--[^, =]+)", message)
    if not match:
        return message
    names = [name for name, _ in command_hints(cls)]
    return f"{match[1]}: unknown flag. {propose_name(match[1], names, '--')}"


def propose_name(name: str, names: Collection[str], prefix: str = "") -> str:
    """Return the sentence that names the setting that a wrong name may mean."""
    name = name.strip("-").replace("-", "_").lower()
    proposals = {ours: f"--{ours.replace('_', '-')}" if prefix else ours for ours in names}
    matches = [each for each in OTHER_NAMES if name in OTHER_NAMES[each].split()]
    matches = [each for each in matches if each in proposals]
    if matches:
        proposals[name] = " or ".join(map(proposals.__getitem__, matches))
    return did_you_mean(name, proposals, "See --help for all settings.")


def check_flags(rules: Iterable[tuple[str, Any, Any, str]]) -> None:
    """Raise UserError for the first flag that is set, and lacks what it needs.

    A rule is (flag, whether it is set, whether the need is met, what it needs).
    """
    for flag, is_set, is_met, need in rules:
        if is_set and not is_met:
            raise UserError(f"{flag}: needs {need}. Leave it out, or give that.")


def unescape(text: str | None) -> str:
    """Return a text of the command line, in which \\n and \\t are escapes; \\r is left out."""
    return (text or "").replace("\\r", "").replace("\\n", "\n").replace("\\t", "\t")


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

    The others have their defaults.
    """
    arguments: dict[str, Any] = {}
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            arguments[name] = build(cast(type, hint), values)
        elif name in values:
            arguments[name] = values[name]
    return cls(**arguments)


def from_values(cls: type[Config], values: Any, source: str) -> Config:
    """Return the dataclass with the fields in ``values``: see :func:`build`.

    ``values`` are as in TOML or JSON: lists for tuples and text for paths. Raises UserError, which
    names the source, for anything that does not fit.
    """
    hints = dict(iterate_hints(cls))
    converted = {}
    # Nothing is converted without values, so that --help does not import pydantic.
    items = convert(values, dict, source).items() if values else ()
    for name, value in items:
        if name not in hints:
            raise UserError(f"{source}: unknown setting {name}. {propose_name(name, hints)}")
        hint = hints[name]
        is_tuple = tuple in (get_origin(hint), *map(get_origin, get_args(hint)))
        if is_tuple and isinstance(value, str | int | float):
            value = [value]
        converted[name] = convert(value, hint, f"{source}: {name}")
        is_path = "Path" in str(hint)  # also inside a union or a tuple
        if is_path and any(map(is_mistyped, value if isinstance(value, list) else [value])):
            raise UserError(f"{source}: {name}: is not a path (got {value!r}){TOML_ADVICE}")
    try:
        return build(cls, converted)
    except (UserError, ValueError) as error:  # of a __post_init__
        raise UserError(f"{source}: {error}") from None
