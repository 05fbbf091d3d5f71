"""One process or many under torchrun, and how they train one model: the only home of torch.distributed."""

import contextlib
import datetime
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engine.core.device import choose_device, keep_freed_memory
from engine.core.errors import UserError

FROM_TORCHRUN = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Silent:
    """Stands, on all processes but the first, for what only the first has: every method does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **keywords: None


class Sliceable(Protocol):
    """A full tensor that may lie on a disk, where only the rows are read that are asked for."""

    shape: torch.Size

    def __getitem__(self, rows: Any) -> Tensor: ...


@dataclass(frozen=True)
class DistributedContext:
    """This process among its peers, and its device."""

    rank: int
    size: int
    device: torch.device
    local_rank: int = 0  # among the processes of its machine
    sharded: bool = False  # each process holds its rows of every parameter (FSDP), not all of them (DDP)
    launch: str = ""  # names the torchrun that started the processes, and starts them again after one failed

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process that speaks and writes."""
        return self.rank == 0

    @property
    def launcher(self) -> str:
        """What starts a Python script on as many processes."""
        machines = int(os.environ.get("GROUP_WORLD_SIZE", 1))
        nodes = f"--nnodes {machines} RENDEZVOUS " if machines > 1 else ""
        return "python" if self.size == 1 else f"torchrun {nodes}--nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"

    def only_first(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """What make(*arguments) makes, on the first process; something silent instead on the others."""
        return make(*arguments) if self.is_main_process else Silent()

    def slice(self, total: int) -> slice:
        """This process's slice of ``total`` things in order; sizes differ by one at most."""
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of all gradients together, of which each process has all, or its rows."""
        norm = nn.utils.get_total_norm([local(gradient) for gradient in gradients])
        return self.sum(norm.square()).sqrt() if self.sharded else norm

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on at least one process. The processors settle it: no GPU is waited for."""
        return bool(self.sum(torch.tensor(float(flag)))) if self.size > 1 else flag

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Around work that some processes do alone for as long as it takes: at its end all have waited for each other.

        Meanwhile each gives word every second, so that only one that is gone, or stopped, is given up: RuntimeError.
        """
        finished, errors = threading.Event(), []

        def give_word() -> None:
            try:
                while self.any(not finished.is_set()):
                    finished.wait(1)
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=give_word, daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()
        if errors:
            raise errors[0]

    def check_same(self, settings: dict[str, Any], but: Container[str] = ()) -> None:
        """Raise UserError, on every process, unless all were given the same; the message names what is not."""
        pairs = [(name, self.broadcast(value), value) for name, value in settings.items() if name not in but]
        other = [f"{name} {first!r} → {value!r}" for name, first, value in pairs if first != value]
        if self.any(bool(other)):
            found = ", ".join(other) or "another process has other settings, or text"
            raise UserError(f"process {self.rank} of {self.size} does not fit the first: {found}; start all alike")

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The first process's value, or another's, anything that JSON can hold; the others' is not looked at."""
        if self.size == 1:
            return value
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor(len(text))
        dist.broadcast(length, source)
        text = text if self.rank == source else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, source)
        return json.loads(bytes(text.tolist()))

    def first_of(self, value: Any) -> Any:
        """The value, as for :meth:`broadcast`, of the first process that has one; None if all have None."""
        having = torch.zeros(self.size)
        having[self.rank] = value is not None
        having = self.sum(having)
        return self.broadcast(value, int(having.argmax())) if having.any() else None

    def broadcast_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The first process's named tensors, one at a time: only it needs to have the file that they come from."""
        if self.size == 1:
            yield from tensors
            return
        mine = iter(tensors if self.is_main_process else ())
        while True:
            name, tensor = next(mine, ("", None))
            header = self.broadcast(None if tensor is None else [name, list(tensor.shape), str(tensor.dtype)])
            if header is None:
                return
            if tensor is None:
                tensor = torch.empty(header[1], dtype=getattr(torch, header[2].removeprefix("torch.")))
            dist.broadcast(tensor, 0)
            yield header[0], tensor

    def gather_full(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """On the first process, a copy of every tensor, full and on the CPU; on the others nothing."""
        full = {}
        for name, tensor in tensors.items():
            gathered = tensor.full_tensor() if is_sharded(tensor) else tensor.detach()
            if self.is_main_process:
                full[name] = gathered.to("cpu", copy=not is_sharded(tensor))
        return full

    def snapshot(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A copy on the CPU of this process's rows of every tensor; of what is not sharded only the first has one."""
        mine = {name: local(tensor) for name, tensor in tensors.items() if is_sharded(tensor) or self.is_main_process}
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in mine.items()}

    def distribute(self, work: Callable[[Tensor], Tensor], stack: Tensor, rows: int, joined: int) -> Tensor:
        """work(stack), which does the same to each matrix of a stack (n, rows, columns): each process does its slice.

        All have the whole stack, and the results are gathered; or sharded, each has its rows of every matrix, which
        travels to one process and its result back. Each ``joined`` matrices in a row stay together.
        """
        if self.size == 1:
            return work(stack)
        n, held, columns = stack.shape
        each = joined * -(-n // (joined * self.size))
        height = -(-rows // self.size) if self.sharded else rows
        stack = F.pad(stack, (0, 0, 0, height - held, 0, each * self.size - n))
        if not self.sharded:
            done = work(stack[each * self.rank : each * (self.rank + 1)]).contiguous()
            gathered = torch.empty_like(stack)
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # until torch 2.12
            gather(gathered, done)
            return gathered[:n]
        arrived = torch.empty_like(stack).view(self.size, each, height, columns)  # first index: from whom
        dist.all_to_all_single(arrived, stack.view_as(arrived))
        done = work(arrived.transpose(0, 1).reshape(each, self.size * height, columns)[:, :rows])
        done = F.pad(done, (0, 0, 0, self.size * height - rows)).view(each, self.size, height, columns)
        returned = torch.empty_like(arrived)
        dist.all_to_all_single(returned, done.transpose(0, 1).contiguous())
        return returned.view(-1, height, columns)[:n, :held]


SINGLE_PROCESS = DistributedContext(0, 1, torch.device("cpu"))


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, of which each process holds its rows."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all, or its local shard."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def rows_like(parameter: Tensor, full: Sliceable) -> Tensor:
    """What this process holds of a full tensor that is sharded as the parameter is: all, or its rows."""
    if not is_sharded(parameter):
        return full[...]
    n, mesh = full.shape[0], parameter.device_mesh
    each = -(-n // mesh.size())
    return full[min(n, each * mesh.get_local_rank()) : min(n, each * (mesh.get_local_rank() + 1))]


def held_like(parameter: Tensor, full: Sliceable) -> Tensor:
    """A copy of a full tensor as the parameter is held: on its device, and sharded if it is; a scalar is not."""
    if not is_sharded(parameter) or not full.shape:
        return full[...].to(parameter.device, copy=True)
    held = rows_like(parameter, full).to(parameter.device, copy=True)
    from torch.distributed.tensor import DTensor

    placed, stride = (parameter.device_mesh, parameter.placements), torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(held, *placed, run_check=False, shape=full.shape, stride=stride)


@torch.no_grad()
def load(model: nn.Module, saved: Iterable[tuple[str, Sliceable]]) -> None:
    """Set every parameter by its name, one at a time. Raises UserError if the names or shapes are not the model's."""
    parameters = dict(model.named_parameters())
    for name, full in saved:
        if name not in parameters or parameters[name].shape != full.shape:
            raise UserError(f"the checkpoint has {name} {tuple(full.shape)}, but the model has no such parameter")
        parameter = parameters.pop(name)
        local(parameter).copy_(rows_like(parameter, full))
    if parameters:
        raise UserError(f"the checkpoint lacks the parameter {next(iter(parameters))}")


def materialise(model: nn.Module, world: DistributedContext, dtype: torch.dtype) -> nn.Module:
    """Move a model from the meta device to this process's, for :func:`load` to fill; returns it.

    Sharded, each process holds its rows of every parameter; they are gathered where they are used, those of ``blocks``
    in dtype (FSDP2: Zhao et al. 2023). What runs through the blocks keeps its own dtype, as it does unsharded.
    """
    if world.sharded:
        from torch.distributed.device_mesh import init_device_mesh  # half a second, which sample.py need not wait
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(world.device.type, (world.size,))
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)
    return model.to_empty(device=world.device)


def replicate(model: nn.Module, world: DistributedContext, *example: Tensor) -> nn.Module:
    """The model as it trains: its gradients are averaged over all processes while the backward pass runs.

    DDP rearranges its buckets after the first backward pass. An example micro-batch, which counts for nothing, goes
    first, so that a resumed run sums in the order of one that never stopped.
    """
    if world.sharded or world.size == 1:
        return model
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    replica(*example).backward()
    replica.zero_grad()
    return replica


def reduces_each(parameters: int, memory: float) -> bool:
    """Whether FSDP reduces gradients in each micro-batch: sends more, but never holds all of float32 at once.

    It does where that would take more than a quarter of a device's memory, in bytes.
    """
    return 4 * parameters > memory / 4


def averaging(model: nn.Module, now: bool) -> contextlib.AbstractContextManager:
    """Around a backward pass: average gradients over the processes now, or leave it to a later micro-batch."""
    if hasattr(model, "set_requires_gradient_sync"):  # sharded
        model.set_requires_gradient_sync(now)
    return contextlib.nullcontext() if now or not isinstance(model, DistributedDataParallel) else model.no_sync()


@contextlib.contextmanager
def processes(device: str, parallel: str = "ddp", timeout: float = 600) -> Iterator[DistributedContext]:
    """This process's DistributedContext: alone, or one of those that torchrun started, joined until the block ends.

    A process that waits longer than timeout seconds for another gives up with an error; torchrun then ends them all.
    """
    given = [
        os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    ]
    missing = [name for name in FROM_TORCHRUN if given[1] != "1" and name not in os.environ]
    if missing or not all(number.isdecimal() for number in given):
        wrong = f"{missing[0]} is not set" if missing else "RANK or LOCAL_RANK is no number"
        raise UserError(f"WORLD_SIZE is {given[1]}, but {wrong}; start many processes with torchrun")
    rank, size, here = map(int, given)
    chosen = choose_device(device, here)
    keep_freed_memory()
    if size == 1:
        yield DistributedContext(rank, size, chosen)
        return
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    wait = datetime.timedelta(seconds=timeout)
    store, _, _ = next(dist.rendezvous("env://", timeout=wait))
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # torchrun reuses its store, with the dead processes' addresses
        store = dist.PrefixStore(f"start {restarts}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    launch = f"{os.getppid()} on {platform.node()}"
    try:
        yield DistributedContext(rank, size, chosen, here, parallel == "fsdp", launch)
    except BaseException:  # its peers may not answer any more, but what is left to the end of the process may abort it
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(2)
        raise
    dist.destroy_process_group()
    time.sleep(0.1)  # its threads still drop what was sent last; one that needs Python's lock as Python ends aborts it
