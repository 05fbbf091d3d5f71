"""Train a GPT on a prepared dataset.

python train.py [FILE.toml] [flags]                       on this machine
python train.py TEXT [flags]                              prepare a file or folder of text first
torchrun --nproc-per-node 8 train.py [FILE.toml] [flags]  on many processes: docs/distributed.md
"""

from engine.core import cli

if __name__ == "__main__":
    cli.tune_openmp_spinning("train")  # before torch is loaded

import contextlib
import gc
import math
import signal
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.core import device
from engine.core.distributed import DistributedContext, has_torchrun_ended, init_distributed
from engine.core.errors import UserError
from engine.core.settings import to_toml
from engine.core.values import check_ranges
from engine.data.batches import open_mixture
from engine.data.chats.chat import turn_ends
from engine.data.dataset import Dataset, verify_dataset
from engine.data.order import derived_seed
from engine.data.tokenizer import load_tokenizer
from engine.generation.scores import QUESTION_BATCH_SIZE, count_right, score_record
from engine.nn.loss import IGNORE_INDEX
from engine.report.callback import default_callbacks
from engine.runs.checkpoint import Checkpoint, ModifyModel, check_definition, check_modification
from engine.runs.run_files import find_checkpoint
from engine.training.callbacks import print_summary
from engine.training.config import BUILT_IN_DATA, TrainConfig, load_config
from engine.training.estimate import describe_plan
from engine.training.resolve import load_questions, resolve
from engine.training.run_dir import RunDir
from engine.training.trainer import Callback, Record, Trainer
from prepare import prepare_to_train

NUM_TIMED_STEPS = 5  # after those that capture


def main(arguments: list[str] | None = None) -> int:
    """Train with the settings of the command line, and return the exit code."""
    started_at = cli.PROCESS_START if arguments is None else None
    arguments = sys.argv[1:] if arguments is None else arguments
    config = load_config(arguments)
    device.keep_freed_memory()
    if config.plan:
        print(plan(config))
        return 0
    with (
        init_distributed(config.device, config.parallel, config.timeout) as dist_ctx,
        cli.Interruption() as interruption,
    ):

        def should_stop() -> bool:
            return interruption.signal > 0 or has_torchrun_ended()

        trainer = train(config, dist_ctx, None, should_stop, started_at)
        if trainer.budget.exhausted and trainer.evaluation:
            print_summary(trainer)
            return 0
        command = cli.shell_command(sys.argv[0], "--out", trainer.config.out, "--resume")
        command = f"{dist_ctx.torchrun_command} {command}"
        trainer.say(f"Interrupted after step {trainer.step:,}. Resume with: {command}")
        return 128 + (interruption.signal or signal.SIGTERM)


def train(
    config: TrainConfig,
    dist_ctx: DistributedContext | None = None,
    callbacks: Sequence[Callback] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    started_at: float | None = None,
    modify_model: ModifyModel | None = None,
) -> Trainer:
    """Train until the budget is used up, or should_stop() is true on any rank; save the last step.

    Defaults are those of the command line. ``started_at`` is the start of config.minutes, in
    seconds of time.monotonic(); None: now. ``modify_model`` changes the model before it gets
    weights and an optimizer: docs/architecture.md. Raises UserError for invalid settings.
    """
    if dist_ctx is None:
        with init_distributed(config.device, config.parallel, config.timeout) as dist_ctx:
            return train(config, dist_ctx, callbacks, should_stop, started_at, modify_model)
    started_at = time.monotonic() if started_at is None else started_at
    if callbacks is None:
        callbacks = dist_ctx.run_on_main(default_callbacks, config) or ()
    check_ranges(config)
    device.use_deterministic_kernels(config.deterministic)  # before the first use of CUDA
    run_dir = RunDir(config.out_path, config.may_resume, dist_ctx, config.keep_checkpoints)
    with contextlib.closing(run_dir):
        # Data, and the checkpoint to start from: the newest of this run, or a base model.
        checkpoint = run_dir.newest(config.resume and not config.auto_resume)
        data = open_data(config, dist_ctx)
        base = None if checkpoint else open_base(config, data, dist_ctx, modify_model)

        # Settings, and the data that fits them.
        measure = partial(measure_step_seconds, dist_ctx, modify_model=modify_model)
        run_config, data = resolve(config, data, dist_ctx, started_at, checkpoint, base, measure)

        # Model and optimizer, then the training loop.
        with Trainer(run_config, dist_ctx, data, run_dir, callbacks, modify_model) as trainer:
            if checkpoint:
                trainer.restore(checkpoint)
            else:
                trainer.initialize(base)
            trainer.questions = load_questions(run_config, dist_ctx, data, trainer.model)
            trainer.start_budget(started_at, checkpoint)
            run_dir.write_settings(to_toml(run_config))
            with trainer.budget.pause():
                trainer.notify("on_train_start")
            trainer.passes.wrap_model()
            training_loop(trainer, should_stop)
    return trainer


def training_loop(trainer: Trainer, should_stop: Callable[[], bool]) -> None:
    """Step, log, evaluate and save, each when it is due."""
    config = trainer.config
    budget = trainer.budget
    is_due = budget.exhausted or budget.is_due("evaluate", trainer.step)
    if trainer.step and not trainer.evaluation and is_due:
        evaluate_and_save(trainer, should_stop)  # the evaluation before the resume was stopped
    while not (budget.exhausted or trainer.dist_ctx.any(should_stop())):
        loss, learning_rate, grad_norm = train_step(trainer)
        budget.update(trainer.step)
        trainer.average_weights()
        trainer.notify("on_step")
        if trainer.step % config.log_every == 0 or trainer.step == budget.total_steps:
            trainer.log_training(loss, learning_rate, grad_norm)
        if budget.exhausted or budget.is_due("evaluate", trainer.step):
            evaluate_and_save(trainer, should_stop)
        if budget.is_due("save", trainer.step):
            trainer.save()

    trainer.save()
    if trainer.run_dir:
        trainer.run_dir.wait()  # raises the error of a save in the background


def train_step(trainer: Trainer) -> tuple[Tensor, float, Tensor]:
    """Make one optimizer step.

    Returns this rank's term of the mean loss (nats per token), the learning rate, and the gradient
    norm before clipping. Loss and gradient are sums, divided by the targets of the full batch.
    """
    batch = trainer.batches.get(trainer.step)  # inputs and targets, (rows of this rank, T) each
    loss = trainer.passes.acceleration.run_with_fallback(compute_gradients, trainer, *batch)
    learning_rate, grad_norm = trainer.optimizer.step(trainer.step, trainer.budget.total_steps)
    trainer.step += 1
    trainer.evaluation = None
    return loss, learning_rate, grad_norm


def compute_gradients(trainer: Trainer, inputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the gradients of a batch in micro-batches; return this rank's term of the loss."""
    config = trainer.config
    dist_ctx = trainer.dist_ctx
    if config.model.dropout:
        torch.manual_seed(derived_seed(config.seed, trainer.step, dist_ctx.rank))
    num_targets = dist_ctx.sum((targets != IGNORE_INDEX).sum()).clamp(min=1)
    # DDP and FSDP average gradients over the ranks: times dist_ctx.size they are sums.
    scale = dist_ctx.size / num_targets * trainer.optimizer.loss_scale
    rows = config.micro_batch_rows(dist_ctx)
    micro_batches = list(zip(inputs.split(rows), targets.split(rows), strict=True))
    last = len(micro_batches) - 1
    total_loss = torch.zeros((), device=dist_ctx.device)
    for index, pair in enumerate(micro_batches):
        total_loss += trainer.passes.add_gradients(*pair, scale, index == 0, index == last)
    return total_loss / num_targets


def evaluate_and_save(trainer: Trainer, should_stop: Callable[[], bool]) -> None:
    """Evaluate, and save if that is the best result; should_stop() ends it without a result."""
    if trainer.run_dir:
        trainer.run_dir.check()
    is_larger = trainer.budget.exhausted and trainer.budget.last_eval_extra_steps > 0
    with trainer.budget.timing("evaluate"):
        smaller = evaluate(trainer, should_stop)
        result = evaluate(trainer, should_stop, is_last=True) if is_larger else smaller
        if result is None or smaller is None:
            return
        record = {"step": trainer.step, **result}
        if is_larger:
            record |= {f"{name}_partial": smaller[name] for name in ("val_loss", "val_tokens")}
        if trainer.questions and math.isfinite(record["val_loss"]):
            score = evaluate_score(trainer, should_stop)
            if score is None:
                return
            record |= score
        trainer.evaluation = record
        trainer.notify("on_record", record)
    if not math.isfinite(record["val_loss"]):
        problem = f"the validation loss must be finite (got {record['val_loss']})"
        step = f"step {trainer.last_save[0]:,}" if trainer.last_save[0] else "the start"
        raise UserError(f"--learning-rate: {problem}. Lower it, and continue from {step}.")
    if trainer.is_best:
        trainer.best_evaluation = record
        trainer.save()


def evaluate(
    trainer: Trainer, should_stop: Callable[[], bool], is_last: bool = False
) -> Record | None:
    """Return the record of an evaluation, on the same windows of each dataset; None if stopped.

    The last evaluation may have more windows: see :meth:`TrainConfig.evaluation_tokens`.
    """
    dist_ctx = trainer.dist_ctx
    passes = trainer.passes
    losses = []
    num_tokens = torch.zeros((), dtype=torch.float64)
    with passes.evaluating():
        for dataset in trainer.data.datasets:
            total_loss = torch.zeros((), dtype=torch.float64)
            num_targets = torch.zeros((), dtype=torch.float64)
            for inputs, targets in passes.evaluation_batches(dataset.val, is_last):
                if dist_ctx.any(should_stop()):
                    return None
                loss = passes.acceleration.run_with_fallback(
                    passes.compute_loss, passes.model, inputs, targets
                )
                total_loss += loss.item()
                num_targets += (targets != IGNORE_INDEX).sum().item()
            num_tokens += num_targets
            losses.append((dist_ctx.sum(total_loss) / dist_ctx.sum(num_targets)).item())
    return trainer.data.evaluation_record(losses) | {"val_tokens": int(dist_ctx.sum(num_tokens))}


def evaluate_score(trainer: Trainer, should_stop: Callable[[], bool]) -> Record | None:
    """Return the part of a record with the score of trainer.questions; None if stopped."""
    dist_ctx = trainer.dist_ctx
    tokenizer = trainer.data.tokenizer
    ends = turn_ends(tokenizer, trainer.data.learns_chats)
    batch_size = dist_ctx.num_models * QUESTION_BATCH_SIZE
    num_right = torch.zeros(())
    with trainer.passes.decoder() as (model, cache_dtype):
        for first in range(0, len(trainer.questions), batch_size):
            if dist_ctx.any(should_stop()):
                return None
            batch = trainer.questions[first : first + batch_size]
            questions = batch[dist_ctx.rank % dist_ctx.num_models :: dist_ctx.num_models]
            num_right += count_right(model, tokenizer, ends, questions, cache_dtype)
    # Sharded ranks have all counted the same questions.
    num_right = dist_ctx.sum(num_right) * dist_ctx.num_models / dist_ctx.size
    digest = zlib.crc32(repr(trainer.questions).encode())
    return {**score_record(num_right.item(), len(trainer.questions)), "questions_digest": digest}


def open_data(config: TrainConfig, dist_ctx: DistributedContext) -> Dataset:
    """Open the datasets, and verify them on each machine; prepare a text, or the built-in one."""
    with dist_ctx.wait_for_all():
        dist_ctx.run_on_main(prepare_text, config)
    with dist_ctx.wait_for_all():
        data = open_mixture(config.data, config.mix)
        dist_ctx.run_on_each_machine(verify_dataset, data, config.verify_data)
    return data


def prepare_text(config: TrainConfig) -> None:
    """Prepare the text with the defaults of prepare.py, or the built-in one if that is missing.

    A text for a base gets the tokenizer of that.
    """
    lacks_built_in = BUILT_IN_DATA in config.data and not BUILT_IN_DATA.exists()
    text = config.text or (BUILT_IN_DATA.name if lacks_built_in else "")
    arguments = [text, *(word for glob in config.glob for word in ("--glob", glob))]
    training = ["--data", config.data[0]]
    if config.text and config.init_from:
        arguments += ["--tokenizer", str(config.init_from)]
        training += ["--init-from", config.init_from]
    if text:
        prepare_to_train(arguments, cli.shell_command("python", "train.py", *training))


def open_base(
    config: TrainConfig,
    data: Dataset,
    dist_ctx: DistributedContext,
    modify_model: ModifyModel | None = None,
) -> Checkpoint | None:
    """Return the checkpoint of ``--init-from`` on the main process, and None on the others."""
    if config.init_from is None:
        return None
    with dist_ctx.wait_for_all():  # raises a UserError on every rank
        base = dist_ctx.run_on_main(find_checkpoint, config.init_from)
        if base:
            check_modification(base, modify_model)
            check_definition(base)
            if not data.tokenizer.is_extension_of(load_tokenizer(base.path / "tokenizer.json")):
                raise data.tokenizer_error(base.path)
    return base


def measure_step_seconds(
    dist_ctx: DistributedContext,
    config: TrainConfig,
    data: Dataset,
    modify_model: ModifyModel | None = None,
) -> float:
    """Measure the seconds of an optimizer step, compiled and in micro-batches as in the run."""
    trainer = Trainer(config, dist_ctx, data, modify_model=modify_model)
    trainer.initialize()
    trainer.passes.wrap_model()
    seconds: list[float] = []
    num_captures = -1  # the first step of a process is slow, too
    while len(seconds) < NUM_TIMED_STEPS:
        started_at = time.monotonic()
        _, _, grad_norm = train_step(trainer)
        grad_norm.item()  # waits for the device
        seconds.append(time.monotonic() - started_at)
        if num_captures != trainer.num_captures:
            num_captures = trainer.num_captures
            seconds.clear()
    del trainer
    gc.collect()  # a module whose forward is replaced refers to itself
    device.release_memory(dist_ctx.device)
    mean_seconds = torch.tensor(seconds, dtype=torch.float64).mean()
    return dist_ctx.sum(mean_seconds).item() / dist_ctx.size


def plan(config: TrainConfig) -> str:
    """Describe memory, operations and time of a run."""
    dist_ctx = DistributedContext(device=device.choose_device(config.device))
    data = open_data(config, dist_ctx)
    base = open_base(config, data, dist_ctx)
    measure = partial(measure_step_seconds, dist_ctx)
    with device.preserve_torch_state(dist_ctx.device):
        run_config, data = resolve(config, data, dist_ctx, time.monotonic(), None, base, measure)
    step_tokens = data.train.tokens_per_step(run_config.batch_size, run_config.context_length)
    return describe_plan(run_config, dist_ctx, step_tokens, data.epoch_tokens)


if __name__ == "__main__":
    cli.run_command(main)
