"""Models, runs and comparisons of several modules' tests."""

import contextlib
import dataclasses
import functools
import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import torch.distributed
from tokenizers import decoders, models, processors, trainers
from tokenizers.pre_tokenizers import Metaspace

import train
from engine.core.cli import run_command
from engine.core.distributed import DistributedContext
from engine.core.files import sha256
from engine.core.settings import load_settings
from engine.data.documents.document import read_documents
from engine.data.records.text import ExampleParser, Reader
from engine.data.sources.notes import Notes
from engine.data.sources.source import Source
from engine.data.tokenizer import ByteTokenizer, Tokenizer, from_document
from engine.data.tokenizer_json import with_extension
from engine.generation.decoding_engine import DecodingEngine
from engine.generation.sampling import row_seeds
from engine.generation.text_batch import TextBatch, TextRequest
from engine.nn.specs import ParameterSpec
from engine.report import callback as report_callback
from engine.runs.checkpoint import Checkpoint, RunState, open_checkpoint, write_checkpoint
from engine.runs.run_files import list_checkpoints
from engine.serving.server import listen, make_server
from engine.training import callbacks
from engine.training.callbacks import MetricsFile
from engine.training.config import TrainConfig
from engine.training.trainer import Callback, Trainer
from model import GPT, ModelConfig
from prepare import PrepareConfig, prepare

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
RUN_TIMEOUT_SECONDS = 120
PEER_TIMEOUT_SECONDS = 10  # of a rank, once another has failed


def numbers_text(count: int) -> str:
    """Return a text that a model learns quickly."""
    return "".join(f"{number} is followed by {number + 1}.\n" for number in range(count))


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """Write records as lines of JSON; return the path."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[Any]:
    """Read lines of JSON, each of which has an end."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def make_dataset(folder: Path, content: Path | str | list[dict[str, Any]], **settings: Any) -> Path:
    """Prepare a path, text or records as FOLDER/data of bytes, if settings do not say otherwise."""
    path = content if isinstance(content, Path) else folder / "in.txt"
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif isinstance(content, list):
        path = write_lines(folder / "in.jsonl", content)
    settings = {"tokenizer": "byte", "out": folder / "data", **settings}
    prepare(PrepareConfig((str(path),), **settings))
    return settings["out"]


def train_sentencepiece(texts: list[str]) -> Tokenizer:
    """Return a Unigram with byte fallback and Metaspace, as in models that use SentencePiece."""
    trained = tokenizers.Tokenizer(models.Unigram())
    trained.pre_tokenizer = Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    document = json.loads(trained.to_str())
    document["model"]["vocab"] += [[f"<0x{byte:02X}>", -100.0] for byte in range(256)]
    document["model"]["byte_fallback"] = True
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(document))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $0", None, [("<s>", 1)])
    return from_document(with_extension(json.loads(tokenizer.to_str()), end_of_text="</s>"))


def make_reader(turns_of: Any = None, fields: Sequence[str] = (), **options: Any) -> Reader:
    """Return a reader; with turns_of, of examples in fields of records."""
    parser = ExampleParser(lambda row: (turns_of(row), []), tuple(fields)) if turns_of else None
    return Reader(examples=parser, **options)


def texts_of(file: Path | Source, notes: Notes | None = None, **options: Any) -> list[str]:
    """Return the texts that a reader with options finds in a file."""
    source = file if isinstance(file, Source) else Source(file, file.name)
    documents = read_documents(source, notes=notes, reader=make_reader(**options))
    return [document.text for document in documents]


SIZES = {"context_length": 16, "num_layers": 2, "num_heads": 3, "d_model": 24}
SMALL = ModelConfig(vocab_size=37, dropout=0.0, **SIZES)
GPT2 = {
    "position": "learned",
    "norm": "layernorm",
    "activation": "gelu",
    "qk_norm": False,
    "tie_embeddings": True,
    "bias": True,
}
YEAR_2017 = GPT2 | {
    "position": "sinusoidal",
    "norm_placement": "post",
    "activation": "relu",
    "scale_embeddings": True,
}
QWEN3 = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 10,
    "norm": "weighted_rmsnorm",
    "rope_base": 1e5,
    "windows": (3, 0),
}
VARIANTS = {
    "default": SMALL,
    "gpt2": dataclasses.replace(SMALL, **GPT2),
    "2017": dataclasses.replace(SMALL, **YEAR_2017),
    "relu2": dataclasses.replace(SMALL, activation="relu2", d_ff=40, logit_softcap=15.0),
    "qwen3": dataclasses.replace(SMALL, **QWEN3),
}


SMALLEST = ModelConfig(vocab_size=1)


def random_model(config: ModelConfig, seed: int = 0) -> GPT:
    """Return a model in which every parameter matters: zeros would hide mistakes."""
    torch.manual_seed(seed)
    model = GPT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


class IdStream:
    """Stands in for a TextStream without a tokenizer: it collects num_tokens ids."""

    num_characters = 0
    tokenizer = SimpleNamespace(special_tokens={})

    def __init__(self, prompt: Sequence[int], num_tokens: int):
        self.prompt = list(prompt)
        self.max_tokens = num_tokens
        self.new_ids: list[int] = []

    @property
    def is_finished(self) -> bool:
        return len(self.new_ids) == self.max_tokens

    def push(self, token: int) -> str:
        self.new_ids.append(token)
        return ""


def decode(
    model,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    seed: int = 0,
    banned: Sequence[int] = (),
    **options: Any,
) -> list[list[int]]:
    """Return the ids after each prompt, all decoded in one batch."""
    streams: list[Any] = [IdStream(prompt, num_tokens) for prompt in prompts]
    batch = TextBatch(DecodingEngine(model), len(prompts), banned)
    for stream, row_seed in zip(streams, row_seeds(seed, prompts), strict=True):
        batch.add(deque([TextRequest(stream, row_seed, options, [].append)]))
        batch.read()
    while batch.requests:
        batch.step()
    return [stream.new_ids for stream in streams]


def make_state(step: int, **values: Any) -> RunState:
    """Return the state of a checkpoint; by default of the smallest model."""
    return RunState(**{"model": SMALLEST, "step": step, "tokens": step, **values})


def save_tokenizer(path: Path) -> None:
    """Write what a checkpoint of a test has for a tokenizer."""
    path.write_text("{}")


def save_run(
    model: GPT, out: Path, tokenizer: Tokenizer | None = None, examples: str | None = None
) -> Path:
    """Save a run folder with one checkpoint of a model."""
    settings = {"data": ["data/a", "data/b"]}
    state = make_state(1, model=model.config, settings=settings, examples=examples)
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    save_tokenizer = (tokenizer or ByteTokenizer()).save
    write_checkpoint(out / "checkpoints" / "step-00000001", state, tensors, {}, save_tokenizer)
    return out


def newest_checkpoint(run: Path) -> Checkpoint:
    """Return the newest checkpoint of a run. Raises UserError if a file of it is corrupted."""
    return open_checkpoint(list_checkpoints(run)[-1]).verify()


def same_checkpoint(actual: Checkpoint, expected: Checkpoint) -> bool:
    """Return whether step, weights and optimizer state are equal, bit for bit."""
    return (
        actual.step == expected.step
        and same_tensors(dict(actual.model()), dict(expected.model()))
        and same_tensors(dict(actual.optimizer()), dict(expected.optimizer()))
    )


def same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Return whether names and tensors are equal, bit for bit."""
    names = expected.keys()
    return actual.keys() == names and all(torch.equal(actual[n], expected[n]) for n in names)


def logged(run: Path, key: str) -> dict[int, Any]:
    """Return {step: value} of a key of metrics.jsonl."""
    records = read_lines(run / "metrics.jsonl")
    return {record["step"]: record[key] for record in records if key in record}


TINY_FLAGS = (
    "--num-layers 2 --num-heads 2 --d-model 16 --context-length 16 --batch-size 4 --warmup-steps 0 "
    "--log-every 1 --eval-tokens 2000 --device cpu"
)
TINY = TINY_FLAGS.split()


def tiny(data: Path, out: Path, *flags: object) -> list[str]:
    """Return arguments of train.py with which a hundred steps take half a second."""
    return list(map(str, ["--data", data, "--out", out, *TINY, *flags]))


@contextlib.contextmanager
def rendezvous(num_ranks: int) -> Iterator[dict[str, str]]:
    """Yield the environment variables, without RANK, of ranks that meet at a store of this process.

    The store chooses its port and keeps it, as that of torchrun: a port that is only known to be
    free may be taken before the first rank listens on it.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    del store


def fork(log: Path, function: Callable[[], int | None]) -> int:
    """Call a function in a child process, whose output goes to a log; return its process id."""
    if torch.cuda.is_available() and "PYTEST_CURRENT_TEST" in os.environ:
        pytest.skip("a fork has no gradients if its parent had some, beside a GPU")
    if child := os.fork():
        return child
    gc.freeze()  # a collection would copy the memory that is shared with the parent
    try:
        output = open(log, "a", encoding="utf-8")  # noqa: SIM115
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        sys.stdout = sys.stderr = output
        torch.set_num_threads(1)
        callbacks.FINAL_SAMPLE_TOKENS = report_callback.SAMPLE_TOKENS = 3
        code = function() or 0
        output.flush()
        os._exit(code)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(99)


def wait_for(child: int) -> int:
    """Return the exit code of a child process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_ranks(log: Path, num_ranks: int, function: Callable[[int], int | None]) -> list[int]:
    """Call function(rank) in a process for each rank; return their exit codes."""
    with rendezvous(num_ranks) as variables:

        def start(rank: int) -> int | None:
            os.environ.update({**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            signal.alarm(RUN_TIMEOUT_SECONDS)
            return function(rank)

        children = [fork(log, partial(start, rank)) for rank in range(num_ranks)]
        return wait_for_ranks(children)


def wait_for_ranks(children: list[int]) -> list[int]:
    """Return the exit codes of ranks. If one fails, end the others like torchrun."""
    codes: dict[int, int] = {}
    deadline = math.inf
    while running := [child for child in children if child not in codes]:
        for child in running:
            process, status = os.waitpid(child, os.WNOHANG)
            if process:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        if deadline == math.inf and any(codes.values()):
            deadline = time.monotonic() + PEER_TIMEOUT_SECONDS
        time.sleep(0.01)
    return [codes[child] for child in children]


@functools.cache
def parse_tiny(*flags: str) -> TrainConfig:
    """Return the settings of TINY and flags: to parse them takes longer than a step."""
    return load_settings(TrainConfig, [*TINY, *flags])


def train_tiny(
    data: Path,
    out: Path,
    *flags: object,
    callbacks: Sequence[Callback] = (),
    should_stop: Callable[[], bool] = lambda: False,
    dist_ctx: DistributedContext | None = None,
    modify_model: Callable[[GPT], None] | None = None,
) -> Trainer:
    """Train a tiny model in this process; callbacks are called after metrics are written."""
    assert not {"--data", "--out"} & {*flags}
    config = dataclasses.replace(parse_tiny(*map(str, flags)), data=(data,), out=out)
    all_callbacks = [MetricsFile(), *callbacks]
    if isinstance(should_stop, Callback):
        all_callbacks.append(should_stop)
    return train.train(config, dist_ctx, all_callbacks, should_stop, None, modify_model)


def add_scales(model: GPT) -> None:
    """Multiply the output of each attention by a learned vector."""
    for index, block in enumerate(model.blocks):
        block.scale = torch.nn.Parameter(torch.empty(model.config.d_model))
        model.specs[f"blocks.{index}.scale"] = ParameterSpec("vector", mean=0.5)
        block.attention.register_forward_hook(lambda layer, inputs, y, block=block: y * block.scale)


class Action(Callback):
    """Call a function when a step has ended, or at its record with a key, or in its evaluation."""

    def __init__(self, step: int, act: Callable[[], Any], when: str = "on_step"):
        self.step = step
        self.act = act
        self.when = when

    def call(self, trainer: Trainer, is_moment: bool) -> None:
        if trainer.step == self.step and is_moment:
            self.act()

    def on_train_start(self, trainer: Trainer) -> None:
        trainer.model.register_forward_pre_hook(
            lambda model, _: self.call(trainer, self.when == "evaluation" and not model.training)
        )

    def on_step(self, trainer: Trainer) -> None:
        self.call(trainer, self.when == "on_step")

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        self.call(trainer, self.when in record)


class SpoilLoss(Callback):
    """Multiplies the training loss of some steps by a factor, on the last rank."""

    def __init__(self, steps: Container[int], factor: float = math.nan):
        self.steps = steps
        self.factor = factor

    def on_train_start(self, trainer: Trainer) -> None:
        is_last_rank = trainer.dist_ctx.rank == trainer.dist_ctx.size - 1

        def spoil(model: torch.nn.Module, inputs: tuple, loss: torch.Tensor) -> torch.Tensor:
            is_spoiled = is_last_rank and model.training and trainer.step + 1 in self.steps
            return loss * self.factor if is_spoiled else loss

        trainer.model.register_forward_hook(spoil)


class SpoilWeights(Callback):
    """Makes the weights of one step not finite, where they are."""

    def on_step(self, trainer: Trainer) -> None:
        weight = trainer.model.token_embedding.weight.data
        if trainer.step == 5:
            self.state = [param.clone() for param in trainer.model.parameters()]
            self.row = weight[3].clone()
            weight[3] = torch.nan
        if trainer.step == 6:
            weight[3] = self.row
            params = trainer.model.parameters()
            assert all(torch.equal(*pair) for pair in zip(params, self.state, strict=True))


class SpoilHead(Callback):
    """Multiplies the head's weights by a factor after a step."""

    def __init__(self, step: int, factor: float):
        self.step = step
        self.factor = factor

    def on_step(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            trainer.model.head.weight.data *= self.factor


class StopAfter(Callback):
    """A callback and ``should_stop`` that is true after a number of steps."""

    def __init__(self, step: float):
        self.last_step = step
        self.step = 0

    def on_step(self, trainer: Trainer) -> None:
        self.step = trainer.step

    def __call__(self) -> bool:
        return self.step >= self.last_step


def assert_same_run(actual: Path, expected: Path) -> None:
    """Compare the newest weights and optimizer state, and every logged loss, bit for bit."""
    assert same_checkpoint(newest_checkpoint(actual), newest_checkpoint(expected))
    for key in ("train_loss", "val_loss", "grad_norm", "learning_rate", "batch_digest"):
        assert logged(actual, key) == logged(expected, key)


def read_files(folder: Path) -> dict[Path, bytes]:
    """Return the content of each file in a folder, and b"" for each folder."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def seal(checkpoint: Path) -> None:
    """Update the hashes in the manifest of a checkpoint that a test changed."""
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"] = {name: sha256(checkpoint / name) for name in manifest["files"]}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def exit_code_of(main: Callable[[], int | None]) -> int:
    """Run a command's main in this process; return its exit code."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        run_command(main)
    except SystemExit as stop:
        return stop.code or 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    raise AssertionError("a command ends by exiting")


@contextlib.contextmanager
def serve_in_thread(app: Any) -> Iterator[SimpleNamespace]:
    """Run the server of an application in a thread; yields its port, and ``end`` as Ctrl-C does."""
    server = make_server(app)
    with listen() as socket:
        thread = threading.Thread(target=server.run, args=([socket],))
        thread.start()

        def end() -> None:
            server.should_exit = True
            thread.join()

        try:
            yield SimpleNamespace(port=socket.getsockname()[1], end=end)
        finally:
            end()


@contextlib.contextmanager
def imitate_cuda(folder: Path, *arguments: str) -> Iterator[Callable[..., dict[str, Any]]]:
    """Start fake_cuda.py; yield a function that trains and decodes there, and returns reports."""
    compiler = shutil.which("c++")
    if not compiler or sys.platform != "linux" or torch.version.cuda:
        pytest.skip("needs Linux, a C++ compiler, and a torch for CPUs")
    library = folder / "fake_cuda.so"
    options = ["-shared", "-fPIC", "-std=c++20", f"-I{Path(torch.__file__).parent}/include"]
    files = [ROOT / "tests/fake_cuda.cpp", "-o", library]
    subprocess.run([compiler, *options, *files], check=True, timeout=120)
    data = make_dataset(folder, [{"text": "abc " * (n % 9)} for n in range(500)])
    command = [sys.executable, ROOT / "tests/fake_cuda.py", library, data, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    path = f"{ROOT}:{ROOT / 'tests/tools'}"
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **pipes) as process:

        def run(variant: str = "default", changes: Any = (), **options: Any) -> dict[str, Any]:
            config = dataclasses.replace(VARIANTS[variant], **{"num_layers": 1, **dict(changes)})
            settings = {"change": "", "optimizer": {}, "dtype": "bfloat16", "batch_size": 4}
            settings |= {**options, "config": dataclasses.asdict(config)}
            print(settings, file=process.stdin, flush=True)
            reports = json.loads(process.stdout.readline())
            assert "error" not in reports, reports["error"]
            return reports

        yield run
        process.kill()  # to end it takes seconds
