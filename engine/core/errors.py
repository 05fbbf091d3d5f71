"""The one exception for mistakes of the user, and errors of libraries that become one."""

import contextlib
import os
from collections.abc import Iterator


class UserError(ValueError):
    """A mistake of the user: a wrong flag, path or file.

    A command prints it as one line without a traceback, and exits with 1. The message follows the
    template ``<flag or path>: <problem> (got X). <Fix>.`` Every other exception is a bug and keeps
    its traceback.
    """


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of a library in Rust, which is not an Exception."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def wrap_library_errors(problem: str) -> Iterator[None]:
    """Turn the exceptions and panics of a library into UserErrors."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise UserError(f"{problem} ({' '.join(str(error).split())})") from None


@contextlib.contextmanager
def wrap_panics() -> Iterator[None]:
    """Turn panics of Rust libraries into UserErrors. Discards stderr, where Rust reports them."""
    stderr = os.dup(2)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise UserError(f"it makes a library panic ({' '.join(str(error).split())})") from None
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
