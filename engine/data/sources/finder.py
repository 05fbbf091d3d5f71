"""Inputs of prepare.py → sources: folders, addresses, standard input, built-in corpora."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path, PurePath

from engine.core.errors import UserError, did_you_mean
from engine.data.sources.built_in import BUILT_IN
from engine.data.sources.notes import LEFT_OUT_NOTE, Notes
from engine.data.sources.source import (
    BLOCK_BYTES,
    HUB_ADVICE,
    SAVED_DATASET_FILES,
    Source,
    file_system,
    wrap_errors,
)

STDIN_NAME = "-"
INPUT_ADVICE = "Give a file, a folder, an address, hf:NAME, - or pydocs."
# The start of an array of objects or of lists of messages, or of an object, in any encoding.
RECORDS_PATTERN = re.compile(rb'[\xef\xbb\xbf\xff\xfe\s\0]*(\[[\s\0]*){0,2}\{[\s\0]*"')


def find_sources(
    inputs: Sequence[str],
    spool: Path,
    globs: Sequence[str] = (),
    notes: Notes | None = None,
    hub_config: str | None = None,
    hub_split: str | None = None,
) -> list[Source]:
    """List the files of the inputs, in the same order on every machine.

    ``spool`` is a folder for a copy of standard input, and ``globs`` select files of folders, or
    exclude them after a "!"; none: all. Raises UserError for a missing input.
    """
    for glob in globs:  # PurePath.match reads ** as *, and raises for an empty pattern
        pattern = glob.removeprefix("!").removeprefix("**/")
        if "**" in pattern or not PurePath(pattern).parts:
            raise UserError(f"--glob: must be a pattern such as *.txt or docs/*.md (got {glob}).")
    sources: list[Source] = []
    for name in inputs:
        if name in BUILT_IN:
            matches = BUILT_IN[name](spool)
        elif name == STDIN_NAME:
            matches = [Source(_copy_stdin(spool), "standard input")]
        elif "://" in name:
            matches = _find_remote(name, globs)
        elif name.startswith("hf:"):
            matches = [_find_hub_dataset(name, hub_config, hub_split or "train")]
        elif Path(name).is_dir():
            matches = _find_in_folder(Path(name), globs, Notes() if notes is None else notes)
        else:
            matches = [Source(find_file(Path(name)), name)]
        if not matches:
            problem = f"contains no files that match {[*globs] or '*'}"
            raise UserError(f"{name}: {problem}. Give a folder with texts, or another --glob.")
        sources += matches
    return sources


def find_file(path: Path) -> Path:
    """Return the absolute path of a file. Raises UserError if it is missing or cannot be read."""
    if not os.path.lexists(path):
        siblings = {each.name: each for each in path.parent.glob("*")}
        raise UserError(f"{path}: not found. {did_you_mean(path.name, siblings, INPUT_ADVICE)}")
    if not path.is_file() or not os.access(path, os.R_OK):
        problem = "links to no file" if path.is_symlink() else "must be a file that can be read"
        raise UserError(f"{path}: {problem}. Give another, or - for standard input.")
    return path.absolute()


def _matches(path: PurePath, globs: Sequence[str]) -> bool:
    """Return whether a path matches a glob, if there are any, and none that excludes it."""
    if not globs:
        return True
    wanted = [glob.removeprefix("**/") for glob in globs if not glob.startswith("!")]
    unwanted = [glob[1:].removeprefix("**/") for glob in globs if glob.startswith("!")]
    return any(map(path.match, wanted or ["*"])) and not any(map(path.match, unwanted))


def _copy_stdin(spool: Path) -> Path:
    """Copy standard input, as a corpus is read more than once; a copy of records ends in .jsonl."""
    copy = spool / "stdin"
    wrap = wrap_errors(f"{STDIN_NAME} in {spool}", "Set TMPDIR to a larger folder.")
    with wrap, open(0, "rb", closefd=False) as stdin, open(copy, "wb") as file:
        shutil.copyfileobj(stdin, file)
    with open(copy, "rb") as file:
        has_records = RECORDS_PATTERN.match(file.read(BLOCK_BYTES))
    return copy.rename(copy.with_suffix(".jsonl")) if has_records else copy


def _find_in_folder(folder: Path, globs: Sequence[str], notes: Notes) -> list[Source]:
    """List the files of a folder; broken links and pipes are left out and noted."""
    if any((folder / name).is_file() for name in SAVED_DATASET_FILES):
        raise UserError(f"{folder}: is a saved Hugging Face dataset. Give it as hf:{folder}.")
    names = [*_list_names(folder, "", globs, set())]
    files = [name for name in names if (folder / name).is_file()]
    notes.add(LEFT_OUT_NOTE, len(names) - len(files), *sorted({*names} - {*files}))
    if names and not files:
        find_file(folder / names[0])
    absolute = folder.absolute()
    return [Source(absolute / name, str(folder / name), name, str(folder)) for name in files]


def _list_names(
    folder: Path, parent: str, globs: Sequence[str], visited: set[str]
) -> Iterator[str]:
    """Yield the paths in a folder of what matches and is no readable folder, in order.

    Hidden names are left out. Folders and files with several links to them are visited once.
    """
    try:
        entries = sorted(os.scandir(folder / parent), key=attrgetter("name"))
    except OSError:
        yield parent
        return
    real_folder = os.path.realpath(folder / parent)
    visited.add(real_folder)
    for entry in entries:
        name = os.path.join(parent, entry.name)
        is_link = entry.is_symlink()
        is_folder = os.path.isdir(entry.path) if is_link else entry.is_dir()
        real_path = os.path.realpath(entry.path) if is_link else f"{real_folder}/{entry.name}"
        if entry.name.startswith(".") or real_path in visited:
            continue
        if is_folder:
            yield from _list_names(folder, name, globs, visited)
        elif _matches(folder / name, globs):
            visited.add(real_path)
            yield name


def _find_remote(address: str, globs: Sequence[str]) -> list[Source]:
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
        Source(file, file, path.lstrip("/"), address)
        for file, path in paths.items()
        if _matches(PurePath(file), globs) and "/." not in path
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
