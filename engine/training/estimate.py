"""What a run takes, found by tracing its model without weights: memory, bytes sent, time.

w is the number of processes, m that of the micro-batches that each has in a step.
"""

import contextlib
import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from engine.core.device import choose_device, choose_dtype, mixed_precision
from engine.core.distributed import reduces_each
from engine.training.acceleration import recompute_activations
from engine.training.optimizer import Optimizer, OptimizerConfig

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}  # bfloat16, dense, from data sheets
NVLINK = 450e9  # bytes/s that a GPU sends to others of its machine: NVLink 4, from the data sheet
NETWORK = 50e9  # bytes/s that a GPU sends to other machines: InfiniBand of 400 Gb/s, a port for each GPU
MACHINE = 8  # GPUs in one
GPU_MEMORY = 80e9  # bytes: an H100's
DISK = 1e9  # bytes/s that a checkpoint is written and hashed at
# The fraction of matrix products' speed that training reaches. On a 2-core CPU a GPT-2 of 10.7M parameters was measured
# at 0.72, with Muon it is less; of a GPU's peak, Llama 3 reached 38 to 43% (Grattafiori et al. 2024, table 4).
REACHED = {"cpu": 2 / 3, "cuda": 0.4, "mps": 0.4}
BYTES = ((1, "B"), (2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB"), (2**40, "TiB"))
TIME = ((1e-6, "µs"), (1e-3, "ms"), (1, "s"), (60, "min"), (3600, "h"), (86400, "days"), (365.25 * 86400, "y"))


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made inside of it held at one time."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function is torch.ops.aten._fused_sgd_.default:  # makes nothing; PyTorch has no form of it without values,
            return None  # and would do it on zeros as large
        result, leaves = function(*arguments, **(keywords or {})), torch.utils._pytree.tree_leaves
        given = {x.untyped_storage()._cdata for x in leaves((arguments, keywords)) if isinstance(x, torch.Tensor)}
        for x in leaves(result):  # a view, and what is changed in place, was not made here
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage())._cdata not in self.sizes.keys() | given:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage._cdata)
        return result

    def _freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


@contextlib.contextmanager
def attention_without_dropout() -> Iterator[None]:
    """Have attention drop nothing: a GPU's kernel drops without keeping anything, which a CPU's can't."""
    dropping = nn.functional.scaled_dot_product_attention  # a TorchFunctionMode would not see what is recomputed
    nn.functional.scaled_dot_product_attention = lambda *given, **named: dropping(*given, **named | {"dropout_p": 0.0})
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = dropping


@dataclass(eq=False)
class Plan:
    """A model and how it is trained. Weights, gradients and optimizer state are float32."""

    make: Callable[[int], nn.Module]  # the model with so many blocks, on PyTorch's default device
    num_layers: int
    batch_size: int = 1  # sequences in a step, over all processes
    micro_batch_size: int | None = None  # the most sequences at once in a process; None: all it has
    steps: int = 1
    optimizer: str = "adamw"  # or muon

    def __post_init__(self):
        with torch.device("meta"):
            self.model = self.make(self.num_layers)
        named = dict(self.model.named_parameters())
        rules = self.model.rules
        matrices = [(rules[name].joined, matrix) for name, matrix in named.items() if rules[name].group == "matrix"]
        self.parameters = sum(parameter.numel() for parameter in named.values())
        self.block = sum(parameter.numel() for parameter in self.model.blocks[0].parameters())
        self.matrices = Counter((joined, matrix.shape) for joined, matrix in matrices)  # how many Muon would move
        self.matrix_weights = sum(matrix.numel() for _, matrix in matrices)
        self.around = self.parameters - self.num_layers * self.block
        self.state = 8 * self.parameters - 4 * self.matrix_weights * (self.optimizer == "muon")

    @functools.cache  # noqa: B019
    def flops_per_token(self) -> float:
        """Operations of a training step, per token, as PyTorch counts them."""

        def flops(layers: int) -> int:
            return self._trace(layers, FlopCounterMode(display=False)).get_total_flops()

        with sdpa_kernel(SDPBackend.MATH):  # made of matrix products, all of which are counted
            return self._over_layers(flops) / self.model.config.context_length

    @functools.cache  # noqa: B019
    def activations(self, sequences: int, dtype: torch.dtype, gpu: bool, sharded: bool = False, lean=False) -> float:
        """The most bytes, weights and gradients apart, of a micro-batch; lean: with activation checkpointing."""

        def peak(layers: int) -> int:
            return self._trace(layers, PeakMemory(), sequences, dtype, sharded, lean, gpu).peak

        if not gpu:
            return self._over_layers(peak)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), attention_without_dropout():  # what a GPU does
            return self._over_layers(peak)

    @functools.cache  # noqa: B019
    def update(self, dtype: torch.dtype) -> float:
        """The most bytes that an optimizer's update holds for a moment, on one process."""

        def peak(layers: int) -> int:
            with torch.device("meta"):
                model = self.make(layers)
            with torch._subclasses.FakeTensorMode(), (counter := PeakMemory()):
                parameters = {name: torch.empty(p.shape) for name, p in model.named_parameters()}
                model.load_state_dict(parameters, assign=True)
                optimizer = Optimizer(model, OptimizerConfig(optimizer=self.optimizer), dtype=dtype)
                for parameter in model.parameters():
                    parameter.grad = torch.empty_like(parameter)
                held, counter.peak = counter.now, counter.now
                optimizer.optimizers[0].step(0.0, torch.zeros(()))
            return counter.peak - held

        return self._over_layers(peak) if self.optimizer == "muon" else 0.0  # AdamW's is fused

    def _over_layers(self, count: Callable[[int], float]) -> float:
        """A count over the whole model. Blocks, or patterns of them, are alike: few show what one more takes."""
        pattern = len(self.model.config.windows or (0,))
        more, few = divmod(self.num_layers - 2, pattern)
        if more <= 1:
            return count(self.num_layers)
        start = count(few + 2)
        return start + more * (count(few + 2 + pattern) - start)

    def _trace(
        self, layers: int, counter: Any, sequences=1, dtype=torch.float32, sharded=False, lean=False, gpu=False
    ) -> Any:
        """Show a counter a forward and a backward pass whose tensors have no values; returns the counter."""
        with torch.device("meta"):
            model = self.make(layers)
        for block in model.blocks if gpu else ():
            block.attention.window = 0  # a GPU's attention keeps as much with a window as without
        if sharded:
            model.blocks.to(dtype)  # in which FSDP gathers their weights
        if lean:
            recompute_activations(model)
        with torch._subclasses.FakeTensorMode():
            weights = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
            model.load_state_dict(weights, assign=True)
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            tokens = torch.zeros(sequences, model.config.context_length, dtype=torch.long)
            with counter:
                with mixed_precision(dtype, tokens.device):
                    loss = model(tokens, tokens)
                loss.backward()
        return counter

    def memory(
        self, sequences: int, m: int, w: int, sharded: bool, dtype=torch.bfloat16, gpu: bool = True, lean: bool = False
    ) -> dict[str, float]:
        """Bytes that a process needs, by what for, with so many sequences in a micro-batch.

        DDP holds all, and gradients twice: in its buckets too. FSDP holds 1/w; of weights also those around the blocks,
        of a block and of the next; of gradients also a block's or, while more micro-batches come, all, if that fits.
        """
        P, shards = self.parameters, w if sharded else 1
        gathered = 4 * self.around + 2 * dtype.itemsize * self.block if sharded else 0
        at_once = P if m > 1 and not reduces_each(P, GPU_MEMORY) else self.block
        passing = 4 * at_once if sharded else 4 * P * (w > 1)
        kept = {"weights": 4 * P / shards + gathered, "gradients": 4 * P / shards + passing}
        kept |= {"optimizer state": self.state / shards}
        kept |= {"activations": self.activations(sequences, dtype, gpu, sharded, lean)}
        return kept | {"+ Muon's update": max(0.0, self.update(dtype) / shards - kept["activations"])}

    def traffic(self, m: int, w: int, sharded: bool, width: int = 2) -> dict[str, float]:
        """Bytes that each process sends in a step: to gather weights, to sum gradients, to distribute Muon's work.

        DDP: a ring all-reduce of float32 gradients. FSDP: a reduce-scatter of them, where memory is short in each
        micro-batch; in each, all-gathers of weights, twice of a block's. Muon's matrices, of 2 bytes: DDP gathers them,
        FSDP sends them there and back.
        """
        others, P = (w - 1) / w, self.parameters
        whole = [(joined * w, size.numel(), n) for (joined, size), n in self.matrices.items()]
        padded = sum(math.ceil(n / each) * each * numel for each, numel, n in whole)
        moved = others * 2 * padded * (self.optimizer == "muon")
        if not sharded:
            return {"weights": 0.0, "gradients": 2 * others * 4 * P, "muon": moved}
        weights = m * others * (4 * self.around + 2 * width * self.num_layers * self.block)
        times = m if reduces_each(P, GPU_MEMORY) else 1
        return {"weights": weights, "gradients": times * others * 4 * P, "muon": 2 * moved / w}

    def step_seconds(self, tokens: int, m: int, w: int, sharded: bool, speed: float) -> tuple[float, float]:
        """Seconds that a step of so many tokens a process computes, at speed FLOP/s, and waits for what is sent.

        Sending, but Muon's, hides behind backward passes (2/3) as it fits: weights in each, gradients in the last.
        """
        computing, sent = tokens * self.flops_per_token() / speed, self.traffic(m, w, sharded)
        hidden, weights = computing / m * 2 / 3, transfer_seconds(sent["weights"], w) / m
        last = max(0.0, weights + transfer_seconds(sent["gradients"], w) - hidden)
        return computing, (m - 1) * max(0.0, weights - hidden) + last + transfer_seconds(sent["muon"], w, not sharded)

    def column(self, w: int, sharded: bool, speed: float, dtype=torch.bfloat16, gpu: bool = True) -> dict[str, str]:
        """The table's cells for w processes at speed FLOP/s each; none if the batch does not divide over them."""
        rows, most = self.batch_size // w, self.micro_batch_size or self.batch_size
        if self.batch_size % w:
            return {}
        m, sequences = min((rows // n, n) for n in range(1, rows + 1) if rows % n == 0 and n <= most)
        sizes = self.memory(sequences, m, w, sharded, dtype, gpu)
        lean = sum(self.memory(sequences, m, w, sharded, dtype, gpu, lean=True).values())
        sizes |= {"= memory": sum(sizes.values()), "or checkpointing": lean}
        sizes |= {"sent": sum(self.traffic(m, w, sharded).values())}
        computing, waiting = self.step_seconds(rows * self.model.config.context_length, m, w, sharded, speed)
        times = {"computing": computing, "waiting": waiting, "all steps": self.steps * (computing + waiting)}
        cells = {what: format_amount(n, BYTES) for what, n in sizes.items()}
        for what in ("= memory", "or checkpointing"):
            cells[what] += "!" * (gpu and sizes[what] > GPU_MEMORY)
        cells |= {what: format_amount(n, TIME) for what, n in times.items()}
        cells["efficiency"] = f"{computing / (computing + waiting):.0%}"
        return {"micro-batches": f"{m} × {sequences}"} | cells

    def describe(self, epochs: Sequence[float], device: torch.device, dtype: torch.dtype) -> str:
        """The plan as text: here, on that device and in that dtype, and on GPUs. epochs: each dataset's, in tokens."""
        kind, speed, peak = device.type, measure_speed(device, dtype), PEAK_FLOPS["H100"]
        tokens, fast = self.batch_size * self.model.config.context_length, peak * REACHED["cuda"]
        columns: dict[str, Any] = {"here": self.column(1, False, speed * REACHED[kind], dtype, kind == "cuda")}
        columns["1 H100"] = self.column(1, False, fast)
        for name, w in (("8", 8), ("8×8", 64)):
            columns |= {f"{name} {how}": self.column(w, how == "fsdp", fast) for how in ("ddp", "fsdp")}
        rows = {"": columns, **{what: [c.get(what, "–") for c in columns.values()] for what in columns["here"]}}
        table = "\n".join(f"{what:<17}" + "".join(f"{cell:>10}" for cell in cells) for what, cells in rows.items())
        saved = 4 * self.parameters + self.state
        done = ", ".join(f"{self.steps * tokens / epoch:,.2f}" for epoch in epochs)
        return f"""model  {self.parameters:,} parameters, {self.flops_per_token() / 1e9:,.3f} GFLOP a token
run    {self.steps:,} steps of {tokens:,} tokens = {self.steps * tokens:,}{f" ({done} epochs)" if done else ""}
here   {REACHED[kind]:.0%} of {speed / 1e12:,.2f} TFLOP/s, measured with matrix products on this {kind}
H100   {REACHED["cuda"]:.0%} of {peak / 1e12:,.0f} TFLOP/s, bfloat16, from the data sheet and not measured;
       sends {NVLINK / 1e9:.0f} GB/s inside a machine of {MACHINE}, {NETWORK / 1e9:.0f} GB/s out of it
save   {format_amount(saved, BYTES)}, {format_amount(saved / DISK, TIME)} to a disk of {DISK / 1e9:.0f} GB/s;
       in the first process's memory with ddp, a w-th in each one's with fsdp
!      more than the {GPU_MEMORY / 1e9:.0f} GB of an H100

{table}"""


def transfer_seconds(sent: float, w: int, ring: bool = True) -> float:
    """Seconds for every process to send so many bytes; of a ring's hops one in eight leaves the machine."""
    leaving = max(0, w - MACHINE) / max(1, w - 1)
    return max(sent / NVLINK, sent * (min(leaving, 1 / MACHINE) if ring else leaving) / NETWORK)


def measure_speed(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of large matrix products here and now."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    return 2 * size**3 / timer.blocked_autorange(min_run_time=0.3).median


@functools.cache
def speed_here(width: int) -> float | None:
    """FLOP/s that training a model of a width reaches on this machine's best device; None if that has no room now."""
    device = choose_device("auto")
    try:
        return measure_speed(device, choose_dtype("auto", device, width)) * REACHED[device.type]
    except RuntimeError:  # another process may have all of a GPU
        return None


def format_amount(amount: float, units: tuple[tuple[float, str], ...]) -> str:
    """An amount in the largest of these units that it reaches."""
    size, unit = max([pair for pair in units if pair[0] <= amount], default=units[0])
    return f"{amount / size:,.{0 if amount >= 100 * size else 1}f} {unit}" if amount else "0"
