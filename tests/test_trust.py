"""Nothing lost, nothing let in: faults of disks, files, numbers and people, through the real commands."""

import ast
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

import sample
import train
from engine.checkpoint import newest_checkpoint
from engine.files import lock, sha256
from engine.settings import load_settings
from engine.shards import open_dataset, verify_dataset
from prepare import PrepareConfig, prepare

TINY = "--num-layers 1 --num-heads 2 --d-model 16 --context-length 16 --batch-size 4 --warmup-steps 2 --log-every 1"
TINY = [*TINY.split(), "--eval-tokens", "500", "--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a dataset, and a finished run of two checkpoints."""
    folder = tmp_path_factory.mktemp("trust")
    text = "".join(f"{number} is followed by {number + 1}.\n" for number in range(2000))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    prepare(PrepareConfig(inputs=(str(folder / "text.txt"),), tokenizer="byte", out=folder / "data"))
    train_here(folder / "data", folder / "run", "--steps", 4, "--eval-every", 2, "--save-every", 2)
    return folder


@pytest.fixture
def copy(place, tmp_path) -> Path:
    """The same, to do harm to."""
    shutil.copytree(place, tmp_path / "copy")
    return tmp_path / "copy"


def train_here(data: Path, out: Path, *flags: object) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "--data", str(data), "--out", str(out), *TINY, *map(str, flags)])
        return train.main()


def sample_here(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sample.py", str(path), "--max-new-tokens", "3", "--device", "cpu"])
        sample.main()


def records(run: Path, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


# What the source never does.

FORBIDDEN = {"eval", "exec", "compile", "__import__", "breakpoint"}
DANGEROUS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}


@pytest.mark.parametrize("path", [*ROOT.glob("*.py"), *ROOT.glob("engine/*.py")], ids=lambda path: path.name)
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


# Files that are not what they seem.


class Malicious:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace: Path):
        self.trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self.trace,)


def seal(path: Path) -> None:
    """Make a checkpoint's manifest agree with its files."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = {name: sha256(path / name) for name in manifest["files"]}
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json", "manifest.json"]
)
def test_a_pickle_in_a_checkpoint_is_refused(copy, tmp_path, name):
    for path in (copy / "run" / "checkpoints").iterdir():
        (path / name).write_bytes(pickle.dumps(Malicious(tmp_path / "trace")))
        if name != "manifest.json":
            seal(path)
    with pytest.raises(ValueError, match=r"damaged|holds no checkpoint"):
        train_here(copy / "data", copy / "run", "--steps", 6, "--resume")
    if name != "optimizer.safetensors":
        with pytest.raises(ValueError, match="damaged"):
            sample_here(copy / "run")
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
        train_here(copy / "data", copy / "new")
    assert not (tmp_path / "trace").exists() and not (copy / "new").exists()


def test_a_pickle_as_settings_is_refused(tmp_path):
    (tmp_path / "config.toml").write_bytes(pickle.dumps(Malicious(tmp_path / "trace")))
    with pytest.raises(ValueError, match=r"config\.toml"):
        load_settings(train.TrainConfig, [str(tmp_path / "config.toml")])
    assert not (tmp_path / "trace").exists()


def leaves(value, path: tuple = ()) -> list[tuple]:
    """The paths to every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(leaf for key, inner in items for leaf in leaves(inner, (*path, key)))]


IGNORED = {"origin", "documents", "sha256"}  # where it came from; counted for interest; looked at by --verify-data


def test_every_field_of_a_datasets_manifest_is_checked(copy):
    path = copy / "data" / "manifest.json"
    manifest = json.loads(path.read_text())
    checked = 0
    for place in leaves(manifest):
        if not place or (set(place) & IGNORED and place != ("tokenizer", "sha256")) or place == ("tokenizer", "kind"):
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
    with pytest.raises(ValueError, match=rf"{name} holds uint32"):
        open_dataset(copy / "data")


def test_altered_tokens_are_found_at_first_use_when_they_change_and_when_asked(copy):
    path = copy / "data" / "train-00000.npy"
    whole = path.read_bytes()
    (copy / "data" / "verified.json").unlink()
    path.write_bytes(whole[:-2] + b"\x07\x00")
    with pytest.raises(ValueError, match=r"train-00000\.npy is not as it was written"):
        train_here(copy / "data", copy / "new")
    path.write_bytes(whole)
    verify_dataset(open_dataset(copy / "data"), again=False)
    before = path.stat()
    path.write_bytes(whole[:-2] + b"\x07\x00")
    with pytest.raises(ValueError, match=r"train-00000\.npy is not as it was written"):
        train_here(copy / "data", copy / "new")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a failing disk would: nobody touched it
    verify_dataset(open_dataset(copy / "data"), again=False)
    with pytest.raises(ValueError, match=r"train-00000\.npy is not as it was written"):
        train_here(copy / "data", copy / "new", "--verify-data")


def test_a_token_outside_the_vocabulary_is_refused_before_the_first_step(copy):
    path = copy / "data" / "val-00000.npy"
    array = np.load(path)
    array[5] = 257
    np.save(path, array)
    manifest = json.loads((copy / "data" / "manifest.json").read_text())
    manifest["splits"]["val"]["shards"][0]["sha256"] = sha256(path)
    (copy / "data" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"val-00000\.npy has token 257 of 257"):
        train_here(copy / "data", copy / "new")
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


def said_in_one_line(done: subprocess.CompletedProcess, message: str) -> bool:
    return done.returncode == 1 and done.stderr.count("\n") == 1 and message in done.stderr


def test_a_disk_that_fills_up_while_saving_leaves_what_was_there(run, place, small_disk):
    flags = [*TINY, "--save-every", 10, "--eval-every", 1000, "--steps", 1000, "--d-model", 64]
    done = run("train.py", "--data", place / "data", "--out", small_disk / "run", *flags)
    assert said_in_one_line(done, "No space left"), done.stderr
    found = newest_checkpoint(small_disk / "run", print)
    assert found.step >= 10 and not list((small_disk / "run" / "checkpoints").glob(".*"))


def test_a_disk_that_fills_up_while_logging_leaves_what_was_there(copy, small_disk, run):
    shutil.copytree(copy / "run", small_disk / "run")
    room = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(b"x" * (room.f_bavail * room.f_bsize - 8192))
    done = run("train.py", "--data", copy / "data", "--out", small_disk / "run", *TINY, "--resume", "--steps", 100_000)
    assert said_in_one_line(done, "No space left"), done.stderr
    (small_disk / "filler").unlink()
    assert newest_checkpoint(small_disk / "run", print).step == 4
    assert train_here(copy / "data", small_disk / "run", "--resume", "--steps", 6) == 0


def test_a_disk_that_fills_up_while_preparing_leaves_nothing(run, place, small_disk):
    (small_disk.parent / "big.txt").write_text((place / "text.txt").read_text() * 60)
    done = run("prepare.py", "big.txt", "--tokenizer", "byte", "--out", small_disk / "data")
    assert said_in_one_line(done, "No space left"), done.stderr
    assert list(small_disk.iterdir()) == []


def test_a_run_folder_that_vanishes_ends_the_run_in_one_line(copy, monkeypatch):
    log = train.log

    def log_and_remove(run, *arguments):
        log(run, *arguments)
        if run.step == 6:
            shutil.rmtree(copy / "run")
            (copy / "run").write_text("in the way")

    monkeypatch.setattr(train, "log", log_and_remove)
    with pytest.raises(OSError, match="run"):
        train_here(copy / "data", copy / "run", "--resume", "--steps", 20, "--save-every", 5)


# People and machines.


def started(run: Path, data: Path, *flags: object) -> subprocess.Popen:
    command = [sys.executable, ROOT / "train.py", "--data", data, "--out", run, *TINY, "--steps", 100_000]
    command += ["--save-every", 50, "--eval-every", 100_000, *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    process = subprocess.Popen(list(map(str, command)), **pipes)
    deadline = time.monotonic() + 60
    while not list(run.glob("checkpoints/step-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_a_second_writer_is_told_who_was_first_and_a_closed_terminal_saves(place, tmp_path):
    process = started(tmp_path / "run", place / "data")
    with pytest.raises(ValueError, match=rf"run is in use by process {process.pid} on "):
        train_here(place / "data", tmp_path / "run", "--resume")
    process.send_signal(signal.SIGHUP)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGHUP and "which is saved" in output and not errors
    saved = newest_checkpoint(tmp_path / "run", print).step
    process = started(tmp_path / "run", place / "data", "--resume")
    process.send_signal(signal.SIGKILL)
    process.wait()
    lock(tmp_path / "run").close()  # a lock ends with its owner
    assert newest_checkpoint(tmp_path / "run", print).step >= saved


def test_a_second_ctrl_c_stops_at_once(place, tmp_path, monkeypatch):
    process = started(tmp_path / "run", place / "data", "--batch-size", 5_000, "--save-every", 1)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert newest_checkpoint(tmp_path / "run", print).step >= 1


NAN_ON_ONE = """
import sys
sys.path.insert(0, {root!r})
import train
from model import GPT
loss, calls = GPT.loss, []
def loss_with_nan(self, x, targets):
    calls.append(1)
    bad = train.os_rank == 1 and {first} < len(calls) <= {last}  # the warm-up is the first
    return loss(self, x, targets) * (float("nan") if bad else 1)
import os
train.os_rank = int(os.environ["RANK"])
GPT.loss = loss_with_nan
from engine.settings import run_command
run_command(train.main)
"""


@pytest.mark.parametrize(("first", "last"), [(5, 7), (5, 1000)])
def test_a_nan_on_one_of_two_processes_is_skipped_by_both(place, tmp_path, first, last):
    (tmp_path / "script.py").write_text(NAN_ON_ONE.format(root=str(ROOT), first=first, last=last))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [tmp_path / "script.py", "--data", place / "data", "--out", tmp_path / "run", *TINY, "--steps", "100"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command += ["--eval-every", "1000", "--save-every", "3"]
    done = subprocess.run(list(map(str, command)), capture_output=True, encoding="utf-8", env=environment, timeout=120)
    skipped = records(tmp_path / "run", "skipped_steps")
    assert skipped[4] == 0 and skipped[5] == 1 and skipped[6] == 2
    found = newest_checkpoint(tmp_path / "run", print)
    if last == 7:
        assert done.returncode == 0 and skipped[100] == 2
        assert records(tmp_path / "run", "train_loss")[100] < records(tmp_path / "run", "train_loss")[1] - 0.3
    else:
        assert done.returncode != 0
        assert f"error: the last {train.MOST_SKIPPED} steps had no finite gradient" in done.stderr
        weights = dict(found.model())
        assert all(tensor.isfinite().all() for tensor in weights.values())
        assert found.step > 4


def test_a_spike_is_told_of(place, tmp_path, capsys, monkeypatch):
    train_step = train.train_step

    def spiking(run):
        loss, *rest = train_step(run)
        return (loss * (5 if run.step == 50 else 1), *rest)

    monkeypatch.setattr(train, "train_step", spiking)
    train_here(place / "data", tmp_path / "run", "--steps", 60, "--eval-every", 100)
    scores = records(tmp_path / "run", "loss_z_score")
    assert scores[50] > train.SPIKE and max(score for step, score in scores.items() if step != 50) < train.SPIKE
    assert "step     50  the loss jumped to" in capsys.readouterr().out


@pytest.mark.parametrize("mode", [["stages"], ["kills", "3"]])
def test_killed_at_any_moment_training_resumes_to_the_same_weights(mode):
    done = subprocess.run([sys.executable, ROOT / "tests" / "soak.py", *mode], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "resumed to the same weights" in done.stdout


def test_a_folder_that_can_not_be_written_is_refused_in_one_line(run, place, tmp_path):
    (tmp_path / "file").write_text("")
    done = run("train.py", "--data", place / "data", "--out", tmp_path / "file" / "run", *TINY)
    assert said_in_one_line(done, "Not a directory")
