"""Faults of disks, files, numbers and users, through the real commands."""

import ast
import contextlib
import functools
import json
import operator
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    ROOT,
    TINY,
    assert_same_run,
    logged,
    newest_checkpoint,
    numbers_text,
    rendezvous,
    seal,
    tiny,
    train_tiny,
)

import sample
import train
from engine.core.errors import UserError
from engine.core.files import sha256, write_json
from engine.core.settings import load_settings
from engine.data.dataset import open_dataset, verify_dataset
from engine.training.checkpoint import REQUIRED_STATE
from engine.training.config import TrainConfig
from engine.training.optimizer import MAX_SKIPPED_STEPS
from engine.training.trainer import Callback, Trainer
from prepare import PrepareConfig, prepare


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """Make a folder with a dataset, and a finished run of two checkpoints."""
    folder = tmp_path_factory.mktemp("trust")
    text = folder / "text.txt"
    text.write_text(numbers_text(2000), encoding="utf-8")
    prepare(PrepareConfig(inputs=(str(text),), tokenizer="byte", out=folder / "data"))
    train_tiny(folder / "data", folder / "run", "--steps", 4, "--eval-every", 2, "--save-every", 2)
    return folder


@pytest.fixture
def copy(workspace, tmp_path) -> Path:
    """Copy the workspace, to damage it."""
    return Path(shutil.copytree(workspace, tmp_path / "copy"))


class At(Callback):
    """Calls a function when a step is recorded."""

    def __init__(self, step: int, act: Callable[[], Any]):
        self.step, self.act = step, act

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if trainer.step == self.step and "train_loss" in record:
            self.act()


# The source.

FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint", "os.system", "os.popen"}
FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
SAFE_ARGUMENTS = {"allow_pickle": "False", "shell": "False"}
SOURCE_FILES = pytest.mark.parametrize(
    "path", [*ROOT.glob("*.py"), *ROOT.glob("engine/**/*.py")], ids=lambda path: path.name
)


@SOURCE_FILES
def test_no_source_file_can_run_what_it_reads(path: Path):
    modules = {name.split(".")[0] for name, _ in imported_modules(path)}
    assert modules.isdisjoint(FORBIDDEN_MODULES)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            arguments = {str(k.arg): ast.unparse(k.value) for k in node.keywords}
            assert name not in FORBIDDEN_CALLS, ast.unparse(node)
            assert name != "torch.load" or arguments.get("weights_only") == "True"
            for argument, value in SAFE_ARGUMENTS.items():
                assert arguments.get(argument, value) == value, ast.unparse(node)


COMMANDS = {path.stem for path in ROOT.glob("*.py")} - {"model"}
LAYERS = ["core", "nn", "model", "data", "generation", "serving", "training"]
LAYERS += ["huggingface", "report", "commands"]


def layer_of(name: str) -> str | None:
    """Return the layer of a dotted module name; None for a module of another project."""
    first, _, rest = name.partition(".")
    if first == "engine":
        return rest.split(".")[0] or None
    if first in COMMANDS | {"benchmarks", "examples"}:
        return "commands"
    return "model" if first == "model" else None


def imported_modules(path: Path) -> list[tuple[str, str]]:
    """List (dotted name, source line) of every import in a file."""
    imports = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            imports += [(f"{node.module}.{alias.name}", ast.unparse(node)) for alias in node.names]
        elif isinstance(node, ast.Import):
            imports += [(alias.name, ast.unparse(node)) for alias in node.names]
    return imports


@SOURCE_FILES
def test_imports_run_one_way(path: Path):
    own = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for name, line in imported_modules(path):
        layer = layer_of(name)
        if layer == "commands":
            assert (own, name.split(".")[0]) == ("train", "prepare"), line
        elif layer:
            assert LAYERS.index(layer) <= LAYERS.index(layer_of(own)), line
            assert own != "model" or layer == "nn", line


# Malicious and corrupted files.


class Malicious:
    """Creates a folder when it is unpickled."""

    def __init__(self, trace: Path):
        self.trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self.trace,)


CHECKPOINT_FILES = "model.safetensors optimizer.safetensors state.json tokenizer.json manifest.json"


@pytest.mark.parametrize("name", CHECKPOINT_FILES.split())
def test_a_pickle_in_a_checkpoint_is_refused(copy: Path, tmp_path: Path, name: str):
    for path in (copy / "run" / "checkpoints").iterdir():
        (path / name).write_bytes(pickle.dumps(Malicious(tmp_path / "trace")))
        if name != "manifest.json":
            seal(path)
    with pytest.raises(UserError):
        train_tiny(copy / "data", copy / "run", "--steps", 6, "--resume")
    is_read = name != "optimizer.safetensors"
    with pytest.raises(UserError) if is_read else contextlib.nullcontext():
        sample.main([str(copy / "run"), "--max-new-tokens", "3", "--device", "cpu"])
    assert not (tmp_path / "trace").exists()


DATASET_FILES = ["train-00000.npy", "val-00000.npy", "manifest.json", "tokenizer.json"]


@pytest.mark.parametrize("name", DATASET_FILES)
def test_a_pickle_in_a_dataset_is_refused(copy: Path, tmp_path: Path, name: str):
    path = copy / "data" / name
    malicious = Malicious(tmp_path / "trace")
    if name.endswith(".npy"):
        np.save(path, np.array([malicious], dtype=object), allow_pickle=True)
    else:
        path.write_bytes(pickle.dumps(malicious))
    if name == "tokenizer.json":
        manifest = json.loads((copy / "data" / "manifest.json").read_text())
        manifest["tokenizer"]["sha256"] = sha256(path)
        (copy / "data" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=re.escape(str(copy / "data"))):
        train_tiny(copy / "data", copy / "new")
    assert not (tmp_path / "trace").exists() and not (copy / "new").exists()


def test_a_pickle_as_settings_is_refused(tmp_path):
    (tmp_path / "config.toml").write_bytes(pickle.dumps(Malicious(tmp_path / "trace")))
    with pytest.raises(UserError, match=r"config\.toml"):
        load_settings(TrainConfig, [str(tmp_path / "config.toml")])
    assert not (tmp_path / "trace").exists()


def leaves(value: Any, path: tuple = ()) -> list[tuple]:
    """List the paths to every value inside a JSON value."""
    items: Any = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    return [path, *(leaf for key, inner in items for leaf in leaves(inner, (*path, key)))]


UNCHECKED_FIELDS = {"origin", "facts", "documents", "kind"}  # informative only


def test_every_field_of_a_datasets_manifest_is_checked(copy: Path):
    path = copy / "data" / "manifest.json"
    content = path.read_text()
    num_checked = 0
    for keys in leaves(json.loads(content)):
        is_shard_hash = "sha256" in keys and "tokenizer" not in keys  # for --verify-data
        if not keys or is_shard_hash or UNCHECKED_FIELDS & set(keys):
            continue
        for wrong in (None, -1, "x", [], {}, 10**12, "../../etc/passwd"):
            if keys[-1] == "bytes" and wrong == 10**12:
                continue
            manifest = json.loads(content)
            parent = functools.reduce(operator.getitem, keys[:-1], manifest)
            parent[keys[-1]] = wrong
            path.write_text(json.dumps(manifest))
            with pytest.raises(UserError, match=f"^{re.escape(str(copy / 'data'))}[^\n]*$"):
                open_dataset(copy / "data")
            num_checked += 1
    assert num_checked > 80


def test_altered_tokens_are_found_at_first_use_and_by_verify_data(copy: Path):
    path = copy / "data" / "train-00000.npy"
    content = path.read_bytes()
    verify_dataset(open_dataset(copy / "data"), force=False)
    stat = path.stat()
    path.write_bytes(content[:-2] + b"\x07\x00")
    with pytest.raises(UserError, match=r"train-00000\.npy: SHA-256"):
        train_tiny(copy / "data", copy / "new")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a failing disk leaves it
    with pytest.raises(UserError, match=r"train-00000\.npy: SHA-256"):
        train_tiny(copy / "data", copy / "new", "--verify-data")
    path.write_bytes(content + b"x")
    with pytest.raises(UserError, match=re.escape(str(copy / "data"))):
        open_dataset(copy / "data")
    assert not (copy / "new").exists()


WRONG_VALUES = (None, 0, -1, 1.5, "10", [1], {"x": [1]}, 10**400)


def test_every_field_of_a_checkpoints_state_is_checked_or_has_a_default(
    copy: Path, workspace: Path
):
    def resume(run: Path) -> None:
        train_tiny(copy / "data", run, "--resume", "--steps", 4, "--eval-every", 2)

    checkpoint = newest_checkpoint(copy / "run").path
    original = newest_checkpoint(workspace / "run")
    state = original.state
    states = [state | {name: wrong} for name in state for wrong in WRONG_VALUES]
    states += [{key: state[key] for key in state.keys() - {name}} for name in state]
    states.append(state | {"unknown": 1})
    for name in ("settings", "model"):
        states += [state | {name: state[name] | {key: [{}]}} for key in state[name]]
    num_refused = 0
    for changed in states:
        write_json(checkpoint / "state.json", changed)
        seal(checkpoint)
        for use in (sample.load, resume):
            try:
                use(copy / "run")
            except UserError as error:
                num_refused += 1
                assert "\n" not in str(error)
        shutil.rmtree(copy / "run" / "checkpoints")
        shutil.copytree(original.path, checkpoint)
    assert num_refused > 150


def test_a_checkpoint_without_fields_of_later_versions_is_resumed(copy: Path):
    checkpoint = newest_checkpoint(copy / "run")
    state = {name: x for name, x in checkpoint.state.items() if name in REQUIRED_STATE}
    state["settings"] = state["settings"].copy()
    for name in ("long_examples", "mix", "window_warmup", "keep_checkpoints", "minutes"):
        del state["settings"][name]
    write_json(checkpoint.path / "state.json", state)
    seal(checkpoint.path)
    assert train_tiny(copy / "data", copy / "run", "--resume", "--steps", 6).step == 6


# Disks.


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


def test_a_disk_that_fills_up_while_saving_keeps_the_saved_checkpoints(run, workspace, small_disk):
    flags = ["--save-every", 10, "--eval-every", 1000, "--steps", 1000]
    flags += ["--num-layers", 1, "--d-model", 64]
    done = run("train.py", *tiny(workspace / "data", small_disk / "run", *flags))
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "No space left" in done.stderr
    assert newest_checkpoint(small_disk / "run").step >= 10
    assert not list((small_disk / "run" / "checkpoints").glob(".*"))


def test_a_disk_that_fills_up_while_logging_keeps_the_run(copy: Path, small_disk: Path):
    out = small_disk / "run"
    shutil.copytree(copy / "run", out)
    stat = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(b"x" * (stat.f_bavail * stat.f_bsize - 8192))
    with pytest.raises(OSError, match="No space left"):
        train_tiny(copy / "data", out, "--resume", "--steps", 100_000, "--save-every", 100)
    (small_disk / "filler").unlink()
    assert newest_checkpoint(out).step == 4
    assert train_tiny(copy / "data", out, "--resume", "--steps", 6).step == 6
    assert list(logged(out, "train_loss")) == [1, 2, 3, 4, 5, 6]


def test_metrics_of_a_full_disk_are_written_when_there_is_space_again(copy, small_disk, capsys):
    shutil.copytree(copy / "run", small_disk / "run")
    filler = small_disk / "filler"

    def fill() -> None:
        with contextlib.suppress(OSError):
            filler.write_bytes(b"x" * 2**21)

    flags = ["--resume", "--steps", 12, "--save-every", 100, "--eval-every", 100]
    with pytest.raises(OSError, match="No space left"):  # the final save
        train_tiny(copy / "data", small_disk / "run", *flags, callbacks=[At(5, fill)])
    assert capsys.readouterr().err.count("warning: Metrics") <= 1
    filler.unlink()
    assert all(map(json.loads, (small_disk / "run" / "metrics.jsonl").read_text().splitlines()))
    flags[2] = 40
    actions = [At(6, fill), At(20, filler.unlink)]
    train_tiny(copy / "data", small_disk / "run", *flags, callbacks=actions)
    assert capsys.readouterr().err.count("warning: Metrics") == 1
    assert list(logged(small_disk / "run", "train_loss")) == list(range(1, 41))


def test_a_disk_that_fills_up_while_preparing_leaves_nothing(workspace, small_disk, tmp_path):
    text = tmp_path / "big.txt"
    text.write_text((workspace / "text.txt").read_text() * 60)
    with pytest.raises(OSError, match="No space left"):
        prepare(PrepareConfig(inputs=(str(text),), tokenizer="byte", out=small_disk / "data"))
    assert list(small_disk.iterdir()) == []


def remove_while_it_is_written(run: Path) -> None:
    """Remove a folder like ``rm -rf``, as another process adds a file to it."""
    shutil.rmtree(run)
    run.mkdir()
    (run / "metrics.jsonl").write_text("")


def replace_by_another(run: Path) -> None:
    run.rename(run.with_name("moved"))
    shutil.copytree(run.with_name("moved"), run)
    (run / "checkpoints" / ".step-00000009.partial.x").mkdir()  # written by that run


@pytest.mark.parametrize("flags", [["--save-every", 5], ["--save-every", 100, "--eval-every", 8]])
@pytest.mark.parametrize(
    "change",
    [
        shutil.rmtree,
        lambda run: run.rename(run.with_name("moved")),
        remove_while_it_is_written,
        replace_by_another,
        lambda run: (run / ".lock").unlink(),
    ],
    ids=["removed", "renamed", "recreated", "replaced", "unlocked"],
)
def test_a_run_folder_that_is_not_its_own_any_more_ends_the_run(copy, change, flags):
    contents = {}

    def change_folder() -> None:
        trainer_dirs[0].wait()
        change(copy / "run")
        contents.update(read_files(copy / "run"))

    class Watch(Callback):
        def on_train_start(self, trainer: Trainer) -> None:
            trainer_dirs.append(trainer.run_dir)

    trainer_dirs: list[Any] = []
    flags = ["--resume", "--steps", 20, "--log-every", 3, *flags]
    with pytest.raises(UserError, match=f"^{copy / 'run'}: .*--resume"):
        train_tiny(copy / "data", copy / "run", *flags, callbacks=[Watch(), At(6, change_folder)])
    assert read_files(copy / "run") == contents
    assert (copy / "run").exists() == bool(contents)


def read_files(folder: Path) -> dict[Path, bytes]:
    """Return the content of each file in a folder, and b"" for each folder."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_a_folder_that_can_not_be_written_is_refused(workspace, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file/run"):
        train.main(tiny(workspace / "data", tmp_path / "file" / "run"))


# Users and numbers.


def test_a_second_run_in_a_folder_is_refused_and_does_the_first_no_harm(workspace, tmp_path):
    def intrude() -> None:
        with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on "):
            train.main(tiny(workspace / "data", tmp_path / "run", "--steps", 4, "--resume"))

    flags = ["--steps", 4, "--eval-every", 2, "--save-every", 2]
    train_tiny(workspace / "data", tmp_path / "run", *flags, callbacks=[At(3, intrude)])
    assert_same_run(workspace / "run", tmp_path / "run")


NAN_ON_ONE = """
import os
import sys

import train
from engine.core.cli import run_command
from engine.training.callbacks import MetricsFile
from engine.core.distributed import init_distributed
from engine.core.settings import load_settings
from engine.training.config import TrainConfig
from engine.training.trainer import Callback


class Spoiling(Callback):
    def __init__(self, last):
        self.last = last

    def on_train_start(self, trainer):
        def spoil(model, inputs, loss):
            bad = model.training and trainer.dist.rank == 1 and 4 <= trainer.step < self.last
            return loss * float("nan") if bad else loss

        trainer.model.register_forward_hook(spoil)


def main():
    out, *flags = sys.argv[1:]
    with init_distributed("cpu", timeout=60) as dist:
        for name, last in (("recovers", 6), ("never", 1000)):
            config = load_settings(TrainConfig, ["--out", f"{out}/{name}", *flags])
            metrics = [MetricsFile()] if dist.is_main_process else []
            train.train(config, dist, [Spoiling(last), *metrics])


os.environ["RANK"] = "0" if os.fork() else "1"  # one import of torch serves both
run_command(main)
"""


@pytest.fixture(scope="module")
def spoiled(workspace, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """Train twice on two ranks, one of which has NaN losses: in steps 5 and 6, or from step 5."""
    out = tmp_path_factory.mktemp("spoiled")
    flags = [*TINY, "--steps", "60", "--eval-every", "1000", "--save-every", "3"]
    command = [sys.executable, "-c", NAN_ON_ONE, out, "--data", workspace / "data", *flags]
    options = {"capture_output": True, "encoding": "utf-8", "timeout": 120}
    with rendezvous(2) as variables:
        environment = {**os.environ, **variables, "LOCAL_RANK": "0", "PYTHONPATH": str(ROOT)}
        return out, subprocess.run(list(map(str, command)), env=environment, **options)


def test_a_nan_on_one_of_two_processes_is_skipped_by_both(spoiled):
    out, _ = spoiled
    skipped = logged(out / "recovers", "skipped_steps")
    losses = logged(out / "recovers", "train_loss")
    assert [skipped[step] for step in (4, 5, 6, 7, 60)] == [0, 1, 2, 2, 2]
    assert losses[5] is losses[6] is None and losses[60] < losses[1] - 0.3


def test_a_run_that_only_skips_ends_in_one_line_with_the_step_to_resume_from(spoiled):
    out, done = spoiled
    checkpoint = newest_checkpoint(out / "never")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(rf"--learning-rate: .*\b{MAX_SKIPPED_STEPS}\b", done.stderr)
    assert f"--resume from step {checkpoint.step}" in done.stderr
    assert checkpoint.step > 4
    assert all(tensor.isfinite().all() for _, tensor in checkpoint.model())
