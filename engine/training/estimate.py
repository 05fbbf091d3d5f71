"""--plan: the parameters, operations, memory and time of a run, from formulas."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils.benchmark import Timer

from engine.core.cli import count_noun
from engine.core.device import DTYPE_BY_NAME, total_memory
from engine.core.distributed import DistributedContext
from engine.core.errors import UserError
from engine.core.sharding import should_reduce_every_microbatch
from engine.nn.attention import MAX_UNFUSED_POSITIONS
from engine.nn.lora import add_lora
from engine.nn.loss import max_chunk_rows
from engine.training.config import RunConfig
from engine.training.optimizer import OPTIMIZER_KINDS
from model import GPT, ModelConfig

H100_FLOPS = 989e12  # per second, of bfloat16 without sparsity, from the data sheet
H100_MEMORY_BYTES = 80e9
CPU_UTILIZATION = 2 / 3  # of measured matrix products
GPU_UTILIZATION = 0.4  # of the data sheet: Grattafiori et al. 2024, table 4
CPU_PROCESS_BYTES = 350 * 2**20  # Python, PyTorch, threads and report
CPU_HEAP_OVERHEAD = 0.3  # measured: freed blocks that the C library keeps, of all activations
MAX_MEMORY_FRACTION = 0.9  # of a device, for a run
# Vectors of the feed-forward width that a position stores for the backward pass.
STORED_HIDDEN_VECTORS = {"swiglu": 4, "relu2": 2, "gelu": 2, "relu": 1}
NUM_BACKWARD_VECTORS = 7  # measured: temporary, of d_model, for each position
PLAN_LORA_RANK = 16
NUM_UPDATES = 7  # of LoRA in a block: queries, keys, values, projection and feed-forward
NUM_MUON_COPIES = 4  # measured: of the largest group of matrices, in a step


@functools.cache
def build_meta_model(model: ModelConfig, lora: tuple[Any, ...] = ()) -> GPT:
    """Return a model whose parameters have shapes only; ``lora`` are arguments of add_lora."""
    with torch.device("meta"):
        gpt = GPT(model)
        if lora:
            add_lora(gpt, *lora)
        return gpt


def lora_arguments(config: RunConfig) -> tuple[Any, ...]:
    """Return the arguments of add_lora for a run; () without LoRA."""
    dtypes = (DTYPE_BY_NAME[config.dtype], DTYPE_BY_NAME[config.frozen_dtype])
    return (config.lora_rank, *dtypes, config.train_tokens) if config.lora_rank else ()


def trained_parameters(config: RunConfig) -> dict[str, Parameter]:
    """Return the parameters of a run that are not frozen, with shapes only."""
    params = build_meta_model(config.model, lora_arguments(config)).named_parameters()
    return {name: parameter for name, parameter in params if parameter.requires_grad}


def count_matrix_weights(model: ModelConfig) -> Counter[torch.Size]:
    """Return the number of weights in the matrices of the blocks, by their shape."""
    gpt = build_meta_model(model)
    counts: Counter[torch.Size] = Counter()
    for name, parameter in gpt.named_parameters():
        if gpt.specs[name].group == "matrix":
            counts[parameter.shape] += parameter.numel()
    return counts


def flops_per_token(config: RunConfig) -> float:
    """Return the operations of a training step per token, of products with weights and attention.

    They are 6 for each weight, of which 2 are of its gradient: 4 if it is frozen.
    """
    model = config.model
    num_weights = count_matrix_weights(model).total() + model.d_model * model.vocab_size
    T = config.context_length
    num_scores = sum(min(window or T, T) for window in model.layer_windows)
    num_per_weight = 4 if config.lora_rank else 6
    return num_per_weight * num_weights + 12 * model.num_heads * model.head_width * num_scores


def activation_bytes(config: RunConfig, rows: int, dist_ctx: DistributedContext) -> float:
    """Return the peak bytes of a forward and backward pass, without weights and gradients.

    Blocks store what their backward pass needs; at the peak there are also the logits, or temporary
    values. With ``checkpoint_activations``, only one block at a time stores more than its input.
    """
    model = config.model
    dtype = DTYPE_BY_NAME[config.dtype]
    is_gpu = dist_ctx.device.type != "cpu"
    is_cast = dtype != torch.float32
    T = config.context_length
    num_tokens = rows * T
    D = model.d_model
    heads_width = model.num_heads * model.head_width
    qk_width = heads_width + model.num_groups * model.head_width

    width = 2 * qk_width  # queries, keys, values, and the output of attention
    width += qk_width * (model.qk_norm + (model.position == "rope"))
    width += STORED_HIDDEN_VECTORS[model.activation] * model.feed_forward_width
    width += 2 * D * (is_cast or model.norm != "rmsnorm")  # inputs of products, after the norms
    if config.lora_rank:  # gate and expand convert their input each; outputs of the A
        width += D * is_cast + NUM_UPDATES * config.lora_rank
    width += 2 * D * (model.dropout > 0)
    stored_bytes = 4 * 2 * D + dtype.itemsize * width  # of a block, for a position

    # Weights in the dtype of products. Those of queries, keys and values are concatenated first.
    num_copied = D * (2 * qk_width - heads_width)
    if is_cast and not dist_ctx.sharded and not config.lora_rank:
        num_copied = count_matrix_weights(model).total() // model.num_layers
    copied_bytes = dtype.itemsize * num_copied

    # On a CPU, attention stores scores with dropout, or for few bfloat16 positions (measured).
    is_short = dtype == torch.bfloat16 and T <= MAX_UNFUSED_POSITIONS
    stores_scores = not is_gpu and (model.dropout > 0 or is_short)
    copies_of_scores = stores_scores * (2.5 if model.dropout else 1.0)
    blocks = []
    for window in model.layer_windows:
        is_windowed = 0 < window < T
        num_keys = min(2 * window, T) if is_windowed else T
        num_values = copies_of_scores * model.num_heads * num_keys
        num_values += 6 * heads_width * is_windowed  # blocks of queries have copies of their keys
        blocks.append(num_tokens * (stored_bytes + dtype.itemsize * num_values) + copied_bytes)

    peak_bytes = loss_bytes(config, num_tokens, is_gpu)
    backward_bytes = NUM_BACKWARD_VECTORS * dtype.itemsize * D * num_tokens
    if config.checkpoint_activations:
        peak_bytes += model.num_layers * copied_bytes * is_cast
        peak_bytes = max(peak_bytes, max(blocks) + backward_bytes)
        return 4 * D * num_tokens * model.num_layers + peak_bytes  # with the blocks' inputs
    return sum(blocks) + max(peak_bytes, backward_bytes)


def loss_bytes(config: RunConfig, num_tokens: int, is_gpu: bool) -> float:
    """Return the bytes of chunks of logits, and of the gradients of inputs and weights."""
    D = config.model.d_model
    V = config.model.vocab_size
    itemsize = DTYPE_BY_NAME[config.dtype].itemsize
    weight = torch.empty(V, 0, device="meta" if is_gpu else "cpu")
    is_fused = is_gpu and config.compile
    num_logits = min(num_tokens, max_chunk_rows(weight, is_fused)) * V
    if is_fused:  # logits and their gradient
        num_bytes = (4 if config.model.logit_softcap else 2) * itemsize * num_logits
    else:
        num_bytes = 4 * (3 if config.model.logit_softcap else 2) * num_logits
        num_bytes += itemsize * num_logits * (itemsize < 4)  # their gradient, for products
    is_trained = not config.lora_rank or config.train_tokens
    num_bytes += 3 * 4 * D * (V * is_trained + num_tokens)  # measured: three copies
    is_converted = is_trained or config.frozen_dtype != config.dtype
    return num_bytes + itemsize * V * D * (itemsize < 4) * is_converted


def optimizer_bytes(config: RunConfig) -> tuple[int, int]:
    """Return the bytes of the optimizer's state, and the peak that a step adds."""
    counts = count_matrix_weights(config.model)
    state = 8 * sum(param.numel() for param in trained_parameters(config).values())  # as AdamW
    if config.lora_rank or not OPTIMIZER_KINDS[config.optimizer.optimizer].is_for_matrices:
        return state, 0
    itemsize = DTYPE_BY_NAME[config.dtype].itemsize
    return state - 4 * counts.total(), NUM_MUON_COPIES * itemsize * max(counts.values())


def estimate_memory(config: RunConfig, rows: int, dist_ctx: DistributedContext) -> dict[str, float]:
    """Return the bytes that a rank needs, by purpose, for micro-batches of ``rows`` sequences.

    With FSDP, a rank also has the full weights of two blocks and of all modules outside the blocks.
    It has the full gradients of one block, or of all while micro-batches accumulate. With DDP and
    captured steps, it has a second copy of the gradients. On a CPU, the process counts too.
    """
    model = build_meta_model(config.model, lora_arguments(config))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    num_params = sum(param.numel() for param in trained_parameters(config).values())
    activations = activation_bytes(config, rows, dist_ctx)
    state, update = optimizer_bytes(config)
    shards = 1
    gathered_bytes = 0
    has_buffers = dist_ctx.size > 1 or config.captures_steps(dist_ctx)
    num_buffered = num_params if has_buffers else 0
    if dist_ctx.sharded:
        shards = dist_ctx.size
        block_params = sum(parameter.numel() for parameter in model.blocks[0].parameters())
        block_bytes = sum(parameter.nbytes for parameter in model.blocks.parameters())
        gathered_bytes = weights - block_bytes
        gathered_bytes += 2 * DTYPE_BY_NAME[config.dtype].itemsize * block_params
        accumulates = rows * shards < config.batch_size
        if not accumulates or should_reduce_every_microbatch(num_params, H100_MEMORY_BYTES):
            num_buffered = min(num_params, block_params)
    overhead = 0.0
    if dist_ctx.device.type == "cpu":
        recomputed = activation_bytes(replace(config, checkpoint_activations=False), rows, dist_ctx)
        overhead = CPU_PROCESS_BYTES + CPU_HEAP_OVERHEAD * recomputed
    return {
        "weights": weights / shards + gathered_bytes,
        "gradients": 4 * num_params / shards + 4 * num_buffered,
        "optimizer state": state / shards,
        "activations": activations,
        "optimizer step": max(0.0, update / shards - activations),
        "process and heap": overhead,
    }


def micro_batch_sizes(config: RunConfig, num_ranks: int) -> list[int]:
    """Return the numbers of sequences that divide a rank's batch, largest first."""
    batch_rows = config.batch_size // num_ranks
    max_rows = config.micro_batch_size or batch_rows
    return [n for n in range(min(max_rows, batch_rows), 0, -1) if batch_rows % n == 0]


def fit_micro_batches(config: RunConfig, dist_ctx: DistributedContext, length: int) -> RunConfig:
    """Return the config, with micro-batches if none are set and the batch does not fit in memory.

    They are the largest that fit, or one sequence. ``length`` is that of the longest sequence.
    """
    if config.micro_batch_size:
        return config
    rows = 1  # if the ranks are more than the sequences, which is refused later
    for rows in micro_batch_sizes(config, dist_ctx.size):
        if fits_memory(replace(config, context_length=length), rows, dist_ctx):
            break
    is_whole_batch = rows * dist_ctx.size == config.batch_size
    return config if is_whole_batch else replace(config, micro_batch_size=rows)


def fits_memory(config: RunConfig, rows: int, dist_ctx: DistributedContext) -> bool:
    """Return whether micro-batches of ``rows`` sequences fit in the memory of every rank."""
    limit = MAX_MEMORY_FRACTION * total_memory(dist_ctx.device)
    if dist_ctx.device.type == "cpu":
        limit /= dist_ctx.size  # ranks on CPUs are of one machine
    return not dist_ctx.any(sum(estimate_memory(config, rows, dist_ctx).values()) > limit)


def check_memory(config: RunConfig, dist_ctx: DistributedContext, length: int) -> None:
    """Raise UserError if not even one sequence fits, with flags with which it does."""
    config = replace(config, context_length=length)
    if fits_memory(config, 1, dist_ctx):
        return
    rank = config.lora_rank or PLAN_LORA_RANK
    recompute = {"checkpoint_activations": True}
    both = f"--lora-rank {rank} --checkpoint-activations"
    fixes: dict[str, dict[str, Any]] = {
        "--checkpoint-activations": recompute,
        f"--lora-rank {rank}": {"lora_rank": rank},
        both: {"lora_rank": rank, **recompute},
    }
    for shorter in (length // 2**n for n in range(1, length.bit_length())):
        fixes[f"{both} --context-length {shorter}"] = {**fixes[both], "context_length": shorter}
    fitting = (
        flags for flags in fixes if fits_memory(replace(config, **fixes[flags]), 1, dist_ctx)
    )
    needed = sum(estimate_memory(config, 1, dist_ctx).values()) / 2**30
    memory = total_memory(dist_ctx.device) / 2**30
    problem = f"fine-tuning needs {needed:,.1f} GiB (got {memory:,.1f} GiB)"
    raise UserError(f"--init-from: {problem}. Use {next(fitting, 'a smaller model')}.")


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

    Tokens are those of an optimizer step, and of an epoch of each dataset.
    """
    utilization = CPU_UTILIZATION if device.type == "cpu" else GPU_UTILIZATION
    speed = utilization * measure_matmul_flops(device, DTYPE_BY_NAME[config.dtype])
    h100_speed = GPU_UTILIZATION * H100_FLOPS
    h100 = torch.device("cuda")
    h100_config = replace(config, dtype="bfloat16", compile=True)
    here = DistributedContext(device=device)
    plans = {"here": (config, here, speed)}
    if config.init_from:
        rank, title = (0, "here, full") if config.lora_rank else (PLAN_LORA_RANK, "here, LoRA")
        plans[title] = (replace(config, lora_rank=rank), here, speed)
    plans |= {
        "1 H100": (h100_config, DistributedContext(device=h100), h100_speed),
        "8 H100, FSDP": (h100_config, DistributedContext(0, 8, h100, sharded=True), h100_speed),
    }
    columns = {}
    for title, (rank_config, dist_ctx, rank_speed) in plans.items():
        if config.batch_size % dist_ctx.size == 0:
            seconds = step_tokens * flops_per_token(rank_config) / dist_ctx.size / rank_speed
            columns[title] = describe_memory(rank_config, dist_ctx)
            columns[title]["one step"] = describe_duration(seconds)
            if config.steps and not config.minutes:
                columns[title]["all steps"] = describe_duration(config.steps * seconds)
    table = [f"{'':<16}" + "".join(f"{title:>14}" for title in columns)]
    for name in columns["here"]:
        table.append(f"{name:<16}" + "".join(f"{cells[name]:>14}" for cells in columns.values()))
    legend = ""
    if any("!" in line for line in table):
        legend = f"!      exceeds the {H100_MEMORY_BYTES / 1e9:.0f} GB of an H100\n"
    num_params = build_meta_model(config.model).num_parameters
    return f"""\
model  {num_params:,} parameters, {flops_per_token(config) / 1e9:,.3f} GFLOP per token
run    {describe_length(config, step_tokens, epoch_tokens)}
speed  here {utilization:.0%} of what matrix products reach, {speed / 1e12:,.2f} TFLOP/s
       H100 {GPU_UTILIZATION:.0%} of its data sheet, in bfloat16, without communication
{legend}
""" + "\n".join(table)


def describe_duration(seconds: float) -> str:
    """Return a duration in the largest unit of which it has at least one, or in milliseconds."""
    for unit, size in (("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{1e3 * seconds:,.4g} ms"


def describe_length(config: RunConfig, step_tokens: int, epoch_tokens: Sequence[float]) -> str:
    """Describe the steps or the minutes of a run, its tokens, and the epochs of each dataset."""
    batch = f"{config.batch_size} × {count_noun(step_tokens // config.batch_size, 'token')} a step"
    if config.minutes or not config.steps:  # with minutes, steps are only a limit
        return f"{count_noun(config.minutes or 0, 'minute')}, {batch}"
    tokens = config.steps * step_tokens
    length = f"{count_noun(config.steps, 'step')}, {batch} = {count_noun(tokens, 'token')}"
    epochs = ", ".join(f"{tokens / epoch:.1f}" for epoch in epoch_tokens)
    return f"{length} ({epochs} epochs)" if epochs else length


def describe_memory(config: RunConfig, dist_ctx: DistributedContext) -> dict[str, str]:
    """Return the micro-batches of a rank and the memory that they need, for the table."""
    rows = micro_batch_sizes(config, dist_ctx.size)[0]
    num_micro_batches = config.batch_size // dist_ctx.size // rows
    cells = {"micro-batches": f"{num_micro_batches} × {rows}"}
    memory = estimate_memory(config, rows, dist_ctx)
    for name, num_bytes in {**memory, "= memory": sum(memory.values())}.items():
        mark = "!" if dist_ctx.device.type != "cpu" and num_bytes > H100_MEMORY_BYTES else ""
        cells[name] = f"{num_bytes / 2**20:,.1f} MiB{mark}"
    return cells
