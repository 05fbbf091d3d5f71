"""An imitated CUDA device: autograd, autocast and Dynamo on fake CUDA tensors, without values.

A program: helpers.imitate_cuda starts it. For each line on stdin it trains and decodes, and prints
what a GPU would refuse to capture. Not imitated: numbers, memory, time, and captures that fail.
"""

import ctypes
import functools
import importlib.util
import json
import signal
import sys
import traceback
from ast import literal_eval
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":  # before torch uses a device
    for library in ("libc10.so", "libtorch_cpu.so", sys.argv[1]):
        path = Path(importlib.util.find_spec("torch").origin).parent / "lib" / library
        LIBRARY = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    LIBRARY.take_events.restype = ctypes.c_char_p

import torch
import torch.cuda.amp.common
from imitation import REFUSED
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

import model
from engine.core.device import choose_device
from engine.core.distributed import DistributedContext
from engine.data.batches import open_mixture
from engine.generation import decoding_engine
from engine.nn import attention
from engine.nn.acceleration import GRAPH_POOLS, GraphPool
from engine.training import passes, trainer
from engine.training.config import TrainConfig, make_run_config
from engine.training.optimizer import OptimizerConfig
from model import ModelConfig
from train import train_step

STREAM = SimpleNamespace(device=torch.device("cuda", 0), wait_stream=id, synchronize=int)
PROPERTIES = object.__new__(torch.cuda._CudaDeviceProperties)  # a constant for Dynamo
vars(PROPERTIES).update(name="imitated", major=8, minor=0, total_memory=16 * 2**30)
CUDA_ANSWERS = {
    "is_available": True,
    "is_bf16_supported": True,
    "device_count": 1,
    "current_device": 0,
    "current_stream": STREAM,
    "mem_get_info": (12 * 2**30, 16 * 2**30),
    "memory_reserved": 2**30,
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    "_get_device_properties": PROPERTIES,
    **dict.fromkeys(["_lazy_init", "empty_cache", "synchronize", "set_device", "set_rng_state"]),
}
FAKE_MODE = FakeTensorMode(allow_non_fake_inputs=True)
kept = []  # losses, with their autograd graphs
# Hooks: the name of a layer, and what replaces its output. All but the first are faults.
CHANGES = {
    "keep losses": ("", kept.append),
    "keep a loss of another stream": ("", kept.append),
    "item": ("final_norm", lambda y: y * y.abs().max().item()),
    "list": ("final_norm", lambda y: y * torch.tensor([1.0], device=y.device)),
    "CPU tensor": ("final_norm", lambda y: y * torch.ones((), device="cpu")),
    "copy": ("final_norm", lambda y: y + y.cpu().sum().to(y.device)),
    "norm": ("blocks.0.attention.heads.0.query_norm", lambda y: y.float()),
}


class ImitatedDevice(TorchDispatchMode):
    """Answers without values, and reports from a captured region what a graph cannot hold."""

    ignore_compile_internals = classmethod(lambda cls: True)  # else Dynamo compiles nothing

    def __init__(self):
        super().__init__()
        self.is_capturing = False
        self.report = {}

    def take_report(self):
        """Return the report of a phase, and start the next one."""
        report = self.report | {"graphs": counters["stats"]["unique_graphs"]}
        report["breaks"] = sum(counters["graph_break"].values())
        report["kernels"] = counters["triton"]["compiled"]
        counters.clear()
        self.report = {"captures": 0, "warnings": [], "findings": [], "events": [], "dtypes": []}
        return report

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not all(isinstance(tensor, FakeTensor) for tensor in inputs):
            args, kwargs = tree_map_only(Tensor, FAKE_MODE.from_tensor, (args, kwargs))
        name = str(function)
        result = None
        try:
            if "_fused_adamw_" not in name:  # which fake tensors do not have
                result = function(*args, **kwargs or {})
        except DataDependentOutputException:  # True, 1 or 0.0
            result = inputs[0].dtype == torch.bool or int(not inputs[0].is_floating_point())
        if self.is_capturing and "_to_copy" in name and result.dtype == torch.float32:
            place = traceback.extract_stack(limit=4)[0]  # below the modes of PyTorch
            is_of_model = place.filename == model.__file__ and "softmax" not in str(place.line)
            if is_of_model and inputs[0].dtype != torch.float32:
                self.report["findings"].append(f"autocast makes 32 bits of 16: {place.line}")
        if self.is_capturing:
            outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            has_cpu = any(tensor.device.type == "cpu" for tensor in inputs + outputs)
            if has_cpu or any(refused in name for refused in REFUSED):
                self.report["findings"].append(f"{name} {traceback.extract_stack()[-5:-1]}")
        return result


DEVICE_MODE = ImitatedDevice()


class ImitatedPool(GraphPool):
    """Calls functions on a stream of their own, instead of recording them."""

    def new_memory(self):
        return None

    def run(self, function):
        outer_stream = LIBRARY.set_stream(1)
        try:
            return function()
        finally:
            LIBRARY.set_stream(outer_stream)

    def capture(self, function, *memory):
        LIBRARY.take_events()
        DEVICE_MODE.is_capturing = True
        try:
            result = self.run(function)
        finally:
            DEVICE_MODE.is_capturing = False
        DEVICE_MODE.report["captures"] += 1
        DEVICE_MODE.report["events"] += LIBRARY.take_events().decode().splitlines()
        return lambda: result


def train_and_decode(change, config, optimizer, **settings):
    """Train for two steps; without a change, decode in both ways; yield each phase after it."""
    settings = {"dtype": "float32", "compile": False, **settings}
    groups = {"model": ModelConfig(**config), "optimizer": OptimizerConfig(**optimizer)}
    dist_ctx = DistributedContext(device=choose_device("auto"))
    run_config = make_run_config(TrainConfig(**settings, **groups), {}, dist_ctx)
    run = trainer.Trainer(run_config, dist_ctx, open_mixture((Path(sys.argv[2]),)))
    if change:
        layer, compute = CHANGES[change]
        run.model.get_submodule(layer).register_forward_hook(lambda _, inputs, y: compute(y))
    if change == "keep a loss of another stream":
        run.model(*run.passes.example_batch())
    run.passes.wrap_model()
    for _ in range(2):
        train_step(run)
    yield "training"
    if change:
        return
    for phase, copies in (("decoding", True), ("decoding with autocast", False)):
        run.passes.copies_decoder &= copies
        with run.passes.decoder() as decoder:
            engine = decoding_engine.DecodingEngine(*decoder)
            for row, length in enumerate((5, 3)):
                engine.add([1] * length)
                engine.read(row)
                for _ in range(1 + engine.captures):
                    engine.step([1] * (row + 1))
        yield phase


def record_dtypes(attend, *arguments, **options):
    """Call a function of attention, and report the dtypes of queries, keys and values."""
    if not torch.compiler.is_compiling():
        dtypes = {str(x.dtype).removeprefix("torch.") for x in arguments[:3] if x.is_cuda}
        DEVICE_MODE.report["dtypes"] = sorted(dtypes.union(DEVICE_MODE.report["dtypes"]))
    return attend(*arguments, **options)


def main():
    """Replace what needs a GPU, and answer the lines of stdin."""
    for name, answer in CUDA_ANSWERS.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch._C._set_only_lift_cpu_tensors(True)  # tensors of lists, as on a GPU
    Tensor.pin_memory = lambda tensor: tensor
    GRAPH_POOLS["cuda"] = ImitatedPool
    trainer.build_meta_model = _disable_current_modes()(trainer.build_meta_model)
    passes.build_decoder = _disable_current_modes()(passes.build_decoder)
    names = ((model, "attend"), (decoding_engine, "attend"), (decoding_engine, "attend_from_last"))
    for module, name in (*names, (attention, "masked_attention")):
        setattr(module, name, functools.partial(record_dtypes, getattr(module, name)))
    for module in (passes, decoding_engine):
        module.warn = lambda text: DEVICE_MODE.report["warnings"].append(text)
    backend = "eager"
    if len(sys.argv) > 3:
        import fake_triton  # which needs Triton

        backend = fake_triton.imitate_triton(PROPERTIES, int(sys.argv[3]))
    torch.compile = functools.partial(torch.compile, backend=backend)
    for line in sys.stdin:
        reports = {}
        signal.alarm(300)  # which ends this process
        torch.compiler.reset()
        DEVICE_MODE.take_report()
        try:
            with redirect_stdout(sys.stderr), FAKE_MODE, DEVICE_MODE:
                for phase in train_and_decode(**literal_eval(line)):
                    reports[phase] = DEVICE_MODE.take_report()
        except Exception:
            reports["error"] = traceback.format_exc()
        kept.clear()
        print(json.dumps(reports), flush=True)


if __name__ == "__main__":
    main()
