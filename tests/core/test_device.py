"""Which device, which dtype, and what is kept of freed memory."""

import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, assert_same_run

from engine.core.device import DTYPES, NARROW, choose_device, choose_dtype, fast_dtype, mixed_precision, total_memory

CPU = torch.device("cpu")


def test_a_device_is_the_one_named_or_for_auto_the_best_there_is():
    assert choose_device("cpu") == CPU
    if torch.cuda.is_available():
        assert choose_device("auto", local_rank=0) == choose_device("cuda") == torch.device("cuda", 0)
    elif not torch.backends.mps.is_available():
        assert choose_device("auto") == choose_device("auto", local_rank=3) == CPU


@pytest.mark.parametrize("name", ["tpux", "cuda:99", "", "cpu:x", "meta"])
def test_a_device_that_is_not_there_is_named_in_one_line(name):
    with pytest.raises(ValueError, match=rf"^--device {name} can't be used here \(.+\); try auto, cpu, cuda or mps$"):
        choose_device(name)


def test_a_dtype_is_the_one_named_whatever_the_device_and_the_width():
    for name, dtype in DTYPES.items():
        assert choose_dtype(name, CPU, 8) == choose_dtype(name, torch.device("cuda"), 8192) == dtype


def test_auto_is_the_fast_dtype_but_for_a_narrow_model_on_a_cpu():
    assert choose_dtype("auto", CPU, NARROW - 1) == torch.float32
    assert choose_dtype("auto", CPU, NARROW) == fast_dtype(CPU)


@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize("avx512", [True, False])
def test_bfloat16_is_fast_on_a_cpu_that_multiplies_it(monkeypatch, amx, avx512):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    assert fast_dtype(CPU) == (torch.bfloat16 if amx or avx512 else torch.float32)
    assert fast_dtype(torch.device("mps")) == torch.float32


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_mixed_precision_computes_products_in_its_dtype_and_nothing_outside_of_it(dtype):
    a, b = torch.randn(2, 4, 4).unbind(0)
    with mixed_precision(dtype, CPU):
        assert (a @ b).dtype == dtype and (a + b).dtype == torch.float32
    assert (a @ b).dtype == torch.float32


FAULTS = """
import resource
import torch
from engine.core.device import keep_freed_memory
keep_freed_memory()
for _ in range(16):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MiB: 16,384 pages of 4 KiB
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another C library")
def test_freed_memory_is_used_again():
    done = subprocess.run([sys.executable, "-c", FAULTS], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    faults = [int(line) for line in done.stdout.split()]
    assert min(faults[-8:]) == 0, faults  # without, each time anew


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_total_memory_is_the_machines():
    with open("/proc/meminfo") as file:
        assert total_memory(torch.device("cpu")) / 2**10 == pytest.approx(int(file.readline().split()[1]), rel=1e-3)


def test_who_asks_for_determinism_gets_it_and_the_same_run(numbers, trained, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    plain = trained("plain", "--steps", 4, "--dropout", 0.1)
    try:
        asked = trained("asked", "--steps", 4, "--dropout", 0.1, "--deterministic")
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_run(plain, asked)
