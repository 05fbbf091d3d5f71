"""What a run takes, on paper: memory, bytes sent, time, for w processes that have m micro-batches each in a step."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

from engine.optimizer import parameter_group

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}  # bfloat16, dense, from data sheets
NVLINK = 450e9  # bytes/s that a GPU sends to others of its machine: NVLink 4, from the data sheet
NETWORK = 50e9  # bytes/s that a GPU sends to other machines: InfiniBand of 400 Gb/s, a port for each GPU
MACHINE = 8  # GPUs in one
# The share of matrix products' speed that training reaches. On a 2-core CPU a GPT-2 of 10.7M parameters was measured at
# 0.72, with Muon it is less; of a GPU's peak, Llama 3 reached 38 to 43% (Grattafiori et al. 2024, table 4).
REACHED = {"cpu": 2 / 3, "cuda": 0.4, "mps": 0.4}
KEPT = {"relu": 1, "gelu": 2, "relu2": 2, "swiglu": 4}  # tensors (…, F) that an activation's way back needs
BYTES = ((1, "B"), (2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB"), (2**40, "TiB"))
TIME = ((1e-6, "µs"), (1e-3, "ms"), (1, "s"), (60, "min"), (3600, "h"), (86400, "days"), (365.25 * 86400, "y"))


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and how it is trained. Weights, gradients and optimizer state are float32."""

    config: Any  # the model's, with its sizes
    parameters: int
    block: int  # parameters of one block
    matrices: dict[torch.Size, int]  # how many the blocks have of each shape
    matrix_weights: int  # parameters of those
    batch_size: int = 1  # sequences in a step, over all processes
    micro_batch_size: int = 0  # the most sequences at once in a process; 0: all it has
    steps: int = 1
    optimizer: str = "adamw"  # or muon
    compute_bytes: int = 2  # of a number in matrix products: 4, or 2
    plain_attention: bool = False  # whether attention keeps its T × T weights for the way back
    logits_at_once: int = 2**25  # more come in pieces of so many

    @classmethod
    def of(cls, model: nn.Module, **training: Any) -> "Shape":
        """That of a model, which may be on the meta device; training: the fields that have defaults."""
        named = dict(model.named_parameters())
        matrices = [p.shape for name, p in named.items() if parameter_group(name, p) == "matrix"]
        block = sum(p.numel() for name, p in named.items() if name.startswith("blocks.0."))
        total, moved = sum(p.numel() for p in named.values()), sum(size.numel() for size in matrices)
        return cls(model.config, total, block, Counter(matrices), moved, **training)


def flops_per_token(shape: Shape) -> int:
    """Operations of a training step, per token: 6 a matrix weight, and attention's (Chowdhery et al. 2022, app. B)."""
    c = shape.config
    return 6 * (shape.matrix_weights + c.vocab_size * c.d_model) + 12 * c.num_layers * c.d_model * c.context_length


def saved_for_backward(shape: Shape, sequences: int, lean: bool = False, sharded: bool = False) -> int:
    """Bytes that a micro-batch's forward pass keeps for the way back, parameters apart.

    A token and layer: norms' inputs (2·D, float32); norms' outputs, query, key, value, what attention mixed (6·D); the
    activation's; copies by RoPE (2·D) and QK-norm (2·D, float32). Once: weights copied, to join heads or by autocast.
    Lean, with activation checkpointing (Chen et al. 2016): each layer's input, and all that one layer keeps.
    """
    c, width, tokens = shape.config, shape.compute_bytes, sequences * shape.config.context_length
    D, V, dropout, cast = c.d_model, c.vocab_size, c.dropout > 0, 0 if sharded or width == 4 else width
    narrow = (6 + 2 * (c.position == "rope") + 2 * dropout) * D + KEPT[c.activation] * c.feed_forward_width
    narrow += shape.plain_attention * (1 + 2 * dropout) * c.num_heads * c.context_length
    layer = tokens * (narrow * width + (2 + 2 * c.qk_norm) * D * 4) + 3 * D * D * width
    layers = c.num_layers * tokens * D * 4 + layer if lean else c.num_layers * layer
    head = tokens * V * 4 + V * D * cast if tokens * V <= shape.logits_at_once else (tokens + V) * D * 4
    return layers + tokens * D * (8 + width) + head + (shape.matrix_weights - 3 * D * D * c.num_layers) * cast


def memory(shape: Shape, sequences: int, m: int, w: int, sharded: bool, lean: bool = False) -> dict[str, float]:
    """Bytes that a process needs, by what for, with so many sequences in a micro-batch.

    DDP holds all, and gradients twice: in its buckets too. FSDP holds 1/w; of weights also those around the blocks, of
    a block and of the next; of gradients also a block's or, while more micro-batches come, all.
    """
    c, P, part = shape.config, shape.parameters, w if sharded else 1
    gathered = shape.compute_bytes * (P - max(0, c.num_layers - 2) * shape.block) if sharded else 0
    passing = 4 * (P if m > 1 else shape.block) if sharded else 4 * P * (w > 1)
    state = 8 * P - 4 * shape.matrix_weights * (shape.optimizer == "muon")
    logits = 8 * min(sequences * c.context_length * c.vocab_size, shape.logits_at_once)  # and their gradient: passing
    kept = {"weights": 4 * P / part + gathered, "gradients": 4 * P / part + passing, "optimizer state": state / part}
    return kept | {"activations": saved_for_backward(shape, sequences, lean, sharded) + logits}


def traffic(shape: Shape, m: int, w: int, sharded: bool) -> dict[str, float]:
    """Bytes that each process sends in a step, to gather weights, to sum gradients, and to share out Muon's work.

    DDP: a ring all-reduce of float32 gradients. FSDP: all-gathers of weights in each micro-batch, a block's forward and
    again back; at last a reduce-scatter of float32 gradients. Muon: each process does its share of the matrices of a
    shape, in 2 bytes; DDP gathers the results, FSDP sends the matrices to that process and back.
    """
    others, P = (w - 1) / w, shape.parameters
    padded = sum(math.ceil(n / w) * w * size.numel() for size, n in shape.matrices.items())
    shared = others * 2 * padded * (shape.optimizer == "muon")
    if not sharded:
        return {"weights": 0.0, "gradients": 2 * others * 4 * P, "muon": shared}
    weights = m * others * shape.compute_bytes * (P + shape.config.num_layers * shape.block)
    return {"weights": weights, "gradients": others * 4 * P, "muon": 2 * shared / w}


def transfer_seconds(sent: float, w: int, ring: bool = True) -> float:
    """Seconds for every process to send so many bytes; of a ring's hops one in eight leaves the machine."""
    leaving = max(0, w - MACHINE) / max(1, w - 1)
    return max(sent / NVLINK, sent * (min(leaving, 1 / MACHINE) if ring else leaving) / NETWORK)


def step_seconds(shape: Shape, tokens: int, m: int, w: int, sharded: bool, speed: float) -> tuple[float, float]:
    """Seconds that a step of so many tokens a process computes, at speed FLOP/s, and waits for what is sent.

    Sending, but Muon's, hides behind backward passes (2/3) as far as it fits: weights in each, gradients in the last.
    """
    computing, sent = tokens * flops_per_token(shape) / speed, traffic(shape, m, w, sharded)
    hidden, weights = computing / m * 2 / 3, transfer_seconds(sent["weights"], w) / m
    last = max(0.0, weights + transfer_seconds(sent["gradients"], w) - hidden)
    return computing, (m - 1) * max(0.0, weights - hidden) + last + transfer_seconds(sent["muon"], w, not sharded)


def measure_speed(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of large matrix products here and now."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    return 2 * size**3 / timer.blocked_autorange(min_run_time=0.3).median


def told(amount: float, units: tuple[tuple[float, str], ...]) -> str:
    """An amount in the largest of these units that it reaches."""
    size, unit = max([pair for pair in units if pair[0] <= amount], default=units[0])
    return f"{amount / size:,.{0 if amount >= 100 * size else 1}f} {unit}" if amount else "0"


def column(shape: Shape, w: int, sharded: bool, speed: float) -> dict[str, str]:
    """The plan's cells for w processes that train at speed FLOP/s each; none if the batch does not divide over them."""
    share, most = shape.batch_size // w, shape.micro_batch_size or shape.batch_size
    if shape.batch_size % w:
        return {}
    m, sequences = min((share // n, n) for n in range(1, share + 1) if share % n == 0 and n <= most)
    sizes, lean = memory(shape, sequences, m, w, sharded), memory(shape, sequences, m, w, sharded, lean=True)
    sent = traffic(shape, m, w, sharded)
    sizes |= {"= memory": sum(sizes.values()), "or checkpointing": sum(lean.values()), "sent": sum(sent.values())}
    computing, waiting = step_seconds(shape, share * shape.config.context_length, m, w, sharded, speed)
    times = {"computing": computing, "waiting": waiting, "all steps": shape.steps * (computing + waiting)}
    cells = {what: told(n, BYTES) for what, n in sizes.items()} | {what: told(n, TIME) for what, n in times.items()}
    return {"micro-batches": f"{m} × {sequences}"} | cells | {"efficiency": f"{computing / (computing + waiting):.0%}"}


def describe_plan(shape: Shape, train_tokens: int, kind: str, speed: float) -> str:
    """The plan as text: here, on a device of a kind (cpu, say), at speed FLOP/s; on GPUs. train_tokens 0: unknown."""
    tokens, peak = shape.batch_size * shape.config.context_length, PEAK_FLOPS["H100"]
    gpus, fast = replace(shape, compute_bytes=2, plain_attention=False), peak * REACHED["cuda"]
    columns = {"here": column(shape, 1, False, speed * REACHED[kind]), "1 H100": column(gpus, 1, False, fast)}
    for name, w in (("8", 8), ("8×8", 64)):
        columns |= {f"{name} {how}": column(gpus, w, how == "fsdp", fast) for how in ("ddp", "fsdp")}
    rows = {"": columns, **{what: [cells.get(what, "–") for cells in columns.values()] for what in columns["here"]}}
    table = "\n".join(f"{what:<17}" + "".join(f"{cell:>10}" for cell in cells) for what, cells in rows.items())
    epochs = f" ({shape.steps * tokens / train_tokens:,.2f} epochs)" if train_tokens else ""
    return f"""model  {shape.parameters:,} parameters, {flops_per_token(shape) / 1e9:,.3f} GFLOP a token
run    {shape.steps:,} steps of {tokens:,} tokens = {shape.steps * tokens:,}{epochs}
here   {REACHED[kind]:.0%} of {speed / 1e12:,.2f} TFLOP/s, measured with matrix products on this {kind}
H100   {REACHED["cuda"]:.0%} of {peak / 1e12:,.0f} TFLOP/s, bfloat16, from the data sheet and not measured;
       sends {NVLINK / 1e9:.0f} GB/s inside a machine of {MACHINE}, {NETWORK / 1e9:.0f} GB/s out of it

{table}"""
