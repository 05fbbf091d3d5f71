"""What several modules' tests are written with."""

import dataclasses
import json
import signal
import unittest.mock
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, processors, trainers
from tokenizers.pre_tokenizers import Metaspace

import train
from engine.core.cli import run_command
from engine.core.files import sha256
from engine.core.settings import load_settings
from engine.training.callbacks import MetricsFile
from engine.training.checkpoint import Checkpoint, open_checkpoint
from engine.training.config import TrainConfig
from engine.training.run_dir import list_checkpoints
from engine.training.trainer import Callback, Trainer
from model import GPT, ModelConfig

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


def numbers_text(count: int) -> str:
    """A text that is quickly learned: one number is followed by the next."""
    return "".join(f"{number} is followed by {number + 1}.\n" for number in range(count))


def train_sentencepiece(texts: list[str]) -> tokenizers.Tokenizer:
    """A Unigram with byte fallback and Metaspace, as models that use SentencePiece have it."""
    special = ["<unk>", "<s>", "</s>"]
    trained = tokenizers.Tokenizer(models.Unigram())
    trained.pre_tokenizer = Metaspace(prepend_scheme="first")
    options: dict[str, Any] = {"special_tokens": special, "unk_token": "<unk>", "show_progress": False}
    trained.train_from_iterator(texts, trainers.UnigramTrainer(vocab_size=500, **options))
    document = json.loads(trained.to_str())
    document["model"]["vocab"] += [[f"<0x{byte:02X}>", -100.0] for byte in range(256)]
    document["model"]["byte_fallback"] = True
    made = tokenizers.Tokenizer.from_str(json.dumps(document))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing("<s> $0", None, [("<s>", 1)])
    return made


SMALL = ModelConfig(vocab_size=37, context_length=16, num_layers=2, num_heads=3, d_model=24)
GPT2 = {"position": "learned", "norm": "layernorm", "activation": "gelu", "qk_norm": False, "tie_embeddings": True}
GPT2 |= {"bias": True}
YEAR_2017 = GPT2 | {"position": "sinusoidal", "norm_placement": "post", "activation": "relu", "scale_embeddings": True}
VARIANTS = {
    "default": SMALL,
    "gpt2": dataclasses.replace(SMALL, **GPT2),
    "2017": dataclasses.replace(SMALL, **YEAR_2017),
    "relu2": dataclasses.replace(SMALL, activation="relu2", d_ff=40, logit_softcap=15.0),
    "qwen3": dataclasses.replace(
        SMALL,
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,
        norm="weighted_rmsnorm",
        rope_base=1e5,
        windows=(3, 0),
    ),
}


def randomised(config: ModelConfig, seed: int = 0) -> GPT:
    """A model whose every parameter matters: matrices that begin as zeros would hide mistakes."""
    torch.manual_seed(seed)
    model = GPT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def newest_checkpoint(run: Path) -> Checkpoint:
    """Return the newest checkpoint of a run. Raises UserError if a file of it is corrupted."""
    return open_checkpoint(list_checkpoints(run)[-1]).verify()


def same_checkpoint(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether two checkpoints have the same step, weights and optimizer state, bit for bit."""
    pairs = [(dict(one.model()), dict(other.model())), (dict(one.optimizer()), dict(other.optimizer()))]
    return one.step == other.step and all(same_tensors(*pair) for pair in pairs)


def same_tensors(mine: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same names, and under each the same numbers, bit for bit."""
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


def logged(run: Path, key: str) -> dict[int, Any]:
    """What metrics.jsonl has under a key, by the step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


TINY = "--num-layers 2 --num-heads 2 --d-model 16 --context-length 16 --batch-size 4 --warmup-steps 0 --log-every 1"
TINY = [*TINY.split(), "--eval-tokens", "2000", "--device", "cpu"]


def tiny(data: Path, out: Path, *flags: object) -> list[str]:
    """The arguments of train.py for a model and batches so small that a hundred steps take half a second."""
    return list(map(str, ["--data", data, "--out", out, *TINY, *flags]))


class MetricsWithoutPlot(MetricsFile):
    """Writes every record, and draws nothing: a picture takes longer than ten steps."""

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        with unittest.mock.patch("engine.training.callbacks.draw_loss"):
            super().on_record(trainer, record)


def train_tiny(
    data: Path,
    out: Path,
    *flags: object,
    callbacks: Sequence[Callback] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> Trainer:
    """Train a tiny model in this process, with metrics; the callbacks are called after the metrics are written."""
    config = load_settings(TrainConfig, tiny(data, out, *flags))
    all_callbacks = [MetricsWithoutPlot(), *callbacks]
    if isinstance(should_stop, Callback):
        all_callbacks.append(should_stop)
    return train.train(config, callbacks=all_callbacks, should_stop=should_stop)


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit: the newest checkpoints' weights and optimizer state, and every logged loss."""
    assert same_checkpoint(newest_checkpoint(one), newest_checkpoint(other))
    for key in ("train_loss", "val_loss", "grad_norm", "learning_rate", "batch_digest"):
        assert logged(one, key) == logged(other, key)


def seal(checkpoint: Path) -> None:
    """Make a checkpoint's manifest agree with its files, whatever was done to them."""
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"] = {name: sha256(checkpoint / name) for name in manifest["files"]}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def exit_code_of(main: Callable[[], int | None]) -> int:
    """The exit code of a command's main, run in this process; what it does to signals is undone."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        run_command(main)
    except SystemExit as stop:
        return stop.code or 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    raise AssertionError("a command ends by exiting")
