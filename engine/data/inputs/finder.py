"""Inputs of prepare.py → sources: folders, addresses, standard input, built-in corpora."""

import ast
import difflib
import json
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path, PurePath

from engine.core.cli import count_noun, warn
from engine.core.errors import UserError
from engine.core.files import atomic_directory, sha256
from engine.data.inputs.sources import (
    BLOCK_BYTES,
    DEFAULT_ENCODING,
    HUB_ADVICE,
    SAVED_DATASET_FILES,
    Source,
    file_system,
    wrap_errors,
)
from engine.data.inputs.text import BYTE_ORDER_MARKS, FOREIGN_PATTERNS, find_kind

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STDIN_NAME = "-"
INPUT_ADVICE = "Give a file, a folder, an address, hf:NAME, - or pydocs."
FINDER_FILE = ".DS_Store"  # of a folder that macOS has shown
# The start of an array of objects or of lists of messages, or of an object.
RECORDS_PATTERN = re.compile(r'\ufeff?\s*(\[\s*){0,2}\{\s*"')
# Folders that hold tests, tables or installed packages.
EXCLUDED_PATTERN = re.compile("tests?|idle_test|encodings|pydoc_data|.*-packages")
DOCUMENTED_NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MIN_DOCUMENT_CHARACTERS = 200  # of a module's docstrings


def find_sources(
    inputs: tuple[str, ...],
    spool: Path,
    glob: str | None = None,
    hub_config: str | None = None,
    hub_split: str | None = None,
) -> list[Source]:
    """List the files of the inputs, in the same order on every machine.

    ``spool`` is a folder for a copy of standard input, and ``glob`` selects files of folders; None:
    all. Raises UserError for a missing input.
    """
    pattern = "*" if glob is None else glob.removeprefix("**/")
    if "**" in pattern or not PurePath(pattern).parts:
        raise UserError(f"--glob: must be a pattern such as *.txt or docs/*.md (got {glob}).")
    sources: list[Source] = []
    for name in inputs:
        if name == "stdlib":
            matches = _find_modules()
        elif name == "pydocs":
            matches = [Source(_write_documentation(spool / "pydocs.jsonl"), name)]
        elif name == "shakespeare":
            matches = [Source(_download_shakespeare(), name)]
        elif name == STDIN_NAME:
            matches = [Source(_copy_stdin(spool), "standard input")]
        elif "://" in name:
            matches = _find_remote(name, pattern)
        elif name.startswith("hf:"):
            matches = [_find_hub_dataset(name, hub_config, hub_split or "train")]
        elif Path(name).is_dir():
            matches = _find_in_folder(Path(name), pattern)
        else:
            matches = [Source(find_file(Path(name)), name)]
        if not matches:
            problem = f"no files match {glob!r}. Give another --glob, in quotes."
            if glob is None:
                problem = "contains no files. Give a folder with texts."
            raise UserError(f"{name}: {problem}")
        text_files = [source.name for source in matches if source.kind == "text"]
        if glob is None and text_files and len(text_files) < len(matches):
            reason = f"has plain text ({text_files[0]}) beside records"
            suffix = next(source.suffixes[0] for source in matches if source.kind != "text")
            raise UserError(f"{name}: {reason}. Choose files with --glob '*{suffix}'.")
        sources += matches
    return sources


def find_file(path: Path) -> Path:
    """Return the absolute path of a file. Raises UserError if it is missing or cannot be read."""
    if not os.path.lexists(path):
        siblings = [each.name for each in path.parent.glob("*")]
        similar = difflib.get_close_matches(path.name, siblings, 1)
        advice = f"Did you mean {path.with_name(similar[0])}?" if similar else INPUT_ADVICE
        raise UserError(f"{path}: not found. {advice}")
    if not path.is_file() or not os.access(path, os.R_OK):
        advice = "Give another, - for standard input, or choose files with --glob"
        raise UserError(f"{path}: must be a file that can be read, and no pipe. {advice}.")
    return path.absolute()


def _copy_stdin(spool: Path) -> Path:
    """Copy standard input, as a corpus is read more than once; a copy of records ends in .jsonl."""
    copy = spool / "stdin"
    try:
        with open(0, "rb", closefd=False) as stdin, open(copy, "wb") as file:
            shutil.copyfileobj(stdin, file)
    except OSError as error:
        reason = f"could not be copied to {spool} ({error.strerror})"
        raise UserError(f"{STDIN_NAME}: {reason}. Set TMPDIR to a larger folder.") from None
    with open(copy, "rb") as file:
        head = file.read(BLOCK_BYTES)
    text = head.decode(find_kind(head, BYTE_ORDER_MARKS) or DEFAULT_ENCODING, errors="replace")
    has_records = RECORDS_PATTERN.match(text)
    return copy.rename(copy.with_suffix(".jsonl")) if has_records else copy


def _find_in_folder(folder: Path, pattern: str) -> list[Source]:
    if any((folder / name).is_file() for name in SAVED_DATASET_FILES):
        raise UserError(f"{folder}: is a saved Hugging Face dataset. Give it as hf:{folder}.")
    sources = [
        Source(find_file(path), str(path), path.relative_to(folder).as_posix())
        for path in _list_files(folder, pattern, set())
    ]
    foreign = [source for source in sources if _is_foreign(Path(source.path))]
    if foreign and len(foreign) < len(sources):
        count = count_noun(len(foreign), "file")
        warn(f"{folder}: {count} left out, not text (such as {foreign[0].listed_name})")
        sources = [source for source in sources if source not in foreign]
    return sources


def _is_foreign(path: Path) -> bool:
    """Return whether a file is certainly not text."""
    with open(path, "rb") as file:
        return path.name == FINDER_FILE or find_kind(file.peek(), FOREIGN_PATTERNS) is not None


def _list_files(folder: Path, pattern: str, visited: set[Path]) -> Iterator[Path]:
    """Yield the files at any depth that match, in order, without hidden ones.

    Folders and files with several links to them are visited once.
    """
    real_folder = Path(os.path.realpath(folder))
    if real_folder in visited:
        return
    visited.add(real_folder)
    with wrap_errors(str(folder), "Change its permissions."):
        paths = sorted(folder.iterdir())
    for path in paths:
        if path.name.startswith(".") and path.name != FINDER_FILE:
            continue
        if path.is_dir():
            yield from _list_files(path, pattern, visited)
        elif path.match(pattern):
            is_link = path.is_symlink()
            real_path = Path(os.path.realpath(path)) if is_link else real_folder / path.name
            if real_path not in visited:
                visited.add(real_path)
                yield path


def _find_remote(address: str, pattern: str) -> list[Source]:
    """List the files of an address, without hidden ones, unless the address names them."""
    fs, path = file_system(address)
    with wrap_errors(address):
        if "*" in path:
            entries = fs.glob(path, detail=True).items()
            files = [file for file, info in entries if info["type"] == "file"]
        elif address.endswith("/") or fs.info(path)["type"] == "directory":
            files = fs.find(path)
        else:
            return [Source(address, address)]
        folder = f"{path}/".partition("*")[0].rpartition("/")[0]
        paths = {fs.unstrip_protocol(file): file.removeprefix(folder) for file in sorted(files)}
    return [
        Source(file, file, path.lstrip("/"))
        for file, path in paths.items()
        if PurePath(file).match(pattern) and "/." not in path
    ]


def _find_hub_dataset(name: str, config: str | None, split: str) -> Source:
    path = name.removeprefix("hf:")
    if Path(path).exists():
        folder = Path(path).absolute()
        return Source(folder, name, folder.name, hub_split=split, hub_config=config)
    with wrap_errors(name, HUB_ADVICE):
        from huggingface_hub import HfApi

        revision = HfApi().dataset_info(path).sha or ""
    return Source(path, name, name, hub_split=split, hub_config=config, revision=revision)


def _download_shakespeare() -> Path:
    """Return the path of the cached text. Raises UserError if it cannot be had, or is another."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "gpt-trainer")
    try:
        path = cache.expanduser() / SHAKESPEARE_SHA256[:16] / "input.txt"
        if not path.exists():
            fs, remote = file_system(SHAKESPEARE_URL)
            advice = "Check the connection, or give stdlib or a file of your own instead."
            with atomic_directory(path.parent) as partial, wrap_errors(SHAKESPEARE_URL, advice):
                fs.get_file(remote, str(partial / path.name))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        reason = f"can't keep {SHAKESPEARE_URL} ({error})"
        raise UserError(f"{cache}: {reason}. Set XDG_CACHE_HOME to another folder.") from None
    actual_sha256 = sha256(path)
    if actual_sha256 != SHAKESPEARE_SHA256:
        path.unlink()
        reason = f"SHA-256 must be {SHAKESPEARE_SHA256} (got {actual_sha256})"
        raise UserError(f"{SHAKESPEARE_URL}: {reason}. Download it again.")
    return path


def _find_modules() -> list[Source]:
    """List the modules of the library, named by their paths in it."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folder_names, names in os.walk(root):
        folder_names[:] = [n for n in folder_names if not EXCLUDED_PATTERN.fullmatch(n)]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    files = {str(path.relative_to(root)): path for path in sorted(paths) if not path.is_symlink()}
    return [Source(path, name, name) for name, path in files.items()]


def _write_documentation(target: Path) -> Path:
    """Write a line of JSON for each topic of the language reference, and for each module.

    The document of a module is its docstrings. Raises UserError if the reference is missing.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError("pydocs: needs pydoc_data of Python. Install it, or give stdlib.") from None
    documents = [topics[name].strip() for name in sorted(topics)]
    for module in _find_modules():
        nodes = ast.walk(ast.parse(Path(module.path).read_bytes()))
        texts = [ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED_NODES)]
        documents.append("\n\n".join(text.strip() for text in texts if text))
    long_documents = [text for text in documents if len(text) >= MIN_DOCUMENT_CHARACTERS]
    lines = [json.dumps({"text": f"{text}\n"}) for text in long_documents]
    target.write_text("\n".join(lines), encoding="utf-8")
    return target
