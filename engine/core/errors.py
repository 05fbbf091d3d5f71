"""The one exception for mistakes of the user, and errors of libraries that become one."""

import contextlib
import difflib
import importlib
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ENGINE_FOLDER = Path(__file__).resolve().parents[1]
MAX_REASON_CHARACTERS = 200  # of an error, in a warning
MIN_SIMILARITY = 0.65  # of a name to the one that was meant: 1 is equal
BUG_TYPES = (AssertionError, AttributeError, LookupError, NameError, TypeError)


class UserError(Exception):
    """A mistake of the user, which a command prints as one line before it exits with 1.

    The message follows the template ``<flag or path>: <problem> (got X). <Fix>.`` Every other
    exception is a bug and keeps its traceback.
    """


def did_you_mean(name: str, proposals: Mapping[str, object], advice: str) -> str:
    """Return the question whether a wrong name means a proposal, by the name that is most similar.

    A name that begins with the wrong one comes first. ``advice`` is returned if none is similar.
    """
    matches = sorted((each for each in proposals if each.startswith(name)), key=len)
    matches = matches if len(name) > 2 or name in matches else []
    matches += difflib.get_close_matches(name, proposals, 1, MIN_SIMILARITY)
    return f"Did you mean {proposals[matches[0]]}?" if matches else advice


@contextlib.contextmanager
def wrap_library_errors(problem: str, *types: type[Exception], advice: str = "") -> Iterator[None]:
    """Turn exceptions of these types, and panics of libraries in Rust, into UserErrors."""
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # it is not an Exception
        if not isinstance(error, types) and not is_panic:
            raise
        raise UserError(f"{problem} ({' '.join(str(error).split())}){advice}") from None


def is_bug(error: BaseException) -> bool:
    """Return whether an error is a mistake in this project's code, rather than one of a library."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, BUG_TYPES) and ENGINE_FOLDER in Path(frame.f_code.co_filename).parents


def import_optional(module: str, name: str, extra: str = "data") -> Any:
    """Import a module of an optional package. Raises UserError with the command to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        command = f'pip install -e ".[{extra}]"'
        raise UserError(f"{name}: needs the package {module}. Install it: {command}") from None


def describe_briefly(error: Exception) -> str:
    """Return the class of an error and its first line."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:MAX_REASON_CHARACTERS]
