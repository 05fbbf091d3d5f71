"""Corpora in Python's standard library: its sources, and its documentation."""

import ast
import json
import re
import sysconfig
from pathlib import Path

from engine.core.errors import UserError
from engine.data.inputs.local import list_files

# Folders that hold tests, tables or installed packages.
EXCLUDED_PATTERN = re.compile("tests?|idle_test|encodings|pydoc_data|.*-packages")
DOCUMENTED_NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MIN_DOCUMENT_CHARACTERS = 200  # of a module's docstrings


def find_modules() -> list[tuple[Path, str]]:
    """Return the path of each module, and its path in the library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = list_files(
        root, lambda path: path.is_symlink() or bool(EXCLUDED_PATTERN.fullmatch(path.name))
    )
    return [(path, str(path.relative_to(root))) for path in files if path.suffix == ".py"]


def write_documentation(target: Path) -> Path:
    """Write a line of JSON for each topic of the language reference, and for each module.

    The document of a module is its docstrings. Raises UserError if the reference is missing.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError("pydocs: needs pydoc_data of Python. Install it, or give stdlib.") from None
    documents = [topics[name].strip() for name in sorted(topics)]
    for path, _ in find_modules():
        nodes = ast.walk(ast.parse(path.read_bytes()))
        texts = [ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED_NODES)]
        documents.append("\n\n".join(text.strip() for text in texts if text))
    long_documents = [text for text in documents if len(text) >= MIN_DOCUMENT_CHARACTERS]
    lines = [json.dumps({"text": f"{text}\n"}) for text in long_documents]
    target.write_text("\n".join(lines), encoding="utf-8")
    return target
