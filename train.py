"""Train a GPT on a prepared dataset: data/<name>/ → out/<run>/.

python train.py [config/NAME.toml] [--flags]      --help shows every setting
"""

from engine.core.cli import STARTED, Interruption, command_line, run_command, wait_briefly

if __name__ == "__main__":
    wait_briefly("train")  # before torch is loaded

import contextlib
import math
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from engine.core.cli import warn
from engine.core.device import DTYPES, ask_for_determinism, choose_device, choose_dtype, total_memory
from engine.core.distributed import (
    SINGLE_PROCESS,
    DistributedContext,
    averaging,
    load,
    materialise,
    processes,
    reduces_each,
    replicate,
)
from engine.core.errors import UserError
from engine.core.settings import check_ranges, differing, flatten, given_settings, load_settings, to_toml
from engine.data import batches
from engine.data.mixture import Mixture, as_paths, open_mixture
from engine.nn.loss import IGNORED
from engine.report.callback import Report
from engine.training.acceleration import compile_parts, recompute_activations
from engine.training.budget import BATCH_SIZE, EVERY, STEPS
from engine.training.callbacks import MetricsFile, Terminal, WeightsAndBiases, conclude, describe, notify
from engine.training.checkpoint import Checkpoint, check_tokenizer, inherited, with_rows
from engine.training.estimate import Plan
from engine.training.optimizer import Optimizer, OptimizerConfig
from engine.training.run_dir import UNRECORDED, RunDir, changed_settings, find_checkpoint
from engine.training.sizing import FEW, chooses, outlook, sized
from engine.training.trainer import Run
from model import GPT, ModelConfig
from prepare import PrepareConfig, prepare

BUILT_IN = Path("data/stdlib")
WINDOW_WARMUP, NARROW = 0.2, 16  # of a run, and the tokens that its first block sees meanwhile (docs/recipe.md)


@dataclass(frozen=True)
class ChangeableConfig:
    """What a resumed run may change: where and how fast it runs, how long, and what it reports."""

    data: tuple[Path, ...] = (BUILT_IN,)  # The dataset: what prepare.py made; or several, drawn from as --mix says.
    out: Path = Path("out/stdlib")  # The run folder, for checkpoints, metrics and pictures.
    # Optimizer steps in all; None: 1,200. With --minutes, at most; None: as many as they allow, or teach something.
    steps: Annotated[int | None, "at least 1, at most 1e9"] = None
    minutes: Annotated[float | None, "above 0, at most 1e7"] = None  # How long to train, from start to exit.
    micro_batch_size: Annotated[int | None, "at least 0"] = None  # Sequences at once; None: all. Fewer save memory.
    # Steps between evaluations; None: 500; with --minutes about ten, in 4% of the time at most.
    eval_every: Annotated[int | None, "at least 1"] = None
    eval_tokens: Annotated[int, "at least 0"] = 2**17  # Tokens of each validation split to evaluate on; 0: all.
    # Steps between saves, besides new bests; None: 500; with --minutes about ten, in 4% of the time at most.
    save_every: Annotated[int | None, "at least 1"] = None
    log_every: Annotated[int, "at least 1"] = 10  # Steps between training records in metrics.jsonl.
    device: str = "auto"  # cpu, cuda, mps, or auto: the best there is.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # Of matrix products; auto: the fast one.
    compile: bool | None = None  # Compile the model; None: on CUDA, where it pays.
    checkpoint_activations: bool = False  # Recompute each block in the backward pass: slower, in far less memory.
    parallel: Literal["ddp", "fsdp"] = "ddp"  # Under torchrun: each process holds the whole model, or a shard of it.
    timeout: Annotated[int, "at least 1, at most 1e8"] = 600  # Seconds without an answer that end the run.
    deterministic: bool = False  # On CUDA: only kernels that give the same bits each time, which are slower.
    resume: bool = False  # Continue from the newest checkpoint in the run folder, if there is one.
    verify_data: bool = False  # Hash the dataset anew; without, only if its files changed since the last time.
    plan: bool = False  # Only print what the run takes, here and on GPUs: memory, messages, time.
    wandb: bool = False  # Log to Weights & Biases too (WANDB_MODE=offline keeps it on this machine).
    init_from: Path | None = None  # Begin with the weights, shape and tokenizer of this run, or imported model.


@dataclass(frozen=True)
class TrainConfig(ChangeableConfig):
    """Train a GPT on a prepared dataset: python train.py [FILE.toml] [flags]. The file sets what the flags do not."""

    depth: Annotated[int | None, "at least 1, at most 24"] = None  # Layers, and all sizes; None: by time or steps.
    # Sequences in one optimizer step, over all processes.
    batch_size: Annotated[int, "at least 1, at most 1e6"] = BATCH_SIZE
    seed: Annotated[int, "at least 0, below 9e18"] = 1  # Of the initial weights, the order of the data, and dropout.
    mix: Annotated[tuple[float, ...] | None, "above 0"] = None  # Share of sequences from each dataset; None: by tokens.
    long_examples: Literal["leave_out", "cut"] = "leave_out"  # What to do with examples longer than the context.
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self):
        object.__setattr__(self, "data", as_paths(self.data, self.mix))
        if found := [path for path in self.data if self.out.resolve().is_relative_to(path.resolve())]:
            raise UserError(f"--out {self.out} lies in the dataset {found[0]}; choose a folder outside of it")
        if self.steps and self.steps <= (warmup := self.optimizer.warmup_steps or 0):
            raise UserError(f"--steps {self.steps} end before --warmup-steps {warmup} do; lower the warm-up")


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; returns the exit code."""
    config, given = load_settings(TrainConfig, arguments), given_settings(arguments)
    if config.plan:
        print(plan(config, given))
        return 0
    with processes(config.device, config.parallel, config.timeout) as world, Interruption() as interruption:
        observers = [MetricsFile(), Terminal(), Report(), *([WeightsAndBiases()] if config.wandb else [])]
        watching, begun = observers if world.is_main_process else (), STARTED if arguments is None else None
        run = train(config, world, watching, lambda: bool(interruption.signal), begun, given)
        if run.budget.share < 1 or run.val_loss is None:
            done = f"after step {run.step:,}, which is saved" if run.step else "before the first step"
            run.say(f"Interrupted {done}. Go on with: {world.launcher} {command_line(arguments, '--resume')}")
            return 128 + (interruption.signal or signal.SIGTERM)
        conclude(run)
    return 0


def train(
    config: TrainConfig,
    world: DistributedContext = SINGLE_PROCESS,
    observers: Sequence[Any] = (),
    stop: Callable = bool,
    begun: float | None = None,
    given: Collection[str] | None = None,
) -> Run:
    """Train until all is done, or stop() is true on any process (bool() never is); what is done is saved.

    Observers are notified on this process. ``begun`` is when the minutes began, of time.monotonic(); None: now.
    ``given`` names the settings that are not to be chosen; None: those that are no defaults. Raises UserError for
    settings that can't be trained with.
    """
    begun = time.monotonic() if begun is None else begun
    check_ranges(config)
    given = differing(config) if given is None else set(given)
    observers, dataset = list(observers), open_data(config, world)
    free = UNRECORDED | {"device"}
    asked = {"the text in data": dataset.sha256, "the settings given": sorted(given - free)}
    world.check_same(flatten(config) | asked, but=free)
    config = sized(config, given, dataset, world, begun, GPT)
    base = world.only_first(find_checkpoint, config.init_from) if config.init_from else None
    config = complete(config, dataset, world, base)
    dataset = batches.fitting(dataset, config.model.context_length, config.long_examples == "cut")
    world.check_same({"dtype": config.dtype})  # "auto" is each machine's own
    ask_for_determinism(config.deterministic)
    torch.manual_seed(config.seed)
    with torch.device("meta"):
        model = GPT(config.model)
    model = materialise(model, world, DTYPES[config.dtype])
    optimizer = Optimizer(model, config.optimizer, world, DTYPES[config.dtype])
    folder = RunDir(config.out, config.resume, world)
    run = Run(config, world, dataset, model, optimizer, folder)
    try:
        restore(run, base, begun)
        with run.clock.pause():
            prepare_to_train(run)
            notify(observers, "started", run)
        loop(run, observers, stop)
    finally:
        run.folder.close()
        notify(observers, "closed")
        run.replica = run.model  # freed after its process group, DDP may wait for itself: PyTorch 2.13, gloo
    return run


def loop(run: Run, observers: list[Any], stop: Callable) -> None:
    """Evaluate, save, step and record, each when it is time; what an interruption left out comes after the resume."""
    config = run.config
    while True:
        finished, record = run.budget.share >= 1, None
        with run.clock.pause():
            due = run.budget.is_due("save") or finished
            if run.step and run.val_loss is None and (run.budget.is_due("evaluate") or finished):
                with run.budget.timing("evaluate"):
                    if (record := evaluate(run, stop)) is None:
                        break
                    notify(observers, "recorded", run, record)
                if run.val_loss < run.best_loss:
                    run.best_loss, due = run.val_loss, True
            if due and (record or run.step > run.saved):
                with run.budget.timing("save"):
                    save(run)
        if finished or run.world.any(stop()):
            break
        results = train_step(run)
        run.budget.advance(run.step, run.clock)
        notify(observers, "stepped", run)
        if run.step % config.log_every == 0 or run.step == run.budget.total:
            notify(observers, "recorded", run, run.training_record(*results))
    if run.step > run.saved:
        save(run)
    run.folder.wait()


def plan(config: TrainConfig, given: Collection[str] | None = None) -> str:
    """What the run would take. Without the dataset vocabulary and sizes must be given; ValueError if not."""
    epochs, device = [], choose_device(config.device)
    here, existing = DistributedContext(0, 1, device), all(path.exists() for path in config.data)
    given = differing(config) if given is None else set(given)
    if config.minutes and not chooses(config, given):
        raise UserError("--plan tells what --minutes would choose, but the size is given; give --steps, not --minutes")
    if existing or not config.model.vocab_size or config.init_from or chooses(config, given):
        dataset = open_data(config, SINGLE_PROCESS)
        if config.minutes:
            return outlook(config, given, dataset, here, GPT)
        config = sized(config, given, dataset, here, 0.0, GPT)
        base = find_checkpoint(config.init_from) if config.init_from else None
        config, epochs = complete(config, dataset, here, base), dataset.epochs
    batches.check_sizes(config.batch_size, 1, config.micro_batch_size)
    shape, training = config.model, (config.batch_size, config.micro_batch_size, config.steps or STEPS)
    plan = Plan(lambda n: GPT(replace(shape, num_layers=n)), shape.num_layers, *training, config.optimizer.optimizer)
    dtype = choose_dtype(config.dtype, device, shape.d_model)
    return plan.describe(epochs, device, dtype)


def open_data(config: TrainConfig, world: DistributedContext) -> Mixture:
    """The datasets; the built-in one is prepared first if need be. Each machine verifies its own copies."""
    with world.patience():
        if BUILT_IN in config.data and not BUILT_IN.exists() and world.is_main_process:
            prepare(PrepareConfig(inputs=("stdlib",), out=BUILT_IN))
    with world.patience():
        mixture = open_mixture(config.data, config.mix)
        if world.local_rank == 0:
            mixture.verify(config.verify_data)
    return mixture


def complete(config: TrainConfig, dataset: Mixture, world: DistributedContext, base: Checkpoint | None) -> TrainConfig:
    """The settings with what follows from data, machine and base. Raises UserError for what does not fit them."""
    need, shape = dataset.tokenizer.vocab_size, config.model
    if base:
        world.only_first(check_tokenizer, base.path, dataset.tokenizer, dataset.path)
        shape = inherited(
            world.broadcast(base.state["model"] if world.is_main_process else None), shape, config.init_from
        )
        shape = replace(shape, vocab_size=max(shape.vocab_size, need))
    if (size := shape.vocab_size or need) < need:
        raise UserError(f"--vocab-size {size} is too small: {dataset.path} needs {need}; leave it out, or raise it")
    batches.check_sizes(config.batch_size, world.size, config.micro_batch_size)
    batches.check_length(dataset, shape.context_length)
    dtype = choose_dtype(config.dtype, world.device, shape.d_model)
    if not config.minutes:
        every = {name: getattr(config, name) or EVERY for name in ("eval_every", "save_every")}
        config = replace(config, steps=config.steps or STEPS, **every)
    optimizer = config.optimizer
    if optimizer.window_warmup is None:
        optimizer = replace(optimizer, window_warmup=0.0 if base or size <= FEW else WINDOW_WARMUP)
    config = replace(config, model=replace(shape, vocab_size=size), optimizer=optimizer)
    return replace(config, dtype=str(dtype).removeprefix("torch."))


def restore(run: Run, base: Checkpoint | None, begun: float) -> None:
    """Bring the run to the state of its newest whole checkpoint, or begin, with the base's weights if there is one.

    Only the first process need have them. Raises UserError for a checkpoint made with settings that must not change.
    """
    found = run.folder.newest(run.say)
    state = found.state if found else None
    if state:
        run.step = run.saved = state["step"]
        may_change = {one.name for kind in (ChangeableConfig, OptimizerConfig) for one in fields(kind)} - {"optimizer"}
        changed = changed_settings(state, flatten(run.config), may_change, run.dataset.sha256)
        if found.sha256["tokenizer.json"] != run.dataset.manifest["tokenizer"]["sha256"]:
            raise UserError(f"{found.path} is damaged: its tokenizer.json is not the one of {run.dataset.path}")
        run.changes = [*state.get("changes", []), *([{"step": run.step} | changed] if changed else [])]
        load(run.model, run.folder.tensors(found, "model"))
        run.optimizer.load_state(run.folder.tensors(found, "optimizer"))
        run.best_loss = math.inf if state["best_val_loss"] is None else state["best_val_loss"]
        run.val_loss = state.get("val_loss")
    else:
        sizes = {name: len(parameter) for name, parameter in run.model.named_parameters()}
        weights = run.world.broadcast_tensors(with_rows(base.model(), sizes)) if base else run.model.initial_values()
        load(run.model, weights)
    run.begin(time.monotonic() - begun, state)
    if state:
        run.say(f"Resuming after step {run.step:,}{describe(changed, run, run.step / state['share'])}")
    run.folder.write_settings(to_toml(run.config))


def prepare_to_train(run: Run) -> None:
    """Have the model recompute activations if asked, compiled where that pays, and joined with its peers."""
    config, world, model = run.config, run.world, run.model
    if config.checkpoint_activations:
        recompute_activations(model)
    rows = config.micro_batch_size or config.batch_size // world.size
    example = torch.zeros(2, rows, config.model.context_length, dtype=torch.long, device=world.device)
    with run.autocast():
        if config.compile or (config.compile is None and world.device.type == "cuda"):
            parts = model.blocks if world.sharded else [model]
            if failed := compile_parts(parts, lambda: model(*example).backward()):
                world.only_first(warn, f"training goes on without compiling, which failed: {failed}")
            model.zero_grad()
        run.replica = replicate(model, world, *example)
    fits = not reduces_each(model.num_parameters, total_memory(world.device))
    run.reduces_each = world.sharded and world.any(not fits) and rows * world.size < config.batch_size
    if run.reduces_each:
        run.say("Gradients are reduced in each micro-batch: whole, they would take over a quarter of the memory")


def train_step(run: Run) -> tuple[Tensor, float, Tensor]:
    """One optimizer step: returns this process's term of the loss, the learning rate, and the gradient's norm.

    Loss and gradient are sums over the whole batch, divided by the number of its targets that count.
    """
    (inputs, targets), config, world = run.batches.get(run.step), run.config, run.world
    if config.model.dropout:
        torch.manual_seed(batches.derived_seed(config.seed, run.step, world.rank))
    counted = world.sum((targets != IGNORED).sum()).clamp(min=1)
    micro = config.micro_batch_size or len(inputs)
    pieces = list(zip(inputs.split(micro), targets.split(micro), strict=True))
    total = torch.zeros((), device=world.device)
    for index, (x, y) in enumerate(pieces):
        ready = run.reduces_each or index == len(pieces) - 1
        with averaging(run.replica, now=ready), run.autocast(), narrow_window(run):
            loss = run.replica(x, y)
            run.optimizer.scaled(loss * (world.size / counted)).backward()  # the processes' gradients are averaged
        total += loss.detach()
    learning_rate, grad_norm = run.optimizer.step(run.step, run.budget.total)
    run.step, run.val_loss = run.step + 1, None
    return total / counted, learning_rate, grad_norm


@contextlib.contextmanager
def narrow_window(run: Run) -> Iterator[None]:
    """Early in the run, have the first block's attention see the last few positions alone.

    So its heads soon look at the previous token, from which those of the next block learn to find what followed the
    same token before (induction heads, Olsson et al. 2022); with all in view that takes many times as long.
    """
    attention, config = run.model.blocks[0].attention, run.config
    whole = attention.window
    if run.budget.share < config.optimizer.window_warmup:
        attention.window = min(whole or NARROW, NARROW)
    try:
        yield
    finally:
        attention.window = whole


@torch.no_grad()
def evaluate(run: Run, stop: Callable = bool) -> dict[str, Any] | None:
    """An evaluation's record for metrics.jsonl, of the same windows each time; None if stop() told it to end before."""
    config, world, datasets = run.config, run.world, run.dataset.datasets
    shape = (config.model.context_length, config.eval_tokens, world.rank, world.size)
    pairs = ((i, pair) for i, one in enumerate(datasets) for pair in batches.evaluation_batches(one.val, *shape))
    totals = torch.zeros(len(datasets), 2, dtype=torch.float64)  # summed loss, targets that count
    run.model.eval()
    for i, pair in pairs:
        if stopped := world.any(stop()):
            break
        inputs, targets = pair.to(world.device)
        with run.autocast():
            loss = run.model(inputs, targets)
        totals[i] += torch.tensor([loss.item(), (targets != IGNORED).sum().item()])
    run.model.train()
    if stopped:
        return None
    record = run.dataset.evaluation([summed / counted for summed, counted in world.sum(totals).tolist()])
    run.val_loss = record["val_loss"]
    return {"step": run.step} | record


def save(run: Run) -> None:
    """Write a checkpoint of this step."""
    config, manifest = run.config, run.dataset.manifest
    state = {"step": run.step, "tokens": run.step * run.tokens_per_step, "elapsed_seconds": run.clock.elapsed}
    state |= {"share": run.budget.share, "val_loss": run.val_loss, "best_val_loss": run.best_loss}
    state |= {"changes": run.changes}
    state |= {"model": asdict(config.model), "settings": flatten(config), "data_sha256": run.dataset.sha256}
    state |= {"examples": manifest["origin"].get("examples"), "documents": manifest["splits"]["train"]["documents"]}
    run.folder.save(state, run.model.state_dict(), run.optimizer.state(), run.dataset.tokenizer.save)
    run.saved = run.step


if __name__ == "__main__":
    run_command(main)
