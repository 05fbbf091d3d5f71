"""Inductor and Triton for an imitated GPU: kernels are compiled, and never run."""

from types import SimpleNamespace

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.utils import counters
from torch._inductor import compile_fx, config
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


def compile_kernel(kernel, *arguments, **options):
    """Compile one configuration of a kernel for the target, instead of all for the GPU."""
    if not kernel.compile_results:  # it is new
        kernel.configs = kernel.configs[:1]
        kernel._precompile_worker()
    counters["triton"]["compiled"] += 1


def compile_graph(graph_module, inputs, **options):
    """Compile the kernels of a graph; return the graph, whose operations fake tensors know."""
    compile_fx.compile_fx_inner(graph_module, inputs, **options)
    return make_boxed_func(graph_module.forward)


def imitate_triton(properties, capability):
    """Let Inductor compile for a GPU of a capability; return a backend for torch.compile."""
    properties.major, properties.minor = divmod(capability, 10)
    sizes = {"multi_processor_count": 40, "max_threads_per_multi_processor": 1024, "warp_size": 32}
    vars(properties).update(sizes, regs_per_multiprocessor=2**16, gcnArchName="")
    target = GPUTarget("cuda", capability, properties.warp_size)
    driver.set_active(
        SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    )
    triton_helpers.set_driver_to_gpu = lambda: None
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch.cuda._exchange_device = lambda index: index
    torch.cuda._maybe_exchange_device = lambda index: index
    FakeTensorMode.avoid_device_init = property(lambda mode: True)
    CachingAutotuner.precompile = compile_kernel
    config.compile_threads = 1
    config.fx_graph_cache = False
    config.joint_graph_constant_folding = False  # it computes on the device
    config.shape_padding = False  # it measures
    return lambda module, inputs: compile_fx.compile_fx(module, inputs, compile_graph)
