"""The one exception for mistakes of the user."""


class UserError(ValueError):
    """A mistake of the user: a wrong flag, path or file.

    A command prints it as one line without a traceback, and exits with 1. The message follows the
    template ``<flag or path>: <problem> (got X). <Fix>.`` Every other exception is a bug and keeps
    its traceback.
    """
