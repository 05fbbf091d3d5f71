"""Plans against hand arithmetic, and against what PyTorch counts and keeps."""

import dataclasses
import time
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from engine import plan
from engine.plan import Shape
from model import GPT, LOGITS_AT_ONCE, LONGEST_PLAIN, ModelConfig

GPT2 = {"position": "learned", "norm": "layernorm", "activation": "gelu", "qk_norm": False}
GPT2 |= {"tie_embeddings": True, "bias": True}
YEAR_2017 = GPT2 | {"position": "sinusoidal", "norm_placement": "post", "activation": "relu", "scale_embeddings": True}
SMALL = {"vocab_size": 500, "context_length": 128, "num_layers": 3, "num_heads": 4, "d_model": 128}
DTYPES = (torch.float32, torch.bfloat16)


def shape_of(sizes: dict, dtype: torch.dtype = torch.bfloat16, **training) -> Shape:
    """A model's shape as it trains on a CPU in that dtype."""
    config = ModelConfig(**sizes)
    with torch.device("meta"):
        model = GPT(config)
    short = dtype == torch.bfloat16 and config.context_length <= LONGEST_PLAIN
    kept = {"plain_attention": short or config.dropout > 0, "logits_at_once": LOGITS_AT_ONCE}
    return Shape.of(model, compute_bytes=dtype.itemsize, **kept, **training)


def loss_of(model: GPT, sequences: int, dtype: torch.dtype) -> torch.Tensor:
    tokens = torch.zeros(sequences, model.config.context_length, dtype=torch.long)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        return model(tokens, tokens)


@pytest.fixture(scope="module")
def gpt2() -> Shape:
    sizes = {"vocab_size": 50257, "context_length": 1024, "num_layers": 12, "num_heads": 12, "d_model": 768}
    return shape_of(sizes | GPT2, batch_size=512, micro_batch_size=32, steps=10_000)


@pytest.fixture(scope="module")
def large() -> Shape:
    sizes = {"vocab_size": 50304, "context_length": 2048, "num_layers": 32, "num_heads": 32, "d_model": 4096}
    return shape_of(sizes, optimizer="muon", batch_size=512, micro_batch_size=8)


def test_gpt2_is_counted_as_by_hand(gpt2):
    assert gpt2.parameters == 124_439_808
    assert gpt2.matrix_weights == 12 * 12 * 768**2
    assert plan.flops_per_token(gpt2) == 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024


@pytest.mark.parametrize("kind", [{}, GPT2])
def test_operations_are_those_that_pytorch_counts(kind):
    sizes = SMALL | {"num_layers": 2, "context_length": 96} | kind
    model = GPT(ModelConfig(**sizes))
    with FlopCounterMode(display=False) as counter:
        loss_of(model, 3, torch.bfloat16).backward()
    assert plan.flops_per_token(shape_of(sizes)) * 3 * 96 == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind",
    [
        {},
        GPT2,
        YEAR_2017,
        {"activation": "swiglu"},
        {"qk_norm": False},
        {"position": "learned"},
        {"dropout": 0.1},
        {"num_heads": 8},
        {"d_model": 512, "context_length": 32},  # weights copied are a large part
        {"context_length": 640},
        {"vocab_size": 50304},
    ],
    ids=str,
)
def test_kept_for_the_way_back_is_what_autograd_keeps(kind, dtype):
    sizes, sequences = SMALL | kind, 6
    model = GPT(ModelConfig(**sizes))
    ours = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(model, sequences, dtype)
    measured = sum(storage.nbytes() for storage in kept.values())
    assert plan.saved_for_backward(shape_of(sizes, dtype), sequences) == pytest.approx(measured, rel=0.1)


class Memory(TorchDispatchMode):
    """The bytes of all tensors that are alive, and the most that there have been."""

    def __init__(self, tensors):
        super().__init__()
        self.alive, self.now, self.peak = {}, 0, 0
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.now, self.peak)
            weakref.finalize(storage, self.remove, key)

    def remove(self, key: int) -> None:
        self.now -= self.alive.pop(key)

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("kind", [{}, GPT2])
def test_memory_is_what_two_micro_batches_take(kind, lean, dtype):
    sizes = SMALL | {"num_layers": 4, "d_model": 256} | kind
    model = GPT(ModelConfig(**sizes))
    if lean:
        for block in model.blocks:
            block.forward = lambda *x, whole=block.forward: checkpoint(whole, *x, use_reentrant=False)
    memory = Memory([*model.parameters(), *model.buffers()])
    with memory:
        for _ in range(2):
            loss_of(model, 8, dtype).backward()
    needs = plan.memory(shape_of(sizes, dtype), 8, m=2, w=1, sharded=False, lean=lean)
    assert sum(needs.values()) - needs["optimizer state"] == pytest.approx(memory.peak, rel=0.2)


def test_optimizer_state_is_two_numbers_a_weight_or_muons_one(gpt2):
    muon = dataclasses.replace(gpt2, optimizer="muon")
    assert plan.memory(gpt2, 1, 1, 1, False)["optimizer state"] == 8 * gpt2.parameters
    rest = gpt2.parameters - gpt2.matrix_weights
    assert plan.memory(muon, 1, 1, 1, False)["optimizer state"] == 8 * rest + 4 * gpt2.matrix_weights


def test_sharding_divides_all_but_what_is_gathered(large):
    P, block = large.parameters, 12 * 4096**2
    around = P - 32 * block
    assert around == 2 * 50304 * 4096
    whole, eighth = plan.memory(large, 8, 1, 8, False), plan.memory(large, 8, 1, 8, True)
    assert whole["weights"] == 4 * P
    assert whole["gradients"] == 2 * 4 * P
    assert eighth["weights"] == 4 * P / 8 + 2 * (around + 2 * block)
    assert eighth["gradients"] == 4 * P / 8 + 4 * block
    assert eighth["optimizer state"] == whole["optimizer state"] / 8
    assert plan.memory(large, 8, 2, 8, True)["gradients"] == 4 * P / 8 + 4 * P  # whole until the last micro-batch


def test_two_processes_send_what_is_counted_by_hand(large):
    P, matrices, block = large.parameters, 32 * 12 * 4096**2, 12 * 4096**2
    assert plan.traffic(large, 3, 2, False) == {"weights": 0, "gradients": 4 * P, "muon": matrices}
    sent = plan.traffic(large, 3, 2, True)
    assert sent == {"weights": 3 * (P + 32 * block), "gradients": 2 * P, "muon": matrices}
    adamw = dataclasses.replace(large, optimizer="adamw")
    assert plan.traffic(adamw, 3, 2, True)["muon"] == 0
    assert not any(sum(plan.traffic(large, 3, 1, sharded).values()) for sharded in (False, True))


def test_matrices_too_few_for_all_processes_are_padded(gpt2):
    muon = dataclasses.replace(gpt2, optimizer="muon")
    heads, rest = 12 * 3 * 12 * 64 * 768, 768**2 + 2 * 4 * 768**2  # 432 matrices, and 12 of each of three shapes
    assert plan.traffic(muon, 1, 64, False)["muon"] == pytest.approx(63 / 64 * 2 * (heads * 448 / 432 + 64 * rest))


def test_a_network_slows_an_exchange_of_all_with_all_more_than_a_ring():
    assert plan.transfer_seconds(450e9, 8) == plan.transfer_seconds(450e9, 8, ring=False) == 1
    assert plan.transfer_seconds(400e9, 64) == 1  # an eighth of it through 50 GB/s
    assert plan.transfer_seconds(63e9, 64, ring=False) == pytest.approx(56 / 50)


@pytest.mark.parametrize("sharded", [False, True])
def test_efficiency_falls_with_processes_and_rises_with_tokens(large, sharded):
    def efficiency(tokens: int, w: int, shape: Shape = large) -> float:
        computing, waiting = plan.step_seconds(shape, tokens, 1, w, sharded, 400e12)
        assert waiting >= 0
        return computing / (computing + waiting)

    by_processes = [efficiency(2**20 // w, w) for w in (1, 2, 8, 16, 64, 256)]
    assert by_processes[0] == 1
    assert by_processes == sorted(by_processes, reverse=True) and by_processes[-1] < 0.98
    by_tokens = [efficiency(2**power, 64) for power in range(10, 17)]
    assert by_tokens == sorted(by_tokens) and by_tokens[0] < 0.7 < 0.98 < by_tokens[-1]
    assert efficiency(2**17, 64, dataclasses.replace(large, optimizer="adamw")) == 1  # all of it hides


def test_what_does_not_hide_is_waited_for(gpt2):
    computing, waiting = plan.step_seconds(gpt2, 1024, 1, 8, False, 400e12)
    assert computing == 1024 * plan.flops_per_token(gpt2) / 400e12
    assert waiting == pytest.approx(2 * 7 / 8 * 4 * gpt2.parameters / 450e9 - computing * 2 / 3)
    _, in_two = plan.step_seconds(gpt2, 1024, 2, 8, False, 400e12)
    assert in_two - waiting == pytest.approx(computing / 3)  # only the second of two hides anything
    _, sharded = plan.step_seconds(gpt2, 16, 4, 8, True, 400e12)
    sent = sum(plan.traffic(gpt2, 4, 8, True).values())
    assert sharded == pytest.approx(sent / 450e9 - 16 * plan.flops_per_token(gpt2) / 400e12 * 2 / 3)


def test_the_plan_is_a_table_of_80_columns(gpt2, large):
    for shape in (gpt2, large, shape_of(SMALL, batch_size=8)):
        text = plan.describe_plan(shape, 10**9, "cpu", 0.4e12)
        assert max(map(len, text.splitlines())) <= 80
    lines = plan.describe_plan(gpt2, 10**9, "cpu", 0.4e12).splitlines()
    assert lines[0] == "model  124,439,808 parameters, 0.854 GFLOP a token"
    assert lines[1] == "run    10,000 steps of 524,288 tokens = 5,242,880,000 (5.24 epochs)"
    rows = {line[:17].strip(): line[17:] for line in lines[6:]}
    assert rows["micro-batches"].split("  ")[-1].strip() == "1 × 8"  # 32 does not fit into 512 / 64
    assert rows["weights"].split()[:2] == ["475", "MiB"]
    assert "epochs" not in plan.describe_plan(gpt2, 0, "cpu", 0.4e12)


def test_gpus_compute_in_bfloat16_whatever_is_used_here(gpt2):
    here = dataclasses.replace(gpt2, compute_bytes=4, plain_attention=True)
    rows = {line[:17].strip(): line[17:] for line in plan.describe_plan(here, 0, "cpu", 0.4e12).splitlines()[6:]}
    for what, cell in plan.column(gpt2, 1, False, 0.4 * 989e12).items():
        assert rows[what][10:20].strip() == cell
    for what, cell in plan.column(here, 1, False, 0.4e12 * 2 / 3).items():
        assert rows[what][:10].strip() == cell


def test_a_batch_that_does_not_divide_is_said_to():
    text = plan.describe_plan(shape_of(SMALL, batch_size=12, micro_batch_size=8), 0, "cpu", 0.4e12)
    cells = next(line for line in text.splitlines() if line.startswith("micro-batches"))[17:]
    assert cells.split("  ")[-1].strip() == "–" and cells.count("–") == 4
    assert "2 × 6" in cells


def test_speed_is_that_of_matrix_products():
    a = torch.randn(1024, 1024)
    begun = time.perf_counter()
    speed = plan.measure_speed(a.device, a.dtype)
    assert time.perf_counter() - begun < 5
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - begun)
    assert speed == pytest.approx(2 * 1024**3 / min(times), rel=0.6)
