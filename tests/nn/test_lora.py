"""LoRA: equal to W + B A, step 0 equal to the base, adapters and their bases."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import (
    StopAfter,
    assert_same_run,
    logged,
    make_dataset,
    newest_checkpoint,
    numbers_text,
    random_model,
    read_lines,
    train_tiny,
)
from torch.func import functional_call

import sample
from engine.core.errors import UserError
from engine.nn.inference import build_decoder
from engine.nn.lora import add_lora, lora_scale, merge_updates
from engine.nn.specs import draw_initial_values
from engine.report.callback import Report
from engine.runs.run_files import find_checkpoint
from engine.training import passes
from model import GPT, ModelConfig

RANK = 3
CONFIGS = {
    "grouped, with biases and a tied head": dict(num_kv_heads=2, bias=True, tie_embeddings=True),
    "one group": dict(num_kv_heads=1, norm="weighted_rmsnorm", qk_norm=False, qkv_bias=True),
    "layer norms and learned positions": dict(norm="layernorm", position="learned", bias=True),
}
TOKENS = torch.arange(34).reshape(2, 17) * 7 % 50


def make_config(changes: dict) -> ModelConfig:
    """Return a config with four heads."""
    return ModelConfig(vocab_size=50, context_length=20, num_heads=4, d_model=32, **changes)


def with_lora(base: GPT, seed: int | None = None, **dtypes: torch.dtype) -> GPT:
    """Return a model with the weights of a base and updates, of which B is 0 without a seed."""
    model = random_model(base.config)
    model.load_state_dict(base.state_dict())
    add_lora(model, RANK, **dtypes)
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    assert all(".lora." in name for name, _ in trained)
    for name, value in draw_initial_values(trained, model.specs, 5):
        model.get_parameter(name).data.copy_(value)
    if seed is not None:
        torch.manual_seed(seed)
        for _, param in trained:
            param.data.normal_(0, 0.1)
    return model


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def base(request) -> GPT:
    return random_model(make_config(request.param))


def test_step_0_is_the_base_bit_for_bit(base):
    model = with_lora(base)
    assert torch.equal(model(TOKENS), base(TOKENS))
    with torch.autocast("cpu", torch.bfloat16):  # frozen weights in bfloat16 are the same
        rounded = random_model(base.config)
        rounded.load_state_dict({name: v.bfloat16() for name, v in base.state_dict().items()})
        half = with_lora(rounded, matrix_dtype=torch.bfloat16, token_dtype=torch.bfloat16)
        assert half.token_embedding.weight.dtype == torch.bfloat16
        assert torch.equal(half(TOKENS), rounded(TOKENS))


def test_updates_add_their_products_to_the_weights(base):
    model = with_lora(base, seed=1)
    expected = base.state_dict()
    updates = {name: value for name, value in model.named_parameters() if ".lora." in name}
    attention = base.blocks[1].attention
    for kind, group_size in (("query", 1), ("key", 4 // base.config.num_groups)):
        update = [updates[f"blocks.1.attention.{kind}.lora.{letter}"] for letter in "BA"]
        rows = (lora_scale(RANK) * update[0] @ update[1]).split(base.config.head_width)
        for index, head in enumerate(list(attention.heads)[::group_size]):
            weight = expected[f"blocks.1.attention.heads.{index * group_size}.{kind}.weight"]
            assert torch.equal(weight, getattr(head, kind).weight)
            weight += rows[index]
    merged = GPT(base.config).eval()
    merged.load_state_dict(dict(merge_updates(model.state_dict(), 4 // base.config.num_groups)))
    for name, value in merged.named_parameters():
        if "blocks.1" in name and ("query" in name or "key" in name):
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0)
    for computed in (merged, build_decoder(model)):
        torch.testing.assert_close(computed(TOKENS), model(TOKENS), atol=1e-5, rtol=0)
    assert not torch.allclose(model(TOKENS), base(TOKENS), atol=1e-2)
    assert all(param.requires_grad == (".lora." in n) for n, param in model.named_parameters())


def test_the_loop_over_heads_and_a_replaced_head_compute_the_same(base):
    model = with_lora(base, seed=1)
    attention = model.blocks[0].attention
    x = torch.randn(2, 17, 32)
    rotation = model.rotation(torch.arange(17))
    torch.testing.assert_close(attention(x, rotation), attention.loop(x, rotation))
    attention.heads[1].query.register_forward_hook(lambda layer, inputs, y: 2 * y)
    torch.testing.assert_close(attention(x, rotation), attention.loop(x, rotation))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_gradients_are_those_of_the_written_out_sum(is_compiled):
    base = random_model(make_config({"num_kv_heads": 2, "bias": True, "num_layers": 1}))
    model = with_lora(base, seed=1).train()
    forward = torch.compile(model, backend="aot_eager") if is_compiled else model
    targets = TOKENS.roll(-1, 1)
    loss = forward(TOKENS, targets)
    loss.backward()
    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    weights = dict(merge_updates(params, 4 // base.config.num_groups))
    expected = functional_call(random_model(base.config).train(), weights, (TOKENS, targets))
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, param in model.named_parameters():
        assert (param.grad is not None) == (".lora." in name)
        if param.grad is not None:
            torch.testing.assert_close(param.grad, params[name].grad, atol=1e-4, rtol=1e-4)


# Runs.


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A dataset and a base run."""
    folder = tmp_path_factory.mktemp("lora")
    train_tiny(make_dataset(folder, numbers_text(1500)), folder / "base", "--steps", 30)
    return folder


@pytest.fixture
def tune(folder, tmp_path):
    """Train a run with LoRA in a folder of its own, from a copy of the base that may be moved."""
    shutil.copytree(folder / "base", tmp_path / "base")
    flags = ["--init-from", tmp_path / "base", "--lora-rank", RANK, "--eval-every", 4]
    return lambda name, *more, **options: train_tiny(
        folder / "data", tmp_path / name, *flags, *more, **options
    )


def test_a_run_starts_as_its_base_and_trains_and_saves_only_the_updates(tune, folder, tmp_path):
    start = tune("start", "--steps", 1, "--learning-rate", 0)
    assert start.evaluation["val_loss"] == logged(folder / "base", "val_loss")[30]
    run = tune("run", "--steps", 8, "--optimizer", "adamw", "--learning-rate", 0.01)
    assert run.evaluation["val_loss"] < start.evaluation["val_loss"] - 0.01
    checkpoint = find_checkpoint(tmp_path / "run")
    saved = dict(checkpoint.model())
    assert saved.keys() == set(run.optimizer.parameters) and all(".lora." in name for name in saved)
    before = dict(find_checkpoint(tmp_path / "base").model())
    assert all(torch.equal(run.model.get_parameter(name), before[name]) for name in before)
    assert run.evaluation["val_loss"] == run.best_evaluation["val_loss"]
    longer = ["--steps", 40, "--save-every", 2, "--eval-every", 2, "--resume"]
    train_tiny(folder / "data", tmp_path / "base", *longer)  # keeps what the run needs
    logits = sample.load(tmp_path / "run", "cpu", dtype="float32").model(TOKENS[:, :16])
    torch.testing.assert_close(logits, run.model.eval()(TOKENS[:, :16]), atol=1e-5, rtol=0)


def test_a_run_resumes_bit_for_bit_from_a_base_that_was_moved(tune, folder, tmp_path):
    def load(name: str, **options) -> torch.Tensor:
        return sample.load(tmp_path / name, "cpu", **options).model(TOKENS[:, :16])

    tune("full", "--steps", 8)
    tune("parts", "--steps", 8, should_stop=StopAfter(3))
    (tmp_path / "base").rename(tmp_path / "moved")
    for use in (partial(tune, "parts", "--steps", 8, "--resume"), partial(load, "parts")):
        with pytest.raises(UserError, match=r"base.*--base"):
            use()

    tune("parts", "--steps", 8, "--resume", "--base", tmp_path / "moved")
    assert_same_run(tmp_path / "parts", tmp_path / "full")
    load("parts", base=tmp_path / "moved")
    untrained = tmp_path / "untrained"
    train_tiny(folder / "data", untrained, "--steps", 1)
    with pytest.raises(UserError, match=r"another base model.*--base"):
        load("parts", base=untrained)
    with pytest.raises(UserError, match="--base"):
        load("moved", base=tmp_path / "moved")


def test_a_run_can_start_from_a_run_with_lora(tune, folder, tmp_path):
    first = tune("first", "--steps", 8)
    expected = pytest.approx(first.best_evaluation["val_loss"], abs=1e-5)
    flags = ["--steps", 1, "--learning-rate", 0, "--eval-tokens", 2000]
    flags += ["--init-from", tmp_path / "first"]
    for run in (train_tiny(folder / "data", tmp_path / "all", *flags), tune("third", *flags)):
        assert run.evaluation["val_loss"] == expected
    assert newest_checkpoint(tmp_path / "third").state.base.path.startswith(str(tmp_path))


def test_tokens_that_are_new_to_the_base_are_trained(tune, folder, tmp_path, capsys):
    answer = {"role": "assistant", "content": "yes"}
    chats = [{"messages": [{"role": "user", "content": f"{n}"}, answer]} for n in range(40)]
    data = make_dataset(tmp_path, chats, chat=True, tokenizer=str(folder / "base"))
    flags = ["--init-from", folder / "base", "--lora-rank", RANK, "--steps", 4, "--auto-resume"]
    run = train_tiny(data, tmp_path / "run", *flags, should_stop=StopAfter(2))
    assert "token embeddings are trained" in capsys.readouterr().err
    resumed = train_tiny(data, tmp_path / "run", *flags)
    embedding = resumed.model.token_embedding.weight
    assert resumed.step == 4 and not torch.equal(embedding, run.model.token_embedding.weight)
    saved = dict(newest_checkpoint(tmp_path / "run").model())
    assert {"token_embedding.weight", "head.weight"} <= saved.keys()


def test_the_samples_of_a_run_need_no_merged_weights(tune, folder, tmp_path, monkeypatch):
    flags = ["--steps", 2, "--learning-rate", 0]
    train_full = partial(train_tiny, folder / "data", tmp_path / "full", "--init-from")
    train_full(tmp_path / "base", *flags, "--eval-every", 4, callbacks=[Report()])
    monkeypatch.setattr(passes, "build_decoder", None)
    tune("in-place", *flags, callbacks=[Report()])
    samples = [read_lines(tmp_path / name / "samples.jsonl") for name in ("full", "in-place")]
    assert samples[0] == samples[1] and len(samples[0]) > 2
