"""Faults of disks, files, numbers and users, through the real commands."""

import ast
import contextlib
import copy
import itertools
import json
import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    ROOT,
    Action,
    SpoilLoss,
    logged,
    newest_checkpoint,
    numbers_text,
    read_files,
    seal,
    train_tiny,
)

import prepare
import sample
import train
from engine.core.errors import UserError
from engine.core.files import sha256, write_json
from engine.data.dataset import open_dataset, verify_dataset
from engine.runs.checkpoint import open_checkpoint
from engine.training.optimizer import MAX_SKIPPED_STEPS


@pytest.fixture(scope="module")
def workspace(numbers, tmp_path_factory) -> Path:
    """Make a folder with a dataset, and a finished run of two checkpoints."""
    folder = tmp_path_factory.mktemp("trust")
    shutil.copytree(numbers, folder / "data")
    train_tiny(folder / "data", folder / "run", "--steps", 4, "--eval-every", 2, "--save-every", 2)
    return folder


@pytest.fixture
def place(workspace, tmp_path) -> Path:
    """Copy the workspace, to damage it."""
    return Path(shutil.copytree(workspace, tmp_path / "copy"))


# The source.

FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint", "os.system", "os.popen"}
FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
SAFE_ARGUMENTS = {"allow_pickle": "False", "shell": "False"}
LAYERS = ["engine.core", "engine.nn", "model", "engine.data", "engine.generation", "engine.runs"]
LAYERS += ["engine.serving", "engine.training", "engine.huggingface", "engine.report", "prepare"]
COMMANDS = {path.stem for path in ROOT.glob("*.py")} | {"benchmarks", "examples"}
RANKS = dict.fromkeys(COMMANDS, len(LAYERS)) | {name: rank for rank, name in enumerate(LAYERS)}


def layer_of(name: str) -> str:
    """Return the layer of a dotted module name: a folder of the engine, or a top-level module."""
    return ".".join(name.split(".")[: 2 if name.startswith("engine.") else 1])


def test_no_source_file_can_run_what_it_reads_and_imports_run_one_way():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("engine/**/*.py")]:
        own = layer_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                check_call(node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    check_import(own, f"{source}{alias.name}")


def check_call(call: ast.Call) -> None:
    name = ast.unparse(call.func)
    arguments = {str(word.arg): ast.unparse(word.value) for word in call.keywords}
    assert name not in FORBIDDEN_CALLS, ast.unparse(call)
    assert name != "torch.load" or arguments.get("weights_only") == "True"
    assert SAFE_ARGUMENTS | arguments == arguments | SAFE_ARGUMENTS, ast.unparse(call)


def check_import(own: str, name: str) -> None:
    assert name.split(".")[0] not in FORBIDDEN_MODULES
    layer = layer_of(name)
    if layer != own and (layer in RANKS or layer.startswith("engine.")):
        assert RANKS[layer] < RANKS[own], (own, name)
        assert layer != "prepare" or own == "train", name
        assert own != "model" or layer == "engine.nn", name


# Malicious and corrupted files.

CHECKPOINT = "run/checkpoints/step-00000004"
SEALED_FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json")
FILES = [f"{CHECKPOINT}/{name}" for name in (*SEALED_FILES, "manifest.json")]
FILES += ["data/train-00000.npy", "data/val-00000.npy", "data/tokenizer.json"]
FILES += ["data/manifest.json", "run/config.toml"]
WRONG_VALUES = (None, -1, "../../etc/passwd", {"x": [1]})


class Malicious:
    """Creates a folder when it is unpickled."""

    def __init__(self, trace: Path):
        self.trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self.trace,)


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_place_of_a_file_is_refused(place, tmp_path, name):
    path = place / name
    manifest = path.with_name("manifest.json")
    sealed = sha256(path).encode()
    malicious = Malicious(tmp_path / "trace")
    path.write_bytes(pickle.dumps(malicious))
    if path.suffix == ".npy":
        np.save(path, np.array([malicious], dtype=object), allow_pickle=True)
    if manifest.exists():
        manifest.write_bytes(manifest.read_bytes().replace(sealed, sha256(path).encode()))
    shutil.rmtree(place / "run" / "checkpoints" / "step-00000002")
    flags = ["--data", str(place / "data"), "--out", str(place / "run"), "--steps", "6", "--resume"]
    with pytest.raises(UserError, match=re.escape(str(place / name.split("/")[0]))):
        train.main([str(place / "run" / "config.toml"), *flags])
    is_sampled = name.startswith(CHECKPOINT) and "optimizer" not in name
    with pytest.raises(UserError) if is_sampled else contextlib.nullcontext():
        sample.main([str(place / "run"), "--max-new-tokens", "3", "--device", "cpu"])
    assert not (tmp_path / "trace").exists()


def corruptions(value: Any) -> Iterator[Any]:
    """Yield a JSON value with each part of it removed, or replaced by each wrong value."""
    keys = range(len(value)) if isinstance(value, list) else ()
    for key in value if isinstance(value, dict) else keys:
        for replacement in (*WRONG_VALUES, *corruptions(value[key])):
            changed = copy.copy(value)
            changed[key] = replacement
            yield changed
        if isinstance(value, dict):
            yield {name: item for name, item in value.items() if name != key}


def test_every_field_of_a_manifest_is_checked(place):
    readers = {"data": open_dataset, CHECKPOINT: lambda path: open_checkpoint(path).verify()}
    for name, read in readers.items():
        path = place / name / "manifest.json"
        for manifest in corruptions(json.loads(path.read_text())):
            write_json(path, manifest)
            with pytest.raises(UserError, match=f"^{re.escape(str(path.parent))}[^\n]*$"):
                read(path.parent)


def test_every_field_of_a_state_is_checked(place):
    path = place / CHECKPOINT
    shutil.rmtree(path.with_name("step-00000002"))
    state = json.loads((path / "state.json").read_text())
    states = [state | {name: wrong} for name in (*state, "unknown") for wrong in WRONG_VALUES]
    nested = corruptions({name: state[name] for name in ("settings", "model")})
    states += [state | changes for changes in itertools.islice(nested, 0, None, 61)]
    flags = ["--resume", "--steps", 4]
    num_refused = 0
    for index, changed in enumerate(states):
        write_json(path / "state.json", changed)
        seal(path)
        try:
            if index % 3:
                sample.load(place / "run")
            else:
                train_tiny(place / "data", place / "run", *flags)
        except UserError as error:
            num_refused += 1
            assert "\n" not in str(error)
    assert num_refused > 40
    write_json(path / "state.json", state)
    seal(path)
    assert train_tiny(place / "data", place / "run", "--resume", "--steps", 6).step == 6


def test_altered_tokens_are_found_at_first_use_and_by_verify_data(place):
    path = place / "data" / "train-00000.npy"
    verify_dataset(open_dataset(place / "data"), force=False)
    stat = path.stat()
    path.write_bytes(path.read_bytes()[:-2] + b"\x07\x00")
    for flags in ((), ("--verify-data",)):
        with pytest.raises(UserError, match=r"train-00000\.npy: SHA-256"):
            train_tiny(place / "data", place / "new", *flags)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a failing disk leaves it
    assert not (place / "new").exists()


# Disks, folders and numbers.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1.2 MB."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", path]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_keeps_the_checkpoints_and_delays_the_metrics(place, small_disk, capsys):
    run = shutil.copytree(place / "run", small_disk / "run")
    filler = small_disk / "filler"

    def fill() -> None:
        with contextlib.suppress(OSError):
            filler.write_bytes(b"x" * 2**21)

    flags = ["--resume", "--save-every", 100, "--eval-every", 100, "--steps"]
    with pytest.raises(OSError, match="No space left"):  # the final save
        train_tiny(place / "data", run, *flags, 12, callbacks=[Action(5, fill, "train_loss")])
    assert capsys.readouterr().err.count("warning: Metrics") <= 1
    filler.unlink()
    assert newest_checkpoint(run).step == 4 and not [*run.glob("checkpoints/.*")]
    assert all(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    actions = [Action(6, fill, "train_loss"), Action(20, filler.unlink, "train_loss")]
    train_tiny(place / "data", run, *flags, 40, callbacks=actions)
    assert capsys.readouterr().err.count("warning: Metrics") == 1
    assert list(logged(run, "train_loss")) == list(range(1, 41))


def replace_by_another(run: Path) -> None:
    run.rename(run.with_name("moved"))
    shutil.copytree(run.with_name("moved"), run)
    (run / "checkpoints" / ".step-00000009.partial.x").mkdir()  # written by that run


@pytest.mark.parametrize(
    "change", [shutil.rmtree, replace_by_another, lambda run: (run / ".lock").unlink()]
)
def test_a_run_folder_that_is_not_its_own_any_more_ends_the_run(place, change):
    run = place / "run"
    contents = {}

    def change_folder() -> None:
        change(run)
        contents.update(read_files(run))

    flags = ["--resume", "--steps", 20, "--log-every", 3, "--save-every", 100, "--eval-every", 8]
    with pytest.raises(UserError, match=f"^{run}: .*--resume"):
        train_tiny(place / "data", run, *flags, callbacks=[Action(6, change_folder, "train_loss")])
    assert read_files(run) == contents
    assert run.exists() == bool(contents)


def test_losses_that_are_not_finite_are_skipped_until_they_end_the_run(workspace, tmp_path):
    run = tmp_path / "run"
    flags = ["--steps", 1000, "--eval-every", 1000, "--save-every", 3]
    spoil = SpoilLoss([5, 6, *range(61, 1001)])
    with pytest.raises(UserError, match=rf"--learning-rate: .*\b{MAX_SKIPPED_STEPS}\b") as error:
        train_tiny(workspace / "data", run, *flags, callbacks=[spoil])
    skipped, losses = (logged(run, key) for key in ("skipped_steps", "train_loss"))
    assert [skipped[step] for step in (4, 5, 6, 7, 60, 61)] == [0, 1, 2, 2, 2, 3]
    assert losses[5] is losses[6] is losses[61] is None and losses[60] < losses[1] - 0.3
    assert "NaN" not in (run / "metrics.jsonl").read_text()
    saved = newest_checkpoint(run)
    assert saved.step >= 60 and all(tensor.isfinite().all() for _, tensor in saved.model())
    assert f"step {saved.step}." in str(error.value)


def test_a_disk_that_fills_up_while_preparing_leaves_nothing(small_disk, tmp_path):
    text = tmp_path / "big.txt"
    text.write_text(numbers_text(100_000))
    with pytest.raises(OSError, match="No space left"):
        prepare.main([str(text), "--tokenizer", "byte", "--out", str(small_disk / "data")])
    assert list(small_disk.iterdir()) == []
