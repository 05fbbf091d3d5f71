"""Nothing lost, nothing let in: faults of disks, files, numbers and people, through the real commands."""

import ast
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ROOT, TINY, assert_same_run, logged, newest_checkpoint, numbers_text, seal, tiny, train_tiny

import sample
import train
from engine.core.errors import UserError
from engine.core.files import sha256
from engine.core.settings import load_settings
from engine.data.dataset import open_dataset, verify_dataset
from engine.training.config import TrainConfig
from engine.training.optimizer import MAX_SKIPPED_STEPS
from engine.training.trainer import Callback, Trainer
from prepare import PrepareConfig, prepare


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a dataset, and a finished run of two checkpoints."""
    folder = tmp_path_factory.mktemp("trust")
    (folder / "text.txt").write_text(numbers_text(2000), encoding="utf-8")
    prepare(PrepareConfig(inputs=(str(folder / "text.txt"),), tokenizer="byte", out=folder / "data"))
    train_tiny(folder / "data", folder / "run", "--steps", 4, "--eval-every", 2, "--save-every", 2)
    return folder


@pytest.fixture
def copy(place, tmp_path) -> Path:
    """The same, to do harm to."""
    return Path(shutil.copytree(place, tmp_path / "copy"))


class At(Callback):
    """Does something once, when the record of a step is made."""

    def __init__(self, step: int, act: Callable[[], Any]):
        self.step, self.act = step, act

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if trainer.step == self.step and "train_loss" in record:
            self.act()


# What the source never does.

FORBIDDEN = {"eval", "exec", "compile", "__import__", "breakpoint"}
DANGEROUS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}


@pytest.mark.parametrize("path", [*ROOT.glob("*.py"), *ROOT.glob("engine/**/*.py")], ids=lambda path: path.name)
def test_no_source_file_can_run_what_it_reads(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name.split(".")[0] for alias in node.names}
            assert not DANGEROUS & (names | {(getattr(node, "module", None) or "").split(".")[0]}), ast.unparse(node)
        if isinstance(node, ast.Call):
            name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert name not in FORBIDDEN, ast.unparse(node)
            assert name != "torch.load" or given.get("weights_only") == "True", ast.unparse(node)
            assert given.get("allow_pickle", "False") == "False", ast.unparse(node)
            assert given.get("shell", "False") == "False" and name not in ("os.system", "os.popen"), ast.unparse(node)


COMMANDS = {path.stem for path in ROOT.glob("*.py")} - {"model"}
LAYERS = ("core", "nn", "model", "data", "generation", "training", "huggingface", "report", "commands")


def layer_of(name: str) -> str | None:
    """The layer of a dotted module name; None for a module of another project."""
    first, _, rest = name.partition(".")
    if first == "engine":
        return rest.split(".")[0] or None
    if first in COMMANDS | {"benchmarks", "examples"}:
        return "commands"
    return "model" if first == "model" else None


def imported_modules(path: Path) -> list[tuple[str, str]]:
    """(dotted name, source line) of every import in a file, wherever it stands."""
    imports = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            imports += [(f"{node.module}.{alias.name}", ast.unparse(node)) for alias in node.names]
        elif isinstance(node, ast.Import):
            imports += [(alias.name, ast.unparse(node)) for alias in node.names]
    return imports


@pytest.mark.parametrize("path", [*ROOT.glob("*.py"), *ROOT.glob("engine/**/*.py")], ids=lambda path: str(path.name))
def test_imports_run_one_way(path):
    own = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for name, line in imported_modules(path):
        layer = layer_of(name)
        if layer == "commands":
            assert (own, name.split(".")[0]) == ("train", "prepare"), line
        elif layer:
            assert LAYERS.index(layer) <= LAYERS.index(layer_of(own)), line
            assert own != "model" or layer == "nn", line


# Files that are not what they seem.


class Malicious:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace: Path):
        self.trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self.trace,)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json", "manifest.json"]
)
def test_a_pickle_in_a_checkpoint_is_refused(copy, tmp_path, name):
    for path in (copy / "run" / "checkpoints").iterdir():
        (path / name).write_bytes(pickle.dumps(Malicious(tmp_path / "trace")))
        if name != "manifest.json":
            seal(path)
    with pytest.raises(UserError):
        train_tiny(copy / "data", copy / "run", "--steps", 6, "--resume")
    arguments = [str(copy / "run"), "--max-new-tokens", "3", "--device", "cpu"]
    if name == "optimizer.safetensors":  # not read to sample
        sample.main(arguments)
    else:
        with pytest.raises(UserError):
            sample.main(arguments)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("name", ["train-00000.npy", "val-00000.npy", "manifest.json", "tokenizer.json"])
def test_a_pickle_in_a_dataset_is_refused(copy, tmp_path, name):
    harmful = Malicious(tmp_path / "trace")
    if name.endswith(".npy"):
        np.save(copy / "data" / name, np.array([harmful], dtype=object), allow_pickle=True)
    else:
        (copy / "data" / name).write_bytes(pickle.dumps(harmful))
        manifest = json.loads((copy / "data" / "manifest.json").read_text()) if name == "tokenizer.json" else None
        if manifest:
            manifest["tokenizer"]["sha256"] = sha256(copy / "data" / name)
            (copy / "data" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="can't be used"):
        train_tiny(copy / "data", copy / "new")
    assert not (tmp_path / "trace").exists() and not (copy / "new").exists()


def test_a_pickle_as_settings_is_refused(tmp_path):
    (tmp_path / "config.toml").write_bytes(pickle.dumps(Malicious(tmp_path / "trace")))
    with pytest.raises(ValueError, match=r"config\.toml"):
        load_settings(TrainConfig, [str(tmp_path / "config.toml")])
    assert not (tmp_path / "trace").exists()


def leaves(value, path: tuple = ()) -> list[tuple]:
    """The paths to every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(leaf for key, inner in items for leaf in leaves(inner, (*path, key)))]


IGNORE_INDEX = {
    "origin",
    "facts",
    "documents",
    "sha256",
}  # where it came from; for interest; for --verify-data


def test_every_field_of_a_datasets_manifest_is_checked(copy):
    path = copy / "data" / "manifest.json"
    manifest = json.loads(path.read_text())
    checked = 0
    for place in leaves(manifest):
        if (
            not place
            or (set(place) & IGNORE_INDEX and place != ("tokenizer", "sha256"))
            or place == ("tokenizer", "kind")
        ):
            continue
        for wrong in (None, -1, "x", [], {}, 10**12, "../../etc/passwd"):
            damaged = json.loads(json.dumps(manifest))
            holder = damaged
            for key in place[:-1]:
                holder = holder[key]
            if place[-1] == "bytes" and wrong == 10**12:  # only a figure
                continue
            holder[place[-1]] = wrong
            path.write_text(json.dumps(damaged))
            with pytest.raises(ValueError, match="can't be used") as caught:
                open_dataset(copy / "data")
            assert "\n" not in str(caught.value) and str(copy / "data") in str(caught.value)
            checked += 1
    assert checked > 80


@pytest.mark.parametrize("name", ["train-00000.npy", "val-00000.npy"])
def test_every_damage_to_a_shard_is_refused_by_name(copy, name):
    path = copy / "data" / name
    whole = path.read_bytes()
    array = np.load(path)
    refused = {"deleted": None, "emptied": b"", "truncated": whole[:-1], "longer": whole + b"x", "no header": whole[8:]}
    for damaged in refused.values():
        path.unlink(missing_ok=True)
        if damaged is not None:
            path.write_bytes(damaged)
        with pytest.raises(ValueError, match="can't be used"):
            open_dataset(copy / "data")
    np.save(path, array.astype(np.uint32))
    with pytest.raises(ValueError, match=rf"{name} must be uint16"):
        open_dataset(copy / "data")


def test_altered_tokens_are_found_at_first_use_when_they_change_and_when_asked(copy):
    path = copy / "data" / "train-00000.npy"
    whole = path.read_bytes()
    (copy / "data" / "verified.json").unlink()
    path.write_bytes(whole[:-2] + b"\x07\x00")
    with pytest.raises(ValueError, match=r"train-00000\.npy: SHA-256 mismatch"):
        train_tiny(copy / "data", copy / "new")
    path.write_bytes(whole)
    verify_dataset(open_dataset(copy / "data"), again=False)
    before = path.stat()
    path.write_bytes(whole[:-2] + b"\x07\x00")
    with pytest.raises(ValueError, match=r"train-00000\.npy: SHA-256 mismatch"):
        train_tiny(copy / "data", copy / "new")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a failing disk would: nobody touched it
    verify_dataset(open_dataset(copy / "data"), again=False)
    with pytest.raises(ValueError, match=r"train-00000\.npy: SHA-256 mismatch"):
        train_tiny(copy / "data", copy / "new", "--verify-data")


def test_a_token_outside_the_vocabulary_is_refused_before_the_first_step(copy):
    path = copy / "data" / "val-00000.npy"
    array = np.load(path)
    array[5] = 257
    np.save(path, array)
    manifest = json.loads((copy / "data" / "manifest.json").read_text())
    manifest["splits"]["val"]["shards"][0]["sha256"] = sha256(path)
    (copy / "data" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"val-00000\.npy has token 257 of 257"):
        train_tiny(copy / "data", copy / "new")
    assert not (copy / "new").exists()


# Disks.


@pytest.fixture
def small_disk(tmp_path):
    """A file system that is soon full."""
    path = tmp_path / "small"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("a file system can't be mounted here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_disk_that_fills_up_while_saving_leaves_what_was_there(run, place, small_disk):
    flags = ["--save-every", 10, "--eval-every", 1000, "--steps", 1000, "--num-layers", 1, "--d-model", 64]
    done = run("train.py", *tiny(place / "data", small_disk / "run", *flags))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "No space left" in done.stderr, done.stderr
    assert newest_checkpoint(small_disk / "run").step >= 10
    assert not list((small_disk / "run" / "checkpoints").glob(".*"))


def test_a_disk_that_fills_up_while_logging_leaves_what_was_there(copy, small_disk):
    shutil.copytree(copy / "run", small_disk / "run")
    room = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(b"x" * (room.f_bavail * room.f_bsize - 8192))
    with pytest.raises(OSError, match="No space left"):
        train_tiny(copy / "data", small_disk / "run", "--resume", "--steps", 100_000, "--save-every", 100)
    (small_disk / "filler").unlink()
    assert newest_checkpoint(small_disk / "run").step == 4
    assert train_tiny(copy / "data", small_disk / "run", "--resume", "--steps", 6).step == 6
    assert list(logged(small_disk / "run", "train_loss")) == [1, 2, 3, 4, 5, 6]


def test_a_disk_that_fills_up_while_preparing_leaves_nothing(place, small_disk, tmp_path):
    (tmp_path / "big.txt").write_text((place / "text.txt").read_text() * 60)
    with pytest.raises(OSError, match="No space left"):
        prepare(PrepareConfig(inputs=(str(tmp_path / "big.txt"),), tokenizer="byte", out=small_disk / "data"))
    assert list(small_disk.iterdir()) == []


def test_a_removed_run_folder_ends_the_run_with_an_error_that_names_it(copy):
    class RemoveAtStepSix(Callback):
        def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
            if trainer.step == 6:
                trainer.run_dir.wait()
                shutil.rmtree(copy / "run")

    flags = ["--resume", "--steps", 20, "--save-every", 5]
    with pytest.raises(UserError, match=f"^{copy / 'run'}: .*removed"):
        train_tiny(copy / "data", copy / "run", *flags, callbacks=[RemoveAtStepSix()])
    assert not (copy / "run").exists()


def test_a_folder_that_can_not_be_written_is_refused(place, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file/run"):
        train.main(tiny(place / "data", tmp_path / "file" / "run"))


# People and machines.


def test_a_second_run_in_a_folder_is_refused_and_does_the_first_no_harm(place, tmp_path):
    def intrude() -> None:
        with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on "):
            train.main(tiny(place / "data", tmp_path / "run", "--steps", 4, "--resume"))

    flags = ["--steps", 4, "--eval-every", 2, "--save-every", 2]
    train_tiny(place / "data", tmp_path / "run", *flags, callbacks=[At(3, intrude)])
    assert_same_run(place / "run", tmp_path / "run")


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
            train.train(config, dist, [Spoiling(last), *([MetricsFile()] if dist.is_main_process else [])])


os.environ["RANK"] = "0" if os.fork() else "1"  # one import of torch serves both
run_command(main)
"""


@pytest.fixture(scope="module")
def spoiled(place, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """The folder of two runs on two init_distributed, one of which meets NaN: at steps 5 and 6, and from step 5 on."""
    out = tmp_path_factory.mktemp("spoiled")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    flags = ["--data", place / "data", *TINY, "--steps", 60, "--eval-every", 1000, "--save-every", 3]
    command = list(map(str, [sys.executable, "-c", NAN_ON_ONE, out, *flags]))
    environment = os.environ | found | {"PYTHONPATH": str(ROOT)}
    return out, subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=120)


def test_a_nan_on_one_of_two_processes_is_skipped_by_both(spoiled):
    out, _ = spoiled
    skipped, losses = logged(out / "recovers", "skipped_steps"), logged(out / "recovers", "train_loss")
    assert [skipped[step] for step in (4, 5, 6, 7, 60)] == [0, 1, 2, 2, 2]
    assert losses[5] is losses[6] is None and losses[60] < losses[1] - 0.3


def test_a_run_that_only_skips_ends_in_one_line_that_says_where_to_go_on(spoiled):
    out, done = spoiled
    assert done.returncode == 1 and "Traceback" not in done.stderr
    found = newest_checkpoint(out / "never")
    message = f"error: --learning-rate: the gradients of {MAX_SKIPPED_STEPS} steps in a row were not finite."
    assert message in done.stderr and f"--resume from step {found.step}" in done.stderr
    assert found.step > 4 and all(tensor.isfinite().all() for _, tensor in found.model())
