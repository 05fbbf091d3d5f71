"""Many tasks on many machines: Ray runs them, and runs again what was lost."""

import contextlib
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.data.sources import needed

TIMEOUT = 10  # seconds to reach a cluster
RETRIES = 5  # of a task whose worker, or machine, was lost


@contextlib.contextmanager
def ray_cluster(address: str) -> Iterator[tuple[int, Callable[[Callable, Sequence[Any]], Iterator[Any]]]]:
    """How many workers there are, and run(function, tasks), which yields results as they are done.

    address is local, local:4 for so many workers on this machine, or that of a cluster, whose machines all have this
    project, and what it reads and writes, at the same paths. Raises UserError if it can't be reached.
    """
    ray, local = needed("ray", f"--ray {address}", extra="ray"), re.fullmatch("local(?::([1-9][0-9]*))?", address)
    root = str(Path(__file__).resolve().parents[1])
    options = {"address": "local" if local else address}
    options |= {"num_cpus": int(local[1])} if local and local[1] else {}
    try:
        if found := re.fullmatch(r"(?:ray://)?(.*):([0-9]+)", "" if local else address):
            socket.create_connection((found[1], int(found[2])), TIMEOUT).close()  # Ray itself tries for minutes
        environment = {"env_vars": {"PYTHONPATH": root}}
        ray.init(
            **options, runtime_env=environment, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
        )
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        advice = "give local, local:4 for four workers, or the address of a cluster that runs"
        raise UserError(f"--ray {address} can't be reached ({type(error).__name__}: {said}); {advice}") from None

    def run(function: Callable, tasks: Sequence[Any]) -> Iterator[Any]:
        remote = ray.remote(num_cpus=1, max_retries=RETRIES)(function)
        waiting = [remote.remote(task) for task in tasks]
        while waiting:
            (done, *_), waiting = ray.wait(waiting)
            try:
                yield ray.get(done)
            except ray.exceptions.RayTaskError as error:  # the task's own
                for other in waiting:
                    ray.cancel(other)
                raise error.cause from None
            except ray.exceptions.RayError as error:
                said = " ".join(str(error).split())[:300]
                raise UserError(f"Ray gave up a task ({said}); run the same again for what is missing") from None

    try:
        yield max(1, int(ray.cluster_resources().get("CPU", 1))), run
    finally:
        ray.shutdown()
