"""Which device and dtype, and memory that is reused."""

import os

import pytest
import torch
from helpers import Action, assert_same_run

import sample
from engine.core.device import (
    DTYPE_BY_NAME,
    MIN_BFLOAT16_WIDTH,
    choose_device,
    choose_dtype,
    choose_num_threads,
    fast_dtype,
    usable_memory,
)
from engine.core.errors import UserError

CPU_DEVICE = torch.device("cpu")


def test_device_is_the_named_one_or_for_auto_the_best():
    assert choose_device("cpu") == CPU_DEVICE
    if torch.cuda.is_available():
        assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
    elif not torch.backends.mps.is_available():
        assert choose_device("auto") == choose_device("auto", local_rank=3) == CPU_DEVICE


@pytest.mark.parametrize("name", ["tpux", "", "meta", "xla:0", "cuda:99", "cpu:x"])
def test_a_missing_device_and_one_gpu_for_several_ranks_are_refused(name):
    with pytest.raises(UserError, match=f"^--device: {name} .*$"):
        choose_device(name)
    with pytest.raises(UserError, match=r"^--device: .*cuda:0"):
        choose_device("cuda:0", local_rank=1, num_local_ranks=2)


def test_dtype_is_the_named_one_or_for_auto_the_fast_one_except_for_narrow_models_on_a_cpu():
    for name, dtype in DTYPE_BY_NAME.items():
        assert choose_dtype(name, CPU_DEVICE, 8) == dtype
        assert choose_dtype(name, torch.device("cuda"), 8192) == dtype
    assert choose_dtype("auto", CPU_DEVICE, MIN_BFLOAT16_WIDTH - 1) == torch.float32
    assert choose_dtype("auto", CPU_DEVICE, MIN_BFLOAT16_WIDTH) == fast_dtype(CPU_DEVICE)


def test_bfloat16_is_fast_on_a_cpu_with_instructions_for_it(monkeypatch):
    for capability in ("amx_tile", "avx512_bf16", "avx2"):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda name=capability: {name: True})
        is_slow = capability == "avx2"
        assert fast_dtype(CPU_DEVICE) == (torch.float32 if is_slow else torch.bfloat16)
    assert fast_dtype(torch.device("mps")) == torch.float32


def test_a_deterministic_run_is_the_same_and_leaves_the_state_of_torch(trained, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr("ctypes.CDLL", None)  # malloc's settings are not changed
    plain = trained("plain", "--steps", 4, "--dropout", 0.1)
    getters = [torch.get_num_threads, torch.get_deterministic_debug_mode, torch.initial_seed]
    states = [[get() for get in getters]]

    def act() -> None:
        torch.set_num_threads(3)
        states.append([get() for get in getters])

    flags = ["--steps", 4, "--dropout", 0.1, "--deterministic"]
    assert_same_run(plain, trained("det", *flags, callbacks=[Action(4, act, "val_loss")]))
    assert states[1][:2] == [3, 2] and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert states[0] == [get() for get in getters] and sample.load(plain)


@pytest.mark.parametrize(
    ("times", "num_threads", "seconds"),
    [([5], 6, 4), ([3.9], 6, 4), ([3, 2.9], 3, 3), ([3, 2], 1, 2)],
)
def test_fewer_threads_compute_where_they_are_faster(times, num_threads, seconds, monkeypatch):
    threads = [6]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    remaining = [*times]
    assert choose_num_threads(4, lambda: remaining.pop(0)) == seconds
    assert threads[-1] == num_threads and not remaining


@pytest.fixture
def gpu_without_kernels(monkeypatch):
    """A GPU that reports itself, and on which no kernel runs."""

    class Unusable:
        def add(self, number):
            message = "CUDA error: no kernel image is available for execution on the device"
            raise RuntimeError(f"{message}\nCUDA kernel errors might be reported elsewhere")

    for name, result in (("is_available", True), ("init", None), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)
    monkeypatch.setattr(torch, "ones", lambda *_, device: Unusable())


def test_a_gpu_without_kernels_is_refused_and_with_auto_the_cpu_is_used(
    gpu_without_kernels, capsys
):
    with pytest.raises(UserError, match=r"^--device: cuda:0 .*no kernel image"):
        choose_device("cuda")
    assert choose_device("auto") == CPU_DEVICE
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "no kernel image" in errors
    with pytest.raises(UserError, match="--device"):  # ranks must have one kind of device
        choose_device("auto", local_rank=1, num_local_ranks=2)


def test_a_gpu_without_bfloat16_computes_in_float16_in_the_memory_that_others_leave(monkeypatch):
    device = torch.device("cuda", 0)
    for is_supported, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda result=is_supported, **_: result
        )
        assert choose_dtype("auto", device, 8) == dtype
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 16))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2)
    assert usable_memory(device) == 5 + 2
