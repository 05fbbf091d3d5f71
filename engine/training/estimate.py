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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from engine.core.device import choose_dtype, mixed_precision, total_memory
from engine.core.distributed import SINGLE_PROCESS, DistributedContext
from engine.core.sharding import should_reduce_every_microbatch
from engine.data.batches import check_sizes
from engine.nn.acceleration import checkpoint_activations
from engine.training.budget import DEFAULT_STEPS
from engine.training.config import TrainConfig, with_sizes
from engine.training.optimizer import Optimizer, OptimizerConfig
from model import GPT, ModelConfig, MultiHeadAttention

# FLOP/s of bfloat16 without sparsity, from data sheets.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
# Fraction of them, on a CPU of measured matrix products. GPU: Grattafiori et al. 2024, table 4.
ASSUMED_MFU = {"cpu": 2 / 3, "cuda": 0.4, "mps": 0.4}
H100_MEMORY_BYTES = 80e9
MAX_MEMORY_FRACTION = 0.9  # of a device, for a run
BYTE_UNITS = ((1, "B"), (2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB"), (2**40, "TiB"))
TIME_UNITS = ((1e-6, "µs"), (1e-3, "ms"), (1, "s"), (60, "min"), (3600, "h"), (86400, "days"))


@dataclass(frozen=True)
class Hardware:
    """The dtype of matrix products, the kind of device, and the ranks of DDP or FSDP."""

    dtype: torch.dtype
    is_gpu: bool
    num_ranks: int = 1
    is_sharded: bool = False


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that are created inside, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()  # ids of the living ones
        self.current = 0
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if str(function).startswith("aten._fused_"):  # an optimizer's update in place: no result,
            return None  # and no implementation without values
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if id(storage) not in self.storages:
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
    """Count memory, without values, from when the meta model has weights and gradients."""
    with FakeTensorMode(), PeakMemory() as counter:
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


def over_layers(model: ModelConfig, count: Callable[[ModelConfig], float]) -> float:
    """Return a count over all layers, from few: every pattern of blocks adds the same."""
    pattern = len(model.windows or (0,))
    num_more, num_few = divmod(model.num_layers - 2, pattern)
    if num_more <= 1:
        return count(model)
    few = count(replace(model, num_layers=num_few + 2))
    more = count(replace(model, num_layers=num_few + 2 + pattern))
    return few + num_more * (more - few)


@functools.cache
def flops_per_token(model: ModelConfig) -> float:
    """Return the operations of a training step, per token, as PyTorch counts them."""

    def count(part: ModelConfig) -> float:
        gpt = build_meta_model(part)
        # Attention in matrix products, all of which are counted.
        with trace_memory(gpt), sdpa_kernel(SDPBackend.MATH):
            tokens = torch.zeros(1, part.context_length, dtype=torch.long)
            with FlopCounterMode(display=False) as counter:
                gpt(tokens, tokens).backward()
        return counter.get_total_flops()

    return over_layers(model, count) / model.context_length


@functools.cache
def activation_bytes(model: ModelConfig, rows: int, hardware: Hardware, checkpointing: bool = False) -> float:
    """Return the most bytes of a forward and backward pass, besides weights and gradients."""

    def count(part: ModelConfig) -> float:
        gpt = build_meta_model(part)
        dtype = hardware.dtype
        if hardware.is_gpu:  # fused attention stores no scores: with dropout, windows, and in bf16
            dtype = torch.float16 if dtype == torch.bfloat16 else dtype  # fused on a CPU too
            for module in gpt.modules():
                if isinstance(module, MultiHeadAttention):
                    module.window = 0
                    module.attention_dropout = 0.0
        if hardware.is_sharded:
            gpt.blocks.to(dtype)  # FSDP gathers their weights in it
        if checkpointing:
            checkpoint_activations(gpt)
        with trace_memory(gpt) as counter:
            tokens = torch.zeros(rows, part.context_length, dtype=torch.long)
            with mixed_precision(dtype, tokens.device):
                loss = gpt(tokens, tokens)
            loss.backward()
            return counter.peak

    return over_layers(model, count)


@functools.cache
def optimizer_bytes(model: ModelConfig, optimizer: OptimizerConfig, dtype: torch.dtype) -> tuple[float, float]:
    """Return the bytes of the optimizer's state, and the most that a step needs besides."""

    @functools.cache
    def count(part: ModelConfig) -> tuple[int, int]:
        gpt = build_meta_model(part)
        with trace_memory(gpt) as counter:
            traced = Optimizer(gpt, optimizer, SINGLE_PROCESS, dtype)
            traced.clip_gradients()
            traced.update(0.0)
            return counter.current, counter.peak - counter.current

    return over_layers(model, lambda m: count(m)[0]), over_layers(model, lambda m: count(m)[1])


def estimate_memory(config: TrainConfig, rows: int, hardware: Hardware) -> dict[str, float]:
    """Return the bytes that a rank needs, by purpose, for micro-batches of ``rows`` sequences.

    DDP stores gradients in its buckets too. FSDP stores a fraction of everything, and in full what
    is in use: weights around the blocks, of one block and the next; gradients of a block, or of all
    while micro-batches are accumulated.
    """
    model = build_meta_model(config.model)
    num_params = model.num_parameters
    block_params = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    shards = hardware.num_ranks if hardware.is_sharded else 1
    gathered_bytes = 0
    buffered = num_params if hardware.num_ranks > 1 else 0
    if hardware.is_sharded:
        gathered_bytes = 4 * (num_params - len(model.blocks) * block_params)
        gathered_bytes += 2 * hardware.dtype.itemsize * block_params
        accumulates = rows * hardware.num_ranks < (config.batch_size or 1)
        if not accumulates or should_reduce_every_microbatch(num_params, H100_MEMORY_BYTES):
            buffered = block_params
    lean = config.checkpoint_activations
    activations = activation_bytes(config.model, rows, hardware, lean)
    state, update = optimizer_bytes(config.model, config.optimizer, hardware.dtype)
    return {
        "weights": 4 * num_params / shards + gathered_bytes,
        "gradients": 4 * num_params / shards + 4 * buffered,
        "optimizer state": state / shards,
        "activations": activations,
        "optimizer step": max(0.0, update / shards - activations),
    }


def bound_memory(config: TrainConfig, rows: int) -> float:
    """Return an upper bound of the bytes that a rank needs, without a trace."""
    model = config.model
    tokens = rows * model.context_length
    scores = model.context_length * model.num_heads * model.num_layers
    per_token = 400 * model.d_model * model.num_layers + 24 * scores + 16 * (model.vocab_size or 0)
    return 32 * build_meta_model(model).num_parameters + tokens * per_token


def largest_micro_batch(config: TrainConfig, dist: DistributedContext) -> int:
    """Return the most sequences, at most a rank's batch, that fit in memory at once, or 0.

    A micro-batch size that is set is the only choice.
    """
    dtype = choose_dtype(config.dtype, dist.device, config.model.d_model)
    hardware = Hardware(dtype, dist.device.type != "cpu", dist.size, dist.sharded)
    limit = MAX_MEMORY_FRACTION * total_memory(dist.device)
    if not hardware.is_gpu:
        limit /= dist.size  # ranks on CPUs are of one machine
    batch_rows = (config.batch_size or 1) // dist.size
    choices = [rows for rows in range(batch_rows, 0, -1) if batch_rows % rows == 0]
    for rows in [config.micro_batch_size] if config.micro_batch_size else choices:
        too_large = bound_memory(config, rows) > limit
        if too_large:
            too_large = sum(estimate_memory(config, rows, hardware).values()) > limit
        if not dist.any(too_large):
            return rows
    return 0


def measure_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of large matrix products."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    return 2 * size**3 / timer.blocked_autorange(min_run_time=0.3).median


def describe_plan(config: TrainConfig, device: torch.device, epoch_tokens: Sequence[float]) -> str:
    """Describe what a run needs: on this device, on one H100, and on eight with FSDP.

    ``epoch_tokens`` are the tokens of an epoch of each dataset. Sizes that are None have defaults.
    """
    config = with_sizes(config, {})
    batch_size = config.batch_size or 1
    check_sizes(batch_size, 1, config.micro_batch_size)
    dtype = choose_dtype(config.dtype, device, config.model.d_model)
    here_flops = ASSUMED_MFU[device.type] * measure_matmul_flops(device, dtype)
    h100_flops = ASSUMED_MFU["cuda"] * PEAK_FLOPS["H100"]
    hardware = {
        "here": (Hardware(dtype, device.type != "cpu"), here_flops),
        "1 H100": (Hardware(torch.bfloat16, True), h100_flops),
        "8 H100, FSDP": (Hardware(torch.bfloat16, True, 8, True), h100_flops),
    }
    columns = {
        name: plan_cells(config, *column) for name, column in hardware.items() if batch_size % column[0].num_ranks == 0
    }
    table = [f"{'':<16}" + "".join(f"{name:>14}" for name in columns)]
    for name in columns["here"]:
        table.append(f"{name:<16}" + "".join(f"{cells[name]:>14}" for cells in columns.values()))
    steps = config.steps or DEFAULT_STEPS
    step_tokens = batch_size * config.model.context_length
    tokens = steps * step_tokens
    epochs = "".join(f", {tokens / epoch:,.2f} epochs" for epoch in epoch_tokens)
    num_params = build_meta_model(config.model).num_parameters
    gflop = flops_per_token(config.model) / 1e9
    checkpoint = 4 * num_params + optimizer_bytes(config.model, config.optimizer, dtype)[0]
    return f"""\
model       {num_params:,} parameters, {gflop:,.3f} GFLOP per token
run         {steps:,} steps of {step_tokens:,} tokens = {tokens:,}{epochs}
checkpoint  {format_amount(checkpoint, BYTE_UNITS)}
speed       here {ASSUMED_MFU[device.type]:.0%} of what matrix products reach
            H100 {ASSUMED_MFU["cuda"]:.0%} of its data sheet, in bfloat16, without communication
!           exceeds the {H100_MEMORY_BYTES / 1e9:.0f} GB of an H100

""" + "\n".join(table)


def plan_cells(config: TrainConfig, hardware: Hardware, flops: float) -> dict[str, str]:
    """Return a column of the table, for ranks that each compute at ``flops`` FLOP/s."""
    batch_rows = (config.batch_size or 1) // hardware.num_ranks
    most = config.micro_batch_size or batch_rows
    rows = max(n for n in range(1, batch_rows + 1) if batch_rows % n == 0 and n <= most)
    memory = estimate_memory(config, rows, hardware)
    cells = {"micro-batches": f"{batch_rows // rows} × {rows}"}
    for name, num_bytes in {**memory, "= memory": sum(memory.values())}.items():
        mark = "!" if hardware.is_gpu and num_bytes > H100_MEMORY_BYTES else ""
        cells[name] = format_amount(num_bytes, BYTE_UNITS) + mark
    seconds = batch_rows * config.model.context_length * flops_per_token(config.model) / flops
    cells["TFLOP/s"] = f"{flops / 1e12:,.2f}"
    cells["one step"] = format_amount(seconds, TIME_UNITS)
    cells["all steps"] = format_amount((config.steps or DEFAULT_STEPS) * seconds, TIME_UNITS)
    return cells


def format_amount(amount: float, units: Sequence[tuple[float, str]]) -> str:
    """Return an amount in the largest unit that it reaches."""
    size, unit = max([pair for pair in units if pair[0] <= amount], default=units[0])
    return f"{amount / size:,.{0 if amount >= 100 * size else 1}f} {unit}" if amount else "0"
