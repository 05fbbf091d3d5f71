"""A dataset made by Ray's workers on this machine, one of which is killed.

WORKERS=4 pytest -o addopts= tests/test_cluster.py      as many workers
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import prepare as command
from engine.core.files import held_alone
from engine.data.cluster import ray_cluster

WORKERS = int(os.environ.get("WORKERS", "2"))
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")  # to import it takes seconds


def workers() -> list[int]:
    """The processes in which Ray is making a part."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [int(path.parent.name)] if path.read_bytes().startswith(b"ray::prepare_part") else []
        except OSError:
            continue
    return found


@contextlib.contextmanager
def here(address: str) -> Iterator[tuple[int, Callable]]:
    """Runs tasks in this process."""
    yield WORKERS, map


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for the workers in /proc")
def test_a_worker_is_killed_and_the_merge_fails_and_yet_all_is_as_one_process_makes_it(
    code: str, tmp_path: Path, monkeypatch
):
    (tmp_path / "texts").mkdir()
    for number in range(4 * WORKERS):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number}\n" + code * 3, encoding="utf-8")
    prepare = [sys.executable, command.__file__, "texts", "--vocab-size", "400", "--ray", f"local:{WORKERS}", "--out"]
    with held_alone(tmp_path / "ray"):  # so the parts can be made, and not be merged
        process = subprocess.Popen(
            [*prepare, "ray"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while process.poll() is None and not (killed := [*(tmp_path / "ray.parts").glob(".*.partial.*/train-*.npy")]):
            time.sleep(0.005)
        victims = workers()
        assert killed and victims
        os.kill(victims[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1 and re.fullmatch("error: .*ray is in use by process .*\n", errors)
    parts = sorted(path for path in (tmp_path / "ray.parts").iterdir() if path.is_dir())
    assert len(parts) == 4 * WORKERS and not (tmp_path / "ray").exists()
    for path in (tmp_path / "texts").iterdir():  # what is not read again can't be missed
        stat = path.stat()
        path.write_bytes(b"\xff" * stat.st_size)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "ray_cluster", here)  # Ray takes seconds to start
    command.main([*prepare[2:], "ray"])
    assert not (tmp_path / "ray.parts").exists()
    for number in range(4 * WORKERS):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number}\n" + code * 3, encoding="utf-8")
    command.main([str(tmp_path / "texts"), "--vocab-size", "400", "--out", str(tmp_path / "one")])
    one, by_ray = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "ray"))
    stamps = [files.pop("prepared_from.json") for files in (one, by_ray)]
    assert one == by_ray and stamps[0] != stamps[1]


def test_a_task_that_ray_gives_up_is_one_line(monkeypatch):
    class Lost(Exception):
        pass

    def get(done: object) -> None:
        raise Lost("the worker died\nmany times")

    exceptions = SimpleNamespace(RayError=Lost, RayTaskError=ZeroDivisionError)
    fake = SimpleNamespace(init=lambda **_: None, shutdown=lambda: None, cluster_resources=dict, exceptions=exceptions)
    fake.remote = lambda **_: lambda function: SimpleNamespace(remote=lambda task: task)
    fake.wait, fake.get = lambda waiting: (waiting[:1], waiting[1:]), get
    monkeypatch.setitem(sys.modules, "ray", fake)
    said = r"^Ray gave up a task \(the worker died many times\); run the same again for what is missing$"
    with ray_cluster("local") as (_, run), pytest.raises(ValueError, match=said):
        list(run(print, [1, 2]))


def test_a_cluster_that_is_not_there_is_one_line():
    message = r"^--ray 127\.0\.0\.1:9 can't be reached \(.*\); give local"
    with pytest.raises(ValueError, match=message) as caught, ray_cluster("127.0.0.1:9"):
        pass
    assert "\n" not in str(caught.value)
