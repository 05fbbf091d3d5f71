"""The built-in corpora: pydocs, stdlib and shakespeare."""

import ast
import json
import os
import re
import sysconfig
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import atomic_directory, sha256
from engine.data.sources.source import Source, file_system, wrap_errors

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
CACHE_ADVICE = "Check the connection and XDG_CACHE_HOME, or give stdlib or a file of your own."
# Folders that hold tests, tables or installed packages.
EXCLUDED_PATTERN = re.compile("tests?|idle_test|encodings|pydoc_data|.*-packages")
DOCUMENTED_NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MIN_DOCUMENT_CHARACTERS = 200  # of a module's docstrings


def download_shakespeare(spool: Path) -> list[Source]:
    """Return the cached text. Raises UserError if it cannot be downloaded, or is another."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "gpt-trainer")
    with wrap_errors(f"{SHAKESPEARE_URL} in {cache}", CACHE_ADVICE):
        path = cache.expanduser() / SHAKESPEARE_SHA256[:16] / "input.txt"
        if not path.exists():
            fs, remote = file_system(SHAKESPEARE_URL)
            with atomic_directory(path.parent) as partial:
                fs.get_file(remote, str(partial / path.name))
        actual_sha256 = sha256(path)
        if actual_sha256 != SHAKESPEARE_SHA256:
            path.unlink()
            reason = f"SHA-256 must be {SHAKESPEARE_SHA256} (got {actual_sha256})"
            raise UserError(f"{SHAKESPEARE_URL}: {reason}. Download it again.")
    return [Source(path, "shakespeare")]


def find_modules(spool: Path) -> list[Source]:
    """List the modules of the library, named by their paths in it."""
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not EXCLUDED_PATTERN.fullmatch(name)]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    names = {path: str(path.relative_to(root)) for path in sorted(paths) if not path.is_symlink()}
    return [Source(path, name, name) for path, name in names.items()]


def write_documentation(spool: Path) -> list[Source]:
    """Write a line of JSON for each topic of the language reference, and for each module.

    The document of a module is its docstrings. Raises UserError if the reference is missing.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError("pydocs: needs pydoc_data of Python. Install it, or give stdlib.") from None
    documents = [topics[name].strip() for name in sorted(topics)]
    for module in find_modules(spool):
        nodes = ast.walk(ast.parse(Path(module.path).read_bytes()))
        texts = [ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED_NODES)]
        documents.append("\n\n".join(text.strip() for text in texts if text))
    long_documents = [text for text in documents if len(text) >= MIN_DOCUMENT_CHARACTERS]
    lines = [json.dumps({"text": f"{text}\n"}) for text in long_documents]
    path = spool / "pydocs.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return [Source(path, "pydocs")]


BUILT_IN = {
    "pydocs": write_documentation,
    "stdlib": find_modules,
    "shakespeare": download_shakespeare,
}
