"""Corpora in Python's standard library: its sources, and its documentation."""

import ast
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from engine.core.errors import UserError
from engine.data.inputs.local import list_files

# Folders that hold tests or tables. Those of installed packages end in "-packages".
EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "encodings", "pydoc_data"}
MIN_DOCUMENT_CHARACTERS = 200  # of a module's docstrings


def find_modules() -> list[tuple[Path, str]]:
    """Return the path of each module, and its path in the library."""
    root = Path(sysconfig.get_path("stdlib"))

    def is_excluded(path: Path) -> bool:
        name = path.name
        return name in EXCLUDED_FOLDERS or name.endswith("-packages") or path.is_symlink()

    files = list_files(root, is_excluded)
    return [(path, str(path.relative_to(root))) for path, _ in files if path.suffix == ".py"]


def write_documentation(target: Path) -> None:
    """Write a line of JSON for each topic of the language reference, and for each module.

    The document of a module is its docstrings. Raises UserError if the reference is missing.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        problem = "this Python has no language reference (pydoc_data)"
        raise UserError(f"pydocs: {problem}. Install all of Python, or give stdlib.") from None
    documents = [topics[name].strip() for name in sorted(topics)]
    documents += ["\n\n".join(docstrings(path)) for path, _ in find_modules()]
    long_documents = [text for text in documents if len(text) >= MIN_DOCUMENT_CHARACTERS]
    lines = [json.dumps({"text": f"{text}\n"}) for text in long_documents]
    target.write_text("\n".join(lines), encoding="utf-8")


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module, and of its classes and functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the module's syntax
        tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text.strip()
