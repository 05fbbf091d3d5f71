"""--plan: the parameters, operations, memory and time of a run, from traces without values."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer

from engine.core.cli import count_noun
from engine.core.device import DTYPE_BY_NAME, mixed_precision, total_memory
from engine.core.distributed import SINGLE_PROCESS, DistributedContext
from engine.core.sharding import should_reduce_every_microbatch
from engine.nn.acceleration import checkpoint_activations
from engine.training.config import RunConfig
from engine.training.optimizer import Optimizer, OptimizerConfig
from model import GPT, ModelConfig, MultiHeadAttention

H100_FLOPS = 989e12  # per second, of bfloat16 without sparsity, from the data sheet
H100_MEMORY_BYTES = 80e9
CPU_UTILIZATION = 2 / 3  # of measured matrix products
GPU_UTILIZATION = 0.4  # of the data sheet: Grattafiori et al. 2024, table 4
CPU_PROCESS_BYTES = 350 * 2**20  # Python, PyTorch, threads and report
CPU_HEAP_OVERHEAD = 0.3  # measured: freed blocks that the C library keeps, of activations
MAX_MEMORY_FRACTION = 0.9  # of a device, for a run


@dataclass(frozen=True)
class Hardware:
    """The dtype of matrix products, the kind of device, and the ranks of DDP or FSDP."""

    dtype: torch.dtype
    is_gpu: bool
    num_ranks: int = 1
    is_sharded: bool = False


class PeakMemory(TorchDispatchMode):
    """Counts the current and peak bytes of the tensors that are created in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()  # ids of the living ones
        self.current = 0
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if str(function).startswith("aten._fused_"):  # an update in place, without a result
            return None
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and id(storage) not in self.storages:
                self.storages.add(id(storage))
                self.current += storage.nbytes()
                self.peak = max(self.peak, self.current)
                weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        return result

    def _free(self, key: int, num_bytes: int) -> None:
        self.storages.remove(key)
        self.current -= num_bytes


@contextlib.contextmanager
def trace_memory(gpt: GPT) -> Iterator[PeakMemory]:
    """Count memory beyond the weights and gradients of a meta model, without values."""
    with FakeTensorMode(allow_non_fake_inputs=True), PeakMemory() as counter:
        weights = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in gpt.named_parameters()}
        gpt.load_state_dict(weights, assign=True)
        grads = [torch.empty_like(parameter) for parameter in gpt.parameters()]
        for parameter, grad in zip(gpt.parameters(), grads, strict=True):
            parameter.grad = grad  # alive until the end, though an optimizer's step drops it
        counter.current = counter.peak = 0
        yield counter


def build_meta_model(model: ModelConfig) -> GPT:
    """Return a model whose parameters have shapes only."""
    with torch.device("meta"):
        return GPT(model)


def extrapolate_layers(model: ModelConfig, count: Callable[[ModelConfig], Tensor]) -> Tensor:
    """Measure two shallow models, and extrapolate linearly in the number of window patterns."""
    pattern = len(model.windows or (0,))
    num_patterns, num_extra = divmod(model.num_layers - 2, pattern)
    if num_patterns <= 1:
        return count(model)
    smaller = count(replace(model, num_layers=num_extra + 2))
    larger = count(replace(model, num_layers=num_extra + 2 + pattern))
    return smaller + num_patterns * (larger - smaller)


def flops_per_token(model: ModelConfig) -> float:
    """Return the operations of a training step per token: 6 for each weight, and attention."""
    gpt = build_meta_model(model)
    num_weights = model.d_model * model.vocab_size  # of the head
    for name, parameter in gpt.named_parameters():
        num_weights += parameter.numel() * (gpt.specs[name].group == "matrix")
    T = model.context_length
    num_scores = sum(min(window or T, T) for window in model.layer_windows)
    return 6 * num_weights + 12 * model.num_heads * model.head_width * num_scores


@functools.cache
def activation_bytes(
    model: ModelConfig, rows: int, hardware: Hardware, checkpointing: bool = False
) -> float:
    """Return the peak bytes of a forward and backward pass, without weights and gradients."""

    def trace_peak(config: ModelConfig) -> Tensor:
        """Return the peak bytes of a micro-batch, traced on a CPU."""
        gpt = build_meta_model(config)
        dtype = hardware.dtype
        # On a GPU, attention is fused and stores no scores. On a CPU, it is fused only without
        # dropout and windows, and not in bfloat16.
        if hardware.is_gpu:
            dtype = torch.float16 if dtype == torch.bfloat16 else dtype
            for module in gpt.modules():
                if isinstance(module, MultiHeadAttention):
                    module.window = 0
                    module.attention_dropout = 0.0
        if hardware.is_sharded:
            gpt.blocks.to(dtype)  # FSDP gathers their weights in it
        if checkpointing:
            checkpoint_activations(gpt)
        with trace_memory(gpt) as counter:
            tokens = torch.zeros(rows, config.context_length, dtype=torch.long)
            with mixed_precision(dtype, tokens.device):
                loss = gpt(tokens, tokens)
            loss.backward()
        return torch.tensor(counter.peak)

    return extrapolate_layers(model, trace_peak).item()


@functools.cache
def optimizer_bytes(
    model: ModelConfig, optimizer: OptimizerConfig, dtype: torch.dtype
) -> tuple[int, int]:
    """Return the bytes of the optimizer's state, and the peak that a step adds."""

    def trace_step(config: ModelConfig) -> Tensor:
        """Return the bytes of the state and of a traced step."""
        gpt = build_meta_model(config)
        with trace_memory(gpt) as counter:
            traced = Optimizer(gpt, optimizer, SINGLE_PROCESS, dtype)
            traced.clip_gradients()
            traced.update(0.0)
            num_bytes = (counter.current, counter.peak - counter.current)
        return torch.tensor(num_bytes)

    state, update = extrapolate_layers(model, trace_step).tolist()
    return state, update


def estimate_memory(config: RunConfig, rows: int, hardware: Hardware) -> dict[str, float]:
    """Return the bytes that a rank needs, by purpose, for micro-batches of ``rows`` sequences.

    With FSDP, a rank also has the full weights of two blocks and of all modules outside the blocks.
    It has the full gradients of one block, or of all while micro-batches accumulate. With DDP, it
    has a second copy of the gradients. On a CPU, the memory of the process counts too.
    """
    model = build_meta_model(config.model)
    num_params = model.num_parameters
    activations = activation_bytes(config.model, rows, hardware, config.checkpoint_activations)
    state, update = optimizer_bytes(config.model, config.optimizer, hardware.dtype)
    shards = 1
    gathered_bytes = 0
    num_buffered = num_params if hardware.num_ranks > 1 else 0
    if hardware.is_sharded:
        shards = hardware.num_ranks
        block_params = sum(parameter.numel() for parameter in model.blocks[0].parameters())
        gathered_bytes = 4 * (num_params - len(model.blocks) * block_params)
        gathered_bytes += 2 * hardware.dtype.itemsize * block_params
        accumulates = rows * shards < config.batch_size
        if not accumulates or should_reduce_every_microbatch(num_params, H100_MEMORY_BYTES):
            num_buffered = block_params
    memory = {
        "weights": 4 * num_params / shards + gathered_bytes,
        "gradients": 4 * num_params / shards + 4 * num_buffered,
        "optimizer state": state / shards,
        "activations": activations,
        "optimizer step": max(0.0, update / shards - activations),
    }
    overhead = CPU_PROCESS_BYTES + CPU_HEAP_OVERHEAD * activations
    return {**memory, "process and heap": 0.0 if hardware.is_gpu else overhead}


def bound_memory(config: RunConfig, rows: int) -> float:
    """Return an upper bound of the bytes that a rank needs, without a trace."""
    model = config.model
    tokens = rows * model.context_length
    scores = model.context_length * model.num_heads * model.num_layers
    per_token = 400 * model.d_model * model.num_layers + 24 * scores + 16 * model.vocab_size
    tensors = 32 * build_meta_model(model).num_parameters + tokens * per_token
    return CPU_PROCESS_BYTES + (1 + CPU_HEAP_OVERHEAD) * tensors


def micro_batch_sizes(config: RunConfig, num_ranks: int) -> list[int]:
    """Return the numbers of sequences that divide a rank's batch, largest first."""
    batch_rows = config.batch_size // num_ranks
    max_rows = config.micro_batch_size or batch_rows
    return [n for n in range(min(max_rows, batch_rows), 0, -1) if batch_rows % n == 0]


def largest_micro_batch(config: RunConfig, dist_ctx: DistributedContext) -> int:
    """Return the most sequences, at most a rank's batch, that fit in memory at once, or 0.

    A micro-batch size that is set is the only choice.
    """
    dtype = DTYPE_BY_NAME[config.dtype]
    hardware = Hardware(dtype, dist_ctx.device.type != "cpu", dist_ctx.size, dist_ctx.sharded)
    limit = MAX_MEMORY_FRACTION * total_memory(dist_ctx.device)
    if not hardware.is_gpu:
        limit /= dist_ctx.size  # ranks on CPUs are of one machine
    sizes = micro_batch_sizes(config, dist_ctx.size)
    for rows in sizes[:1] if config.micro_batch_size else sizes:
        is_too_large = bound_memory(config, rows) > limit
        if is_too_large:
            is_too_large = sum(estimate_memory(config, rows, hardware).values()) > limit
        if not dist_ctx.any(is_too_large):
            return rows
    return 0


def fit_micro_batches(config: RunConfig, dist_ctx: DistributedContext) -> RunConfig:
    """Return the config, with micro-batches if the batch does not fit in memory."""
    rows = max(1, largest_micro_batch(config, dist_ctx))
    if config.micro_batch_size or rows * dist_ctx.size == config.batch_size:
        return config
    return replace(config, micro_batch_size=rows)


def measure_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of large matrix products."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    return 2 * size**3 / timer.blocked_autorange(min_run_time=0.3).median


def describe_plan(
    config: RunConfig, device: torch.device, step_tokens: int, epoch_tokens: Sequence[float]
) -> str:
    """Describe what a run needs: on this device, on one H100, and on eight with FSDP.

    ``step_tokens`` are the tokens of an optimizer step, and ``epoch_tokens`` those of an epoch of
    each dataset.
    """
    batch_size = config.batch_size
    dtype = DTYPE_BY_NAME[config.dtype]
    utilization = CPU_UTILIZATION if device.type == "cpu" else GPU_UTILIZATION
    speed = utilization * measure_matmul_flops(device, dtype)
    h100_speed = GPU_UTILIZATION * H100_FLOPS
    step_flops = step_tokens * flops_per_token(config.model)
    steps = config.steps or 0  # 0: as many as fit
    plans = {
        "here": (Hardware(dtype, device.type != "cpu"), speed),
        "1 H100": (Hardware(torch.bfloat16, True), h100_speed),
        "8 H100, FSDP": (Hardware(torch.bfloat16, True, 8, True), h100_speed),
    }
    columns = {}
    for title, (hardware, rank_speed) in plans.items():
        if batch_size % hardware.num_ranks == 0:
            seconds = step_flops / hardware.num_ranks / rank_speed
            columns[title] = describe_memory(config, hardware)
            columns[title]["one step"] = f"{1e3 * seconds:,.2f} ms"
            if steps:
                columns[title]["all steps"] = f"{steps * seconds / 3600:,.2f} h"
    table = [f"{'':<16}" + "".join(f"{title:>14}" for title in columns)]
    for name in columns["here"]:
        table.append(f"{name:<16}" + "".join(f"{cells[name]:>14}" for cells in columns.values()))
    tokens = steps * step_tokens
    epochs = "".join(f", {tokens / epoch:,.2f} epochs" for epoch in epoch_tokens)
    step_length = count_noun(step_tokens, "token")
    length = f"{count_noun(steps, 'step')} of {step_length} = {tokens:,}{epochs}"
    if not steps:
        length = f"{count_noun(config.minutes or 0, 'minute')} in steps of {step_length}"
    num_params = build_meta_model(config.model).num_parameters
    return f"""\
model  {num_params:,} parameters, {flops_per_token(config.model) / 1e9:,.3f} GFLOP per token
run    {length}
speed  here {utilization:.0%} of what matrix products reach, {speed / 1e12:,.2f} TFLOP/s
       H100 {GPU_UTILIZATION:.0%} of its data sheet, in bfloat16, without communication
!      exceeds the {H100_MEMORY_BYTES / 1e9:.0f} GB of an H100

""" + "\n".join(table)


def describe_memory(config: RunConfig, hardware: Hardware) -> dict[str, str]:
    """Return the micro-batches of a rank and the memory that they need, for the table."""
    rows = micro_batch_sizes(config, hardware.num_ranks)[0]
    num_micro_batches = config.batch_size // hardware.num_ranks // rows
    cells = {"micro-batches": f"{num_micro_batches} × {rows}"}
    memory = estimate_memory(config, rows, hardware)
    for name, num_bytes in {**memory, "= memory": sum(memory.values())}.items():
        mark = "!" if hardware.is_gpu and num_bytes > H100_MEMORY_BYTES else ""
        cells[name] = f"{num_bytes / 2**20:,.1f} MiB{mark}"
    return cells
