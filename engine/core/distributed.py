"""Processes under torchrun: process groups, and collectives between the ranks."""

import contextlib
import datetime
import json
import os
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from engine.core.device import choose_device, preserve_torch_state
from engine.core.errors import UserError
from engine.core.sharding import is_sharded, local

Result = TypeVar("Result")
NamedTensor = tuple[str, Tensor]
CPU_DEVICE = torch.device("cpu")
PARENT_ID = os.getppid()
LONG_TIMEOUT = datetime.timedelta(days=1)  # for ranks that wait for one that works alone
GROUP_SHUTDOWN_SECONDS = 2.0
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# torch 2.13 renamed all_gather_into_tensor, and warns of the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class DistributedContext:
    """The rank of this process, the world size, and its device. All collectives are methods."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU_DEVICE
    local_rank: int = 0  # among the processes of its machine
    sharded: bool = False  # FSDP: each rank holds some rows of every parameter
    long_group: dist.ProcessGroup | None = None  # with LONG_TIMEOUT, on the CPU

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, the only process that prints and writes."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether one process computes with a full model of its own."""
        return self.size == 1 and not self.sharded

    @property
    def num_models(self) -> int:
        """The number of models with which the ranks compute: sharded ranks have one together."""
        return 1 if self.sharded else self.size

    @property
    def torchrun_command(self) -> str:
        """The command that starts a Python script on as many processes of a machine."""
        launcher = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE')}"
        return launcher if self.size > 1 else "python"

    @property
    def is_restart(self) -> bool:
        """Whether torchrun started this process again after a fault (``--max-restarts``)."""
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0

    def run_on_main(self, fn: Callable[..., Result], *args: Any) -> Result | None:
        """Return fn(*args) on the main process, and None on the others."""
        return fn(*args) if self.is_main_process else None

    def run_on_each_machine(self, fn: Callable[..., Any], *args: Any) -> None:
        """Call fn(*args) on one process of each machine."""
        if self.local_rank == 0:
            fn(*args)

    def broadcast_from_main(self, fn: Callable[..., Result], *args: Any) -> Result:
        """Run fn(*args) on the main process, and return its result (of JSON types) on every rank.

        fn may take hours. Its UserError is raised on every rank.
        """
        with self.wait_for_all():
            result = self.run_on_main(fn, *args)
        return self.broadcast(result)

    def rank_slice(self, total: int) -> slice:
        """Return this rank's slice of ``total`` items; sizes differ by at most 1."""
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def sum(self, value: Tensor) -> Tensor:
        """Return a new tensor with the sum over all ranks."""
        total = value.clone()
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any rank, without waiting for a GPU."""
        return bool(self.sum(torch.tensor(float(flag))))

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of all gradients together; of sharded ones each rank has some rows."""
        norm = nn.utils.get_total_norm([local(gradient) for gradient in gradients])
        return self.sum(norm.square()).sqrt() if self.sharded else norm

    @contextlib.contextmanager
    def wait_for_all(self) -> Iterator[None]:
        """Let ranks work alone for hours, and wait until all have left the block.

        A UserError of one rank is raised on all.
        """
        user_error = None
        try:
            yield
        except UserError as error:
            user_error = error
        if self.size > 1:
            dist.barrier(self.long_group)
        self.raise_error(user_error)

    def raise_error(self, error: BaseException | None) -> None:
        """Raise the error of any rank on all: its own, or a UserError with the message.

        The message names the rank, unless the error is a mistake of the user.
        """
        text = f"rank {self.rank}: {error}" if error else None
        messages = self.gather_json(str(error) if isinstance(error, UserError) else text)
        if error:
            raise error
        for message in messages:
            if message is not None:
                raise UserError(message)

    def assert_equal_across_ranks(self, settings: dict, ignore: Container[str] = ()) -> None:
        """Raise UserError on every rank unless all have the same settings, of JSON types."""
        expected = self.broadcast(settings)
        changes = [
            f"{name} {expected.get(name)!r} → {settings.get(name)!r}"
            for name in expected | settings
            if name not in ignore and expected.get(name) != settings.get(name)
        ]
        text = f"rank {self.rank} has other settings: {', '.join(changes)}. Start all ranks alike."
        self.raise_error(UserError(text) if changes else None)

    def gather_json(self, value: Any) -> list[Any]:
        """Return the values, of JSON types, of all ranks, in the order of the ranks."""
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        length = torch.tensor(len(text))
        dist.all_reduce(length, dist.ReduceOp.MAX)
        padded = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8)
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded)
        return [json.loads(text.numpy().tobytes()) for text in texts]

    def broadcast(self, value: Any) -> Any:
        """Return the value, of JSON types, of the main process."""
        return self.gather_json(value if self.is_main_process else None)[0]

    def broadcast_tensors(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield the named tensors of the main process on every rank, one at a time."""
        if self.size == 1:
            yield from tensors
            return
        remaining = iter(tensors if self.is_main_process else ())
        while True:
            with self.wait_for_all():
                name, tensor = next(remaining, ("", torch.empty(0)))
            header = [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            name, shape, dtype = self.broadcast(header)
            if not name:
                return
            if not self.is_main_process:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(tensor, 0)
            yield name, tensor

    def copy_to_cpu(self, tensors: dict[str, Tensor], gather: bool = True) -> dict[str, Tensor]:
        """Return copies on the CPU: of full tensors on rank 0, or of the rows of each rank.

        Only rank 0 has copies of tensors that are not sharded.
        """
        copies = {}
        for name, tensor in tensors.items():
            value = tensor.full_tensor() if gather and is_sharded(tensor) else local(tensor)
            if self.is_main_process or (is_sharded(tensor) and not gather):
                copies[name] = value.detach().to("cpu", copy=True)
        return copies

    def map_matrices_across_ranks(
        self, fn: Callable[[Tensor], Tensor], stacked: Tensor, num_rows: int, group_size: int
    ) -> Tensor:
        """Return fn(stacked) for matrices (n, rows, columns), distributed over the ranks.

        ``fn`` must compute each group of ``group_size`` consecutive matrices independently, on one
        rank. With DDP every rank has the full matrices, and gathers the results. With FSDP it has
        some of their ``num_rows`` rows: each matrix is sent to one rank, and its result back.
        """
        if self.size == 1:
            return fn(stacked)
        n, num_local_rows, columns = stacked.shape
        n_per_rank = group_size * -(-n // (group_size * self.size))
        height = -(-num_rows // self.size) if self.sharded else num_rows
        stacked = F.pad(stacked, (0, 0, 0, height - num_local_rows, 0, n_per_rank * self.size - n))
        if not self.sharded:
            results = torch.empty_like(stacked)
            start = n_per_rank * self.rank
            all_gather_single(results, fn(stacked[start : start + n_per_rank]).contiguous())
            return results[:n]
        received = torch.empty_like(stacked).view(self.size, n_per_rank, height, columns)
        dist.all_to_all_single(received, stacked.view_as(received))  # first index: the sending rank
        matrices = received.transpose(0, 1).reshape(n_per_rank, self.size * height, columns)
        results = F.pad(fn(matrices[:, :num_rows]), (0, 0, 0, self.size * height - num_rows))
        results = results.view(n_per_rank, self.size, height, columns).transpose(0, 1)
        returned = torch.empty_like(received)
        dist.all_to_all_single(returned, results.contiguous())
        return returned.view(-1, height, columns)[:n, :num_local_rows]


SINGLE_PROCESS = DistributedContext()


def has_torchrun_ended() -> bool:
    """Return whether torchrun, the parent of this process, ended before it, as by SIGUSR1."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != PARENT_ID


@contextlib.contextmanager
def init_distributed(
    device: str = "auto", parallel: str = "ddp", timeout: float = 600
) -> Iterator[DistributedContext]:
    """Yield the context of this process, which is the only one or a rank under torchrun.

    ``parallel`` is "ddp" or "fsdp". A rank that waits for another longer than ``timeout`` seconds
    raises RuntimeError, and torchrun ends all ranks. Raises UserError without torchrun's variables.
    """
    size = int(os.environ.get("WORLD_SIZE") or 1)
    if size == 1:
        rank_device = choose_device(device)
        with preserve_torch_state(rank_device):
            yield DistributedContext(device=rank_device)
        return
    try:
        rank, local_rank, num_local_ranks = (int(os.environ[name]) for name in RANK_VARIABLES)
    except KeyError as error:
        advice = "Start several processes with torchrun."
        raise UserError(f"{error.args[0]}: must be set beside WORLD_SIZE. {advice}") from None
    rank_device = choose_device(device, local_rank, num_local_ranks)
    limit = datetime.timedelta(seconds=timeout)
    backend = "cpu:gloo,cuda:nccl" if rank_device.type == "cuda" else "gloo"
    store, _, _ = next(dist.rendezvous("env://", timeout=limit))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # a restart meets addresses of dead processes
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    long_group = dist.new_group(timeout=max(limit, LONG_TIMEOUT), backend="gloo")
    sharded = parallel == "fsdp"
    try:
        with preserve_torch_state(rank_device):
            yield DistributedContext(rank, size, rank_device, local_rank, sharded, long_group)
    except BaseException:
        # Peers may be gone. Leaving the group to the interpreter's exit can abort the process.
        thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
        thread.start()
        thread.join(GROUP_SHUTDOWN_SECONDS)
        raise
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads still free buffers, and abort if Python ends meanwhile
