"""Training under fire. Torch is imported once, and each run is a fork.

    python tests/soak.py stages        killed at every stage of a save, then resumed
    python tests/soak.py kills 100     killed so many times at random moments
    python tests/soak.py long 20000    so many steps: memory and open files

The first two must end in the weights of a run that nothing happened to. Exit code 0: all is well.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # else every fork would import it, for its optimizer

sys.path.insert(0, str(Path(__file__).parents[1]))

import safetensors.torch

import train
from engine import checkpoint
from engine.checkpoint import list_checkpoints, newest_checkpoint
from prepare import PrepareConfig, prepare

SHAPE = "--num-layers 1 --num-heads 2 --d-model 16 --context-length 16 --batch-size 4 --warmup-steps 2 --dropout 0.1"
SHAPE = [*SHAPE.split(), "--eval-tokens", "200", "--eval-every", "1000000", "--device", "cpu", "--resume"]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def forked(out: Path, *flags: object, before: Callable = lambda: None) -> int:
    """Begin a run in a child; returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        sys.stdout = sys.stderr = open(out.with_suffix(".log"), "a")  # noqa: SIM115
        torch.set_num_threads(1)
        sys.argv = ["train.py", "--data", str(out.parent / "data"), "--out", str(out), *SHAPE, *map(str, flags)]
        before()
        os._exit(train.main())
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(99)


def ended(child: int) -> int:
    """The exit code of a child, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def third_time(act: Callable) -> Callable:
    """Counts calls, and acts on the third: two checkpoints are there, and one is too many."""
    calls = []

    def counted(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            act(*arguments)

    return counted


def mid_file() -> None:
    save_file = safetensors.torch.save_file

    def half(tensors: dict, path: Path) -> None:
        save_file(tensors, path)
        os.truncate(path, path.stat().st_size // 2)
        die()

    optimizers = third_time(half)
    safetensors.torch.save_file = lambda tensors, path: (
        save_file(tensors, path),
        optimizers(tensors, path) if path.name.startswith("optimizer") else None,
    )


def before_the_manifest() -> None:
    write_json, manifest = checkpoint.write_json, third_time(die)
    checkpoint.write_json = lambda path, value: (
        manifest() if path.name == "manifest.json" else None,
        write_json(path, value),
    )


def before_the_rename() -> None:
    rename, step = Path.rename, third_time(die)
    Path.rename = lambda path, target: (step() if "step-" in Path(target).name else None, rename(path, target))


def after_the_rename() -> None:
    rename, step = Path.rename, third_time(die)
    Path.rename = lambda path, target: (rename(path, target), step() if "step-" in Path(target).name else None)


def mid_prune() -> None:
    def part(path: Path, **_: object) -> None:
        if path.name.startswith("step-"):
            (path / "model.safetensors").unlink()
            die()

    checkpoint.shutil.rmtree = part


def same(one: Path, other: Path) -> bool:
    """Whether two runs ended in the same weights and optimizer state, bit for bit."""
    a, b = newest_checkpoint(one, print), newest_checkpoint(other, print)
    pairs = ((dict(a.model()), dict(b.model())), (dict(a.optimizer()), dict(b.optimizer())))
    return a.step == b.step and all(
        mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)
        for mine, others in pairs
    )


def stages(folder: Path) -> None:
    flags = ("--steps", 60, "--save-every", 10)
    assert ended(forked(folder / "whole", *flags)) == 0
    for stage in (mid_file, before_the_manifest, before_the_rename, after_the_rename, mid_prune):
        out = folder / stage.__name__
        assert ended(forked(out, *flags, before=stage)) == -signal.SIGKILL, stage
        left = [path.name for path in list_checkpoints(out)]
        assert ended(forked(out, *flags)) == 0 and same(folder / "whole", out), stage
        assert not list((out / "checkpoints").glob(".*")), "temporary files were left"
        print(f"{stage.__name__.replace('_', ' ')}: left {', '.join(left)}; resumed to the same weights")


def kills(folder: Path, times: int) -> None:
    steps, survived = 200 * times, 0
    flags = ("--steps", steps, "--save-every", 7, "--log-every", 50)
    for number in range(times):
        child = forked(folder / "killed", *flags)
        time.sleep(random.Random(number).uniform(0.02, 0.6))
        os.kill(child, signal.SIGKILL)
        survived += ended(child) == 0
    assert not survived, f"{survived} of {times} ended before they were killed"
    reached = [path.name for path in list_checkpoints(folder / "killed")]
    assert ended(forked(folder / "killed", *flags)) == 0 and ended(forked(folder / "whole", *flags)) == 0
    assert same(folder / "whole", folder / "killed")
    print(f"{times} kills, up to {reached[-1]} of {steps} steps; resumed to the same weights")


def long(folder: Path, steps: int) -> None:
    child = forked(folder / "long", "--steps", steps, "--save-every", 500, "--log-every", 100)
    seen = []
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if list_checkpoints(folder / "long"):
            pages = int(Path(f"/proc/{child}/statm").read_text().split()[1])
            seen.append((pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{child}/fd"))))
        time.sleep(0.2)
    early, late = seen[len(seen) // 10], seen[len(seen) * 9 // 10]
    told = [f"{memory:.1f} MiB and {files} open files" for memory, files in (early, late)]
    print(f"{steps} steps: {told[0]} at a tenth of the way, {told[1]} at nine tenths")
    assert newest_checkpoint(folder / "long", print).step == steps
    assert late[0] < early[0] * 1.05 + 5 and late[1] <= early[1] + 2


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp())
    try:
        (place / "text.txt").write_text("".join(f"{n} is followed by {n + 1}.\n" for n in range(500)))
        prepare(PrepareConfig(inputs=(str(place / "text.txt"),), tokenizer="char", out=place / "data"))
        {"stages": stages, "kills": kills, "long": long}[sys.argv[1]](place, *map(int, sys.argv[2:]))
    finally:
        shutil.rmtree(place, ignore_errors=True)
