"""Plans against hand arithmetic, and against what PyTorch counts and allocates."""

import dataclasses
import re
import time

import pytest
import torch
from helpers import GPT2, YEAR_2017, numbers_text
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import train
from engine.training.acceleration import recompute_activations
from engine.training.estimate import BYTES, TIME, Plan, format_amount, measure_speed, transfer_seconds
from model import GPT, ModelConfig
from prepare import PrepareConfig, prepare

SMALL = {"vocab_size": 500, "context_length": 128, "num_layers": 2, "num_heads": 4, "d_model": 128}
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")
KINDS = [
    {},
    GPT2,
    YEAR_2017,
    {"activation": "relu2"},
    {"qk_norm": False},
    {"position": "learned"},
    {"dropout": 0.1},
    {"num_heads": 8},
    {"d_model": 320, "context_length": 16},  # weights copied are a large part
    {"context_length": 640, "num_layers": 1},
    {"windows": (40, 0)},
    {"vocab_size": 50304, "d_model": 64, "num_layers": 1},  # logits in pieces
]


def plan_of(sizes: dict, **training) -> Plan:
    config = ModelConfig(**sizes)
    return Plan(lambda layers: GPT(dataclasses.replace(config, num_layers=layers)), config.num_layers, **training)


@pytest.fixture(scope="module")
def gpt2() -> Plan:
    sizes = {"vocab_size": 50257, "context_length": 1024, "num_layers": 12, "num_heads": 12, "d_model": 768}
    return plan_of(sizes | GPT2, batch_size=512, micro_batch_size=32, steps=10_000)


@pytest.fixture(scope="module")
def large() -> Plan:
    sizes = {"vocab_size": 50304, "context_length": 2048, "num_layers": 32, "num_heads": 4, "d_model": 4096}
    return plan_of(sizes | {"activation": "relu2"}, optimizer="muon", batch_size=512, micro_batch_size=8)


# Operations.


def test_gpt2_is_counted_as_by_hand(gpt2):
    assert gpt2.parameters == 124_439_808
    assert gpt2.block == 12 * 768**2 + 13 * 768
    assert gpt2.matrix_weights == 12 * 12 * 768**2
    by_hand = 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024
    assert gpt2.flops_per_token() == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("kind", [{}, GPT2, {"activation": "relu2", "num_layers": 6}], ids=["default", "gpt2", "deep"])
def test_operations_are_those_that_pytorch_counts(kind):
    sizes = SMALL | {"context_length": 96} | kind
    model, tokens = GPT(ModelConfig(**sizes)), torch.zeros(3, 96, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", BFLOAT16):  # whose attention is written out
        model(tokens, tokens).backward()
    assert plan_of(sizes).flops_per_token() * 3 * 96 == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_operations_with_windows_are_those_of_the_band_in_every_pattern_of_layers():
    shape = SMALL | {"context_length": 600, "num_layers": 8}

    def count(windows: tuple[int, ...] | None) -> float:
        return plan_of(shape | {"windows": windows}).flops_per_token()

    full, local, mixed = count(None), count((64,)), count((64, 64, 0))
    assert full - local == pytest.approx((full - mixed) * 8 / 6, rel=1e-6)  # 6 of 8 layers are local
    attention = 12 * 8 * 128 * 600  # of full layers, per token: the scores and their use, forward and backward
    assert (full - local) / attention == pytest.approx(1 - (64 + 32) / 600, abs=0.01)  # blocks of 32
    model, tokens = GPT(ModelConfig(**shape | {"windows": (64, 64, 0)})), torch.zeros(1, 600, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).backward()
    assert mixed * 600 == pytest.approx(counter.get_total_flops(), rel=1e-6)


# Memory.


def allocated(call) -> int:
    """The most bytes that PyTorch's allocator gave out at one time during a call, beyond what it had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def measured_peak(sizes: dict, sequences: int, dtype: torch.dtype, lean: bool = False) -> int:
    """What the second of two micro-batches allocates: weights and gradients are there before."""
    model = GPT(ModelConfig(**sizes))
    if lean:
        recompute_activations(model)

    def micro_batch(rows: int) -> None:
        tokens = torch.randint(model.config.vocab_size, (2, rows, model.config.context_length))
        with torch.autocast("cpu", dtype, enabled=dtype != FLOAT32):
            loss = model(*tokens)
        loss.backward()

    micro_batch(1)
    return allocated(lambda: micro_batch(sequences))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: " ".join(map(str, kind)) or "default")
def test_activations_are_what_a_micro_batch_allocates(kind, dtype):
    sizes = SMALL | kind
    sequences = 2 if "context_length" in kind else 6
    planned = plan_of(sizes).activations(sequences, dtype, gpu=False)
    assert planned == pytest.approx(measured_peak(sizes, sequences, dtype), rel=0.05)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("kind", [{}, GPT2, {"d_model": 320, "context_length": 16}], ids=["default", "gpt2", "wide"])
def test_checkpointed_activations_are_what_a_micro_batch_allocates(kind, dtype):
    sizes = SMALL | kind
    plan = plan_of(sizes)
    planned = plan.activations(6, dtype, gpu=False, lean=True)
    assert planned == pytest.approx(measured_peak(sizes, 6, dtype, lean=True), rel=0.1)
    assert planned < plan.activations(6, dtype, gpu=False)


@pytest.mark.parametrize("lean", [False, True])
def test_many_layers_are_told_from_a_few(lean):
    sizes = SMALL | {"num_layers": 6}
    planned = plan_of(sizes).activations(6, FLOAT32, gpu=False, lean=lean)
    assert planned == pytest.approx(measured_peak(sizes, 6, FLOAT32, lean), rel=0.02)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_gpu_s_attention_keeps_nothing_that_grows_with_the_square_of_the_context(dropout):
    def ratio(gpu: bool) -> float:  # of long sequences to short ones with as many tokens
        long, short = (plan_of(SMALL | {"dropout": dropout, "context_length": T}) for T in (512, 128))
        return long.activations(2, BFLOAT16, gpu) / short.activations(8, BFLOAT16, gpu)

    assert ratio(gpu=True) == pytest.approx(1, rel=0.02) and ratio(gpu=False) > 1.2
    plan = plan_of(SMALL | {"dropout": dropout})
    assert plan.activations(6, BFLOAT16, gpu=True, lean=True) < plan.activations(6, BFLOAT16, gpu=True)
    plan = plan_of(SMALL)
    assert plan.activations(6, FLOAT32, gpu=True) == plan.activations(6, FLOAT32, gpu=False)


def test_what_is_gathered_in_bfloat16_is_not_converted_once_more():
    plan = plan_of(SMALL | {"d_model": 320, "context_length": 16})
    whole, gathered = (plan.activations(6, BFLOAT16, gpu=True, sharded=sharded) for sharded in (False, True))
    assert whole - gathered == pytest.approx(2 * plan.matrix_weights, rel=0.3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_optimizer_state_is_two_numbers_a_weight_or_muons_one(optimizer):
    plan = plan_of(SMALL, optimizer=optimizer)
    of_matrices = 4 if optimizer == "muon" else 8
    expected = 8 * (plan.parameters - plan.matrix_weights) + of_matrices * plan.matrix_weights
    assert plan.memory(1, 1, 1, False)["optimizer state"] == expected
    assert plan.matrix_weights == 2 * (4 * 128**2 + 3 * 128 * 352)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_is_traced_and_not_done(optimizer, monkeypatch):
    def done(*operation: object) -> None:
        raise AssertionError(operation)

    monkeypatch.setattr(torch._subclasses.fake_tensor, "run_fallback_kernel", done)
    assert plan_of(SMALL, optimizer=optimizer).update(BFLOAT16) >= 0


def test_sharding_divides_all_but_what_is_gathered(large):
    P, block = large.parameters, 12 * 4096**2
    around = P - 32 * block
    assert around == 2 * 50304 * 4096
    whole, eighth = large.memory(8, 1, 8, False), large.memory(8, 1, 8, True)
    assert whole["weights"] == 4 * P
    assert whole["gradients"] == 2 * 4 * P
    assert eighth["weights"] == 4 * P / 8 + 4 * around + 2 * 2 * block
    assert eighth["gradients"] == 4 * P / 8 + 4 * block
    assert eighth["optimizer state"] == whole["optimizer state"] / 8
    assert 4 * P > 80e9 / 4 and large.memory(8, 2, 8, True)["gradients"] == eighth["gradients"]  # reduced in each


def test_gradients_that_fit_are_whole_until_the_last_micro_batch(gpt2):
    P = gpt2.parameters
    assert gpt2.memory(8, 2, 8, True)["gradients"] == 4 * P / 8 + 4 * P
    assert gpt2.traffic(3, 2, True)["gradients"] == gpt2.traffic(1, 2, True)["gradients"] == 2 * P


# Traffic and time.


def test_two_processes_send_what_is_counted_by_hand(large):
    P, matrices, block = large.parameters, 32 * 12 * 4096**2, 12 * 4096**2
    assert large.traffic(3, 2, False) == {"weights": 0, "gradients": 4 * P, "muon": matrices}
    weights = 3 / 2 * (4 * (P - 32 * block) + 2 * 2 * 32 * block)
    assert large.traffic(3, 2, True) == {"weights": weights, "gradients": 3 * 2 * P, "muon": matrices}
    assert dataclasses.replace(large, optimizer="adamw").traffic(3, 2, True)["muon"] == 0
    assert not any(sum(large.traffic(3, 1, sharded).values()) for sharded in (False, True))


def test_matrices_too_few_for_all_processes_are_padded(gpt2):
    muon = dataclasses.replace(gpt2, optimizer="muon")
    heads, rest = 12 * 3 * 12 * 64 * 768, 768**2 + 2 * 4 * 768**2  # 432 matrices, and 12 of each of three shapes
    assert muon.traffic(1, 64, False)["muon"] == pytest.approx(63 / 64 * 2 * (heads * 448 / 432 + 64 * rest))
    pairs = plan_of(SMALL, optimizer="muon")  # 2 layers: each process has a pair, or nothing
    assert pairs.traffic(1, 4, False)["muon"] == 3 / 4 * 2 * (24 * 32 + 4 * 128 + 4 * 2 * 352 + 4 * 352) * 128


def test_a_network_slows_an_exchange_of_all_with_all_more_than_a_ring():
    assert transfer_seconds(450e9, 8) == transfer_seconds(450e9, 8, ring=False) == 1
    assert transfer_seconds(400e9, 64) == 1  # an eighth of it through 50 GB/s
    assert transfer_seconds(63e9, 64, ring=False) == pytest.approx(56 / 50)
    assert transfer_seconds(0, 1) == 0


@pytest.mark.parametrize("sharded", [False, True])
def test_efficiency_falls_with_processes_and_rises_with_tokens(large, sharded):
    def efficiency(tokens: int, w: int, plan: Plan = large) -> float:
        computing, waiting = plan.step_seconds(tokens, 1, w, sharded, 400e12)
        assert waiting >= 0
        return computing / (computing + waiting)

    by_processes = [efficiency(2**20 // w, w) for w in (1, 2, 8, 16, 64, 256)]
    assert by_processes[0] == 1
    assert by_processes == sorted(by_processes, reverse=True) and by_processes[-1] < 0.98
    by_tokens = [efficiency(2**power, 64) for power in range(10, 17)]
    assert by_tokens == sorted(by_tokens) and by_tokens[0] < 0.7 < 0.98 < by_tokens[-1]
    assert efficiency(2**17, 64, dataclasses.replace(large, optimizer="adamw")) == 1  # all of it hides


def test_what_does_not_hide_is_waited_for(gpt2):
    flops = gpt2.flops_per_token()
    computing, waiting = gpt2.step_seconds(1024, 1, 8, False, 400e12)
    assert computing == 1024 * flops / 400e12
    assert waiting == pytest.approx(2 * 7 / 8 * 4 * gpt2.parameters / 450e9 - computing * 2 / 3)
    _, in_two = gpt2.step_seconds(1024, 2, 8, False, 400e12)
    assert in_two - waiting == pytest.approx(computing / 3)  # only the second of two hides anything
    _, sharded = gpt2.step_seconds(16, 4, 8, True, 400e12)
    sent = sum(gpt2.traffic(4, 8, True).values())
    assert sharded == pytest.approx(sent / 450e9 - 16 * flops / 400e12 * 2 / 3)


def test_speed_is_that_of_matrix_products():
    def measure_here() -> float:
        begun = time.perf_counter()
        for _ in range(5):
            a @ a
        return 5 * 2 * 1024**3 / (time.perf_counter() - begun)

    a, ratios = torch.randn(1024, 1024), []
    while len(ratios) < 10 and not any(0.7 < ratio < 1.4 for ratio in ratios):  # a neighbour may be busy in one of two
        ratios.append(measure_speed(CPU, FLOAT32) / measure_here())
    assert len(ratios) < 10, ratios


# The table.


def rows_of(table: str) -> dict[str, list[str]]:
    """The cells of each row of a plan's table, by its name."""
    lines = table.split("\n\n", 1)[1].splitlines()
    return {line[:17].strip(): [line[i : i + 10].strip() for i in range(17, 77, 10)] for line in lines}


def test_a_plan_is_a_table_of_80_columns():
    plan = plan_of(SMALL, batch_size=512, micro_batch_size=32, steps=10_000, optimizer="muon")
    text = plan.describe([10**9], CPU, BFLOAT16)
    lines, rows = text.splitlines(), rows_of(text)
    assert max(map(len, lines)) <= 80
    assert lines[0] == f"model  {plan.parameters:,} parameters, {plan.flops_per_token() / 1e9:.3f} GFLOP a token"
    assert lines[1] == "run    10,000 steps of 65,536 tokens = 655,360,000 (0.66 epochs)"
    assert rows[""] == ["here", "1 H100", "8 ddp", "8 fsdp", "8×8 ddp", "8×8 fsdp"]
    assert rows["micro-batches"] == ["16 × 32", "16 × 32", "2 × 32", "2 × 32", "1 × 8", "1 × 8"]  # 32 of 8 are none
    assert rows["weights"][:2] == [format_amount(4 * plan.parameters, BYTES)] * 2
    for name, cell in plan.column(64, True, 0.4 * 989e12).items():
        assert rows[name][5] == cell


def test_a_table_of_a_batch_that_divides_over_one_process_alone_and_of_an_unknown_dataset():
    plan = plan_of(SMALL, batch_size=12, micro_batch_size=8)
    text = plan.describe([], CPU, FLOAT32)
    assert "epochs" not in text
    rows = rows_of(text)
    for name in rows.keys() - {""}:
        assert rows[name][2:] == ["–"] * 4 and "–" not in rows[name][:2]
    assert rows["micro-batches"][:2] == ["2 × 6"] * 2
    for column, (dtype, gpu) in enumerate([(FLOAT32, False), (BFLOAT16, True)]):  # whatever is used here
        assert rows["activations"][column] == format_amount(plan.activations(6, dtype, gpu), BYTES)
    assert rows["activations"][0] != rows["activations"][1]


def test_amounts_are_told_in_the_unit_that_fits():
    assert [format_amount(n, BYTES) for n in (0, 5, 1536, 2**30 * 250)] == ["0", "5.0 B", "1.5 KiB", "250 GiB"]
    assert [format_amount(n, TIME) for n in (2e-6, 0.15, 90, 86400 * 800)] == ["2.0 µs", "150 ms", "1.5 min", "2.2 y"]


def test_the_command_plans_with_a_dataset_or_a_vocabulary_and_makes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = "--plan --out planned --num-layers 1 --num-heads 2 --d-model 16 --context-length 16 --batch-size 4"
    flags = [*flags.split(), "--device", "cpu"]
    assert train.main([*flags, "--vocab-size", "300", "--data", "nowhere"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^run    1,200 steps of 64 tokens = 76,800$", said, re.MULTILINE)
    with pytest.raises(ValueError, match="nowhere holds no dataset"):
        train.main([*flags, "--data", "nowhere"])
    (tmp_path / "text.txt").write_text(numbers_text(100), encoding="utf-8")
    prepare(PrepareConfig(inputs=("text.txt",), tokenizer="char", out=tmp_path / "data"))
    capsys.readouterr()
    assert train.main([*flags, "--data", "data", "--steps", "10", "--dtype", "float32"]) == 0
    said = capsys.readouterr().out
    assert "epochs)" in said and max(map(len, said.splitlines())) <= 80 and len(rows_of(said)) == 14
    assert not (tmp_path / "planned").exists()
