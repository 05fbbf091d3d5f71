"""Which device to compute on, in which dtype, and how it keeps memory."""

import ctypes
import math
import os
import sys

import torch

from engine.core.errors import UserError

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # glibc's <malloc.h>
NARROW = 64  # below it, converting to bfloat16 does not pay: at 64 it gains a third, at 128 a half, with AVX512-BF16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device named, or for ``auto`` the best; of several GPUs the local_rank-th. ValueError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError("nothing trains there")
        if device.type == "cuda":
            device = torch.device("cuda", local_rank if device.index is None else device.index)
        if device.type == "cuda":
            torch.cuda.init()
            torch.cuda.set_device(device)  # first, or the other GPUs' processes all take memory on this one
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name} can't be used here ({reason}); try auto, cpu, cuda or mps") from None
    return device


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where its matrix products are at least twice as fast as float32's, else float32."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:  # with AMX 7 times as fast, with AVX512-BF16 twice
        fast = device.type == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
    return torch.bfloat16 if fast else torch.float32


def choose_dtype(name: str, device: torch.device, width: int) -> torch.dtype:
    """What a model of that d_model computes its matrix products in: the dtype named, or for ``auto`` the fast one."""
    if name != "auto":
        return DTYPES[name]
    return torch.float32 if device.type == "cpu" and width < NARROW else fast_dtype(device)


def mixed_precision(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """Inside of it, matrix products compute in that dtype."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def ask_for_determinism(asked: bool) -> None:
    """If asked, before its first use, have CUDA use only kernels that give the same bits each time: slower."""
    if asked:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def total_memory(device: torch.device) -> float:
    """Bytes of memory that the device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf


def keep_freed_memory() -> None:
    """Have the C library keep large freed blocks for new tensors: each 4 KiB got anew is a page fault."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc
        libc.mallopt(MMAP_THRESHOLD, 2**30)
        libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)
