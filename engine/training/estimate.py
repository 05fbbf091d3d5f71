"""--plan: the parameters, operations, memory and time of a run, from formulas."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.benchmark import Timer

from engine.core.cli import count_noun
from engine.core.device import DTYPE_BY_NAME, usable_memory
from engine.core.distributed import DistributedContext
from engine.core.errors import UserError
from engine.nn.attention import MAX_UNFUSED_POSITIONS
from engine.nn.loss import max_chunk_rows
from engine.runs.checkpoint import build_meta_model
from engine.training.config import TrainConfig
from engine.training.optimizer import OPTIMIZER_KINDS
from model import ModelConfig

CPU_UTILIZATION = 2 / 3  # of measured matrix products
GPU_UTILIZATION = 0.4  # Grattafiori et al. 2024, table 4
# On a CPU: Python, PyTorch and its libraries, threads, and freed blocks that the C library keeps.
CPU_PROCESS_BYTES = 2**20 * (680 if torch.version.cuda else 390)
CPU_HEAP_OVERHEAD = 0.4  # of the activations
MAX_MEMORY_FRACTION = 0.9  # of a device, for a run whose micro-batches are chosen
MAX_MEMORY_EXCESS = 1.1  # of a device: a run that needs more is refused
MEMORY_ERROR = 0.25  # relative, of an estimate
MIN_AVERAGED_EPOCHS = 2  # of a run whose weights are averaged
MAX_AVERAGED_EPOCHS = 3  # time constant; it grows with overfitting (experiments, 2026-11-29)
AVERAGES_PER_EPOCH = 8
cached_meta_model = functools.cache(build_meta_model)


def lora_arguments(config: TrainConfig) -> tuple[Any, ...]:
    """Return the arguments of add_lora for a run; () without LoRA."""
    dtypes = (DTYPE_BY_NAME[config.dtype], DTYPE_BY_NAME[config.frozen_dtype])
    return (config.lora_rank, *dtypes, config.train_tokens) if config.lora_rank else ()


def count_matrix_weights(model: ModelConfig) -> int:
    """Return the number of weights in the matrices of the blocks."""
    gpt = cached_meta_model(model)
    named_params = gpt.named_parameters()
    return sum(param.numel() for name, param in named_params if gpt.specs[name].group == "matrix")


def estimate_overfitting(epochs: float, num_weights: int, num_tokens: float) -> float:
    """Return the overfitting of weights in matrices to a text: above 1, regularization helps.

    Fitted to one-minute to ten-minute runs (experiments, 2026-11-24 and 2026-11-27).
    """
    return math.sqrt(epochs**3 * num_weights / num_tokens) / 22


def averaging_weight(
    config: TrainConfig, step: int, step_tokens: int, epoch_tokens: float, is_last: bool
) -> float:
    """Return the weight of the parameters after a step in their moving average; 0: do not average.

    A text that is read again is averaged over, by its overfitting; fine-tuning is not.
    """
    step_epochs = step_tokens / epoch_tokens
    epochs = step * step_epochs
    interval = max(1 / AVERAGES_PER_EPOCH, step_epochs)
    is_due = is_last or epochs % interval < step_epochs
    if config.init_from or epochs < MIN_AVERAGED_EPOCHS or not is_due:
        return 0.0
    overfitting = estimate_overfitting(epochs, count_matrix_weights(config.model), epoch_tokens)
    return interval / (interval + min(2 * overfitting, MAX_AVERAGED_EPOCHS))


def flops_per_token(config: TrainConfig) -> float:
    """Return the operations of a training step per token, of products with weights and attention.

    They are 6 for each weight, of which 2 are of its gradient: 4 if it is frozen.
    """
    model = config.model
    num_weights = count_matrix_weights(model) + model.d_model * model.vocab_size
    T = config.context_length
    num_scores = sum(min(window or T, T) for window in model.layer_windows)
    num_per_weight = 4 if config.lora_rank else 6
    return num_per_weight * num_weights + 12 * model.num_heads * model.head_width * num_scores


def activation_bytes(config: TrainConfig, rows: int, dist_ctx: DistributedContext) -> float:
    """Return the peak bytes of a forward and backward pass, without weights and gradients.

    Blocks store what their backward pass needs; at the peak there are the logits too. With
    ``checkpoint_activations``, one block at a time stores more than its input.
    """
    model = config.model
    D = model.d_model
    V = model.vocab_size
    num_gates = 2 if model.activation == "swiglu" else 1
    is_cpu = dist_ctx.device.type == "cpu"
    itemsize = DTYPE_BY_NAME[config.dtype].itemsize
    num_tokens = rows * config.context_length

    # Values that a block stores for a position, in the dtype of products.
    num_values: float = 2 * D + 6 * model.num_heads * model.head_width
    num_values += 2 * num_gates * model.feed_forward_width
    if (is_cpu and model.dropout) or model.attention == "loop":
        num_values += 2.5 * model.num_heads * config.context_length  # scores of attention
    elif is_cpu and itemsize < 4 and config.context_length <= MAX_UNFUSED_POSITIONS:
        num_values += model.num_heads * config.context_length
    block_bytes = num_tokens * (4 * 2 * D + itemsize * num_values)  # inputs in float32

    is_fused = config.compile and not is_cpu
    weight = torch.empty(V, 0, device="cpu" if is_cpu else "meta")  # its length decides the chunk
    num_logits = V * min(num_tokens, max_chunk_rows(weight, is_fused))
    num_trained = V if not config.lora_rank or config.train_tokens else 0
    # Fused: logits and gradients, in the dtype of products; else float32, and 16 bits of gradients.
    logits_bytes = (2 * itemsize if is_fused else 10) * num_logits
    # In float32, of inputs and weight: gradient, that of a chunk, and their sum.
    logits_bytes += 12 * D * (num_tokens + num_trained)
    if itemsize < 4 and not config.lora_rank:  # weights in the dtype of products
        logits_bytes += itemsize * (V * D + count_matrix_weights(model))
    if config.checkpoint_activations:
        gradient_values = num_gates * model.feed_forward_width  # beside those of a block
        block_bytes += num_tokens * (4 * D + itemsize * gradient_values)
        return 4 * D * num_tokens * model.num_layers + max(logits_bytes, block_bytes)
    return model.num_layers * block_bytes + logits_bytes


def estimate_memory(
    config: TrainConfig, rows: int, dist_ctx: DistributedContext
) -> dict[str, float]:
    """Return the bytes that a rank needs, by purpose, for micro-batches of ``rows`` sequences.

    The sum is within MEMORY_ERROR of what is used. With FSDP, a rank also has the full weights
    outside the blocks and of two blocks. With DDP and captured steps, gradients exist twice.
    """
    model = cached_meta_model(config.model_config, lora_arguments(config))
    num_trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    weights = sum(param.nbytes for param in model.parameters())
    gradients = 4 * num_trained
    state = 8 * num_trained  # as AdamW
    if not config.lora_rank and OPTIMIZER_KINDS[config.optimizer.optimizer].is_for_matrices:
        state -= 4 * count_matrix_weights(config.model)
    gathered_bytes = 0
    if dist_ctx.sharded:
        block_bytes = sum(param.nbytes for param in model.blocks.parameters())
        gathered_bytes = weights - block_bytes + 2 * block_bytes // config.model.num_layers
    elif dist_ctx.size > 1 or config.captures_steps(dist_ctx):
        gradients *= 2
    shards = dist_ctx.size if dist_ctx.sharded else 1
    activations = activation_bytes(config, rows, dist_ctx)
    memory = {
        "weights": weights / shards + gathered_bytes,
        "gradients": gradients / shards,
        "optimizer state": state / shards,
        "activations": activations,
    }
    if dist_ctx.device.type == "cpu":  # a checkpoint is copied, and written in the background
        saved_bytes = (4 * num_trained + state) / shards
        memory["process, saves"] = CPU_PROCESS_BYTES + CPU_HEAP_OVERHEAD * activations + saved_bytes
    return memory


def micro_batch_sizes(batch_rows: int, max_rows: int) -> list[int]:
    """Return the numbers of sequences up to max_rows that divide a rank's batch, largest first."""
    return [n for n in range(max_rows, 0, -1) if batch_rows % n == 0]


def memory_fraction(config: TrainConfig, rows: int, dist_ctx: DistributedContext) -> float:
    """Return the memory for micro-batches of ``rows`` sequences, as a fraction of what a rank has.

    It is that of the rank with the least; ranks on CPUs share the memory of one machine.
    """
    needed = sum(estimate_memory(config, rows, dist_ctx).values())
    num_ranks = dist_ctx.size if dist_ctx.device.type == "cpu" else 1
    return max(dist_ctx.gather_json(num_ranks * needed / usable_memory(dist_ctx.device)))


def fit_micro_batches(
    config: TrainConfig, dist_ctx: DistributedContext, length: int
) -> TrainConfig:
    """Return the config, with micro-batches if none are set and the batch does not fit in memory.

    They are the largest that fit, or one sequence. ``length`` is that of the longest sequence.
    Raises UserError if even one needs over 10% more than there is, with a base model.
    """
    batch_rows = config.batch_size // dist_ctx.size
    if config.micro_batch_size is not None or not batch_rows:  # too few sequences: refused later
        return config
    longest = replace(config, model=replace(config.model, context_length=length))
    for rows in micro_batch_sizes(batch_rows, batch_rows):
        fraction = memory_fraction(longest, rows, dist_ctx)
        if fraction <= MAX_MEMORY_FRACTION:
            break
    if config.init_from and fraction > MAX_MEMORY_EXCESS:
        problem = f"fine-tuning needs {fraction:.0%} ± {MEMORY_ERROR:.0%} of the memory"
        advice = "Use a smaller model, --context-length, --lora-rank or --checkpoint-activations"
        raise UserError(f"--init-from: {problem}. {advice}.")
    return replace(config, micro_batch_size=0 if rows == batch_rows else rows)


def measure_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of large matrix products."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    return 2 * size**3 / timer.blocked_autorange(min_run_time=0.3).median


def describe_plan(
    config: TrainConfig,
    dist_ctx: DistributedContext,
    step_tokens: int,
    epoch_tokens: Sequence[float],
) -> str:
    """Describe what a run needs on this device.

    Tokens are those of an optimizer step, and of an epoch of each dataset.
    """
    utilization = CPU_UTILIZATION if dist_ctx.device.type == "cpu" else GPU_UTILIZATION
    speed = utilization * measure_matmul_flops(dist_ctx.device, DTYPE_BY_NAME[config.dtype])
    num_params = cached_meta_model(config.model_config).num_parameters
    flops = flops_per_token(config)
    seconds = step_tokens * flops / speed
    rows = config.micro_batch_rows(dist_ctx)
    memory = estimate_memory(config, rows, dist_ctx)
    memory["= memory"] = sum(memory.values())
    table = {"micro-batches": f"{config.batch_size // rows} × {rows}"}
    table |= {name: f"{size / 2**20:,.1f} MiB" for name, size in memory.items()}
    table["one step"] = f"{1e3 * seconds:,.4g} ms"
    if config.steps and not config.minutes:
        table["all steps"] = f"{config.steps * seconds / 60:,.4g} min"
    return f"""\
model  {num_params:,} parameters, {flops / 1e9:,.3f} GFLOP per token
run    {describe_length(config, step_tokens, epoch_tokens)}
speed  {utilization:.0%} of what matrix products reach, {speed / 1e12:,.2f} TFLOP/s
memory within {MEMORY_ERROR:.0%}

""" + "\n".join(f"{name:<16}{value:>14}" for name, value in table.items())


def describe_length(config: TrainConfig, step_tokens: int, epoch_tokens: Sequence[float]) -> str:
    """Describe the steps or the minutes of a run, its tokens, and the epochs of each dataset."""
    batch = f"{config.batch_size} × {count_noun(step_tokens // config.batch_size, 'token')} a step"
    if config.minutes or not config.steps:  # with minutes, steps are only a limit
        return f"{count_noun(config.minutes or 0, 'minute')}, {batch}"
    tokens = config.steps * step_tokens
    length = f"{count_noun(config.steps, 'step')}, {batch} = {count_noun(tokens, 'token')}"
    return f"{length} ({', '.join(f'{tokens / epoch:.1f}' for epoch in epoch_tokens)} epochs)"
