"""One process or many, and the device each computes on: the only home of torch.distributed."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # glibc's <malloc.h>
NARROW = 160  # measured: at 128 bfloat16 gains nothing on a CPU with AVX512-BF16, at 176 a sixth, at 384 a third
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class World:
    """This process among its peers, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is the process that speaks and writes."""
        return self.rank == 0

    def share(self, total: int) -> slice:
        """This process's part of ``total`` things in order; sizes differ by one at most."""
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on at least one process."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def wait(self) -> None:
        """Go on when all processes are here."""
        if self.size > 1:
            dist.barrier()

    def replicate(self, model: nn.Module) -> nn.Module:
        """The model as it trains: its gradients are averaged over all processes while the backward pass runs."""
        return DistributedDataParallel(model) if self.size > 1 else model


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
def processes(device: str) -> Iterator[World]:
    """This process's World: alone, or one of those that torchrun started, joined until the block ends."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    chosen = choose_device(device)
    keep_freed_memory()
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", chosen.index or 0)))
        torch.cuda.set_device(chosen)
    if size == 1:
        yield World(rank, size, chosen)
        return
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield World(rank, size, chosen)
    finally:
        dist.destroy_process_group()


def averaging(model: nn.Module, now: bool) -> contextlib.AbstractContextManager:
    """Around a backward pass: average gradients over the processes now, or leave it to a later micro-batch."""
    return contextlib.nullcontext() if now or not isinstance(model, DistributedDataParallel) else model.no_sync()
