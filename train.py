"""Train a GPT on a prepared dataset: data/<name>/ → out/<run>/.

python train.py [config/NAME.toml] [--flags]      --help shows every setting
torchrun --nproc-per-node 8 train.py config/gpt2-124m.toml
"""

import dataclasses
import io
import math
import shlex
import signal
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_activations
from tqdm import tqdm

from engine import checkpoint, shards
from engine.files import lock, sha256
from engine.generate import generate, opening, stream
from engine.optimizer import Optimizer, OptimizerConfig
from engine.parallel import DTYPES, World, averaging, choose_device, choose_dtype, processes
from engine.plan import Shape, describe_plan, measure_speed
from engine.report import Progress, Recorder
from engine.settings import Interruption, flatten, load_settings, run_command, to_toml
from engine.shards import Dataset, open_dataset
from model import GPT, LOGITS_AT_ONCE, LONGEST_PLAIN, ModelConfig

EVALUATION_TOKENS = 2**14  # in one forward pass of an evaluation
SAMPLE_TOKENS = 200  # of the sample at the end
SPIKE = 6  # standard deviations above the recent mean: a loss to tell of
MOST_SKIPPED = 50  # steps in a row without a finite gradient, after which a run ends
BUILT_IN = Path("data/stdlib")


@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT on a prepared dataset."""

    data: Path = BUILT_IN  # The dataset: what prepare.py made.
    out: Path = Path("out/stdlib")  # The run folder, for checkpoints, metrics and pictures.
    steps: int = 400  # Optimizer steps in all.
    batch_size: int = 32  # Sequences in one optimizer step, over all processes.
    micro_batch_size: int = 0  # Sequences in one forward pass of one process; 0: all it has. Fewer save memory.
    seed: int = 1  # Of the initial weights, the order of the data, and dropout.
    eval_every: int = 200  # Steps between evaluations.
    eval_tokens: int = 2**17  # Tokens of the validation split to evaluate on, spread evenly; 0: all.
    save_every: int = 200  # Steps between checkpoints; a new best evaluation is saved too.
    log_every: int = 10  # Steps between training records in metrics.jsonl.
    device: str = "auto"  # cpu, cuda, mps, or auto: the best there is.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # Of matrix products; auto: what is quick.
    compile: bool | None = None  # Compile the model; None: on CUDA, where it pays.
    checkpoint_activations: bool = False  # Recompute each block when going back: slower, in far less memory.
    parallel: Literal["ddp", "fsdp"] = "ddp"  # Under torchrun: every process holds the whole model, or its rows.
    timeout: int = 600  # Seconds that a process waits for the others before all end with an error.
    resume: bool = False  # Go on from the newest checkpoint in the run folder, if there is one.
    verify_data: bool = False  # Hash the dataset anew; without, only if its files changed since it was last verified.
    plan: bool = False  # Only say what the run takes, here and on GPUs: memory, messages, time.
    wandb: bool = False  # Log to Weights & Biases too (WANDB_MODE=offline keeps it on this machine).
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self):
        for name in ("steps", "batch_size", "eval_every", "save_every", "log_every", "timeout"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


# What a resumed run may set anew: where and how fast it runs, how long, and what it tells.
MAY_CHANGE = {"data", "out", "steps", "micro_batch_size", "eval_every", "eval_tokens", "save_every", "log_every"}
MAY_CHANGE |= {
    "device",
    "dtype",
    "compile",
    "checkpoint_activations",
    "parallel",
    "timeout",
    "resume",
    "verify_data",
    "wandb",
}


@dataclass
class Run:
    """What the loop works with, and how far it is. All processes have the same, but that only the first records."""

    config: TrainConfig
    world: World
    dataset: Dataset
    model: GPT
    replica: nn.Module  # the model as it trains: compiled, averaging its gradients with its peers
    optimizer: Optimizer
    batches: shards.Batches
    step: int = 0
    saved: int = 0  # the step of the newest checkpoint
    elapsed: float = 0.0  # seconds, those before a resume too
    best_loss: float = math.inf
    recorder: Recorder | None = None
    saver: checkpoint.Saver | None = None
    lock: IO | None = None  # while it is open, the run folder is ours

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch_size * self.config.model.context_length

    def autocast(self) -> torch.autocast:
        return mixed_precision(self.config, self.world)

    def say(self, text: str) -> None:
        if self.world.is_first:
            tqdm.write(text, file=sys.stdout)


def main() -> int:
    """Train as the command line says; returns the exit code."""
    config = load_settings(TrainConfig)
    if config.plan:
        print(plan(config))
        return 0
    with processes(config.device, config.parallel, config.timeout) as world, Interruption() as interruption:
        dataset = open_data(config, world)
        config = complete(config, dataset, world)
        torch.manual_seed(config.seed)
        model = world.materialise(partial(GPT, config.model), DTYPES[config.dtype])
        optimizer = Optimizer(model, config.optimizer, world, DTYPES[config.dtype])
        replica = prepare_to_train(model, config, world)
        run = Run(config, world, dataset, model, replica, optimizer, load_batches(dataset, config, world))
        restore(run)
        describe(run)
        with Progress(run.step, config.steps, run.tokens_per_step, run.elapsed, world.is_first) as progress:
            while run.step < config.steps and not world.any(bool(interruption.signal)):
                loss, learning_rate, grad_norm = train_step(run)
                progress.advance()
                run.elapsed, finished = progress.elapsed, run.step == config.steps
                if run.step % config.log_every == 0 or finished:
                    log(run, progress, loss, learning_rate, grad_norm)
                if run.step % config.eval_every == 0 or finished:
                    progress.pause(evaluate_and_save, run)
                elif run.step % config.save_every == 0:
                    progress.pause(save, run)
        if run.step < config.steps:
            return interrupted(run, interruption)
        conclude(run)
    return 0


def plan(config: TrainConfig) -> str:
    """What the run would take. Without the dataset its vocabulary must be given; ValueError if it is not."""
    known = config.model.vocab_size and not (config.data / "manifest.json").exists()
    dataset = None if known else open_dataset(config.data)
    device = choose_device(config.device)
    size = config.model.vocab_size or dataset.tokenizer.vocab_size
    with torch.device("meta"):
        model = GPT(dataclasses.replace(config.model, vocab_size=size))
    dtype = choose_dtype(config.dtype, device, config.model.d_model)
    plain = (dtype == torch.bfloat16 and config.model.context_length <= LONGEST_PLAIN) or config.model.dropout > 0
    shape = Shape.of(
        model,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        steps=config.steps,
        optimizer=config.optimizer.optimizer,
        compute_bytes=dtype.itemsize,
        plain_attention=plain and device.type == "cpu",
        logits_at_once=LOGITS_AT_ONCE,
    )
    return describe_plan(shape, len(dataset.train) if dataset else 0, device.type, measure_speed(device, dtype))


def open_data(config: TrainConfig, world: World) -> Dataset:
    """The dataset; the built-in one is prepared first if need be."""
    if config.data == BUILT_IN and not config.data.exists() and world.is_first:
        from prepare import PrepareConfig, prepare

        prepare(PrepareConfig(inputs=("stdlib",), out=config.data))
    world.wait()
    dataset = open_dataset(config.data)
    if world.is_first:
        shards.verify_dataset(dataset, config.verify_data)
    return dataset


def complete(config: TrainConfig, dataset: Dataset, world: World) -> TrainConfig:
    """The settings with what follows from the data and the machine. Raises ValueError for what does not fit them."""
    size = config.model.vocab_size or dataset.tokenizer.vocab_size
    if size < dataset.tokenizer.vocab_size:
        need = f"{dataset.path} needs {dataset.tokenizer.vocab_size}"
        raise ValueError(f"--vocab-size {size} is too small: {need}; leave it out, or pad with more")
    if config.batch_size % world.size:
        near = [
            n
            for n in (config.batch_size // world.size * world.size, -(-config.batch_size // world.size) * world.size)
            if n
        ]
        raise ValueError(
            f"--batch-size {config.batch_size} does not divide over {world.size} processes; "
            f"try {' or '.join(map(str, near))}"
        )
    share = config.batch_size // world.size
    if config.micro_batch_size and share % config.micro_batch_size:
        divisors = ", ".join(str(n) for n in range(1, share + 1) if share % n == 0)
        raise ValueError(f"--micro-batch-size {config.micro_batch_size} does not divide {share}; try one of {divisors}")
    for split in (dataset.train, dataset.val):
        shards.windows_per_epoch(len(split), config.model.context_length)
    dtype = str(choose_dtype(config.dtype, world.device, config.model.d_model)).removeprefix("torch.")
    model = dataclasses.replace(config.model, vocab_size=size)
    return dataclasses.replace(config, model=model, dtype=dtype)


def mixed_precision(config: TrainConfig, world: World) -> torch.autocast:
    """Inside of it, matrix products compute in the settings' dtype."""
    return torch.autocast(world.device.type, DTYPES[config.dtype], enabled=config.dtype != "float32")


def prepare_to_train(model: GPT, config: TrainConfig, world: World) -> nn.Module:
    """The model recomputing activations if asked, compiled where that pays, and joined with its peers."""
    if config.checkpoint_activations:
        for block in model.blocks:
            block.forward = partial(checkpoint_activations, block.forward, use_reentrant=False)
    if config.compile or (config.compile is None and world.device.type == "cuda"):
        for part in model.blocks if world.sharded else [model]:
            part.compile()
    rows = config.micro_batch_size or config.batch_size // world.size
    example = torch.zeros(2, rows, config.model.context_length, dtype=torch.long, device=world.device)
    with mixed_precision(config, world):
        return world.replicate(model, *example)


def load_batches(dataset: Dataset, config: TrainConfig, world: World) -> shards.Batches:
    """This process's part of every batch."""
    share = world.share(config.batch_size)
    length = config.model.context_length
    return shards.Batches(dataset.train, length, config.seed, config.batch_size, share, world.device)


def restore(run: Run) -> None:
    """Make or re-open the run folder; with --resume, bring back the state of its newest whole checkpoint.

    Only the first process looks into the folder: another machine need not have it. Raises ValueError if checkpoints
    are there that were not asked for, or were made with settings that differ.
    """
    config, world = run.config, run.world
    resume = config.resume or world.restarted
    if world.is_first:
        config.out.mkdir(parents=True, exist_ok=True)
        run.lock = lock(config.out)
        run.saver = checkpoint.Saver(config.out, run.dataset.tokenizer.save)
    if world.is_first and checkpoint.list_checkpoints(config.out) and not resume:
        raise ValueError(f"{config.out} already holds checkpoints; go on with --resume, or choose another --out")
    found = checkpoint.newest_checkpoint(config.out, run.say) if resume and world.is_first else None
    if found and sha256(found.path / "tokenizer.json") != run.dataset.manifest["tokenizer"]["sha256"]:
        raise ValueError(f"{found.path} is damaged: its tokenizer.json is not the one of {run.dataset.path}")
    state = world.tell(found.state if found else None)
    if state:
        check_same_run(run, state)
        world.load(run.model, world.tell_tensors(found.model() if found else ()))
        run.optimizer.load_state(world.tell_tensors(found.optimizer() if found else ()))
        run.step = run.saved = state["step"]
        run.elapsed = state["elapsed_seconds"]
        run.best_loss = math.inf if state["best_val_loss"] is None else state["best_val_loss"]
        run.say(f"Resuming after step {run.step:,}")
    if world.is_first:
        (config.out / "config.toml").write_text(to_toml(config), encoding="utf-8")
        run.recorder = Recorder(config.out, run.step, flatten(config) | {"out": str(config.out)}, config.wandb)


def check_same_run(run: Run, state: dict[str, Any]) -> None:
    """Raise ValueError if a checkpoint's state was made with settings, or on text, that this run does not have."""
    settings = flatten(run.config)
    changed = [
        f"{name} {was!r} → {settings[name]!r}"
        for name, was in state["settings"].items()
        if name not in MAY_CHANGE and settings.get(name) != was
    ]
    if state["data_sha256"] != sha256(run.dataset.path / "manifest.json"):
        changed.append("the text in --data")
    if changed:
        raise ValueError(f"--resume can't change {', '.join(changed)}; set it back, or choose another --out")


def describe(run: Run) -> None:
    """Say what is about to happen."""
    config, model, data = run.config, run.config.model, run.dataset
    tokens = config.steps * run.tokens_per_step
    run.say(
        f"data   {data.path}: {len(data.train):,} tokens to train on, {len(data.val):,} to validate; "
        f"vocabulary {data.tokenizer.vocab_size:,} ({data.tokenizer.kind})\n"
        f"model  {run.model.num_parameters():,} parameters: {model.num_layers} layers, {model.num_heads} heads, "
        f"d_model {model.d_model}, context {model.context_length}\n"
        f"run    {config.steps:,} steps of {config.batch_size} × {model.context_length} tokens = {tokens:,} "
        f"({tokens / len(data.train):.1f} epochs), {config.optimizer.optimizer}, on {run.world.size} × "
        f"{run.world.device} in {config.dtype} → {config.out}"
    )


def train_step(run: Run) -> tuple[Tensor, float, Tensor]:
    """One optimizer step: returns the loss over the whole batch, the learning rate, and the gradient's norm."""
    config, world = run.config, run.world
    inputs, targets = run.batches.get(run.step)
    if config.model.dropout:
        torch.manual_seed(shards.derived_seed(config.seed, run.step, world.rank))
    micro = config.micro_batch_size or len(inputs)
    pieces = list(zip(inputs.split(micro), targets.split(micro), strict=True))
    total = torch.zeros((), device=world.device)
    for index, (x, y) in enumerate(pieces):
        with averaging(run.replica, now=index == len(pieces) - 1), run.autocast():
            loss = run.replica(x, y) / len(pieces)
            run.optimizer.scaled(loss).backward()
        total += loss.detach()
    learning_rate, grad_norm = run.optimizer.step(run.step, config.steps)
    run.step += 1
    return total, learning_rate, grad_norm


def log(run: Run, progress: Progress, loss: Tensor, learning_rate: float, grad_norm: Tensor) -> None:
    """Record a training step; here, and nowhere else in the loop, the device is waited for.

    Raises ValueError when too many steps in a row had no finite gradient.
    """
    loss = run.world.sum(loss / run.world.size).item()
    digest = run.world.sum(torch.tensor(run.batches.digest, dtype=torch.float64))
    skipped, in_a_row = (int(run.optimizer.guard[what].item()) for what in ("skipped", "skipped_in_a_row"))
    speed = progress.measure(run.step, loss)
    if run.recorder:
        run.saver.check()
        z_score = run.recorder.z_score(loss)
        if z_score > SPIKE:
            run.say(
                f"step {run.step:>6,}  the loss jumped to {loss:.4f}, {z_score:.0f} deviations above the recent mean"
            )
        run.recorder.add(
            {
                "step": run.step,
                "tokens": run.step * run.tokens_per_step,
                "train_loss": loss,
                "learning_rate": learning_rate,
                "grad_norm": grad_norm.item(),
                "tokens_per_second": round(speed, 1),
                "elapsed_seconds": round(progress.elapsed, 3),
                "skipped_steps": skipped,
                "loss_z_score": round(z_score, 2),
                "batch_digest": f"{int(digest.item()):x}",
            }
        )
    if in_a_row >= MOST_SKIPPED:
        raise ValueError(
            f"the last {in_a_row} steps had no finite gradient, and changed nothing; lower --learning-rate, set "
            f"--clip-norm, or compute in another --dtype, and go on with --resume from step {run.saved:,}"
        )


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Mean loss, in nats per token, over the same windows of the validation split every time."""
    tokens, length, world = run.dataset.val, run.config.model.context_length, run.world
    starts, scored_before = shards.evaluation_windows(len(tokens), length, run.config.eval_tokens)
    share = world.share(len(starts))
    mine, before = starts[share], scored_before[share]
    if len(mine) * world.size < len(starts):  # all take as many: one with nothing to score fills up
        mine, before = np.append(mine, starts[0]), np.append(before, length)
    rows = max(1, EVALUATION_TOKENS // length)
    total = torch.zeros(2, dtype=torch.float64)  # summed loss, targets
    run.model.eval()
    for first in range(0, len(mine), rows):
        windows = shards.evaluation_batch(tokens, mine[first : first + rows], before[first : first + rows], length)
        inputs, targets = torch.from_numpy(windows).to(world.device)
        with run.autocast():
            loss = run.model(inputs, targets)
        scored = int((targets >= 0).sum())
        total += torch.tensor([loss.item() * scored if scored else 0.0, scored])
    run.model.train()
    summed, scored = world.sum(total).tolist()
    return summed / scored


def evaluate_and_save(run: Run) -> None:
    """Evaluate, record, redraw the picture, and save if it is time, or the best so far, or the end."""
    loss = evaluate(run)
    bits = loss / math.log(2) / run.dataset.bytes_per_token("val")
    record = {"step": run.step, "val_loss": loss, "val_bits_per_byte": bits, "val_perplexity": math.exp(min(loss, 700))}
    run.say(f"step {run.step:>6,}  validation loss {loss:.4f}, {bits:.4f} bits per byte  ({run.elapsed:,.0f} s)")
    if run.recorder:
        run.recorder.add(record)
        run.recorder.draw_loss()
    improved = loss < run.best_loss
    run.best_loss = min(loss, run.best_loss)
    if improved or run.step % run.config.save_every == 0 or run.step == run.config.steps:
        save(run, loss)


def save(run: Run, val_loss: float | None = None) -> None:
    """Write a checkpoint of this step."""
    model, optimizer = run.world.wholes(run.model.state_dict()), run.world.wholes(run.optimizer.state())
    if run.world.is_first:
        state = {
            "step": run.step,
            "tokens": run.step * run.tokens_per_step,
            "val_loss": val_loss,
            "best_val_loss": None if run.best_loss == math.inf else run.best_loss,
            "elapsed_seconds": run.elapsed,
            "model": dataclasses.asdict(run.config.model),
            "settings": {k: str(v) if isinstance(v, Path) else v for k, v in flatten(run.config).items()},
            "data_sha256": sha256(run.dataset.path / "manifest.json"),
            "documents": run.dataset.manifest["splits"]["train"]["documents"],
        }
        run.saver.save(state, model, optimizer)
    run.saved = run.step


def interrupted(run: Run, interruption: Interruption) -> int:
    """Save what is done and say how to go on; return the exit code that tells of the signal."""
    if run.step > run.saved:
        save(run)
    if run.saver:
        run.saver.wait()
    command = shlex.join([sys.argv[0], *(argument for argument in sys.argv[1:] if argument != "--resume"), "--resume"])
    done = f"after step {run.step:,}, which is saved" if run.step else "before the first step"
    run.say(f"Interrupted {done}. Go on with: {run.world.launcher} {command}")
    return 128 + (interruption.signal or signal.SIGTERM)


def conclude(run: Run) -> None:
    """The result, a sample, and where to go from here."""
    if run.recorder:
        run.saver.wait()
        last = run.recorder.last("val_loss")
        run.recorder.close()
        run.say(
            f"\n{run.config.steps:,} steps in {run.elapsed:,.1f} s. Validation loss {last['val_loss']:.4f} nats per "
            f"token, perplexity {last['val_perplexity']:.2f}, {last['val_bits_per_byte']:.4f} bits per byte.\n\n"
            "A sample:\n"
        )
    run.model.eval()
    tokenizer = run.dataset.tokenizer
    prompt = opening(tokenizer, run.dataset.manifest["splits"]["train"]["documents"])
    prompt = torch.tensor([prompt], device=run.world.device)
    never = [*tokenizer.unused_ids(), *range(tokenizer.vocab_size, run.config.model.vocab_size)]
    choice = {"temperature": 0.8, "top_p": 0.95, "seed": run.config.seed, "never": never}
    # Every process takes part, as a sharded model needs; a cache would need its heads' weights outside of its layers.
    tokens = generate(run.model, prompt, SAMPLE_TOKENS, use_cache=not run.world.sharded, **choice)
    stream(tokens, tokenizer, sys.stdout if run.world.is_first else io.StringIO())
    run.say(f"\n\nMore of it: python sample.py {run.config.out}")


if __name__ == "__main__":
    run_command(main)
