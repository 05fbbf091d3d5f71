"""An imitated CUDA device: autograd, autocast and the dispatcher on fake CUDA tensors.

A program: its arguments are the library of fake_cuda.cpp and a dataset. For each line of JSON on
stdin it trains and decodes, and prints a line with what a GPU would refuse to capture. Tensors have
no values. Not imitated: kernels, random numbers, memory, time, and captures that fail.
"""

import contextlib
import ctypes
import importlib.util
import json
import sys
import traceback
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
from engine.training.config import RunConfig
from engine.training.optimizer import OptimizerConfig
from train import train_step

STREAM = SimpleNamespace(device=torch.device("cuda", 0), wait_stream=id, synchronize=int)
PROPERTIES = {"name": "imitated", "major": 8, "minor": 0, "total_memory": 16 * 2**30}
CUDA_ANSWERS = {
    "is_available": True,
    "device_count": 1,
    "is_bf16_supported": True,
    "get_device_capability": (8, 0),
    "get_device_properties": SimpleNamespace(**PROPERTIES, multi_processor_count=80),
    "mem_get_info": (12 * 2**30, 16 * 2**30),
    "memory_reserved": 2**30,
    "current_stream": STREAM,
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    **dict.fromkeys(["_lazy_init", "empty_cache", "synchronize", "set_device", "set_rng_state"]),
}
FAKE_MODE = FakeTensorMode(allow_non_fake_inputs=True)
kept_losses = []


def hook_norm(compute):
    """Return a function that adds a hook to the last norm of a trainer's model."""
    return lambda run: run.model.final_norm.register_forward_hook(lambda _, x, y: compute(y))


def first_query_norm(run):
    return run.model.blocks[0].attention.heads[0].query_norm


# Changes of a trainer. All but the first break captures, or the dtype of attention.
CHANGES = {
    "keep losses": lambda run: run.model.register_forward_hook(lambda *x: kept_losses.append(x[2])),
    "item": hook_norm(lambda y: y * y.abs().max().item()),
    "comparison": hook_norm(lambda y: y * torch.equal(y, y)),
    "list": hook_norm(lambda y: y * torch.tensor([1.0], device=y.device)),
    "CPU tensor": hook_norm(lambda y: y * torch.ones((), device="cpu")),
    "copy": hook_norm(lambda y: y + y.cpu().sum().to(y.device)),
    "stream": lambda run: kept_losses.append(run.model(*run.passes.example_batch())),
    "norm": lambda run: first_query_norm(run).register_forward_hook(lambda *x: x[2].float()),
}


class ImitatedDevice(TorchDispatchMode):
    """Answers without values, and reports from a captured region what a graph cannot hold."""

    is_capturing = False

    def start_report(self):
        self.report = {"captures": 0, "failures": [], "findings": [], "events": [], "dtypes": []}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not all(isinstance(tensor, FakeTensor) for tensor in inputs):
            args, kwargs = tree_map_only(Tensor, FAKE_MODE.from_tensor, (args, kwargs))
        result = None
        try:
            if "_fused_adamw_" not in str(function):  # which fake tensors do not have
                result = function(*args, **kwargs or {})
        except DataDependentOutputException:  # True, 1 or 0.0
            result = inputs[0].dtype == torch.bool or int(not inputs[0].is_floating_point())
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        is_refused = any(name in str(function) for name in REFUSED)
        has_cpu = any(tensor.device.type == "cpu" for tensor in inputs + outputs)
        if self.is_capturing and (is_refused or has_cpu):
            frames = traceback.extract_stack()[-6:-1]
            self.report["findings"].append(f"{function} {[(x.name, x.lineno) for x in frames]}")
        return result


DEVICE_MODE = ImitatedDevice()


class ImitatedPool(GraphPool):
    """Calls functions on a stream of their own, instead of recording them."""

    def _open(self, device):
        self.stream = STREAM

    def new_memory(self):
        return None

    def run(self, function):
        outer_stream = LIBRARY.set_stream(1)
        try:
            return function()
        finally:
            LIBRARY.set_stream(outer_stream)

    def capture(self, function, *memory):
        DEVICE_MODE.report["captures"] += 1
        LIBRARY.take_events()
        DEVICE_MODE.is_capturing = True
        try:
            result = self.run(function)
        finally:
            DEVICE_MODE.is_capturing = False
        DEVICE_MODE.report["events"] += LIBRARY.take_events().decode().splitlines()
        return lambda: result

    def fail(self, reason):
        DEVICE_MODE.report["failures"].append(str(reason))
        super().fail(reason)


def train_and_decode(change, architecture, optimizer, **settings):
    """Train for two steps, then decode in both ways; yield the name of each phase after it."""
    architecture = {k: tuple(v) if isinstance(v, list) else v for k, v in architecture.items()}
    config = RunConfig(
        model=model.ModelConfig(**architecture),
        optimizer=OptimizerConfig(**optimizer),
        batch_size=4,
        **settings,
    )
    dist_ctx = DistributedContext(device=choose_device("auto"))
    run = trainer.Trainer(config, dist_ctx, open_mixture((Path(sys.argv[2]),)))
    CHANGES.get(change, id)(run)
    run.passes.wrap_model()
    for _ in range(2):
        train_step(run)
    yield "training"
    for name, has_own_weights in (("decoding", True), ("decoding with autocast", False)):
        passes.fits_merged_weights = lambda *_, answer=has_own_weights: answer
        with run.passes.decoder() as decoder:
            engine = decoding_engine.DecodingEngine(*decoder)
            for row, length in enumerate((5, 3)):
                engine.add([1] * length)
                engine.read(row)
                for _ in range(2):
                    engine.step([1] * (row + 1))
        yield name


def record_dtypes(attend):
    """Return a function of attention that reports the dtypes of queries, keys and values."""

    def record(*arguments, **options):
        dtypes = {str(x.dtype).removeprefix("torch.") for x in arguments[:3] if x.is_cuda}
        DEVICE_MODE.report["dtypes"] = sorted(dtypes.union(DEVICE_MODE.report["dtypes"]))
        return attend(*arguments, **options)

    return record


def with_values(function):
    """Return a function that makes tensors with values."""

    def compute(*arguments):
        with _disable_current_modes():
            return function(*arguments)

    return compute


def main():
    """Replace what needs a GPU, and answer the lines of stdin."""
    for name, answer in CUDA_ANSWERS.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch._C._set_only_lift_cpu_tensors(True)  # tensors of lists, as on a GPU
    torch.compile = lambda function, **options: function
    Tensor.pin_memory = lambda tensor: tensor
    GRAPH_POOLS["cuda"] = ImitatedPool
    names = ((trainer, "build_meta_model"), (trainer, "check_attention"), (passes, "build_decoder"))
    for module, name in names:
        setattr(module, name, with_values(getattr(module, name)))
    names = ((model, "attend"), (decoding_engine, "attend"), (decoding_engine, "attend_from_last"))
    for module, name in (*names, (attention, "masked_attention")):
        setattr(module, name, record_dtypes(getattr(module, name)))
    for line in sys.stdin:
        reports = {}
        DEVICE_MODE.start_report()
        try:
            with contextlib.redirect_stdout(sys.stderr), FAKE_MODE, DEVICE_MODE:
                for phase in train_and_decode(**json.loads(line)):
                    reports[phase] = DEVICE_MODE.report
                    DEVICE_MODE.start_report()
        except Exception:
            reports["error"] = traceback.format_exc()
        kept_losses.clear()
        print(json.dumps(reports), flush=True)


if __name__ == "__main__":
    main()
