"""The device and dtype to compute with, and how the C library reuses memory."""

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterator

import torch

from engine.core.cli import say, warn
from engine.core.errors import UserError

MIN_BFLOAT16_WIDTH = 64  # of a model on a CPU: narrower ones lose more by converting than they gain
MIN_BFLOAT16_DECODING_WIDTH = 512  # likewise in decoding: smaller weights stay in a CPU's cache
MALLOC_MMAP_THRESHOLD = -3  # options of mallopt: glibc's <malloc.h>
MALLOC_TRIM_THRESHOLD = -1
MAX_TIME_OF_HALF = 0.95  # relative to that of all threads, for which half of them are used
# Relative, between two ways to compute the same in a dtype.
ROUNDING_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
DTYPE_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str, local_rank: int = 0, num_local_ranks: int = 1) -> torch.device:
    """Return the named device, or the best one for ``auto``; ``cuda`` is the local rank's GPU.

    Raises UserError for a missing device, and for one GPU of several local ranks.
    """
    is_automatic = name == "auto"
    if is_automatic:
        has_mps = torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    if name == "cuda":
        name = f"cuda:{local_rank}"
    elif name.startswith("cuda:") and num_local_ranks > 1:
        raise UserError(f"--device: one GPU of {num_local_ranks} ranks (got {name}). Use cuda.")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError(f"unsupported device type {device.type}")
        if device.type == "cuda":
            torch.cuda.init()
            torch.cuda.set_device(device)  # else each process allocates memory on GPU 0 too
        torch.ones(1, device=device).add(1).item()  # by a kernel
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        if is_automatic and num_local_ranks == 1:  # a GPU for which this PyTorch has no kernels
            warn(f"the CPU is used, as {name} does not work with this PyTorch ({reason})")
            return torch.device("cpu")
        advice = "Use auto, cpu, cuda or mps."
        raise UserError(f"--device: {name} is not available ({reason}). {advice}") from None
    return device


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return a 16-bit dtype whose matrix products are at least twice as fast, else float32."""
    if device.type == "cuda":  # float16 on older GPUs, such as a T4
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_bfloat16 else torch.float16
    capabilities = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    is_fast = any(capabilities.get(name) for name in ("amx_tile", "avx512_bf16"))
    return torch.bfloat16 if is_fast else torch.float32


def choose_num_threads(seconds: float, measure: Callable[[], float]) -> float:
    """Halve the CPU threads of this process while that is faster, and return the seconds.

    Threads wait for each other, and so for other programs. ``seconds`` is measured with all.
    """
    max_threads = torch.get_num_threads()
    num_threads = max_threads
    while num_threads > 1:
        torch.set_num_threads(num_threads // 2)
        seconds_of_half = measure()
        if seconds_of_half > MAX_TIME_OF_HALF * seconds:
            break
        num_threads //= 2
        seconds = seconds_of_half
    torch.set_num_threads(num_threads)
    if num_threads < max_threads:
        say(f"{num_threads} of {max_threads} threads, which is faster beside other programs")
    return seconds


def choose_dtype(
    name: str, device: torch.device, width: int, min_cpu_width: int = MIN_BFLOAT16_WIDTH
) -> torch.dtype:
    """Return the named dtype for matrix products; for ``auto`` the fast one for that d_model."""
    if name != "auto":
        return DTYPE_BY_NAME[name]
    if device.type == "cpu" and width < min_cpu_width:
        return torch.float32
    return fast_dtype(device)


def mixed_precision(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """Return a context in which matrix products are computed in that dtype."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def use_deterministic_kernels(enabled: bool) -> None:
    """Make CUDA use only deterministic kernels. Call it before the first matrix product."""
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@contextlib.contextmanager
def any_kernels() -> Iterator[None]:
    """Allow kernels that are not reproducible, where CUDA has no others."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(0)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def forked_generators(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context after which the global generators have the states from before it."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


@contextlib.contextmanager
def preserve_torch_state(device: torch.device) -> Iterator[None]:
    """Restore PyTorch's threads, random state and kernels after a block, for the caller's code."""
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        stack.enter_context(forked_generators(device))
        yield


def usable_memory(device: torch.device) -> float:
    """Return the bytes of a device's memory; of a GPU's, those that no other process uses."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if sys.platform == "win32":
        return math.inf
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def release_memory(device: torch.device) -> None:
    """Return the memory that no tensor uses to the GPU."""
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # torch 2.12, after a capture that failed
            torch.cuda.empty_cache()


def keep_freed_memory() -> None:
    """Let glibc reuse large freed blocks, which saves a page fault for every 4 KiB of a tensor."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not in musl
        libc.mallopt(MALLOC_MMAP_THRESHOLD, 2**30)
        libc.mallopt(MALLOC_TRIM_THRESHOLD, 2**31 - 1)
