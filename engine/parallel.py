"""One process or many, and the device each computes on: the only home of torch.distributed."""

import contextlib
import ctypes
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # glibc's <malloc.h>
NARROW = 160  # measured: at 128 bfloat16 gains nothing on a CPU with AVX512-BF16, at 176 a sixth, at 384 a third
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class World:
    """This process among its peers, and its device."""

    rank: int
    size: int
    device: torch.device
    sharded: bool = False  # each process holds its rows of every parameter (FSDP), not all of them (DDP)
    restarted: bool = False  # torchrun started the processes again after one failed

    @property
    def is_first(self) -> bool:
        """Whether this is the process that speaks and writes."""
        return self.rank == 0

    @property
    def launcher(self) -> str:
        """What starts a Python script on as many processes."""
        return "python" if self.size == 1 else f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"

    def share(self, total: int) -> slice:
        """This process's part of ``total`` things in order; sizes differ by one at most."""
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on at least one process. The processors settle it: no GPU is waited for."""
        return bool(self.sum(torch.tensor(float(flag)))) if self.size > 1 else flag

    def wait(self) -> None:
        """Go on when all processes are here."""
        self.any(False)

    def tell(self, value: Any) -> Any:
        """What the first process has for a value, anything that JSON can hold; the others' is not looked at."""
        if self.size == 1:
            return value
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor(len(text))
        dist.broadcast(length, 0)
        text = text if self.is_first else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, 0)
        return json.loads(bytes(text.tolist()))

    def tell_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The first process's named tensors, one at a time: only it needs to have the file that they come from."""
        if self.size == 1:
            yield from tensors
            return
        mine = iter(tensors if self.is_first else ())
        while True:
            name, tensor = next(mine, ("", None))
            header = self.tell(None if tensor is None else [name, list(tensor.shape), str(tensor.dtype)])
            if header is None:
                return
            if tensor is None:
                tensor = torch.empty(header[1], dtype=getattr(torch, header[2].removeprefix("torch.")))
            dist.broadcast(tensor, 0)
            yield header[0], tensor

    def materialise(self, make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
        """The model that make() makes, on this process's device: whole, or this process's rows of every parameter.

        Sharded, it is made without values and filled one parameter at a time, so that no process ever holds all of it.
        Its ``blocks``, and what is around them, are gathered in dtype where they are used (FSDP2).
        """
        if not self.sharded:
            return make().to(self.device)
        from torch.distributed.device_mesh import init_device_mesh  # half a second, which sample.py need not wait
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        with torch.device("meta"):
            model = make()
        mesh = init_device_mesh(self.device.type, (self.size,))
        policy = MixedPrecisionPolicy(None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        model.to_empty(device=self.device)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for parameter, value in zip(model.parameters(), model.initial_values(), strict=True):
            self.fill(parameter, value)
        return model

    def replicate(self, model: nn.Module, *example: Tensor) -> nn.Module:
        """The model as it trains: its gradients are averaged over all processes while the backward pass runs.

        example is a micro-batch. DDP lays its buckets out anew after the first backward pass: one that counts for
        nothing goes first, so that a resumed run sums in the order of one that never stopped.
        """
        if self.sharded or self.size == 1:
            return model
        replica = DistributedDataParallel(model, broadcast_buffers=False)
        replica(*example).backward()
        replica.zero_grad()
        return replica

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """What this process holds of a whole tensor: all, or its rows if it holds rows of the parameter ``like``."""
        if not in_parts(like):
            return whole
        height = -(-len(whole) // self.size)
        return whole[height * self.rank : height * (self.rank + 1)]

    @torch.no_grad()
    def fill(self, parameter: Tensor, whole: Tensor) -> None:
        """Set what this process holds of a parameter."""
        local(parameter).copy_(self.part(whole, parameter))

    def load(self, model: nn.Module, saved: Iterable[tuple[str, Tensor]]) -> None:
        """Set parameters by name, one at a time. Raises ValueError if the names are not the model's."""
        parameters = dict(model.named_parameters())
        for name, whole in saved:
            if name not in parameters or parameters[name].shape != whole.shape:
                raise ValueError(f"the checkpoint has {name} {tuple(whole.shape)}, but the model has no such parameter")
            self.fill(parameters.pop(name), whole)
        if parameters:
            raise ValueError(f"the checkpoint lacks the parameter {next(iter(parameters))}")

    def wholes(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """On the first process, every tensor whole and on the CPU if it was in parts; on the others nothing."""
        result = {}
        for name, tensor in tensors.items():
            whole = tensor.full_tensor().cpu() if in_parts(tensor) else tensor.detach()
            if self.is_first:
                result[name] = whole
        return result

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of all gradients together, where each process has all of them, or its rows."""
        norm = nn.utils.get_total_norm(gradients)
        return self.sum(norm.square()).sqrt() if self.sharded else norm

    def share_out(self, work: Callable[[Tensor], Tensor], stack: Tensor, rows: int) -> Tensor:
        """work(stack), for work that does the same to each matrix of a stack: every process does its share.

        stack is (n, rows, columns) and the same everywhere, and the results are gathered; or it is this process's
        rows of each matrix, and every matrix travels to one process and its result back.
        """
        if self.size == 1:
            return work(stack)
        n, held, columns = stack.shape
        each, height = -(-n // self.size), -(-rows // self.size) if self.sharded else rows
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
        back = torch.empty_like(arrived)
        dist.all_to_all_single(back, done.transpose(0, 1).contiguous())
        return back.view(-1, height, columns)[:n, :held]


ALONE = World(0, 1, torch.device("cpu"))


def in_parts(tensor: Tensor) -> bool:
    """Whether this is a DTensor, of which each process holds its rows."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if in_parts(tensor) else tensor


def part_of(parameter: Tensor) -> Tensor:
    """The tensor that an optimizer moves for a parameter: itself, or this process's rows of it."""
    if not in_parts(parameter):
        return parameter
    part = local(parameter).detach()
    part.whole_rows = len(parameter)
    return part


def take_part(part: Tensor, parameter: Tensor) -> None:
    """Point a part at where the parameter and its gradient are now."""
    if part is not parameter:
        part.data, part.grad = local(parameter).detach(), local(parameter.grad)


def whole_rows(part: Tensor) -> int:
    """Rows of the parameter that a part is of."""
    return getattr(part, "whole_rows", len(part))


def spread_like(value: Tensor, parameter: Tensor) -> Tensor:
    """An optimizer's memory of a part, as a part of the same whole; a count stays what it is."""
    if not in_parts(parameter) or not value.ndim:
        return value
    from torch.distributed.tensor import DTensor

    place = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(value, parameter.device_mesh, parameter.placements, **place)


def choose_device(name: str) -> torch.device:
    """The device of that name, or the best there is for ``auto``. Raises ValueError for one that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name} can't be used here ({reason}); try auto, cpu, cuda or mps") from None
    return device


def quick_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where its matrix products are at least twice as fast as float32's, else float32.

    That is on CUDA since Ampere, and on CPUs with AMX (7 times as fast) or AVX512-BF16 (twice).
    """
    if device.type == "cuda":
        quick = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        quick = device.type == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
    return torch.bfloat16 if quick else torch.float32


def choose_dtype(name: str, device: torch.device, width: int) -> torch.dtype:
    """What a model of that d_model computes its matrix products in: that named, or for ``auto`` the quick one.

    On a CPU, a narrow model's products are too small to pay for turning their inputs into bfloat16.
    """
    if name != "auto":
        return DTYPES[name]
    return torch.float32 if device.type == "cpu" and width < NARROW else quick_dtype(device)


def keep_freed_memory() -> None:
    """Have the C library keep large freed blocks for new tensors: each 4 KiB got anew is a page fault."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc
        libc.mallopt(MMAP_THRESHOLD, 2**30)
        libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)


@contextlib.contextmanager
def processes(device: str, parallel: str = "ddp", timeout: float = 600) -> Iterator[World]:
    """This process's World: alone, or one of those that torchrun started, joined until the block ends.

    A process that waits longer than timeout seconds for another gives up with an error; torchrun then ends them all.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    chosen = choose_device(device)
    keep_freed_memory()
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", chosen.index or 0)))
        torch.cuda.set_device(chosen)
    if size == 1:
        yield World(rank, size, chosen)
        return
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    wait = datetime.timedelta(seconds=timeout)
    store, _, _ = next(dist.rendezvous("env://", timeout=wait))
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # torchrun reuses its store, with the dead processes' addresses
        store = dist.PrefixStore(f"start {restarts}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    yield World(rank, size, chosen, parallel == "fsdp", restarts > 0)
    dist.destroy_process_group()  # after an error it could wait for peers: the end of the process does it then


def averaging(model: nn.Module, now: bool) -> contextlib.AbstractContextManager:
    """Around a backward pass: average gradients over the processes now, or leave it to a later micro-batch."""
    if hasattr(model, "set_requires_gradient_sync"):  # sharded
        model.set_requires_gradient_sync(now)
    return contextlib.nullcontext() if now or not isinstance(model, DistributedDataParallel) else model.no_sync()
