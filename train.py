"""Train a GPT on a prepared dataset.

python train.py [FILE.toml] [flags]                       on this machine
torchrun --nproc-per-node 8 train.py [FILE.toml] [flags]  on many processes: docs/many-machines.md
"""

from engine.core.cli import (
    PROCESS_START,
    Interruption,
    command_line,
    run_command,
    say,
    tune_openmp_spinning,
)

if __name__ == "__main__":
    tune_openmp_spinning("train")  # before torch is loaded

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.core.device import choose_device, use_deterministic_kernels
from engine.core.distributed import DistributedContext, init_distributed, single_process
from engine.core.errors import UserError
from engine.core.settings import check_ranges, load_settings
from engine.core.sharding import gradient_sync
from engine.data import batches
from engine.data.mixture import Mixture, open_mixture
from engine.nn.loss import IGNORE_INDEX
from engine.report.callback import Report
from engine.training.callbacks import (
    MetricsFile,
    Terminal,
    WeightsAndBiases,
    describe_changes,
    print_summary,
)
from engine.training.checkpoint import Checkpoint
from engine.training.config import BUILT_IN_DATA, TrainConfig
from engine.training.estimate import describe_plan
from engine.training.resolve import check_tokenizer, make_measure, resolve_config
from engine.training.run_dir import KEEP_LAST, RunDir, find_checkpoint
from engine.training.sizing import should_choose_sizes, size_table
from engine.training.trainer import Callback, Trainer
from prepare import PrepareConfig, prepare

NUM_TIMED_STEPS = 5  # the fastest counts: the first steps of a process are slow


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says. Returns the exit code."""
    config = load_settings(TrainConfig, arguments)
    if config.plan:
        print(plan(config))
        return 0
    with (
        init_distributed(config.device, config.parallel, config.timeout) as dist,
        Interruption() as interruption,
    ):
        started_at = PROCESS_START if arguments is None else None
        trainer = train(config, dist, None, lambda: bool(interruption.signal), started_at)
        if trainer.budget.progress < 1 or trainer.val_loss is None:
            state = f"checkpoint saved at step {trainer.step:,}" if trainer.step else "before the first step"
            trainer.say(f"Interrupted; {state}. Resume with: {dist.launcher} {command_line(arguments, '--resume')}")
            return 128 + (interruption.signal or signal.SIGTERM)
        print_summary(trainer)
    return 0


def train(
    config: TrainConfig,
    dist: DistributedContext | None = None,
    callbacks: Sequence[Callback] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    started_at: float | None = None,
) -> Trainer:
    """Train until the budget is used up, or should_stop() is true on any rank. The last step is always saved.

    Args:
        config: every setting; one that is None is chosen automatically.
        dist: this process among its ranks. None: as config.device and config.parallel say, on all ranks of torchrun.
        callbacks: called on this process. None: those of the command line, on the main process.
        started_at: when config.minutes began, in seconds of time.monotonic(). None: now.

    Raises UserError for settings that cannot be trained with.
    """
    if dist is None:
        with init_distributed(config.device, config.parallel, config.timeout) as dist:
            return train(config, dist, callbacks, should_stop, started_at)
    started_at = time.monotonic() if started_at is None else started_at
    if callbacks is None:
        callbacks = default_callbacks(config) if dist.is_main_process else ()
    check_ranges(config)
    with contextlib.closing(RunDir(config.out, config.resume, dist, config.keep_checkpoints or KEEP_LAST)) as run_dir:
        checkpoint = run_dir.newest(lambda text: dist.run_on_main(say, text))
        data = open_data(config, dist)
        base = open_base(config, data, dist) if checkpoint is None else None
        config = resolve_config(config, data, dist, started_at, checkpoint or base, measure_step_seconds)
        data = batches.drop_long_examples(data, config.model.context_length, config.long_examples == "cut")
        use_deterministic_kernels(config.deterministic)

        trainer = Trainer(config, dist, data, run_dir, callbacks)
        try:
            restore_or_initialize(trainer, checkpoint, base, started_at)
            with trainer.clock.pause():
                trainer.wrap_model()
                trainer.notify("on_train_start")
            training_loop(trainer, should_stop)
        finally:
            trainer.notify("on_train_end")
            trainer.ddp_model = trainer.model  # DDP must be freed before its process group
    return trainer


def training_loop(trainer: Trainer, should_stop: Callable[[], bool]) -> None:
    """Step, log, evaluate and save, each when it is due."""
    budget = trainer.budget
    if trainer.step and trainer.val_loss is None and (budget.exhausted or budget.eval_due(trainer.step)):
        evaluate_and_save(trainer, should_stop)  # an interruption came before this evaluation was done

    while not (budget.exhausted or trainer.dist.any(should_stop())):
        loss, learning_rate, grad_norm = train_step(trainer)
        budget.update(trainer.step, trainer.clock)
        trainer.notify("on_step")
        if trainer.step % trainer.config.log_every == 0 or trainer.step == budget.total_steps:
            trainer.log_training(loss, learning_rate, grad_norm)
        if budget.exhausted or budget.eval_due(trainer.step):
            evaluate_and_save(trainer, should_stop)
        if budget.save_due(trainer.step):
            trainer.save()

    trainer.save()
    if trainer.run_dir:
        trainer.run_dir.wait()  # raises the error of a save in the background


def train_step(trainer: Trainer) -> tuple[Tensor, float, Tensor]:
    """Make one optimizer step.

    Returns this rank's term of the mean training loss, in nats per token; the learning rate; the gradient norm before
    clipping. Loss and gradient are sums over the whole batch, divided by its number of counted targets.
    """
    config = trainer.config
    dist = trainer.dist
    inputs, targets = trainer.batches.get(trainer.step)  # (rows of this rank, T) each
    if config.model.dropout:
        torch.manual_seed(batches.derived_seed(config.seed, trainer.step, dist.rank))
    num_targets = dist.sum((targets != IGNORE_INDEX).sum()).clamp(min=1)
    rows = config.micro_batch_size or len(inputs)
    micro_batches = list(zip(inputs.split(rows), targets.split(rows), strict=True))
    total_loss = torch.zeros((), device=dist.device)
    for index, micro_batch in enumerate(micro_batches):
        sync = trainer.reduce_every_microbatch or index == len(micro_batches) - 1
        with (
            gradient_sync(trainer.ddp_model, sync),
            trainer.autocast(),
            trainer.attention_window_warmup(),
        ):
            loss = trainer.ddp_model(*micro_batch)
            # DDP and FSDP average gradients over the ranks: times dist.size they are sums.
            trainer.optimizer.scale_loss(loss * (dist.size / num_targets)).backward()
        total_loss += loss.detach()
    learning_rate, grad_norm = trainer.optimizer.step(trainer.step, trainer.budget.total_steps)
    trainer.step += 1
    trainer.val_loss = None
    return total_loss / num_targets, learning_rate, grad_norm


def evaluate_and_save(trainer: Trainer, should_stop: Callable[[], bool]) -> None:
    """Evaluate, tell the callbacks, and save if this is the best loss so far or the end of the run."""
    with trainer.clock.pause(), trainer.budget.timing("evaluate"):
        losses = evaluate(trainer, should_stop)
        if losses is None:
            return
        record = trainer.data.evaluation(losses)
        trainer.val_loss = record["val_loss"]
        trainer.notify("on_record", {"step": trainer.step, **record})
    if trainer.val_loss < trainer.best_val_loss:
        trainer.best_val_loss = trainer.val_loss
        trainer.save()


@torch.no_grad()
def evaluate(trainer: Trainer, should_stop: Callable[[], bool] = lambda: False) -> list[float] | None:
    """Compute the validation loss on each dataset, in nats per token, on the same windows every time.

    Returns None if should_stop() ended it early, on any rank.
    """
    config = trainer.config
    dist = trainer.dist
    totals = torch.zeros(len(trainer.data.datasets), 2, dtype=torch.float64)  # summed loss, counted targets
    trainer.model.eval()
    try:
        for index, dataset in enumerate(trainer.data.datasets):
            shape = (config.model.context_length, config.eval_tokens, dist.rank, dist.size)
            for batch in batches.evaluation_batches(dataset.val, *shape):
                if dist.any(should_stop()):
                    return None
                inputs, targets = batch.to(dist.device)
                with trainer.autocast():
                    loss = trainer.model(inputs, targets)
                totals[index] += torch.tensor([loss.item(), (targets != IGNORE_INDEX).sum().item()])
    finally:
        trainer.model.train()
    return [loss / num_targets for loss, num_targets in dist.sum(totals).tolist()]


def default_callbacks(config: TrainConfig) -> list[Callback]:
    """The callbacks of the command line."""
    callbacks: list[Callback] = [MetricsFile(), Terminal(), Report()]
    if config.wandb:
        callbacks.append(WeightsAndBiases())
    return callbacks


def open_data(config: TrainConfig, dist: DistributedContext) -> Mixture:
    """Open the datasets; the built-in one is prepared first if it is missing. Each machine verifies its own copies."""
    with dist.keep_alive():
        if BUILT_IN_DATA in config.data and not BUILT_IN_DATA.exists() and dist.is_main_process:
            prepare(PrepareConfig(inputs=("stdlib",), out=BUILT_IN_DATA))
    with dist.keep_alive():
        data = open_mixture(config.data, config.mix)
        if dist.local_rank == 0:
            data.verify(config.verify_data)
    return data


def open_base(config: TrainConfig, data: Mixture, dist: DistributedContext) -> Checkpoint | None:
    """Open the model that ``--init-from`` names, on the main process only. Raises UserError on every rank."""

    def open_and_check(path: Path) -> Checkpoint:
        checkpoint = find_checkpoint(path)
        check_tokenizer(checkpoint.path, data.tokenizer, data.path)
        return checkpoint

    return dist.run_on_main(open_and_check, config.init_from) if config.init_from else None


def measure_step_seconds(config: TrainConfig, data: Mixture, dist: DistributedContext) -> float:
    """Time optimizer steps of a config as they will run: compiled, in its micro-batches, with its ranks."""
    trainer = Trainer(config, dist, data)
    trainer.initialize()
    trainer.wrap_model()
    seconds = []
    for _ in range(NUM_TIMED_STEPS):
        started_at = time.monotonic()
        _, _, grad_norm = train_step(trainer)
        grad_norm.item()  # waits for the device
        seconds.append(time.monotonic() - started_at)
    return dist.sum(torch.tensor(min(seconds), dtype=torch.float64)).item() / dist.size


def restore_or_initialize(
    trainer: Trainer, checkpoint: Checkpoint | None, base: Checkpoint | None, started_at: float
) -> None:
    """Set weights, optimizer state and clock: of the run's newest checkpoint, of the base model, or new ones."""
    if checkpoint is None:
        trainer.initialize(base)
        trainer.start_budget(time.monotonic() - started_at, None)
    else:
        changed = trainer.restore(checkpoint)
        trainer.start_budget(time.monotonic() - started_at, checkpoint.state)
        trainer.say(f"Resuming after step {trainer.step:,}{describe_changes(changed, trainer, checkpoint.state)}")
    trainer.write_settings()


def plan(config: TrainConfig) -> str:
    """Describe what a run would take, without training. Without the dataset, sizes and vocabulary must be set."""
    dist = single_process(choose_device(config.device))
    chooses = should_choose_sizes(config)
    if config.minutes and not chooses:
        raise UserError("--plan: shows what --minutes would choose, but the size is set. Use --steps.")
    epoch_tokens: list[float] = []
    needs_data = chooses or config.init_from or not config.model.vocab_size
    if needs_data or all(path.exists() for path in config.data):
        data = open_data(config, dist)
        if config.minutes:
            return size_table(config, data, dist, make_measure(data, dist, measure_step_seconds))
        base = open_base(config, data, dist)
        config = resolve_config(config, data, dist, time.monotonic(), base, measure_step_seconds)
        epoch_tokens = data.epochs
    return describe_plan(config, dist.device, epoch_tokens)


if __name__ == "__main__":
    run_command(main)
